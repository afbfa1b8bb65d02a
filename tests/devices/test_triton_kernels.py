"""Each Triton kernel against its definition in plain torch: on the GPU, or through Triton's interpreter on the CPU."""

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tgi.kernels import reference, resident, sampling
from tgi.kernels.batch import PREFILL_TILE, ForwardBatch
from tgi.kernels.resident import SlotState

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tgi.kernels.triton import attention, choice, small, state

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCES)


@pytest.fixture(scope="module")
def device(device_name: str) -> torch.device:
    return torch.device(device_name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


# Between the matrix products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (5, 1), (2, 576)])
def test_norms(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (torch.randn(rows, width + 3, device=device).to(dtype)[:, :width] for _ in range(2))
    weight = torch.rand(width, device=device).to(dtype)
    close(small.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    out, total = small.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    close(out, expected)
    close(total, expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 99), (2, 2500)])
def test_gates(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width, device=device).to(dtype) * 4
    close(small.silu_mul(x), reference.silu_mul(x))
    close(small.gelu_tanh_mul(x), reference.gelu_tanh_mul(x))


def caches(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, by_head: bool) -> list[Tensor]:
    """Keys and values, in memory by token or by head."""
    blocks, size, heads, d = shape
    order = (blocks, heads, size, d) if by_head else shape
    made = [torch.randn(order, device=device).to(dtype) for _ in range(2)]
    return [cache.transpose(1, 2) for cache in made] if by_head else made


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
    angles = torch.rand(positions, rotary // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    batch = make_batch(device, [], [])
    batch.positions = torch.randint(positions, (tokens,), device=device)
    batch.kv_index = torch.randperm(4 * block_size, device=device)[:tokens]
    expected = reference.rotary_and_cache(q.clone(), k, v, cos_sin, batch, k_expected, v_expected)
    close(small.rotary_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache), expected)
    close(k_cache, k_expected)
    assert torch.equal(v_cache, v_expected)


# Attention --------------------------------------------------------------------------------------------------------


def make_batch(device: torch.device, decode: list[int], chunks: list[tuple[int, int]], size: int = 16) -> ForwardBatch:
    """Rows with so many cached tokens each, then chunks (start, end). Tables and slots are shuffled; row -1 is padding."""
    ends = [*decode, *(end for _, end in chunks)]
    counts = [max(1, -(-end // size)) for end in ends]
    ids = (torch.randperm(sum(counts)) + 1).to(torch.int32).split(counts) if counts else ()
    slots = torch.randperm(len(ends) + 2)[: len(ends)].to(torch.int32)
    tables = torch.full(
        (len(ends) + 2, max(counts, default=1)), 10**6, dtype=torch.int32
    )  # read by mistake, it crashes
    for slot, row_ids in zip(slots.tolist(), ids, strict=True):
        tables[slot, : len(row_ids)] = row_ids
    tiles: list[list[int]] = []
    token = len(decode)
    for row, (start, end) in enumerate(chunks, len(decode)):
        for first in range(start, end, PREFILL_TILE):
            count = min(PREFILL_TILE, end - first)
            tiles.append([int(slots[row]), token, first, count])
            token += count
    rows = slots.clone()
    for row, length in enumerate(decode):
        if length == 0:
            rows[row] = -1
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        kv_index=nothing,
        block_tables=tables.to(device),
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        num_decode=len(decode),
        chunk_starts_cpu=[start for start, _ in chunks],
        chunk_ends_cpu=[end for _, end in chunks],
        max_seq_len=max(ends, default=0),
        logit_tokens=None,
        table_rows=rows.to(device),
        prefill_tiles=torch.tensor(tiles, dtype=torch.int32, device=device) if tiles else None,
    )


BATCHES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "decode": ([1, 16, 17, 65, 300, 0], []),
    "one row": ([260], []),
    "prompts": ([], [(0, 1), (0, 130)]),
    "over prefixes": ([], [(16, 20), (33, 170)]),
    "mixed": ([5, 90], [(0, 7), (64, 131)]),
}


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
    for dtype in (torch.float32, torch.float16) if device.type == "cpu" else DTYPES:  # the interpreter has no bf16 dot
        batch = make_batch(device, decode, chunks)
        tokens = len(decode) + sum(end - start for start, end in chunks)
        shape = (int(sum(-(-int(end) // 16) or 1 for end in batch.seq_lens.tolist())) + 2, 16, kv_heads, d)
        k_cache, v_cache = caches(shape, dtype, device, by_head)
        k_cache[0], v_cache[0] = math.nan, math.nan  # nobody's block
        q = torch.randn(tokens, heads, d, device=device).to(dtype)
        exact = replace(batch, block_tables=batch.block_tables.clamp(max=shape[0] - 1))
        expected = reference.attention(q.double(), k_cache.double(), v_cache.double(), exact, d**-0.5, window, softcap)
        real = [row for row in range(tokens) if row >= len(decode) or decode[row]]
        for processors in (1, 132) if decode else (1,):  # one part per row, and several
            op = attention.PagedAttention(processors)
            for _ in range(2):  # the counters are 0 again
                out = op(q, k_cache, v_cache, batch, d**-0.5, window, softcap)
                close(
                    out[real],
                    expected[real],
                    3e-2 if dtype is torch.bfloat16 else 5e-3 if dtype is torch.float16 else 3e-5,
                )
                assert bool(out.isfinite().all())


def test_splits_grow_as_rows_get_fewer() -> None:
    assert attention.num_splits(1, 8, 132) == 32
    assert attention.num_splits(16, 8, 132) == 8
    assert attention.num_splits(256, 8, 132) == 1


# Slots ------------------------------------------------------------------------------------------------------------


def make_state(device: torch.device, num_slots: int = 5, max_tokens: int = 40) -> SlotState:
    made = SlotState(num_slots, max_tokens, 16, device)
    made.tokens.copy_(torch.randint(0, 90, made.tokens.shape))
    made.block_tables.copy_(torch.randint(1, 9, made.block_tables.shape))
    made.lengths.copy_(torch.randint(1, max_tokens - 1, (num_slots,)))
    made.seeds.copy_(torch.randint(-(2**63), 2**63 - 1, (num_slots,)))
    made.filters.copy_(torch.tensor([1.0, 0, 1, 1, 0, 0]))
    return made


def test_writes(device: torch.device) -> None:
    one, two = (SlotState(3, 2000, 16, device) for _ in range(2))
    writes = [(one.tokens_at, 1500), (one.tables_at + 3, 1), (0, 32), (one.rows_at, 3)]
    headers, payload, source = [], [], 4 * len(writes)
    for place, count in writes:
        headers += [place, 0, source, count]
        payload += torch.randint(-(2**31), 2**31 - 1, (count,)).tolist()
        source += count
    staged = torch.tensor(headers + payload, dtype=torch.int32, device=device)
    state.apply_writes(one.words, staged, len(writes))
    resident.apply_writes(two.words, staged, len(writes))
    assert torch.equal(one.words, two.words)
    assert one.tokens[0, 1499] == payload[1499]


@pytest.mark.parametrize("last", [True, False])
def test_inputs(device: torch.device, last: bool) -> None:
    slots = make_state(device)
    rows = torch.tensor([3, 0, -1, 4, 3, -1] * 30, dtype=torch.int32, device=device)
    at = None if last else torch.randint(-1, 30, rows.shape, dtype=torch.int32, device=device)
    for ours, expected in zip(
        state.gather_inputs(slots, rows, at), resident.gather_inputs(slots, rows, at), strict=True
    ):
        assert torch.equal(ours, expected)


# Choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 320, 4097, 9000])
def test_greedy(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    one, two = make_state(device), make_state(device)
    two.words.copy_(one.words)
    logits = (torch.randn(6, vocab, device=device) * 5).to(dtype)
    logits[1, vocab // 2] = math.nan
    logits[2, :] = -math.inf
    logits[3, : vocab - 1] = -math.inf
    rows = torch.tensor([3, 0, 1, 4, 2, -1], dtype=torch.int32, device=device)
    ours, expected = (torch.zeros((2, 8), dtype=torch.int32, device=device) for _ in range(2))
    choice.greedy_into(logits, rows, one, ours)
    resident.greedy_into(logits, rows, two, expected)
    good = [0, 3, 4]
    assert torch.equal(ours[0], expected[0])
    close(ours[1].view(torch.float32)[good], expected[1].view(torch.float32)[good], 1e-4)
    assert bool(ours[1].view(torch.float32)[[1, 2]].isnan().all())
    assert torch.equal(one.words, two.words)


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    slots, out = make_state(device), torch.zeros((2, 1), dtype=torch.int32, device=device)
    logits = torch.zeros((1, 9000), device=device)
    logits[0, [17, 18, 8999]] = 3.0
    for op in (choice.greedy_into, choice.choose_into):
        op(logits, torch.tensor([1], dtype=torch.int32, device=device), slots, out)
        assert out[0, 0] == 17


FILTERS = [
    {},
    {"samples": 1.0},
    {"samples": 1.0, "temperature": 0.4},
    {"samples": 1.0, "top_k": 1},
    {"samples": 1.0, "top_k": 7},
    {"samples": 1.0, "top_k": 5000},
    {"samples": 1.0, "top_p": 0.3},
    {"samples": 1.0, "top_p": 0.97, "temperature": 2.0},
    {"samples": 1.0, "top_p": 1e-6},
    {"samples": 1.0, "typical_p": 0.4},
    {"samples": 1.0, "typical_p": 0.9, "min_p": 0.2},
    {"samples": 1.0, "min_p": 0.3},
    {"samples": 1.0, "top_k": 40, "top_p": 0.8, "typical_p": 0.7, "min_p": 0.01, "temperature": 0.8},
]


@pytest.mark.parametrize("vocab", [50, 2500])
def test_choice(device: torch.device, vocab: int) -> None:
    """Every filter alone and together; each row's draw is the same, so any difference in what is kept soon shows."""
    one, two = make_state(device, len(FILTERS)), make_state(device, len(FILTERS))
    for slot, wanted in enumerate(FILTERS):
        for name, value in wanted.items():
            one.numbers[name][slot] = float(value)
    rows = torch.tensor([*range(len(FILTERS)), -1], dtype=torch.int32, device=device)
    for _ in range(3):
        one.seeds.copy_(torch.randint(-(2**63), 2**63 - 1, one.seeds.shape))
        one.lengths.fill_(7)
        two.words.copy_(one.words)
        logits = torch.randn(len(rows), vocab, device=device) * 2
        logits[:, 3] = -math.inf  # what a mask dropped
        ours, expected = (torch.zeros((2, len(rows)), dtype=torch.int32, device=device) for _ in range(2))
        choice.choose_into(logits, rows, one, ours)
        resident.choose_into(logits, rows, two, expected)
        assert ours[0, :-1].tolist() == expected[0, :-1].tolist()
        close(ours[1, :-1].view(torch.float32), expected[1, :-1].view(torch.float32), 1e-4)
        assert torch.equal(one.words, two.words)


def test_choice_keeps_what_the_filter_keeps(device: torch.device) -> None:
    """Draws of many seeds are exactly the ids that the definition keeps."""
    count, vocab = 60, 12
    logits = torch.randn(1, vocab, device=device).expand(count, vocab).contiguous()
    for name, value in (("top_k", 3.0), ("top_p", 0.6), ("typical_p", 0.5)):
        slots = make_state(device, count)
        slots.numbers["samples"].fill_(1)
        slots.numbers[name].fill_(value)
        out = torch.zeros((2, count), dtype=torch.int32, device=device)
        choice.choose_into(logits, torch.arange(count, dtype=torch.int32, device=device), slots, out)
        kept = getattr(sampling, name)(logits[:1], torch.tensor([value], device=device))
        likely = (kept.softmax(-1) > 0.15).nonzero()[:, 1].tolist()
        allowed = kept.isfinite().nonzero()[:, 1].tolist()
        assert set(likely) <= set(out[0].tolist()) <= set(allowed)


@pytest.mark.parametrize("vocab", [5, 320, 4097, 9000])
@pytest.mark.parametrize("way", ["greedy", "choose", "sample"])
def test_what_cannot_be_chosen_from_is_not_a_number(device: torch.device, vocab: int, way: str) -> None:
    """The step after reads the id before the host sees the NaN, so it must exist whatever the scores are."""
    one = make_state(device, 8)
    if way == "sample":
        one.filters.copy_(torch.tensor([0.8, 4, 0.9, 0.7, 0.1, 1]))
    two = make_state(device, 8)
    two.words.copy_(one.words)
    logits = torch.randn(8, vocab, device=device)
    logits[0] = math.nan
    logits[1] = -math.nan
    logits[2, vocab - 1] = math.nan
    logits[3], logits[3, 0] = -math.inf, math.nan
    logits[4] = -math.inf
    logits[5] = math.inf
    logits[6, vocab - 1], logits[6, 1] = math.inf, math.nan
    rows = torch.tensor([3, 1, 0, 5, 2, 7, 6, 4], dtype=torch.int32, device=device)
    ours, expected = (torch.zeros((2, 8), dtype=torch.int32, device=device) for _ in range(2))
    name = "greedy_into" if way == "greedy" else "choose_into"
    getattr(choice, name)(logits, rows, one, ours)
    getattr(resident, name)(logits, rows, two, expected)
    logprobs = ours[1].view(torch.float32)
    assert logprobs.isnan().tolist() == [True] * 7 + [False]
    assert expected[1].view(torch.float32).isnan().tolist() == [True] * 7 + [False]
    assert ours[0, :7].tolist() == [0] * 7
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(one.words, two.words)
