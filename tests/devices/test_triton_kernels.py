"""Each Triton kernel against its definition in plain torch: on the GPU, or through Triton's interpreter on the CPU."""

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_interpreter import interpreter_as_hardware, make_batch  # noqa: F401, a fixture

from text_generation_inference.kernels import fp8, reference, slot_state
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import FP8, Fp8Rows, Fp8Weight
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.slot_state import SlotState

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


from text_generation_inference.kernels.triton import attention, norms_rotary, quantize, state
from text_generation_inference.kernels.triton import ops as triton_ops
from text_generation_inference.kernels.triton.attention import DecodeChoice, PrefillChoice
from text_generation_inference.kernels.triton.rotate_heads import rotate_heads

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCES)


@pytest.fixture(scope="module")
def device(device_name: str) -> torch.device:
    return torch.device(device_name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(actual: Any, expected: Any, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


# Between the matrix products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (5, 1), (2, 576)])
def test_norms(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (torch.randn(rows, width + 3, device=device).to(dtype)[:, :width] for _ in range(2))
    weight = torch.rand(width, device=device).to(dtype)
    close(norms_rotary.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    out, total = norms_rotary.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    close(out, expected)
    close(total, expected_total)
    x, bias = x + 2, torch.randn(width, device=device).to(dtype)
    for given in ((weight, bias), (weight, None), (None, None)):
        close(norms_rotary.layer_norm(x, *given, 1e-5), reference.layer_norm(x, *given, 1e-5))
    out, total = norms_rotary.add_layer_norm(x, residual, weight, bias, 1e-5)
    expected, expected_total = reference.add_layer_norm(x, residual, weight, bias, 1e-5)
    close(out, expected)
    close(total, expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 99), (2, 2500)])
def test_gates(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width, device=device).to(dtype) * 4
    for name in ("silu_mul", "gelu_mul", "gelu_tanh_mul", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu"):
        close(getattr(norms_rotary, name)(x), getattr(reference, name)(x))


def weights(width: int, device: torch.device) -> dict[str, Fp8Weight]:
    """What rows of this width are multiplied with; only the form of the rows matters."""
    data = torch.zeros(5, width, device=device, dtype=FP8)
    by_row, squares = torch.ones(5, device=device), torch.ones(1, -(-width // 128), device=device)
    return {
        "by row": Fp8Weight(data, by_row),
        "static": Fp8Weight(data, by_row, torch.tensor(0.013, device=device)),
        "by square": Fp8Weight(data, squares),
    }


def same_rows(actual: Tensor | Fp8Rows, plain: Any, quantize_for: Fp8Weight) -> None:
    """Equal to the definition, but for values that were on the edge between two: those are neighbours."""
    assert isinstance(actual, Fp8Rows)
    expected = fp8.quantize_rows(plain, quantize_for)
    assert actual.data.shape == expected.data.shape and actual.data.is_contiguous()
    torch.testing.assert_close(
        actual.scale, expected.scale, rtol=2e-2 if plain.dtype is torch.bfloat16 else 2e-3, atol=0
    )
    torch.testing.assert_close(fp8.dequantize_rows(actual), fp8.dequantize_rows(expected), rtol=0.14, atol=2e-3)
    assert bool((actual.data.float() == expected.data.float()).float().mean() > 0.9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (2, 576), (4, 1), (3, 2200)])
def test_quantize_rows(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x = (torch.randn(rows, width + 3, device=device) * 3).to(dtype)[:, :width]
    x[0] = 0
    for quantize_for in weights(width, device).values():
        actual, expected = quantize.quantize_rows(x, quantize_for), fp8.quantize_rows(x, quantize_for)
        torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-6, atol=0)
        assert bool((actual.data.float() == expected.data.float()).float().mean() >= 0.97)
        torch.testing.assert_close(actual.data.float(), expected.data.float(), rtol=0.14, atol=2e-3)
    none = quantize.quantize_rows(x[:0], weights(width, device)["by square"])
    assert none.data.shape == (0, width) and none.scale.shape == (0, -(-width // 128))


@pytest.mark.parametrize("form", ["by row", "static", "by square"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (2, 576), (2, 2500)])
def test_norms_and_gates_into_fp8(device: torch.device, dtype: torch.dtype, rows: int, width: int, form: str) -> None:
    quantize_for = weights(width, device)[form]
    x, residual = (torch.randn(rows, width + 3, device=device).to(dtype)[:, :width] for _ in range(2))
    weight = torch.rand(width, device=device).to(dtype)
    same_rows(norms_rotary.rms_norm(x, weight, 1e-5, quantize_for), reference.rms_norm(x, weight, 1e-5), quantize_for)
    out, total = norms_rotary.add_rms_norm(x, residual, weight, 1e-5, quantize_for)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    same_rows(out, expected, quantize_for)
    close(total, expected_total)
    gate_up = torch.randn(rows, 2 * width, device=device).to(dtype) * 4
    same_rows(norms_rotary.silu_mul(gate_up, quantize_for), reference.silu_mul(gate_up), quantize_for)
    same_rows(norms_rotary.gelu_tanh_mul(gate_up, quantize_for), reference.gelu_tanh_mul(gate_up), quantize_for)
    same_rows(norms_rotary.relu(x, quantize_for), reference.relu(x), quantize_for)
    shifted, bias = x + 1, weight.flip(0)
    expected = reference.layer_norm(shifted, weight, bias, 1e-5)
    same_rows(norms_rotary.layer_norm(shifted, weight, bias, 1e-5, quantize_for), expected, quantize_for)


def test_gate_of_a_wide_row_into_fp8(device: torch.device) -> None:
    width = 28672
    assert norms_rotary.gate_warps(32768, 0) == 32
    assert norms_rotary.gate_warps(16384, 0) == norms_rotary.gate_warps(32768, 16384) == 16
    gate_up = torch.randn(2, 2 * width, device=device).half() * 4
    quantize_for = weights(width, device)["by row"]
    same_rows(norms_rotary.silu_mul(gate_up, quantize_for), reference.silu_mul(gate_up), quantize_for)


def caches(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, by_head: bool) -> list[Tensor]:
    """Keys and values, in memory by token or by head."""
    blocks, size, heads, d = shape
    order = (blocks, heads, size, d) if by_head else shape
    made = [torch.randn(order, device=device).to(dtype) for _ in range(2)]
    return [cache.transpose(1, 2) for cache in made] if by_head else made


def rotary_table(positions: int, rotary: int, device: torch.device) -> Tensor:
    angles = torch.rand(positions, rotary // 2, device=device) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "rotary"), [(4, 2, 64, 64), (5, 5, 80, 80), (3, 1, 24, 16), (20, 4, 16, 16)]
)
def test_rotary_and_cache(
    device: torch.device, dtype: torch.dtype, by_head: bool, heads: int, kv_heads: int, d: int, rotary: int
) -> None:
    tokens, block_size, positions = 6, 16, 50
    fused = torch.randn(tokens, heads + 2 * kv_heads, d, device=device).to(dtype)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    k_cache, v_cache = caches((4, block_size, kv_heads, d), dtype, device, by_head)
    k_expected, v_expected = k_cache.contiguous(), v_cache.contiguous()
    cos_sin = rotary_table(positions, rotary, device)
    batch = make_batch(device, [], [])
    batch.positions = torch.randint(positions, (tokens,), device=device)
    batch.kv_index = torch.randperm(4 * block_size, device=device)[:tokens]
    expected = reference.rotary_and_cache(q.clone(), k, v, cos_sin, batch, k_expected, v_expected)
    close(norms_rotary.rotary_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache), expected)
    close(k_cache, k_expected)
    assert torch.equal(v_cache, v_expected)


@pytest.mark.parametrize("rotary", [16, 8])
def test_rotation_of_many_heads_into_fp8(device: torch.device, rotary: int) -> None:
    """So many are turned by more programs; key/value heads are no multiple of those of a program."""
    tokens, heads, kv_heads, d = 3, 70, 10, 16
    assert norms_rotary.heads_at_once(heads, small=True, prompts=False) == 8
    assert norms_rotary.heads_at_once(heads, small=False, prompts=False) == 16
    assert norms_rotary.heads_at_once(32, small=True, prompts=False) == 16
    fused = torch.randn(tokens, heads + 2 * kv_heads, d, device=device).half()
    cos_sin, results = rotary_table(50, rotary, device), []
    # The kernel turns in float32; in 16 bits a difference of two products may be several FP8 steps off.
    for op, inputs in ((norms_rotary.rotary_and_cache, fused.clone()), (reference.rotary_and_cache, fused.float())):
        q, k, v = inputs.split((heads, kv_heads, kv_heads), dim=1)
        stored = [torch.zeros(2, 16, kv_heads, d, device=device).to(FP8) for _ in range(2)]
        batch = make_batch(device, [], [])
        batch.positions, batch.kv_index = (torch.arange(start, start + tokens, device=device) for start in (9, 14))
        results.append((op(q, k, v, cos_sin, batch, *stored, (0.02, 0.5)), *(each.float() for each in stored)))
    (q, keys, values), (expected_q, expected_keys, expected_values) = results
    close(q, expected_q.half())
    torch.testing.assert_close(keys, expected_keys, rtol=0.14, atol=2e-3)  # neighbours, on the edge between two
    assert torch.equal(values, expected_values) and bool((values != 0).any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "rotary"), [(16, 16, 80, 80), (3, 1, 64, 64), (20, 4, 24, 16), (2, 2, 2, 2)]
)
def test_rotated_heads(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int, rotary: int
) -> None:
    """Queries and keys lie in one product, whose other values stay as they are."""
    fused = torch.randn(7, heads + 2 * kv_heads, d, device=device).to(dtype)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    cos_sin, kept = rotary_table(14, rotary, device)[::2], v.clone()
    expected = reference.rotate_heads(q.clone(), k.clone(), cos_sin)
    found = rotate_heads(q, k, cos_sin)
    for ours, theirs, before in zip(found, expected, (heads, kv_heads), strict=True):
        close(ours, theirs)
        assert ours.shape == (7, before, d)
    assert torch.equal(v, kept)
    assert rotate_heads(q[:0], k[:0], cos_sin[:0])[0].shape == (0, heads, d)


@pytest.mark.parametrize("over_all", [False, True], ids=["by head", "over all"])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "rotary"), [(4, 2, 64, 64), (17, 1, 24, 16), (3, 3, 128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_on_heads(
    device: torch.device, dtype: torch.dtype, over_all: bool, heads: int, kv_heads: int, d: int, rotary: int
) -> None:
    """With weights in the model's type or in float32; after the scales of a product, where it has left them."""
    for weight_dtype, scaled in ((dtype, False), (torch.float32, True)):
        fused = torch.randn(5, heads + 2 * kv_heads, d, device=device).to(dtype)
        sizes = [d * heads, d * kv_heads] if over_all else [d, d]
        norms = HeadNorms(*(torch.rand(size, device=device).to(weight_dtype) + 0.5 for size in sizes), 1e-5, over_all)
        scales = (torch.rand(5, device=device) + 0.5, torch.rand(fused[0].numel(), device=device)) if scaled else None
        cos_sin = rotary_table(50, rotary, device)
        found, expected = [], []
        for op, results in ((norms_rotary.rotary_and_cache, found), (reference.rotary_and_cache, expected)):
            q, k, v = fused.clone().split((heads, kv_heads, kv_heads), 1)
            caches = [torch.zeros(4, 16, kv_heads, d, device=device, dtype=dtype) for _ in range(2)]
            batch = make_batch(device, [], [])
            batch.positions, batch.kv_index = (torch.arange(start, start + 5, device=device) for start in (9, 30))
            results += [op(q, k, v, cos_sin, batch, *caches, scales=scales, norms=norms), *caches]
        for a, b in zip(found, expected, strict=True):
            close(a, b, 1e-5 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("small_cache", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "rotary"), [(4, 2, 64, 64), (3, 3, 24, 16)])
def test_prompts_are_left_as_the_cache_holds_them(
    device: torch.device, dtype: torch.dtype, small_cache: bool, heads: int, kv_heads: int, d: int, rotary: int
) -> None:
    tokens, block_size, scales = 7, 16, (0.02, 0.03) if small_cache else (1.0, 1.0)
    fused = torch.randn(tokens, heads + 2 * kv_heads, d, device=device).to(dtype)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    v[0, 0, 0] = 99.0  # beyond the largest
    before = fused.clone()
    k_cache, v_cache = (
        torch.zeros(4, block_size, kv_heads, d, device=device, dtype=FP8 if small_cache else dtype) for _ in range(2)
    )
    cos_sin = rotary_table(50, rotary, device)
    batch = make_batch(device, [], [(3, 3 + tokens)])
    batch.positions = torch.arange(3, 3 + tokens, device=device)
    batch.kv_index = torch.randperm(4 * block_size, device=device)[:tokens]
    norms_rotary.rotary_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache, scales)
    held_k, held_v = (
        (cache.view(-1, kv_heads, d).view(torch.uint8 if small_cache else dtype)[batch.kv_index]).view(cache.dtype)
        for cache in (k_cache, v_cache)
    )
    assert torch.equal((held_k.float() * scales[0]).to(dtype), k)
    assert torch.equal((held_v.float() * scales[1]).to(dtype), v)
    cos, sin = cos_sin[batch.positions][:, None, :].chunk(2, dim=-1)
    _, old_k, old_v = before.split((heads, kv_heads, kv_heads), dim=1)
    turned = reference.rotate(old_k.float(), cos, sin).to(dtype)
    if small_cache:
        expected_k, expected_v = fp8.to_fp8(turned.float() / scales[0]), fp8.to_fp8(old_v.float() / scales[1])
        assert v_cache.float().max() == fp8.FP8_MAX
        torch.testing.assert_close(held_k.float(), expected_k.float(), rtol=0.14, atol=2e-3)
        assert torch.equal(held_v.float(), expected_v.float())
    else:
        close(k, turned)
        assert torch.equal(v, old_v)


# Attention --------------------------------------------------------------------------------------------------------


BATCHES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "decode": ([1, 16, 17, 65, 300, 0], []),
    "one row": ([260], []),
    "prompts": ([], [(0, 1), (0, 130)]),
    "over prefixes": ([], [(16, 20), (33, 170)]),
    "mixed": ([5, 90], [(0, 7), (64, 131)]),
}
LONG = {"long": ([], [(0, 700), (0, 513), (40, 260), (300, 302), (128, 400)])}


def from_cache(cache: Tensor, batch: Batch, tokens: int) -> Tensor:
    """This step's own keys or values, as the cache holds them; what is not of a chunk is NaN."""
    meta: PagedMeta = batch.meta
    assert meta.table_rows is not None
    flat = cache.double().flatten(0, 1)
    own = torch.full((tokens, *cache.shape[2:]), math.nan, dtype=torch.float64, device=cache.device)
    token = meta.num_decode
    for row, (start, end) in enumerate(zip(meta.chunk_starts_cpu, meta.chunk_ends_cpu, strict=True), token):
        position = torch.arange(start, end, device=cache.device)
        table = meta.block_tables[int(meta.table_rows[row])].long()
        own[token : token + end - start] = flat[table[position // 16] * 16 + position % 16]
        token += end - start
    return own


def check_attention(
    device: torch.device,
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    op: Callable[..., Tensor],
    window: int | None = None,
    softcap: float | None = None,
    by_head: bool = True,
    kv_scales: tuple[float, float] | None = None,  # of a cache in FP8
    own: bool = False,
    tolerance: float | None = None,
    **more: Any,
) -> None:
    """Against the definition in float64, on what the cache holds. `more` are arguments of the op."""
    decode, chunks = {**BATCHES, **LONG}[name]
    heads, kv_heads, d = shape
    batch = make_batch(device, decode, chunks)
    tokens = len(decode) + sum(end - start for start, end in chunks)
    blocks = int(sum(-(-int(end) // 16) or 1 for end in batch.seq_lens.tolist())) + 2
    made = caches((blocks, 16, kv_heads, d), torch.float32 if kv_scales else dtype, device, by_head)
    made[0][0], made[1][0] = math.nan, math.nan  # nobody's block
    exact = [cache.double() for cache in made]
    if kv_scales:
        made = [fp8.to_fp8(cache / scale) for cache, scale in zip(made, kv_scales, strict=True)]
        exact = [cache.double() * scale for cache, scale in zip(made, kv_scales, strict=True)]
    q = torch.randn(tokens, heads, d, device=device).to(dtype)
    known = replace(batch, meta=replace(batch.meta, block_tables=batch.meta.block_tables.clamp(max=blocks - 1)))
    if window is not None:  # blocks behind it are another's: the definition finds NaN there
        firsts = [length - window for length in decode] + [start - window + 1 for start, _ in chunks]
        for slot, first in zip(batch.meta.table_rows.tolist(), firsts, strict=True):
            if slot >= 0:
                batch.meta.block_tables[slot, : max(0, first) // 16] = 10**6
                known.meta.block_tables[slot, : max(0, first) // 16] = 0
    expected = reference.attention(q.double(), None, None, *exact, known, d**-0.5, window, softcap, **more)
    more |= {"kv_scales": kv_scales} if kv_scales else {}
    k = v = None
    if own:  # as parts of one buffer, like the product they come from
        fused = torch.cat([q, *(from_cache(cache, known, tokens).to(dtype) for cache in exact)], 1)
        q, k, v = fused.split((heads, kv_heads, kv_heads), 1)
        if kv_scales is None and chunks:  # the cache is not read where the tokens are at hand
            for row, (start, end) in enumerate(chunks, len(decode)):
                table = batch.meta.block_tables[int(batch.meta.table_rows[row])].long()
                position = torch.arange(start, end, device=device)
                for cache in made:
                    cache[table[position // 16], position % 16] = math.nan
    real = [row for row in range(tokens) if row >= len(decode) or decode[row]]
    tolerance = tolerance or (3e-2 if dtype is torch.bfloat16 else 5e-3 if dtype is torch.float16 else 3e-5)
    for _ in range(2 if decode else 1):  # the counters are 0 again
        out = op(q, k, v, *made, batch, d**-0.5, window, softcap, **more)
        close(out[real], expected[real], tolerance)
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", BATCHES)
def test_attention_with_slopes(device: torch.device, name: str) -> None:
    """ALiBi, which falls with distance, in every kernel that may look at a batch."""
    op = attention.PagedAttention(5)
    slopes = torch.tensor([0.5, 0.1, 0.03, 0.8], device=device)
    for shape, own in (((4, 4, 64), True), ((4, 2, 48), False)):
        check_attention(device, name, shape, torch.float32, op, own=own, slopes=slopes)
    check_attention(device, name, (4, 4, 64), torch.float16, op, kv_scales=(0.02, 0.5), slopes=slopes, tolerance=8e-3)


@pytest.mark.parametrize("name", BATCHES)
def test_attention_with_sinks_and_chunks(device: torch.device, name: str) -> None:
    """A score without a value, and positions whose runs see nothing of each other, in every kernel."""
    op = attention.PagedAttention(5)
    sinks = torch.tensor([2.5, -1.0, 0.3, -math.inf], device=device)
    check_attention(device, name, (4, 2, 64), torch.float32, op, own=True, sinks=sinks)
    check_attention(device, name, (4, 4, 48), torch.float32, op, window=33, sinks=sinks, attention_chunk=40)
    check_attention(device, name, (4, 4, 64), torch.float32, op, own=True, attention_chunk=24)
    fp8: dict[str, Any] = {"kv_scales": (0.02, 0.5), "tolerance": 8e-3}
    check_attention(device, name, (4, 4, 64), torch.float16, op, sinks=sinks, attention_chunk=50, **fp8)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "window", "softcap", "by_head"),
    [
        (8, 2, 64, None, None, True),
        (4, 4, 80, 70, None, False),
        (6, 2, 96, None, 5.0, True),
        (4, 1, 128, 33, 9.0, False),
        (2, 1, 256, None, None, True),
        (18, 1, 16, 24, None, False),
    ],
)
def test_attention(
    device: torch.device,
    name: str,
    heads: int,
    kv_heads: int,
    d: int,
    window: int | None,
    softcap: float | None,
    by_head: bool,
) -> None:
    decode, chunks = BATCHES[name]
    in_part = device.type == "cpu"  # the interpreter is slow, and has no product in bfloat16
    if in_part and chunks and heads > 16:
        pytest.skip("slow; so many heads with the same keys are a matter of decoding")
    for dtype in (torch.float32 if window else torch.float16,) if in_part else DTYPES:
        for processors in (8,) if in_part and chunks else (1, 8) if decode else (1,):  # one part per row, and several
            for own in (by_head,) if in_part else (False, True) if chunks else (False,):
                op = attention.PagedAttention(processors)
                check_attention(device, name, (heads, kv_heads, d), dtype, op, window, softcap, by_head, own=own)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "window", "softcap"),
    [
        (4, 4, 64, None, None),
        (4, 2, 128, None, None),
        (3, 3, 24, 40, None),
        (2, 2, 80, None, 7.0),
        (2, 1, 256, 33, None),
    ],
)
def test_attention_over_fp8(
    device: torch.device, name: str, heads: int, kv_heads: int, d: int, window: int | None, softcap: float | None
) -> None:
    in_part = device.type == "cpu"
    for dtype in (torch.float32 if window else torch.float16,) if in_part else DTYPES:
        for processors in (8,) if in_part else (1, 8) if BATCHES[name][0] else (1,):
            op = attention.PagedAttention(processors)
            check_attention(
                device, name, (heads, kv_heads, d), dtype, op, window, softcap, kv_scales=(0.02, 0.5), own=True,
                tolerance=1e-2 if dtype is torch.float32 and d > 128 else None,
            )  # fmt: skip


@pytest.mark.parametrize("lanes", [16, 64])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, 6.0)])
def test_heads_with_keys_of_their_own(
    device: torch.device, lanes: int, splits: int, window: int | None, softcap: float | None
) -> None:
    for dtype in (torch.float32 if lanes == 16 else torch.bfloat16,) if device.type == "cpu" else DTYPES:
        op = attention.PagedAttention(1)
        op.decode_choice = DecodeChoice(64, 4, 2, splits, lanes)
        check_attention(device, "decode", (3, 3, 40), dtype, op, window, softcap)
        check_attention(device, "decode", (2, 2, 64), dtype, op, window, softcap, kv_scales=(0.01, 0.7))


@pytest.mark.parametrize("rows", [40, 100, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 64), (2, 2, 128), (8, 1, 80), (12, 1, 64)])
def test_what_is_chosen_for_so_many_rows(device: torch.device, rows: int, heads: int, kv_heads: int, d: int) -> None:
    """With few of them, which is the same to each."""
    for dtype in (torch.float16,) if device.type == "cpu" else (torch.float16, torch.bfloat16):
        for cache, kv_scales in ((dtype, None), (fp8.FP8, (0.02, 0.5))):
            op = attention.PagedAttention(1)
            d_pad = 1 << (d - 1).bit_length()
            chosen = attention.choose_decode(rows, 64, heads // kv_heads, d_pad, dtype, cache, 132)
            assert chosen.splits == 1
            op.decode_choice = chosen
            for window in (None, 50) if rows == 100 else (None,):
                check_attention(device, "decode", (heads, kv_heads, d), dtype, op, window, kv_scales=kv_scales)


def test_one_warp_only_where_its_registers_suffice() -> None:
    def warps(group: int, **more: bool) -> int:
        half = torch.float16
        return attention.choose_decode(256, 8, group, 128, half, half, 132, **more).warps

    assert warps(1) == warps(8) == 1
    assert warps(9) == warps(16) == warps(4, async_copies=False) == 4


@pytest.mark.parametrize(
    ("capability", "takes"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_tiles_in_bulk_only_where_there_is_room(
    capability: tuple[int, int], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    loaded = triton_ops.load_ops(1)
    assert isinstance(loaded, Ops)
    assert isinstance(loaded.attention, attention.PagedAttention)
    assert loaded.attention.bulk_copies is takes


def test_gpus_before_8_0_have_small_tiles() -> None:
    half, single = torch.float16, torch.float32
    assert attention.choose_prefill(128, half, True, async_copies=False).queries == 64
    assert attention.choose_prefill(256, half, True, async_copies=False) == PrefillChoice(32, 16, 4, 1)
    assert attention.choose_prefill(256, single, False, async_copies=False) == PrefillChoice(16, 16, 4, 1)
    assert attention.choose_decode(1, 8, 4, 256, single, single, 40, async_copies=False).block == 16
    assert attention.choose_decode(1, 8, 4, 256, single, single, 40).block == 32


@pytest.mark.parametrize("queries", [16, 32, 64, 128])
@pytest.mark.parametrize("block", [16, 64])
def test_any_tile_of_a_prompt(device: torch.device, queries: int, block: int) -> None:
    op = attention.PagedAttention(1)
    op.prefill_choice = PrefillChoice(queries, block, 4, 2)
    for own in (False, True):
        for window in (None, 50):
            check_attention(device, "over prefixes", (2, 1, 16), torch.float16, op, window, own=own)


@pytest.mark.parametrize(("queries", "block"), [(128, 64), (64, 32), (32, 128)])
@pytest.mark.parametrize("name", ["prompts", "over prefixes", "mixed"])
def test_tiles_in_bulk(device: torch.device, name: str, queries: int, block: int) -> None:
    """What is not of a prompt is NaN in `check_attention`, and tiles reach into it."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no copy engine for tiles")
    op = attention.PagedAttention(1, bulk_copies=True)
    op.prefill_choice = PrefillChoice(queries, block, 8 if queries == 128 else 4, 2, bulk=True)
    bounded = {"sinks": torch.tensor([2.5, -1.0, 0.3, 0.9], device=device), "attention_chunk": 72}
    for window, softcap, more in ((None, None, {}), (50, 6.0, bounded)):
        for dtype in (torch.float16,) if device.type == "cpu" else (torch.float16, torch.bfloat16):
            check_attention(device, name, (4, 2, 64), dtype, op, window, softcap, own=True, **more)


def plain_prompts(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, tiles: Tensor, scale: float, window: int, _: int, one: bool
) -> None:
    """What `hopper_attention.attend` computes, for devices that it is not made for."""
    group = q.shape[1] // k.shape[1]
    for _, token, position, count, _ in tiles.tolist():
        first, end = 0 if one else token - position, position + count
        oldest = max(0, position - window + 1) // 128 * 128 if window else 0  # the tile of keys that it begins in
        keys, values = (part[first + oldest : first + end].double().repeat_interleave(group, 1) for part in (k, v))
        at, n = torch.arange(position, end)[:, None], torch.arange(oldest, end)[None, :]
        seen = (n <= at) & (n > at - window) if window else n <= at
        scores = torch.einsum("qhd,khd->hqk", q[token : token + count].double(), keys) * scale
        shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out[token : token + count] = torch.einsum("hqk,khd->qhd", shares, values).flatten(1).to(out.dtype)


@pytest.mark.parametrize(
    ("name", "head_dim"), [("over prefixes", 128), ("mixed", 128), ("long", 128), ("mixed", 64), ("long", 64)]
)
def test_long_prompts(device: torch.device, name: str, head_dim: int) -> None:
    """By the kernel in Gluon where it runs; elsewhere what stands around it. Long ones are laid out with their prefix."""
    specialised: Callable[..., None] = plain_prompts
    if device.type == "cuda":
        found = triton_ops.specialised(torch.cuda.get_device_capability())
        if found is None:
            pytest.skip("made for capability 9.0")
        specialised = found
    calls: list[bool] = []

    def counted(*arguments: Any) -> None:
        calls.append(arguments[-1])
        specialised(*arguments)

    op = attention.PagedAttention(4, bulk_copies=True, specialised=counted)
    op.many_tiles, op.long_chunk = 1, 5
    dtypes = (torch.float16,) if device.type == "cpu" else (torch.float16, torch.bfloat16)
    decode, chunks = {**BATCHES, **LONG}[name]
    for window, scales in ((None, None), (50, None), (None, (0.5, 2.0))):
        if scales and (device.type == "cpu" and name == "long"):
            continue
        for dtype in dtypes:
            calls.clear()
            for room in ("keys", "values"):  # what was there may be anything
                op.workspace.room(room, 1 << 20, dtype, device).fill_(math.nan)
            check_attention(device, name, (4, 2, head_dim), dtype, op, window, own=True, kv_scales=scales)
            long = [start > 0 for start, end in chunks if start and end - start >= 5]
            assert calls.count(True) == len(long) * (2 if decode else 1)
            assert (False in calls) == (name == "long")


def test_splits_grow_as_rows_get_fewer() -> None:
    assert attention.num_splits(1, 8, 132) == 32
    assert attention.num_splits(4, 8, 132) == attention.num_splits(1, 32, 132) == 8
    assert attention.num_splits(16, 8, 132) == 2
    assert attention.num_splits(256, 8, 132) == 1


def test_grouped_heads_over_fp8_are_split_while_programs_are_few() -> None:
    def chosen(rows: int, cache: torch.dtype, group: int = 8) -> DecodeChoice:
        return attention.choose_decode(rows, 8, group, 128, torch.bfloat16, cache, 132)

    assert chosen(32, fp8.FP8) == DecodeChoice(64, 2, 3, 2)
    assert chosen(64, fp8.FP8).splits == chosen(32, fp8.FP8, group=1).splits == chosen(32, torch.bfloat16).splits == 1
    assert chosen(8, fp8.FP8).splits == attention.num_splits(8, 8, 132) == 4


# Slots ------------------------------------------------------------------------------------------------------------


def make_state(device: torch.device, num_slots: int = 5, max_tokens: int = 40, own_pages: bool = False) -> SlotState:
    max_blocks = -(-max_tokens // 16)
    made = SlotState(num_slots, max_tokens, 1 + num_slots * max_blocks, 16, device, own_pages)
    made.pages.copy_(torch.randint(0, 90, made.pages.shape))
    made.last_tokens.copy_(torch.randint(0, 90, (num_slots,)))
    made.block_tables.copy_(1 + torch.randperm(num_slots * max_blocks).view(num_slots, max_blocks))
    made.lengths.copy_(torch.randint(1, max_tokens - 1, (num_slots,)))
    made.seeds.copy_(torch.randint(-(2**63), 2**63 - 1, (num_slots,)))
    made.filters.copy_(torch.tensor([1.0, 0, 1, 1, 0, 0]))
    return made


def test_writes(device: torch.device) -> None:
    one, two = (SlotState(3, 2000, 100, 16, device) for _ in range(2))
    writes = [
        (one.pages_at, 1500),
        *((one.pages_at + 16 * block, 16) for block in (99, 97, 95)),
        (one.tables_at + 3, 1),
        (0, 32),
        (one.rows_at, 3),
    ]
    headers, payload, source = [], [], 4 * len(writes)
    for place, count in writes:
        headers += [place, 0, source, count]
        payload += torch.randint(-(2**31), 2**31 - 1, (count,)).tolist()
        source += count
    staged = torch.tensor(headers + payload, dtype=torch.int32, device=device)
    state.apply_writes(one.words, staged, len(writes))
    slot_state.apply_writes(two.words, staged, len(writes))
    assert torch.equal(one.words, two.words)
    assert one.pages.view(-1)[1499] == payload[1499] and one.pages[97, 15] == payload[1531]


@pytest.mark.parametrize("last", [True, False])
def test_where_tokens_go_in_layers_with_blocks_of_their_own(device: torch.device, last: bool) -> None:
    """Token ids stay in the pages of the first table."""
    made = SlotState(5, 40, 16, 16, device, has_beside=True)
    assert made.beside is not None and made.words.shape[0] == made.pages_at + 16 * 16
    made.lengths.copy_(torch.tensor([7, 16, 17, 39, 33]))
    made.block_tables.copy_(1 + torch.randperm(15).view(5, 3))
    made.beside.block_tables.copy_(1 + torch.randperm(15).view(5, 3))
    made.pages.copy_(torch.randint(0, 90, made.pages.shape))
    made.last_tokens.copy_(torch.randint(0, 90, (5,)))
    rows = torch.tensor([3, 0, -1, 4], dtype=torch.int32, device=device)
    at = None if last else torch.tensor([-1, 5, 0, 20], dtype=torch.int32, device=device)
    ids = state.gather_inputs(made, rows, at)[0]
    before = made.pages.clone()
    found = state.gather_inputs(made.beside, rows, at)
    for ours, expected in zip(found, slot_state.gather_inputs(made.beside, rows, at), strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(found[0], ids) and torch.equal(made.pages[1:], before[1:])
    assert found[2][0] == made.beside.block_tables[3, 2] * 16 + 6 and found[2][2] == 0  # of 39 tokens the last


@pytest.mark.parametrize(("last", "own_pages"), [(True, False), (False, False), (True, True), (False, True)])
def test_inputs(device: torch.device, last: bool, own_pages: bool) -> None:
    slots = make_state(device, own_pages=own_pages)
    rows = torch.tensor([3, 0, -1, 4, 3, -1] * 30, dtype=torch.int32, device=device)
    at = None if last else torch.randint(0, 30, rows.shape, dtype=torch.int32, device=device)
    if at is not None:
        at[rows == 3] = -1  # a slot has its last token in a step or some of a prompt
    twin = make_state(device, own_pages=own_pages)
    twin.words.copy_(slots.words)
    for ours, expected in zip(
        state.gather_inputs(slots, rows, at), slot_state.gather_inputs(twin, rows, at), strict=True
    ):
        assert torch.equal(ours, expected)
    assert torch.equal(slots.pages[1:], twin.pages[1:])  # the first one is nobody's
