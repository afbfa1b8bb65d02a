"""GPTQ: a matrix into codes, column by column, each column's error made good by those that are still to come.

What counts is the error of products, so the solver is given the sum of x xᵀ over the inputs of the matrix (`Inputs`,
the Hessian of that error). Groups of columns have a scale and a zero point: found before any column is rounded, so that
columns may be rounded in any order (`static_groups`), or when the first of the group is reached. After Frantar et al.,
GPTQ (2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.errors import EngineError
from text_generation_inference.make_quantized.settings import MakingSettings

_BLOCK = 128  # columns after which the others hear of the errors
_CLIPS = tuple(1 - step / 40 for step in range(21))  # shares of the largest weight that scales may be made for
_ERROR_POWER = 2.4
_SMALLEST_SCALE = 2.0**-24  # of float16
_DAMP_TRIES = 5


@dataclass(slots=True)
class Solved:
    """`scale * (code - zero)`, with those of the group of each input."""

    codes: Tensor  # uint8 [out, in]
    scale: Tensor  # float16 [out, groups]
    zero: Tensor  # uint8 [out, groups]; never 0, which the format cannot say
    group_of: Tensor  # int32 [in]

    def widen(self) -> Tensor:
        """float32 `[out, in]`."""
        groups = self.group_of.long()
        return (self.codes.float() - self.zero.float()[:, groups]) * self.scale.float()[:, groups]


class Inputs:
    """The sum of x xᵀ over the inputs that a matrix was given."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.total = torch.zeros((columns, columns), dtype=torch.float32, device=device)
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """rows `[tokens, columns]`."""
        rows = rows.float()
        self.total.addmm_(rows.t(), rows)
        self.count += rows.shape[0]


def find_grid(weight: Tensor, settings: MakingSettings, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight `[columns of a group, out]` -> scale and zero `[out]`, float32 values that the format holds.

    `importance` `[columns]`: what an error in each counts; None: as much in all.
    """
    top = settings.largest_code
    low, high = weight.amin(0).clamp(max=0), weight.amax(0).clamp(min=0)
    if settings.symmetric:
        high = torch.maximum(-low, high)
        low = -high

    def make(share: float) -> tuple[Tensor, Tensor]:
        scale = ((high - low) * share / top).half().float().clamp(min=_SMALLEST_SCALE)
        if settings.symmetric:
            return scale, torch.full_like(scale, (top + 1) // 2)
        return scale, (-low * share / scale).round().clamp(1, top)

    best_scale, best_zero = make(1.0)
    if not settings.clip:
        return best_scale, best_zero
    least = _grid_error(weight, best_scale, best_zero, top, importance)
    for share in _CLIPS[1:]:
        scale, zero = make(share)
        error = _grid_error(weight, scale, zero, top, importance)
        better = error < least
        least = torch.where(better, error, least)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _grid_error(weight: Tensor, scale: Tensor, zero: Tensor, top: int, importance: Tensor | None) -> Tensor:
    rounded = ((weight / scale).round_().add_(zero).clamp_(0, top).sub_(zero)).mul_(scale)
    error = rounded.sub_(weight).abs_().pow_(_ERROR_POWER)
    return (error if importance is None else error.mul_(importance[:, None])).sum(0)


def round_to_nearest(weight: Tensor, settings: MakingSettings) -> Solved:
    """Without inputs to go by."""
    rows, columns = weight.shape
    size = _group_size(settings, columns)
    codes = torch.empty((columns, rows), dtype=torch.uint8, device=weight.device)
    wide = weight.float().t().contiguous()
    scales, zeros = [], []
    for start in range(0, columns, size):
        group = wide[start : start + size]
        scale, zero = find_grid(group, settings)
        codes[start : start + size] = _encode(group, scale, zero, settings.largest_code).to(torch.uint8)
        scales.append(scale)
        zeros.append(zero)
    group_of = torch.arange(columns, device=weight.device) // size
    return _solved(codes, scales, zeros, group_of)


def solve(weight: Tensor, inputs: Inputs, settings: MakingSettings) -> Solved:
    """weight `[out, in]`; it stays as it is."""
    columns = weight.shape[1]
    size = _group_size(settings, columns)
    left = weight.t().to(torch.float32, copy=True).contiguous()  # [in, out]: what is still to be rounded, by now
    hessian = inputs.total / max(1, inputs.count)
    diagonal = hessian.diagonal()
    never = diagonal == 0  # inputs that were always 0: nothing is known of them, so they get the nearest codes
    order = None
    if settings.act_order or settings.static_groups:
        order = diagonal.argsort(descending=True, stable=True)
    diagonal[never] = diagonal.mean().clamp(min=1e-6)
    grids: list[tuple[Tensor, Tensor]] = []
    group_of = torch.arange(columns, device=left.device) // size
    if settings.has_static_groups:  # of what the weights are before any is rounded
        starts = [slice(start, start + size) for start in range(0, columns, size)]
        grids = [find_grid(left[some], settings, diagonal[some]) for some in starts]
    elif order is not None:
        group_of = group_of[order.argsort()]
    if order is not None:
        left, hessian = left[order], hessian[order][:, order]
    places = range(columns) if order is None else order.tolist()
    of_place = group_of.tolist()
    factor = _invert(hessian, settings.percdamp)
    del hessian
    codes = torch.empty(left.shape, dtype=torch.uint8, device=left.device)
    block = min(size, _BLOCK)
    for start in range(0, columns, block):
        end = min(start + block, columns)
        if not settings.has_static_groups and start % size == 0:
            grids.append(find_grid(left[start : start + size], settings))
        errors = torch.empty_like(left[start:end])
        for column in range(start, end):
            scale, zero = grids[of_place[places[column]]]
            wanted = left[column]
            code = _encode(wanted, scale, zero, settings.largest_code)
            codes[column] = code.to(torch.uint8)
            error = (wanted - (code - zero) * scale) / factor[column, column]
            left[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
            errors[column - start] = error
        left[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    if order is not None:
        codes = codes[order.argsort()]
    scales, zeros = ([grid[side] for grid in grids] for side in range(2))
    return _solved(codes, scales, zeros, group_of)


def _solved(codes: Tensor, scales: list[Tensor], zeros: list[Tensor], group_of: Tensor) -> Solved:
    scale, zero = torch.stack(scales, 1).half(), torch.stack(zeros, 1).to(torch.uint8)
    return Solved(codes.t().contiguous(), scale, zero, group_of.to(torch.int32))


def _group_size(settings: MakingSettings, columns: int) -> int:
    return columns if settings.group_size == -1 else settings.group_size


def _encode(weight: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    return ((weight / scale).round() + zero).clamp(0, top)


def _invert(hessian: Tensor, percdamp: float) -> Tensor:
    """The upper Cholesky factor of the inverse, of a Hessian made definite."""
    mean = hessian.diagonal().mean()
    for attempt in range(_DAMP_TRIES):
        damped = hessian.clone()
        damped.diagonal().add_(mean * percdamp * 10**attempt)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return upper
    raise EngineError("the inputs of a matrix cannot be inverted: they are not finite, or --percdamp is too small")
