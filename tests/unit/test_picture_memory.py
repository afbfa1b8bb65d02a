"""What computing pictures takes is measured with the largest that are permitted, and what takes too much is not."""

import itertools
import math
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from text_generation_inference.engine.picture_memory import BATCH_PIXELS, measure_pictures, plan_picture_sizes
from text_generation_inference.pictures.rule import PictureLayout

PATCH = 28


class AnySize:
    """As Qwen does it: any size, a token for each patch."""

    def layout(self, width: int, height: int) -> PictureLayout:
        rows, columns = max(1, height // PATCH), max(1, width // PATCH)
        return PictureLayout((rows * PATCH, columns * PATCH, 3), (1, rows, columns), (rows * columns,))


class Metered:
    """A device and a model: a value of a batch takes a byte, of so many that there are."""

    torch_device = torch.device("cpu")

    def __init__(self, free: int, there: int | None = None) -> None:
        self.free, self.there = free, free if there is None else there
        self.last = 0
        self.batches: list[list[tuple[int, ...]]] = []

    def free_bytes(self) -> int:
        return self.free

    def stream(self) -> Any:
        return nullcontext()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self.last

    def encode(self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]]) -> Generator[None, None, list[Tensor]]:
        self.last = sum(each.numel() for each in pixels)
        if self.last > self.there:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.batches.append([tuple(each.shape) for each in pixels])
        yield
        return []


def measure(device: Metered, most_tokens: int, most_pixels: int = 1 << 26) -> Any:
    rule: Any = AnySize()
    given: Any = device
    return measure_pictures(given, given, rule, most_tokens, most_pixels)


def test_the_largest_picture_and_the_fullest_batch_are_tried() -> None:
    device = Metered(1 << 40)
    found = measure(device, 40_000)
    assert found.max_tokens is None and found.num_bytes == max(sum(map(math.prod, each)) for each in device.batches)
    (largest,), several = device.batches
    assert 40_000 / 2 < math.prod(largest) / 3 / PATCH**2 <= 40_000
    assert BATCH_PIXELS / 2 < sum(math.prod(each) for each in several) / 3 <= BATCH_PIXELS


def test_a_limit_on_pixels_counts_too() -> None:
    device = Metered(1 << 40)
    measure(device, 40_000, most_pixels=1 << 20)
    assert max(math.prod(each) for batch in device.batches for each in batch) <= 3 << 20


@pytest.mark.parametrize("there", [None, 3 << 20])
def test_what_takes_too_much_is_not_permitted(there: int | None) -> None:
    device = Metered(24 << 20, there)  # a quarter of it is 6 MB: that is a batch
    found = measure(device, 40_000)
    assert found.max_tokens is not None and found.max_tokens < 40_000
    assert found.num_bytes <= 6 << 20 and found.batch_pixels * 3 <= (there or 6 << 20)
    assert found.max_tokens * 3 * PATCH**2 <= (there or 6 << 20)


def test_where_not_even_the_least_fits() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        measure(Metered(1000), 40_000)


class OfPatches:
    """What a plan asks of a tower: four patches become one feature."""

    shares_passes, step, least = False, 4, 256

    def sizes_of(self, shape: Sequence[int], grid: Sequence[int]) -> list[int]:
        return [4 * grid[1] * grid[2]]


@pytest.mark.parametrize("most_tokens", [64, 90, 300, 511, 700, 1000, 1900, 3000, 5000])
def test_padded_passes_hold_all_that_a_prompt_may_have(most_tokens: int) -> None:
    rule: Any = AnySize()
    tower: Any = OfPatches()
    sizes = plan_picture_sizes(tower, rule, most_tokens, 1 << 26)
    drawn = random.Random(0)
    areas = [drawn.uniform(0.5, 1.1) * most_tokens for _ in range(2000)]
    ratios = [drawn.uniform(1, 10) ** drawn.choice((-1, 1)) for _ in areas]
    pairs = zip(areas, ratios, strict=True)
    layouts = [
        rule.layout(int((area * ratio) ** 0.5 * PATCH), int((area / ratio) ** 0.5 * PATCH)) for area, ratio in pairs
    ]
    held = [4 * layout.num_features for layout in layouts if layout.num_features <= most_tokens]
    assert len(held) > 1000 and max(held) <= sizes[-1]
    assert sizes[0] == 256 and all(a < b <= 4 / 3 * a for a, b in itertools.pairwise(sizes))
    assert len(sizes) == 1 or sizes[-2] < 4 * most_tokens  # and no more
