"""Attention over latents (MLA) against its definition in plain torch: on the GPU, or through Triton's interpreter."""

import importlib.util
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from triton_interpreter import interpreter_as_hardware, make_batch  # noqa: F401, a fixture

from text_generation_inference.kernels import latent as reference
from text_generation_inference.kernels.batch import Batch, PagedMeta

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from text_generation_inference.kernels.triton import latent as triton_latent
from text_generation_inference.kernels.triton.latent import (
    LatentChoice,
    TritonLatentAttention,
    choose_splits,
    choose_tiles,
)
from text_generation_inference.kernels.triton.ops import latent_in_flight

BATCHES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "decode": ([1, 16, 17, 65, 300, 0], []),
    "one row": ([260], []),
    "prompts": ([], [(0, 1), (0, 130)]),
    "over prefixes": ([], [(16, 20), (0, 3), (65, 82), (1, 2)]),
    "mixed": ([5, 90], [(40, 52), (0, 7), (16, 23), (0, 20)]),
}


@dataclass(frozen=True)
class Sizes:
    heads: int
    plain: int
    rope: int
    value: int
    latent: int


SMALL, ODD = Sizes(2, 16, 16, 16, 32), Sizes(3, 24, 8, 40, 48)


@pytest.fixture(scope="module")
def device(device_name: str) -> torch.device:
    return torch.device(device_name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def places(batch: Batch, row: int, positions: Tensor) -> Tensor:
    """Where the row's tokens are in the cache."""
    table = batch.meta.block_tables[int(batch.meta.table_rows[row])].long()
    return table[positions // 16] * 16 + positions % 16


def locate(batch: Batch, decode: list[int], chunks: list[tuple[int, int]], device: torch.device) -> None:
    """Positions of the batch's tokens, and where they go."""
    spans = [(max(0, length - 1), max(1, length)) for length in decode] + chunks
    positions = [torch.arange(start, end, device=device) for start, end in spans]
    batch.positions = torch.cat(positions)
    batch.kv_index = torch.cat(
        [
            places(batch, row, at) if row >= len(decode) or decode[row] else torch.zeros_like(at)
            for row, at in enumerate(positions)
        ]
    )


def define(
    q: Tensor, latent: Tensor, up: Tensor, norm: tuple[Tensor, float], cos_sin: Tensor, batch: Batch, cache: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """The definition, row by row: it takes much memory for each."""
    meta: PagedMeta = batch.meta
    plain, parts = q.shape[2] - cos_sin.shape[1], []
    reference.latent_cache(q[..., plain:], latent, *norm, cos_sin, batch, cache)
    absorbed = reference.absorb(q, up[:, :plain])
    starts = [*[None] * meta.num_decode, *meta.chunk_starts_cpu]
    for row, start in enumerate(starts):
        end, token = int(batch.seq_lens[row]), sum(len(part) for part in parts)
        count, tables = 1 if start is None else end - start, meta.block_tables[meta.table_rows[row, None]]
        spans = ([], []) if start is None else ([start], [end])
        alone = PagedMeta(tables, int(start is None), *spans, max(1, end))
        one = replace(batch, seq_lens=batch.seq_lens[row, None].clamp(min=1), meta=alone)
        parts.append(reference.attend(absorbed[token : token + count], cache, one, scale, up.shape[2]))
    return reference.expand_values(torch.cat(parts), up[:, plain:])


def check(
    device: torch.device,
    work: tuple[list[int], list[tuple[int, int]]],
    sizes: Sizes,
    dtype: torch.dtype,
    op: TritonLatentAttention,
    is_captured: bool = False,
) -> None:
    """Against the definition in float64: what attention gives and what the cache holds then."""
    decode, chunks = work
    batch = make_batch(device, decode, chunks)
    locate(batch, decode, chunks, device)
    tokens, blocks = len(batch.positions), int(sum(-(-end // 16) or 1 for end in batch.seq_lens.tolist())) + 2
    width = sizes.latent + sizes.rope
    cache = torch.randn(blocks, 16, 1, width, device=device).to(dtype)
    cache[0] = math.nan  # nobody's block
    query = sizes.plain + sizes.rope
    down = torch.randn(tokens, sizes.heads * query + width, device=device).to(dtype)
    up = (torch.randn(sizes.heads, sizes.plain + sizes.value, sizes.latent, device=device) / sizes.latent**0.5).to(
        dtype
    )
    weight = (torch.rand(sizes.latent, device=device) + 0.5).to(dtype)
    angles = torch.rand(max(int(batch.positions.max()) + 1, 50), sizes.rope // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    scale = query**-0.5
    known = replace(batch, meta=replace(batch.meta, block_tables=batch.meta.block_tables.clamp(max=blocks - 1)))

    def parts(fused: Tensor) -> tuple[Tensor, Tensor]:
        return fused[:, :-width].view(tokens, sizes.heads, query), fused[:, -width:]

    exact_cache = cache.double()
    exact = define(*parts(down.double()), up.double(), (weight.double(), 1e-6), cos_sin, known, exact_cache, scale)
    if is_captured:
        meta: PagedMeta = batch.meta
        assert meta.prefill_tiles is not None
        padding = torch.zeros((2, 5), dtype=torch.int32, device=device)
        tiles = torch.cat((meta.prefill_tiles, padding))
        batch.meta = replace(meta, chunk_starts_cpu=[], chunk_ends_cpu=[], prefill_tiles=tiles)
    found = op(*parts(down.clone()), up, (weight, 1e-6), cos_sin, batch, cache, scale)
    real = [row for row in range(tokens) if row >= len(decode) or decode[row]]
    limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert found.shape == exact.shape and found.dtype == dtype
    assert bool(found[real].isfinite().all())
    assert error(found[real], exact[real]) < limit
    assert error(cache[1:], exact_cache[1:]) < limit


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("sizes", [SMALL, ODD], ids=["whole", "padded"])
def test_latent_attention(device: torch.device, name: str, sizes: Sizes) -> None:
    """With parts of rows (there are more processors than rows) and without, in passes that are captured and not."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    if device.type == "cpu":  # the interpreter is slow, and has no product in bfloat16
        dtypes = (torch.float32,) if name == "decode" else (torch.float16,)
    for dtype in dtypes:
        check(device, BATCHES[name], sizes, dtype, TritonLatentAttention(4, (9, 0)))
    if name == "mixed":
        check(device, BATCHES[name], sizes, dtypes[-1], TritonLatentAttention(4, (9, 0)), is_captured=True)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_parts(device: torch.device, splits: int) -> None:
    """Joined for few rows and for more; some rows are too short for all parts."""
    op = TritonLatentAttention(4, (9, 0))
    op.splits = splits
    for lengths in ([1, 70, 150], [1, 0, 64, 65, 128, 200, 33, 90, 2]):
        check(device, (lengths, []), SMALL, torch.float16, op)


def test_more_heads_than_a_program_has(device: torch.device) -> None:
    for heads in (18, 40) if device.type != "cpu" else (18,):
        check(device, ([3, 40], [(5, 7)]), replace(SMALL, heads=heads), torch.float16, TritonLatentAttention(4, (9, 0)))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (10, 0)])
def test_tiles_of_other_gpus(device: torch.device, capability: tuple[int, int]) -> None:
    check(device, BATCHES["mixed"], SMALL, torch.float16, TritonLatentAttention(4, capability))


def test_wide_latents_in_float32_have_the_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition asks on the host which prompts there are, which a pass that is captured may not."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the definition computes")

    monkeypatch.setattr(triton_latent.reference, "latent_attention", refuse)
    op, wide = TritonLatentAttention(4, (9, 0)), replace(SMALL, latent=136)
    for is_captured in (False, True):
        check(device, ([5, 33], [(3, 9), (0, 4)]), wide, torch.float32, op, is_captured)


def test_real_sizes(device: torch.device) -> None:
    """DeepSeek's, with 16 heads and 128; lengths to 5000, at the edges of tiles and not."""
    if device.type == "cpu":
        pytest.skip("slow through the interpreter")
    capability = torch.cuda.get_device_capability()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    rows = [1, 63, 64, 65, 127, 1000, 5000, 4097, 0]
    works: list[tuple[list[int], list[tuple[int, int]]]] = [
        ([1], []), ([700], []), ([5000], []), ([64, 129], []), (rows, []), (rows * 4, []), (rows * 30, []),
        ([], [(0, 1), (0, 700), (0, 128)]), ([40, 2000], [(0, 300), (1000, 1200), (16, 17), (0, 129)]),
    ]  # fmt: skip
    in_flight = latent_in_flight(capability)
    for heads, decode in ((16, None), (128, None), *([(16, in_flight), (32, in_flight)] if in_flight else [])):
        op = TritonLatentAttention(processors, capability, decode)
        for work in works:
            for dtype in (torch.bfloat16, torch.float16):
                check(device, work, Sizes(heads, 128, 64, 128, 512), dtype, op)
            if work[1]:
                check(device, work, Sizes(heads, 128, 64, 128, 512), torch.bfloat16, op, is_captured=True)


def test_choices() -> None:
    assert [choose_splits(rows, 132) for rows in (1, 4, 8, 16, 33, 64, 66, 128, 132, 256)] == [
        64, 29, 15, 8, 4, 2, 2, 1, 1, 1,
    ]  # fmt: skip
    assert choose_splits(96, 132) == 4  # two would leave a quarter of the processors idle
    assert choose_tiles(16, torch.bfloat16, (9, 0), prompts=False) == LatentChoice(16, 64, 4, 3)
    assert choose_tiles(128, torch.bfloat16, (9, 0), prompts=False).columns == 32
    for capability in ((8, 0), (8, 9), (10, 0), (10, 3), (12, 0)):
        assert choose_tiles(128, torch.bfloat16, capability, prompts=True).block == 32
    assert choose_tiles(16, torch.float16, (7, 5), prompts=True) == LatentChoice(8, 16, 4, 1)
