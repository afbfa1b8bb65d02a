"""Attention over runs of rows: its definition against each run by itself, and the kernel of a GPU against that."""

import pytest
import torch
from torch import Tensor

from text_generation_inference.kernels import flash_segments
from text_generation_inference.kernels.cpu.ops import NativeOps
from text_generation_inference.kernels.segments import Segments, cut, segment_attention

RUNS = {
    "equal": ([6, 6, 6], None),
    "different": ([64, 1, 9, 64, 130], None),
    "of their own": ([3, 3, 5], [70, 4, 7]),
    "one": ([33], None),
    "long": ([256, 256], None),
    "long and different": ([256, 300], None),
    "long with short keys": ([260, 260], [5, 9]),
}
HEADS = [(4, 4, 16), (16, 16, 80), (6, 2, 64)]


def draw(queries: list[int], keys: list[int] | None, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of products: rows lie apart."""
    torch.manual_seed(0)
    num_heads, kv_heads, dim = heads
    q = torch.randn(sum(queries), 2, num_heads, dim)[:, 0]
    k, v = torch.randn(sum(keys or queries), 2, kv_heads, dim).unbind(1)
    return q, k, v


def by_hand(q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int]) -> Tensor:
    """Run after run, score after score."""
    found: list[Tensor] = []
    shared = q.shape[1] // k.shape[1]
    each = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    for one, its_keys, its_values in each:
        its_keys, its_values = (x.repeat_interleave(shared, dim=1) for x in (its_keys, its_values))
        scores = torch.einsum("qhd,khd->hqk", one, its_keys) / q.shape[2] ** 0.5
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), its_values).flatten(1))
    return torch.cat(found)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("runs", list(RUNS))
def test_runs_attend_to_themselves(runs: str, heads: tuple[int, int, int]) -> None:
    queries, keys = RUNS[runs]
    q, k, v = draw(queries, keys, heads)
    found = segment_attention(q, k, v, Segments(queries, q.device, keys))
    torch.testing.assert_close(found, by_hand(q, k, v, queries, keys or queries), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [*HEADS, (4, 4, 12)])  # the last goes to the definition
@pytest.mark.parametrize("runs", list(RUNS))
def test_native_kernels_of_the_cpu(ops: NativeOps, runs: str, heads: tuple[int, int, int]) -> None:
    queries, keys = RUNS[runs]
    q, k, v = draw(queries, keys, heads)
    found = ops.segment_attention(q, k, v, Segments(queries, q.device, keys))
    torch.testing.assert_close(found, by_hand(q, k, v, queries, keys or queries), atol=1e-5, rtol=1e-5)


def test_rows_that_can_be_computed_apart() -> None:
    """In pieces as large as they may be, that no run of any of the segments goes beyond."""
    device = torch.device("cpu")
    full, windows = Segments([8, 4, 4, 20, 2], device), Segments([5, 3, 4, 2, 2, 10, 10, 2], device)
    assert cut([full, windows], 16) == [(0, 16), (16, 36), (36, 38)]
    assert cut([windows], 13) == [(0, 12), (12, 16), (16, 26), (26, 38)]
    assert cut([full, windows], 0) == cut([full], 100) == [(0, 38)]
    assert cut([Segments([3, 3], device, [4, 4])], 3) == [(0, 6)]
    assert windows.within(8, 26).queries == (4, 2, 2, 10)


@pytest.mark.parametrize("runs", list(RUNS))
def test_where_runs_begin(runs: str) -> None:
    queries, keys = RUNS[runs]
    starts = Segments(queries, torch.device("cpu"), keys).starts
    for found, lengths in zip(starts, (queries, keys or queries), strict=True):
        assert found.dtype is torch.int32 and found.diff().tolist() == lengths and found[0] == 0


def test_which_runs_are_long_and_alike() -> None:
    """Their kernel takes nothing else: each of the others has a test in which it would fail."""
    found = [
        name for name, runs in RUNS.items() if flash_segments.is_long(Segments(runs[0], torch.device("cpu"), runs[1]))
    ]
    assert found == ["long"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("runs", list(RUNS))
def test_the_kernel_gives_what_the_definition_gives(
    runs: str, heads: tuple[int, int, int], dtype: torch.dtype, device_name: str
) -> None:
    if device_name != "cuda":
        pytest.skip("a kernel of GPUs")
    (queries, keys), device = RUNS[runs], torch.device(device_name)
    wide = draw(queries, keys, heads)
    q, k, v = (x.to(device, dtype) for x in wide)
    assert flash_segments.takes(q) == (dtype is not torch.float32)
    found = flash_segments.segment_attention(q, k, v, Segments(queries, device, keys))
    bound = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.float().cpu(), by_hand(*wide, queries, keys or queries), atol=bound, rtol=bound)
