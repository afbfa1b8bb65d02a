"""Passes of towers as graphs: features are those of passes without, whatever comes between the parts, and however many
shapes there are. On the CPU, whose double records ops and does them again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from queue_on_cpu import QueueOnCpu
from torch import Tensor
from towers import FAMILIES, make

from text_generation_inference.devices.device import STEPS
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.vision.tower import Tower, run_parts
from text_generation_inference.runner import tower_graphs
from text_generation_inference.runner.tower_graphs import POOL, TowerGraphs

Shape = tuple[tuple[int, ...], tuple[int, ...]]
CPU = torch.device("cpu")


class Towered:
    """What graphs ask of a model."""

    def __init__(self, tower: Tower) -> None:
        self.encode, self.lay_out_pictures = tower.in_parts, tower.lay_out
        self.tower = tower


class Counting(QueueOnCpu):
    """Notes captures and what is forgotten; captures past `room` lack memory."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.room, self.num_captures, self.forgotten = 10**6, 0, list[str | None]()

    def capture(self, work: Any, pool: str = STEPS) -> Any:
        assert pool == POOL
        if self.num_captures >= self.room:
            super().capture(work, pool)  # as far as a lack is found
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.num_captures += 1
        return super().capture(work, pool)

    def forget_captures(self, pool: str | None = None) -> None:
        self.forgotten.append(pool)


class Case:
    def __init__(self, name: str, folder: Path) -> None:
        self.device = Counting(folder)
        self.shapes: list[Shape] = FAMILIES[name][2]
        self.tower = make(name, Ops(), CPU, torch.float32)
        self.graphs = TowerGraphs(self.device, Towered(self.tower))  # pyright: ignore
        self.seed = 0

    def draw(self, shapes: Sequence[Shape]) -> tuple[list[Tensor], list[tuple[int, ...]]]:
        """Other pixels each time."""
        self.seed += 1
        torch.manual_seed(self.seed)
        pixels = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape, _ in shapes]
        return pixels, [grid for _, grid in shapes]

    def check(self, shapes: Sequence[Shape]) -> None:
        given = self.draw(shapes)
        self.same(run_parts(self.graphs.encode(*given)), given)

    def same(self, found: list[Tensor], given: tuple[list[Tensor], list[tuple[int, ...]]]) -> None:
        for ours, theirs in zip(found, self.tower.encode(*given), strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.fixture(params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


@torch.inference_mode()
def test_shapes_that_come_again_are_captured_and_replayed(case: Case) -> None:
    case.check(case.shapes)
    assert not case.device.num_captures  # nobody knows whether they come again
    case.check(case.shapes)
    num_graphs = case.tower.num_parts + 1
    assert (case.device.num_captures, case.device.num_replays) == (num_graphs, num_graphs)
    for _ in range(2):
        case.check(case.shapes)
    assert (case.device.num_captures, case.device.num_replays) == (num_graphs, 3 * num_graphs)
    assert case.graphs.num_captured == 1


@torch.inference_mode()
def test_each_set_of_shapes_has_its_graphs(case: Case) -> None:
    sets = [case.shapes, case.shapes[:1], case.shapes[1:]]
    for _ in range(4):
        for shapes in sets:
            case.check(shapes)
    assert case.graphs.num_captured == len({tuple(shapes) for shapes in sets})
    assert case.device.num_captures == case.graphs.num_captured * (case.tower.num_parts + 1)


@torch.inference_mode()
def test_the_graphs_used_longest_ago_go_first(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_graphs, "MOST_GRAPHS", 2)
    one, two, three = case.shapes[:1], case.shapes[:1] * 2, case.shapes[:1] * 3
    for shapes in (one, one, two, two, one, three, three):  # the third takes the place of the second
        case.check(shapes)
    assert case.graphs.num_captured == 2
    before = case.device.num_captures
    for shapes in (one, three):
        case.check(shapes)
    assert case.device.num_captures == before
    case.check(two)
    assert case.device.num_captures > before
    assert not case.device.forgotten


@torch.inference_mode()
def test_large_passes_are_not_captured(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    num_pixels = sum(torch.Size(shape).numel() // 3 for shape, _ in case.shapes)
    monkeypatch.setattr(tower_graphs, "MOST_PIXELS", num_pixels - 1)
    for _ in range(3):
        case.check(case.shapes)
    assert not case.device.num_captures
    monkeypatch.setattr(tower_graphs, "MOST_PIXELS", num_pixels)
    for _ in range(2):
        case.check(case.shapes)
    assert case.device.num_captures


@torch.inference_mode()
def test_each_part_is_a_graph(case: Case) -> None:
    """So that as much is queued for a part as without graphs, when it is captured too."""
    case.check(case.shapes)
    for _ in range(3):
        given = case.draw(case.shapes)
        parts, before = case.graphs.encode(*given), case.device.num_replays
        for number in range(1, case.tower.num_parts + 1):
            next(parts)
            assert case.device.num_replays == before + number
        case.same(run_parts(parts), given)


@torch.inference_mode()
def test_a_pass_that_is_left_half_way(case: Case) -> None:
    for num_parts in (1, 2):  # while it is captured
        case.check(case.shapes[:1]) if num_parts == 1 else None
        parts = case.graphs.encode(*case.draw(case.shapes[:1]))
        for _ in range(num_parts):
            next(parts)
        del parts
        assert case.graphs.num_captured == 0 and case.device.forgotten == [POOL] * num_parts
    case.check(case.shapes[:1])
    assert case.graphs.num_captured == 1
    parts = case.graphs.encode(*case.draw(case.shapes[:1]))  # while it is replayed
    next(parts)
    del parts
    case.check(case.shapes[:1])
    assert case.graphs.num_captured == 1 and case.device.forgotten == [POOL] * 2


@pytest.mark.parametrize("room", [0, 2])
@torch.inference_mode()
def test_a_lack_of_memory_goes_without(case: Case, room: int) -> None:
    case.device.room = room
    for _ in range(4):
        case.check(case.shapes)
    assert case.graphs.num_captured == 0 and case.device.num_captures == room
    assert case.device.forgotten == [POOL]
    (news,) = case.graphs.take_news()
    assert "without graphs" in news and news.endswith("CUDA out of memory")
    assert not case.graphs.take_news()


@torch.inference_mode()
def test_a_lack_of_memory_leaves_the_graphs_that_there_are(case: Case) -> None:
    for _ in range(2):
        case.check(case.shapes)
    case.device.room = case.device.num_captures + 1
    for _ in range(3):
        case.check(case.shapes[:1])
    before = case.device.num_replays
    case.check(case.shapes)
    assert case.device.num_replays == before + case.tower.num_parts + 1
    assert case.graphs.num_captured == 1 and not case.device.forgotten


@torch.inference_mode()
def test_nothing_is_left_when_all_is_forgotten(case: Case) -> None:
    for _ in range(2):
        case.check(case.shapes)
    case.graphs.forget()
    assert case.graphs.num_captured == 0 and case.device.forgotten == [POOL]
    before = case.device.num_captures
    case.check(case.shapes)
    assert case.device.num_captures == before
    case.check(case.shapes)
    assert case.graphs.num_captured == 1
