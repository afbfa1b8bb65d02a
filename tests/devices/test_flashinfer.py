"""Prompts through flashinfer give what our own kernels give; its place in the engine is tested without it."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from driving import make_request, make_tiny, random_prompts, run, start
from queue_on_cpu import QueueOnCpu
from torch import Tensor

from text_generation_inference.kernels import flashinfer_prompts
from text_generation_inference.kernels.batch import PREFILL_TILE, Batch, PagedMeta
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.triton import norms_rotary

HEADS, KV_HEADS, D, BLOCK = 8, 2, 128, 16


@pytest.fixture
def device(device_name: str) -> torch.device:
    if device_name != "cuda" or not flashinfer_prompts.is_installed():
        pytest.skip("needs a GPU and flashinfer")
    return torch.device("cuda")


def batch_of(decode: int, chunks: list[tuple[int, int]], device: torch.device) -> Batch:
    rows, longest = decode + len(chunks), max([64, *(end for _, end in chunks)])
    tiles, token = [], decode
    for row, (begin, end) in enumerate(chunks, decode):
        for first in range(begin, end, PREFILL_TILE):
            tiles.append([row, token, first, min(PREFILL_TILE, end - first), begin])
            token += tiles[-1][3]
    tiles.sort(key=lambda tile: tile[4] == 0)
    per_row = -(-longest // BLOCK)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return Batch(
        input_ids=nothing,
        positions=nothing,
        kv_index=nothing,
        seq_lens=torch.tensor([50] * decode + [end for _, end in chunks], dtype=torch.int32, device=device),
        meta=PagedMeta(
            block_tables=(torch.arange(rows * per_row, device=device) + 1).int().view(rows, per_row),
            num_decode=decode,
            chunk_starts_cpu=[begin for begin, _ in chunks],
            chunk_ends_cpu=[end for _, end in chunks],
            max_seq_len=longest,
            table_rows=torch.arange(rows, dtype=torch.int32, device=device),
            prefill_tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
            num_prefix_tiles=sum(tile[4] > 0 for tile in tiles),
        ),
    )


def inputs(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    meta: PagedMeta = batch.meta
    lengths = [end - begin for begin, end in zip(meta.chunk_starts_cpu, meta.chunk_ends_cpu, strict=True)]
    tokens = meta.num_decode + sum(lengths)
    fused = torch.randn(tokens, HEADS + 2 * KV_HEADS, D, device=device).bfloat16()
    q, k, v = fused.split((HEADS, KV_HEADS, KV_HEADS), 1)
    blocks = int(meta.block_tables.max()) + 1
    caches = [torch.randn(blocks, KV_HEADS, BLOCK, D, device=device).bfloat16().transpose(1, 2) for _ in range(2)]
    return q, k, v, caches[0], caches[1]


def test_equals_ours(device: torch.device) -> None:
    from text_generation_inference.kernels.triton.attention import PagedAttention

    torch.manual_seed(0)
    ours, other = PagedAttention(132, bulk_copies=True), PagedAttention(132, bulk_copies=True)
    prompts = flashinfer_prompts.FlashinferPrompts(device)
    taken: list[bool] = []

    def watched(*args: object) -> bool:
        taken.append(prompts(*args))  # pyright: ignore
        return taken[-1]

    other.prompts = watched
    # (rows that decode, chunks, whether flashinfer takes them)
    cases = [
        (0, [(0, 1500)], True),
        (3, [(0, 700), (0, 33), (0, 1), (0, 640)], True),
        (2, [(0, 2048), (16, 900)], False),  # tokens before a chunk
        (1, [(0, 200)], False),  # too few
        *[(i, [(0, 1024 + 37 * i), (0, 5 + i)], True) for i in range(6)],  # plans take turns
    ]
    results = []
    for decode, chunks, wanted in cases:
        batch = batch_of(decode, chunks, device)
        q, k, v, k_cache, v_cache = inputs(batch, device)
        for _ in range(2):  # two layers share a plan
            actual = other(q, k, v, k_cache, v_cache, batch, D**-0.5)
        results.append((actual, ours(q, k, v, k_cache, v_cache, batch, D**-0.5)))
        assert taken[-2:] == [wanted, wanted]
    for actual, expected in results:
        assert float((actual.float() - expected.float()).abs().max()) < 2e-2
    batch = batch_of(0, [(0, 1500)], device)
    q, k, v, k_cache, v_cache = inputs(batch, device)
    count = len(taken)
    other(q, k, v, k_cache, v_cache, batch, D**-0.5, 100)  # a window is not for it
    assert len(taken) == count


def test_its_place_in_the_engine(device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some other kernel for whole prompts: asked for every layer of every step with prompts, it changes no answer."""
    if device_name != "cpu" or importlib.util.find_spec("triton") is None:
        pytest.skip("runs in Triton's interpreter")
    from text_generation_inference.kernels.triton.attention import PagedAttention

    tiny = make_tiny("Llama", {}, tmp_path / "model")
    asked = [make_request(n, prompt, 3) for n, prompt in enumerate(random_prompts(320, [20, 9, 50, 4], 5))]
    plain = start(tiny.folder, device="cpu", custom_kernels=False)
    expected = run(plain, asked)
    plain.close()
    taken: list[bool] = []

    def whole_prompts(q: Tensor, k: Tensor, v: Tensor, batch: Batch, out: Tensor, scale: float) -> bool:
        taken.append(flashinfer_prompts.is_for(batch, q.shape[0], least=8))
        if not taken[-1]:
            return False
        first = batch.meta.num_decode
        for end in batch.meta.chunk_ends_cpu:
            rows = slice(first, first + end)
            parts = [part[rows].transpose(0, 1)[None] for part in (q, k, v)]
            found = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
            out[rows] = found[0].transpose(0, 1).reshape(end, -1)
            first += end
        return True

    attention = PagedAttention(1)
    attention.prompts = whole_prompts
    ops = Ops("other prompts", attention=attention, rotary_and_cache=norms_rotary.rotary_and_cache)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: QueueOnCpu(tmp_path, ops))
    engine = start(tiny.folder, max_batch_size=4, max_total_tokens=64, max_batch_prefill_tokens=48)
    taken.clear()
    assert [found.token_ids for found in run(engine, asked)] == [found.token_ids for found in expected]
    engine.close()
    assert True in taken and False in taken  # the prompt of 50 is computed in chunks
