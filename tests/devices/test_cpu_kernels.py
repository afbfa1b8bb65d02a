"""Each native CPU op against its definition in `kernels.reference`."""

import math
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from gguf_blocks import random_blocks
from text_generation_inference.kernels import experts, latent, low_bit, reference
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.cpu import build
from text_generation_inference.kernels.cpu.experts import NativeExperts, PackedExperts
from text_generation_inference.kernels.cpu.fused_decode import MakeNativeFusedDecode
from text_generation_inference.kernels.cpu.latent import NativeLatentAttention
from text_generation_inference.kernels.cpu.low_bit import NativeLowBit
from text_generation_inference.kernels.cpu.ops import NativeOps, Packed, greedy, load_ops
from text_generation_inference.kernels.fused_decode import FusedExperts, FusedLayer
from text_generation_inference.kernels.matrices import BlockPieces
from text_generation_inference.kernels.routing import SoftmaxRouting

QUANTS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "q4_k", "q5_k", "q6_k"]


def make_blocks(kind: str, out: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks, and their values."""
    blocks = random_blocks(kind.upper(), out, width, seed)
    return torch.from_numpy(blocks), torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind.upper()]))


def fit_width(kind: str, width: int) -> int:
    """Blocks of k-quants are of 256."""
    return -(-width // 256) * 256 if kind.endswith("_k") else width


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    """The reference runs on one thread: torch's pool waits for all its threads at every op, slow on a shared machine."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Linear ---------------------------------------------------------------------------------------------------------

SHAPES = [
    (1, 1, 1),
    (1, 50, 33),
    (2, 48, 64),
    (3, 100, 192),
    (5, 47, 200),
    (8, 96, 576),
    (16, 145, 97),
    (31, 49, 400),
    (300, 77, 260),
]


@pytest.mark.parametrize(("rows", "out", "width"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_float32(ops: NativeOps, rows: int, out: int, width: int, biased: bool) -> None:
    x, weight = torch.randn(rows, width), torch.randn(out, width) / math.sqrt(width)
    bias = torch.randn(out) if biased else None
    close(ops.linear(x, ops.pack_linear(weight), bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize(
    ("rows", "out", "width"),
    [(1, 96, 576), (1, 50, 32), (2, 61, 64), (3, 48, 224), (4, 100, 1536), (7, 49, 96), (16, 144, 576), (65, 97, 416)],
)
def test_linear_quantized(ops: NativeOps, kind: str, rows: int, out: int, width: int) -> None:
    width = fit_width(kind, width)
    blocks, weight = make_blocks(kind, out, width)
    packed = ops.pack_blocks([(kind, blocks)], width)
    x, bias = torch.randn(rows, width) / math.sqrt(width), torch.randn(out)
    close(ops.linear(x, packed, bias), reference.linear(x, weight, bias))
    close(ops.linear(x, packed), reference.linear(x, weight))
    assert torch.equal(ops.unpack(packed), weight)


@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize(("rows", "out", "width"), [(5, 50, 256), (16, 49, 1792), (33, 97, 768)])
def test_linear_on_tiles(tiled: NativeOps, kind: str, rows: int, out: int, width: int) -> None:
    blocks, weight = make_blocks(kind, out, width)
    packed = tiled.pack_blocks([(kind, blocks)], width)
    x, bias = torch.randn(rows, width) / math.sqrt(width), torch.randn(out)
    close(tiled.linear(x, packed, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_pieces_of_several_kinds_are_one_matrix(ops: NativeOps, rows: int) -> None:
    pieces = {kind: make_blocks(kind, out, 512) for kind, out in (("q4_k", 100), ("q6_k", 33), ("q8_0", 17))}
    packed = ops.pack_blocks([(kind, blocks) for kind, (blocks, _) in pieces.items()], 512)
    weight = torch.cat([values for _, values in pieces.values()])
    assert packed.shape == weight.shape
    x, bias = torch.randn(rows, 512) / 20, torch.randn(150)
    close(ops.linear(x, packed, bias), reference.linear(x, weight, bias))
    assert torch.equal(ops.unpack(packed), weight)
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([150]), packed)


def test_linear_takes_strided_rows_and_other_forms(ops: NativeOps) -> None:
    weight = torch.randn(70, 64)
    packed = ops.pack_linear(torch.cat([weight, weight])[:70])
    wide = torch.randn(9, 200)
    close(ops.linear(wide[:, 100:164], packed), reference.linear(wide[:, 100:164], weight))
    close(ops.linear(wide[::2, :64], packed), reference.linear(wide[::2, :64], weight))
    close(ops.linear(wide.t()[:64].t(), packed), reference.linear(wide[:, :64], weight))
    half = wide[:, :64].bfloat16()
    assert ops.linear(half, packed).dtype == torch.bfloat16
    close(ops.linear(half, packed).float(), reference.linear(half.float(), weight), 1e-1)
    assert ops.linear(wide[:0, :64], packed).shape == (0, 70)
    close(
        ops.linear(wide[:, :64], ops.pack_linear(torch.randn(64, 70).t().contiguous().t().t().contiguous())),
        ops.linear(wide[:, :64], ops.pack_linear(weight)),
        1e9,
    )
    close(ops.linear(wide[:, :64].double(), weight.double()).float(), reference.linear(wide[:, :64], weight))
    with pytest.raises(ValueError, match="features"):
        ops.linear(wide, packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "out", "width"), [(1, 50, 96), (3, 100, 192), (4, 47, 224), (9, 96, 576), (40, 49, 416)]
)
def test_values_that_16_bits_hold_are_kept_in_them(
    ops: NativeOps, dtype: torch.dtype, rows: int, out: int, width: int
) -> None:
    x, weight, bias = torch.randn(rows, width), (torch.randn(out, width) / 20).to(dtype).float(), torch.randn(out)
    packed, wide = ops.pack_linear(weight), ops.pack_linear(torch.cat([weight, torch.full((1, width), 0.1)]))
    assert isinstance(packed, Packed)
    assert isinstance(wide, Packed)
    assert (packed.kind, wide.kind) == (str(dtype).removeprefix("torch."), "float32")
    assert torch.equal(ops.unpack(packed), weight)
    found = ops.linear(x, packed, bias)
    close(found, reference.linear(x, weight, bias))
    assert torch.equal(found, ops.linear(x, wide, torch.cat([bias, bias[:1]]))[:, :-1])


@pytest.mark.parametrize("kind", ["float32", *QUANTS])
def test_a_row_does_not_depend_on_the_others(ops: NativeOps, kind: str) -> None:
    width = fit_width(kind, 1600)
    x = torch.randn(40, width)
    if kind == "float32":
        packed = ops.pack_linear(torch.randn(100, width))
    else:
        packed = ops.pack_blocks([(kind, make_blocks(kind, 100, width)[0])], width)
    # Quantised weights have one way for few rows and another for many; they differ by rounding.
    few = torch.cat([ops.linear(row[None], packed) for row in x])
    many = few if kind == "float32" else torch.cat([ops.linear(x[:20], packed), ops.linear(x[20:], packed)])
    close(few, many, 1e-4)
    for rows in (5, 8, 9, 16, 17, 40):
        assert torch.equal(ops.linear(x[:rows], packed), many[:rows])
        assert torch.equal(ops.linear(x[40 - rows :], packed), many[40 - rows :])


@pytest.mark.parametrize("kind", QUANTS)
def test_linear_keeps_what_is_small_and_what_is_not_finite(ops: NativeOps, kind: str) -> None:
    """Activations of very different sizes in one row, of none, and of no size at all."""
    blocks, weight = make_blocks(kind, 50, 512)
    packed = ops.pack_blocks([(kind, blocks)], 512)
    x = torch.randn(6, 512) * 10.0 ** torch.linspace(-9, 6, 16).repeat_interleave(32)
    x[1], x[2], x[3, 40], x[4, 7] = 0.0, x[2] * 1e-33, math.nan, math.inf
    exact = (x.double() @ weight.double().t()).float()
    for rows in (slice(0, 1), slice(0, 3), slice(0, 6)):
        found = ops.linear(x[rows], packed)
        largest = weight.abs().max() * x[rows].abs().nan_to_num(0, 0).amax(1, keepdim=True)
        for row, value in enumerate(found):
            if row < 3:
                assert (value - exact[row]).abs().max() <= 2e-6 * largest[row] + 1e-30
        assert not rows.stop > 4 or not found[3:5].isfinite().any()
        assert not rows.stop > 4 or found[5].isfinite().all()


def test_pack_refuses_what_it_cannot_hold(ops: NativeOps) -> None:
    with pytest.raises(ValueError, match="q3_k"):
        ops.pack_blocks([("q3_k", torch.zeros(4, 110, dtype=torch.uint8))], 256)
    for kind, size, width in (("q4_1", 21, 32), ("q4_k", 18, 32), ("q4_k", 144, 288)):
        with pytest.raises(ValueError, match="blocks"):
            ops.pack_blocks([(kind, torch.zeros(4, size, dtype=torch.uint8))], width)
    half = torch.randn(4, 4).half()
    assert ops.pack_linear(half) is half


@pytest.mark.parametrize("kind", ["float32", *QUANTS])
def test_embedding(ops: NativeOps, kind: str) -> None:
    width = fit_width(kind, 96)
    if kind == "float32":
        weight = torch.randn(111, width)
        packed = ops.pack_linear(weight)
    else:
        blocks, weight = make_blocks(kind, 111, width)
        packed = ops.pack_blocks([(kind, blocks)], width)
    assert isinstance(packed, Packed)
    ids = torch.randint(0, 111, (30,))
    assert torch.equal(ops.embedding(ids, packed), reference.embedding(ids, weight))
    assert torch.equal(ops.embedding(ids, weight), reference.embedding(ids, weight))
    for bad in (-1, 111):
        with pytest.raises(IndexError):
            ops.embedding(torch.tensor([0, bad]), packed)


# Experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [None, ("q4_k", "q6_k"), ("q8_0", "q5_0")], ids=str)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (3, 1), (9, 3), (40, 2)])
@pytest.mark.parametrize("scale_inputs", [False, True])
def test_experts(ops: NativeOps, kinds: tuple[str, str] | None, tokens: int, top_k: int, scale_inputs: bool) -> None:
    count, hidden, width = 5, 256, 256
    native = NativeExperts(ops)
    if kinds is None:
        gate_up, down = torch.randn(count * 2 * width, hidden) / 16, torch.randn(count * hidden, width) / 16
        packed = [native.pack_experts(each, count) for each in (gate_up, down)]
    else:  # gates in one kind and values in the other
        halves = [make_blocks(kind, width, hidden, seed) for seed in range(count) for kind in kinds]
        gate_up = torch.cat([values for _, values in halves])
        pieces = [(kind, blocks) for (blocks, _), kind in zip(halves, kinds * count, strict=True)]
        blocks, down = make_blocks(kinds[1], count * hidden, width)
        packed = [
            native.pack_experts(BlockPieces(pieces, gate_up.shape), count),
            native.pack_experts(BlockPieces([(kinds[1], blocks)], down.shape), count),
        ]
    assert all(
        isinstance(each, PackedExperts) and each.shape == plain.shape
        for each, plain in zip(packed, (gate_up, down), strict=True)
    )
    x = torch.randn(tokens, hidden) / 40
    ids = torch.stack([torch.randperm(count - 1)[:top_k] for _ in range(tokens)])  # nobody asks for the last one
    weights = torch.rand(tokens, top_k)
    biases = (torch.randn(count, 2 * width), torch.randn(count, hidden))
    for given in ({"gate": "silu"}, {"gate": "gelu_tanh"}, {"gate": "clamped_swiglu", "biases": biases}):
        found = native.experts(x, ids, weights, *packed, **given, scale_inputs=scale_inputs)
        close(found, experts.experts(x, ids, weights, gate_up, down, **given, scale_inputs=scale_inputs), 1e-4)
    with pytest.raises(IndexError):
        native.experts(x, ids + count, weights, *packed)


# Rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 576), (3, 77), (40, 576), (300, 130)])
def test_norms(ops: NativeOps, rows: int, width: int) -> None:
    wide, weight = torch.randn(rows, width + 5) * 3, torch.randn(width)
    x, residual = wide[:, 2 : 2 + width], torch.randn(rows, width)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    actual, expected = ops.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5)
    close(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    close(ops.rms_norm(x.double(), weight.double(), 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 1536), (5, 77), (70, 1536)])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates(ops: NativeOps, name: str, rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width) * 8
    close(getattr(ops, name)(x), getattr(reference, name)(x))
    extreme = torch.tensor([[-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 100.0, 1e4] + [1.0] * 8])
    close(getattr(ops, name)(extreme), getattr(reference, name)(extreme))


def test_gates_keep_nan(ops: NativeOps) -> None:
    x = torch.ones(1, 40)
    x[0, 3], x[0, 25] = math.nan, math.nan
    for name in ("silu_mul", "gelu_tanh_mul"):
        assert getattr(ops, name)(x).isnan().nonzero()[:, 1].tolist() == [3, 5]


@pytest.mark.parametrize("vocab", [1, 7, 4096, 4100, 49152])
@pytest.mark.parametrize("rows", [1, 5])
def test_greedy(ops: NativeOps, rows: int, vocab: int) -> None:
    logits = torch.randn(rows, vocab) * 5
    index, logprob = ops.greedy(logits)
    assert torch.equal(index, logits.argmax(-1))
    close(logprob, logits.log_softmax(-1).amax(-1))


def test_greedy_ties_and_non_finite(ops: NativeOps) -> None:
    logits = torch.zeros(7, 9000)
    logits[0, [4000, 4097, 8999]] = 3.0
    logits[1, [5000, 7000]] = math.nan
    logits[1, 100] = math.inf
    logits[2, [4500, 4600]] = math.inf
    logits[3] = -math.inf
    logits[4, 5:] = -math.inf
    logits[5, 8999] = 1e30
    for pick in (ops.greedy, greedy):
        index, logprob = pick(logits)
        assert index.tolist() == [4000, 5000, 4500, 0, 0, 8999, 0]
        assert logprob.isnan().tolist() == [False, True, True, True, False, False, False]
        close(logprob[[0, 4, 5, 6]], logits[[0, 4, 5, 6]].log_softmax(-1).amax(-1))


# Rotary embedding and attention -----------------------------------------------------------------------------------


def make_batch(decode: list[int], chunks: list[tuple[int, int]], block_size: int) -> Batch:
    """`decode`: lengths after this step; `chunks`: (start, end). Block ids are shuffled and never 0."""
    lengths = decode + [end for _, end in chunks]
    tables = torch.zeros(len(lengths), max(-(-n // block_size) for n in lengths) + 1, dtype=torch.int32)
    order, taken = torch.randperm(sum(-(-n // block_size) for n in lengths)) + 1, 0
    for row, n in enumerate(lengths):
        count = -(-n // block_size)
        tables[row, :count] = order[taken : taken + count]
        taken += count
    spans = [(n - 1, n) for n in decode] + chunks
    positions = torch.cat([torch.arange(start, end) for start, end in spans])
    rows = torch.cat([torch.full((end - start,), row) for row, (start, end) in enumerate(spans)])
    kv_index = tables[rows, positions // block_size].long() * block_size + positions % block_size
    return Batch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        kv_index=kv_index,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        meta=PagedMeta(
            block_tables=tables,
            num_decode=len(decode),
            chunk_starts_cpu=[start for start, _ in chunks],
            chunk_ends_cpu=[end for _, end in chunks],
            max_seq_len=max(lengths),
        ),
        logit_tokens=torch.zeros(0, dtype=torch.int64),
    )


def make_cache(batch: Batch, block_size: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    blocks = int(batch.meta.block_tables.max()) + 1
    shape = (blocks, block_size, kv_heads, head_dim)
    return torch.randn(shape), torch.randn(shape)


def fused_qkv(tokens: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    q, k, v = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    return q.unflatten(1, (heads, head_dim)), k.unflatten(1, (kv_heads, head_dim)), v.unflatten(1, (kv_heads, head_dim))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (128, 64), (128, 20)])
@pytest.mark.parametrize("block_size", [16, 32])
def test_rotary_and_cache(ops: NativeOps, head_dim: int, rotary_dim: int, block_size: int) -> None:
    batch = make_batch([5, 40], [(0, 50), (17, 18)], block_size)
    q, k, v = fused_qkv(len(batch.positions), 6, 2, head_dim)
    cos_sin = torch.randn(64, rotary_dim)
    caches = make_cache(batch, block_size, 2, head_dim)
    expected_caches = tuple(cache.clone() for cache in caches)
    close(
        ops.rotary_and_cache(q, k, v, cos_sin, batch, *caches),
        reference.rotary_and_cache(q, k, v, cos_sin, batch, *expected_caches),
    )
    close(caches[0], expected_caches[0])
    assert torch.equal(caches[1], expected_caches[1])
    batch.kv_index[3] = caches[0].shape[0] * block_size
    with pytest.raises(IndexError):
        ops.rotary_and_cache(q, k, v, cos_sin, batch, *caches)


BATCHES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "one row": ([7], []),
    "rows": ([1, 16, 17, 64, 65, 130], []),
    "long row": ([1500, 3], []),
    "chunk": ([], [(0, 100)]),
    "chunk with prefix": ([], [(300, 421)]),
    "short chunks": ([], [(0, 1), (40, 42), (63, 65)]),
    "mix": ([33, 600], [(0, 37), (64, 200), (5, 6)]),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 80), (8, 96), (2, 128), (3, 128), (10, 72)])
@pytest.mark.parametrize("block_size", [16, 32])
def test_attention(ops: NativeOps, name: str, group: int, head_dim: int, block_size: int) -> None:
    batch = make_batch(*BATCHES[name], block_size)
    q, k, v = fused_qkv(len(batch.positions), 2 * group, 2, head_dim)
    caches = make_cache(batch, block_size, 2, head_dim)
    scale = head_dim**-0.5
    close(ops.attention(q, k, v, *caches, batch, scale), reference.attention(q, k, v, *caches, batch, scale))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, None), (100, 30.0), (None, 5.0)])
def test_attention_with_window_and_softcap(
    ops: NativeOps, name: str, window: int | None, softcap: float | None
) -> None:
    batch = make_batch(*BATCHES[name], 16)
    q, k, v = fused_qkv(len(batch.positions), 9, 3, 64)
    caches = make_cache(batch, 16, 3, 64)
    close(
        ops.attention(q, k, v, *caches, batch, 0.3, window, softcap),
        reference.attention(q, k, v, *caches, batch, 0.3, window, softcap),
    )


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (None, 40), (33, 40), (None, 300)])
@pytest.mark.parametrize("name", BATCHES)
def test_attention_with_sinks_and_chunks(ops: NativeOps, name: str, window: int | None, chunk: int | None) -> None:
    batch = make_batch(*BATCHES[name], 16)
    q, k, v = fused_qkv(len(batch.positions), 6, 3, 64)
    caches = make_cache(batch, 16, 3, 64)
    for sinks in (torch.tensor([2.5, -1.0, 0.3, -math.inf, 4.0, 0.0]), None):
        asked = (*caches, batch, 0.3, window, None, (1.0, 1.0), None, sinks, chunk)
        close(ops.attention(q, k, v, *asked), reference.attention(q, k, v, *asked))


def test_attention_reads_no_slot_past_the_row(ops: NativeOps) -> None:
    batch = make_batch([5, 20], [(3, 9), (0, 70)], 16)
    q, k, v = fused_qkv(len(batch.positions), 9, 3, 64)
    caches = make_cache(batch, 16, 3, 64)
    expected = ops.attention(q, k, v, *caches, batch, 0.125)
    used = torch.zeros(caches[0].shape[:2], dtype=torch.bool)
    for row, length in enumerate(batch.seq_lens.tolist()):
        for token in range(length):
            used[batch.meta.block_tables[row, token // 16], token % 16] = True
    for cache in caches:
        cache[~used] = math.nan
    assert torch.equal(ops.attention(q, k, v, *caches, batch, 0.125), expected)


def test_attention_refuses_a_wrong_table(ops: NativeOps) -> None:
    batch = make_batch([5, 20], [(3, 9)], 16)
    q, k, v = fused_qkv(len(batch.positions), 4, 2, 64)
    caches = make_cache(batch, 16, 2, 64)
    batch.meta.block_tables[1, 1] = caches[0].shape[0]
    with pytest.raises(IndexError):
        ops.attention(q, k, v, *caches, batch, 0.125)


def test_attention_falls_back(ops: NativeOps) -> None:
    batch = make_batch([5, 20], [(3, 9)], 16)
    q, k, v = fused_qkv(len(batch.positions), 4, 2, 20)
    caches = make_cache(batch, 16, 2, 20)
    close(ops.attention(q, k, v, *caches, batch, 0.2), reference.attention(q, k, v, *caches, batch, 0.2))
    k_wide, v_wide = caches[0].double(), caches[1].double()
    close(
        ops.attention(q.double(), k, v, k_wide, v_wide, batch, 0.2).float(),
        reference.attention(q, k, v, *caches, batch, 0.2),
    )


# Attention over latents -------------------------------------------------------------------------------------------

LATENTS = [(4, 16, 8, 12, 32), (9, 70, 16, 20, 48), (3, 128, 64, 128, 512), (2, 8, 6, 4, 10)]  # heads, p, r, v, c
LatentWork = tuple[Tensor, Tensor, Tensor, tuple[Tensor, float], Tensor, Batch, Tensor, float]


def latent_work(batch: Batch, heads: int, p: int, r: int, v: int, c: int) -> LatentWork:
    """What the op takes. Slots of the cache that no row has are not numbers."""
    wide, width = torch.randn(len(batch.positions), heads * (p + r) + c + r), heads * (p + r)
    q, rows = wide[:, :width].unflatten(1, (heads, p + r)), wide[:, width:]
    cache = torch.full((int(batch.meta.block_tables.max()) + 1, 16, 1, c + r), math.nan)
    for row, length in enumerate(batch.seq_lens.tolist()):
        for token in range(length):
            cache[batch.meta.block_tables[row, token // 16], token % 16] = torch.randn(c + r)
    up, norm = torch.randn(heads, p + v, c) / c**0.5, (torch.rand(c) + 0.5, 1e-6)
    return q, rows, up, norm, torch.randn(1500, r), batch, cache, (p + r) ** -0.5


def copied(work: LatentWork) -> LatentWork:
    q, rows, *same, cache, scale = work
    return q.clone(), rows.clone(), *same, cache.clone(), scale  # pyright: ignore


@pytest.mark.parametrize("name", ["one row", "rows", "chunk with prefix", "mix"])
@pytest.mark.parametrize("sizes", LATENTS, ids=str)
def test_latent_attention(ops: NativeOps, name: str, sizes: tuple[int, int, int, int, int]) -> None:
    work = latent_work(make_batch(*BATCHES[name], 16), *sizes)
    theirs = copied(work)
    found = NativeLatentAttention(ops).latent_attention(*work)
    close(found, latent.latent_attention(*theirs))
    assert torch.equal(work[6].isnan(), theirs[6].isnan())
    close(work[6].nan_to_num(), theirs[6].nan_to_num())


def test_latent_attention_refuses_what_does_not_exist(ops: NativeOps) -> None:
    work = latent_work(make_batch([5, 20], [(3, 9)], 16), *LATENTS[0])
    batch, op = work[5], NativeLatentAttention(ops).latent_attention
    batch.meta.block_tables[1, 1] = work[6].shape[0]
    with pytest.raises(IndexError, match="block table"):
        op(*work)
    batch.positions[0] = 1500
    with pytest.raises(IndexError, match="position"):
        op(*work)


# Whole stack ----------------------------------------------------------------------------------------------------


def reference_layers(
    x: Tensor,
    layers: list[FusedLayer],
    final_norm: Tensor,
    cos_sin: Tensor,
    batch: Batch,
    heads: int,
    gate: str,
) -> Tensor:
    residual, x = x, reference.rms_norm(x, layers[0].input_norm, 1e-5)
    for i, layer in enumerate(layers):
        kv_heads, head_dim = layer.k_cache.shape[2:]
        qkv = reference.linear(x, layer.qkv, layer.qkv_bias).unflatten(1, (-1, head_dim))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None:
            q, k = reference.rms_norm(q, layer.q_norm, 1e-5), reference.rms_norm(k, layer.k_norm, 1e-5)
        table = cos_sin if layer.cos_sin is None else layer.cos_sin
        q = reference.rotary_and_cache(q, k, v, table, batch, layer.k_cache, layer.v_cache)
        x = reference.attention(q, k, v, layer.k_cache, layer.v_cache, batch, 0.125, layer.window, layer.softcap)
        x = reference.linear(x, layer.o, layer.o_bias)
        if layer.attention_out_norm is not None:
            x = reference.rms_norm(x, layer.attention_out_norm, 1e-5)
        x, residual = reference.add_rms_norm(x, residual, layer.post_norm, 1e-5)
        if layer.experts is None:
            x = getattr(reference, gate + "_mul")(reference.linear(x, layer.gate_up, layer.gate_up_bias))
            x = reference.linear(x, layer.down, layer.down_bias)
        else:
            routed = layer.experts.routing(reference.linear(x, layer.experts.router))
            x = experts.experts(x, *routed, layer.gate_up, layer.down, gate)
        if layer.mlp_out_norm is not None:
            x = reference.rms_norm(x, layer.mlp_out_norm, 1e-5)
        norm = final_norm if layer is layers[-1] else layers[i + 1].input_norm
        x, residual = reference.add_rms_norm(x, residual, norm, 1e-5)
    return x


@pytest.mark.parametrize("kind", ["plain", "full", "experts", "few bits", "experts in few bits"])
@pytest.mark.parametrize("name", BATCHES)
def test_stack(ops: NativeOps, name: str, kind: str) -> None:
    full, count = kind == "full", 5 if "experts" in kind else 1
    hidden, heads, kv_heads, head_dim, width = 96, 6, 2, 64, 112
    batch = make_batch(*BATCHES[name], 16)
    qkv = (heads + 2 * kv_heads) * head_dim

    def random_layer(number: int) -> FusedLayer:
        extra = {}
        if full:
            extra = {
                "qkv_bias": torch.randn(qkv), "o_bias": torch.randn(hidden), "gate_up_bias": torch.randn(2 * width),
                "down_bias": torch.randn(hidden), "q_norm": torch.rand(head_dim), "k_norm": torch.rand(head_dim),
                "window": 30 if number else None, "softcap": 20.0, "attention_out_norm": torch.rand(hidden),
                "mlp_out_norm": torch.rand(hidden), "cos_sin": torch.randn(1600, 32) if number else None,
            }  # fmt: skip
        if count > 1:
            rule = SoftmaxRouting(2, p_norm=None if number == 1 else 1.0, factor=1.5)
            extra = {"experts": FusedExperts(torch.randn(count, hidden) / 4, None, None, rule, "silu")}
        layer = FusedLayer(
            torch.rand(hidden), torch.randn(qkv, hidden) / 10, torch.randn(hidden, heads * head_dim) / 20, torch.rand(hidden),
            torch.randn(count * 2 * width, hidden) / 10, torch.randn(count * hidden, width) / 10,
            *make_cache(batch, 16, kv_heads, head_dim), **extra,
        )  # fmt: skip
        if "few bits" not in kind:
            return layer
        coded = {"qkv": (4, 32, True), "o": (8, 128, True), "gate_up": (4, 96, False), "down": (4, 128, False)}
        few = {part: low_bit.quantize(getattr(layer, part), *form) for part, form in coded.items()}
        few["down"].order = torch.randperm(width).int()
        return replace(layer, **few)

    def pack(layer: FusedLayer) -> FusedLayer:
        matrices = {part: getattr(layer, part) for part in ("qkv", "o", "gate_up", "down")}
        experts_of = {part: count if count > 1 and part in ("gate_up", "down") else None for part in matrices}
        if "few bits" in kind:
            found = {part: NativeLowBit(ops).pack_low_bit(each, experts_of[part]) for part, each in matrices.items()}
        else:
            found = {
                part: ops.pack_linear(each)
                if experts_of[part] is None
                else NativeExperts(ops).pack_experts(each, count)
                for part, each in matrices.items()
            }
        if layer.experts is not None:
            found["experts"] = replace(layer.experts, router=ops.pack_linear(layer.experts.router))
        return replace(layer, k_cache=layer.k_cache.clone(), v_cache=layer.v_cache.clone(), **found)

    layers = [random_layer(number) for number in range(3)]
    packed = [pack(layer) for layer in layers]
    final_norm, cos_sin, x = torch.rand(hidden), torch.randn(1600, head_dim), torch.randn(len(batch.positions), hidden)
    gate = "gelu_tanh" if full else "silu"
    make = MakeNativeFusedDecode(ops)
    stack = make(packed, final_norm, cos_sin, heads=heads, eps=1e-5, scale=0.125, activation=gate)
    assert stack is not None
    close(
        stack(x, batch),
        reference_layers(x, layers, final_norm, cos_sin, batch, heads, gate),
        1e-4,
    )
    for ours, theirs in zip(packed, layers, strict=True):
        close(ours.k_cache, theirs.k_cache, 1e-4)
        close(ours.v_cache, theirs.v_cache, 1e-4)


def test_stack_declines_what_has_no_kernel(ops: NativeOps) -> None:
    batch = make_batch([5], [], 16)
    norm, caches, cos_sin = torch.ones(64), make_cache(batch, 16, 1, 64), torch.randn(8, 64)
    packed = [ops.pack_linear(torch.randn(*shape)) for shape in ((192, 64), (64, 64), (160, 64), (64, 80))]
    qkv, o, gate_up, down = packed
    good = FusedLayer(norm, qkv, o, norm, gate_up, down, *caches)
    assert MakeNativeFusedDecode(ops)([good], norm, cos_sin, heads=1, eps=1e-5, scale=1.0) is not None
    assert MakeNativeFusedDecode(ops)([good], norm, cos_sin, heads=1, eps=1e-5, scale=1.0, activation="relu") is None
    assert (
        MakeNativeFusedDecode(ops)(
            [replace(good, qkv=torch.randn(192, 64))], norm, cos_sin, heads=1, eps=1e-5, scale=1.0
        )
        is None
    )
    assert (
        MakeNativeFusedDecode(ops)([replace(good, post_norm=norm.half())], norm, cos_sin, heads=1, eps=1e-5, scale=1.0)
        is None
    )
    with pytest.raises(ValueError, match="fit"):
        MakeNativeFusedDecode(ops)([replace(good, down=o)], norm, cos_sin, heads=1, eps=1e-5, scale=1.0)


# Building -------------------------------------------------------------------------------------------------------


def test_reasons_instead_of_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = load_ops(tmp_path, compilers=())
    assert isinstance(reason, str)
    assert "no C compiler" in reason
    reason = load_ops(tmp_path, compilers=("false",))
    assert isinstance(reason, str)
    reason = load_ops(tmp_path, march="no-such-machine")
    assert isinstance(reason, str)
    monkeypatch.setattr(build, "cpu_flags", lambda: "sse2 fma f16c")
    reason = load_ops(tmp_path)
    assert isinstance(reason, str)
    assert "avx2" in reason


def test_the_folder_is_private_and_the_build_is_reused(ops: NativeOps, cache_dir: Path, tmp_path: Path) -> None:
    folder = cache_dir / "cpu-kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert before
    assert all(path.suffix == ".so" for path in before)
    assert isinstance(load_ops(cache_dir), NativeOps)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    (tmp_path / "cpu-kernels").mkdir()
    os.chmod(tmp_path / "cpu-kernels", 0o777)
    reason = load_ops(tmp_path)
    assert isinstance(reason, str)
    assert "only this user" in reason


def test_no_second_openmp_runtime(ops: NativeOps) -> None:
    ops.linear(torch.randn(64, 256), ops.pack_linear(torch.randn(512, 256)))
    torch.randn(512, 512).mm(torch.randn(512, 512))
    paths = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    names = ("libgomp", "libiomp", "libomp")
    assert len({path for path in paths if Path(path).name.startswith(names)}) <= 1


def test_two_callers_at_once(ops: NativeOps) -> None:
    weight, x = ops.pack_linear(torch.randn(480, 256)), torch.randn(40, 256)
    expected = ops.linear(x, weight)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(result, expected) for result in pool.map(lambda _: ops.linear(x, weight), range(60)))


def test_any_number_of_threads(cache_dir: Path) -> None:
    like_torch = load_ops(cache_dir)
    assert isinstance(like_torch, NativeOps)
    weight, x = like_torch.pack_linear(torch.randn(300, 256)), torch.randn(40, 256)
    results = []
    for threads in (1, 2, 5, 3, 11):
        torch.set_num_threads(threads)
        results.append(like_torch.linear(x, weight))
    assert all(torch.equal(result, results[0]) for result in results)
