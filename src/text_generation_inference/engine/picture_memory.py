"""What computing pictures takes beside weights, cache and steps: measured with the largest that are permitted.

Before there is a cache, so that it leaves as much. A picture that would take too much of the memory is not permitted:
the measure says how many tokens those have that are. Where passes are padded, which sizes a tower's have.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from text_generation_inference.devices.device import Device
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.errors import ValidationError
from text_generation_inference.models.model import Model
from text_generation_inference.models.vision.padded import PaddedTower, pass_sizes
from text_generation_inference.models.vision.tower import run_parts
from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.runner.tower_graphs import MOST_PIXELS

BATCH_PIXELS = 1 << 21  # of pictures that are computed together
_SHARE = 4  # one in so many bytes of free memory may be taken
_RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0)  # of sides: families with tiles have most of them at some
_ALL_RATIOS = (*_RATIOS, 8.0, 16.0, 32.0, 64.0, 128.0, 199.0)
_SMALLEST = 28  # a side
_EXAMPLE_PIXELS = 1 << 16
_MOST_TILES = 32  # of a padded pass: more are no faster together


@dataclass(frozen=True, slots=True)
class PictureMemory:
    num_bytes: int = 0  # that the largest permitted batch takes
    max_tokens: int | None = None  # of a picture that is permitted; None: any
    batch_pixels: int = BATCH_PIXELS  # of pictures that are computed together


def measure_pictures(
    device: Device, model: Model, rule: PictureRule, most_tokens: int, most_pixels: int, captures: bool = False
) -> PictureMemory:
    """`most_tokens`: of a prompt; `most_pixels`: of a picture as it comes; `captures`: small passes have graphs, which
    keep what the largest of them takes."""
    layouts = sorted(_layouts(rule, most_pixels), key=lambda layout: math.prod(layout.shape), reverse=True)
    permitted = [layout for layout in layouts if layout.num_features <= most_tokens]
    if not permitted:
        return PictureMemory()
    allowed = device.free_bytes() // _SHARE
    is_less, batch_pixels = False, BATCH_PIXELS
    while True:
        if is_less:  # then a batch takes no more than the largest picture does
            batch_pixels = min(batch_pixels, math.prod(permitted[0].shape) // 3)
        taken = _try_largest(device, model, permitted, batch_pixels, captures)
        largest = max(layout.num_features for layout in permitted)
        smaller = [layout for layout in permitted if layout.num_features <= largest // 2]
        if taken is not None and (taken <= allowed or not smaller):
            return PictureMemory(taken, largest if is_less else None, batch_pixels)
        if not smaller:
            raise torch.OutOfMemoryError("a picture of the least size")
        permitted, is_less = smaller, True


def _try_largest(
    device: Device, model: Model, layouts: Sequence[PictureLayout], batch_pixels: int, captures: bool
) -> int | None:
    """Bytes of the largest batches of these, largest first; None: there are not as many."""
    batches = [[layouts[0]], _fullest(layouts, batch_pixels)]
    captured = _fullest(layouts, MOST_PIXELS) if captures else []
    if captured and not _has_layout(device, model, captured[0]):
        captured = []

    def encode(batch: Sequence[PictureLayout]) -> None:
        with torch.inference_mode(), device.stream():
            pixels = [torch.zeros(each.shape, dtype=torch.uint8, device=device.torch_device) for each in batch]
            run_parts(model.encode(pixels, [each.grid for each in batch]))

    def measure(batch: Sequence[PictureLayout]) -> int:
        return device.peak_bytes(lambda: encode(batch)) if batch else 0

    try:
        return max(map(measure, batches)) + measure(captured)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _has_layout(device: Device, model: Model, picture: PictureLayout) -> bool:
    with torch.inference_mode(), device.stream():
        return model.lay_out_pictures([tuple(picture.shape)], [tuple(picture.grid)], device.torch_device) is not None


def _fullest(layouts: Sequence[PictureLayout], num_pixels: int) -> list[PictureLayout]:
    """As many as have so many pixels of the largest that has no more; none, if all have."""
    for layout in layouts:
        if count := 3 * num_pixels // math.prod(layout.shape):
            return [layout] * count
    return []


def plan_picture_sizes(tower: PaddedTower, rule: PictureRule, most_tokens: int, most_pixels: int) -> list[int]:
    """Of a tower's padded passes: those of tiles hold as many as are computed together, those of patches the largest
    picture."""
    layouts = [each for each in _layouts(rule, most_pixels, _ALL_RATIOS) if each.num_features <= most_tokens]
    if not layouts:
        return []
    if tower.shares_passes:
        height, width = layouts[0].shape[-3:-1]
        return pass_sizes(tower, min(_MOST_TILES, max(1, BATCH_PIXELS // (height * width))))
    layouts += _largest(rule, most_tokens, most_pixels)
    return pass_sizes(tower, max(size for each in layouts for size in tower.sizes_of(each.shape, each.grid)))


def example_shape(rule: PictureRule) -> tuple[int, ...]:
    """Of the pixels of some picture."""
    return next(iter(_layouts(rule, _EXAMPLE_PIXELS))).shape


def _layouts(rule: PictureRule, most_pixels: int, ratios: Sequence[float] = _RATIOS) -> set[PictureLayout]:
    """Of many sizes up to so many pixels."""
    found: set[PictureLayout] = set()
    for ratio in _both_ways(ratios):
        side = float(_SMALLEST)
        while True:
            side = min(side, math.sqrt(most_pixels))
            if (layout := _layout_of(rule, side, ratio)) is not None:
                found.add(layout)
            if side * side >= most_pixels:
                break
            side *= math.sqrt(2)
    return found


def _largest(rule: PictureRule, most_tokens: int, most_pixels: int) -> list[PictureLayout]:
    """Those with as many tokens as are permitted, or nearly: a prompt may have one between the sizes of `_layouts`."""
    found: list[PictureLayout] = []
    for ratio in _both_ways(_ALL_RATIOS):
        low, high = float(_SMALLEST), math.sqrt(most_pixels)
        while high - low > 1:
            side = (low + high) / 2
            layout = _layout_of(rule, side, ratio)
            if layout is not None and layout.num_features > most_tokens:
                high = side
                continue
            low = side
            if layout is not None:
                found.append(layout)
    return found


def _layout_of(rule: PictureRule, side: float, ratio: float) -> PictureLayout | None:
    """Of a picture with as many pixels as a square of this side; None: a family may have none of that shape."""
    with suppress(ValidationError):
        return rule.layout(max(1, int(side * math.sqrt(ratio))), max(1, int(side / math.sqrt(ratio))))
    return None


def _both_ways(ratios: Sequence[float]) -> list[float]:
    return [*ratios, *(1 / ratio for ratio in ratios)]
