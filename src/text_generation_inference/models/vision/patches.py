"""`PatchTower`: pictures of any grid as rows of patches; those that become one feature follow each other.

Patches may span several frames: a still picture then has moments that are alike, and a video's moments are as pictures
are. Where blocks attend within windows, passes that are padded have the rows of each window together, with padding
where the picture ends.
"""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.models.vision.blocks import PatchEmbedding, normalise
from text_generation_inference.models.vision.grid import by_block, places_of
from text_generation_inference.models.vision.padded import PaddedTower, Piece

_LEAST_PATCHES = 256


class PatchTower(PaddedTower):
    unit = "patches"
    shares_passes = False
    merge: int  # patches in each direction that become one feature
    window: int | None = None  # features in each direction that are seen together; None: all

    @property
    @abstractmethod
    def patches(self) -> PatchEmbedding: ...

    @property
    def step(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.merge**2 * (self.window or 1) ** 2

    @property
    def least(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(_LEAST_PATCHES, self.step)

    def embed(self, picture: Tensor) -> Tensor:
        """Patches of a picture, or of a video's moments, in the order of blocks."""
        is_video = picture.ndim == 4
        if is_video:
            cut = self.patches.cut_frames(picture, self.normalisation)
        else:
            cut = self.patches.cut(picture[None], self.normalisation)
        rows = torch.cat([by_block(moment, self.merge) for moment in cut])
        return self.patches.forward_frames(rows) if is_video else self.patches.forward(rows)

    def sides_of(self, shapes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Rows and columns of patches of all moments of these pictures and videos: a moment is as a picture is."""
        return [self._sides(shape) for shape in shapes for _ in range(self._num_moments(shape))]

    # -- padded passes ---------------------------------------------------------------------------------------------

    def embed_padded(self, patches: Tensor) -> Tensor:
        """uint8 `[rows, values]` of `pieces_of` -> `[rows, hidden]`."""
        values = normalise(patches.unflatten(1, (-1, 3)), self.normalisation, self.patches.dtype).flatten(1)
        return self.patches.forward(values) if self.patches.num_frames is None else self.patches.forward_frames(values)

    def sizes_of(self, shape: Sequence[int], grid: Sequence[int]) -> list[int]:
        along = self.merge * (self.window or 1)
        sides = self.sides_of_pieces(shape, grid)
        return [-(-rows // along) * -(-columns // along) * self.step for rows, columns in sides]

    def sides_of_pieces(self, shape: Sequence[int], grid: Sequence[int]) -> list[tuple[int, int]]:
        """Rows and columns of patches of each piece of a picture."""
        return self.sides_of([shape])

    def num_rows(self, size: int) -> int:
        return size // self.merge**2

    def blank(self) -> Piece:
        values = self._num_frames * self.patches.patch_size**2 * 3
        places = torch.zeros((0, 2), dtype=torch.int32)
        return [torch.zeros((0, values), dtype=torch.uint8), places, places, torch.zeros(0, dtype=torch.bool)]

    def pieces_of(self, pixels: Tensor, grid: Sequence[int]) -> list[Piece]:
        """Patches, uint8; the row and column of each; how many rows and columns there are; whether it is one."""
        found: list[Piece] = []
        for cut in self.cut_pieces(pixels, grid):
            rows, columns = cut.shape[:2]
            order = torch.from_numpy(self._units(rows, columns))  # pyright: ignore[reportUnknownMemberType]
            real = (order >= 0).repeat_interleave(self.merge**2)
            places = self._by_unit(self.places_in(rows, columns).int(), order)
            counts = torch.tensor([(rows, columns)], dtype=torch.int32).expand(len(real), 2)
            found.append([self._by_unit(by_block(cut, self.merge), order), places, counts, real])
        return found

    def cut_pieces(self, pixels: Tensor, grid: Sequence[int]) -> list[Tensor]:
        """Patches of each piece, as they are: uint8 `[rows, columns, values]`."""
        if pixels.ndim == 3:
            pixels = pixels.expand(self._num_frames, *pixels.shape)
        cut = self.patches.cut_pixels(pixels).unflatten(0, (-1, self._num_frames))
        return list(cut.permute(0, 2, 3, 1, 4).flatten(3).unbind())

    def places_in(self, rows: int, columns: int) -> Tensor:
        """Row and column of the patches of a piece, in the order of blocks, as `run` reads them: `[patches, 2]`."""
        return places_of([(rows, columns)], self.merge)

    def order_of(self, shape: Sequence[int], grid: Sequence[int]) -> np.ndarray:
        units = self._units(*self._sides(shape))
        there = np.flatnonzero(units >= 0)
        order = np.empty(len(there), dtype=np.int64)
        order[units[there]] = there
        return np.concatenate([order + moment * len(units) for moment in range(self._num_moments(shape))])

    @property
    def _num_frames(self) -> int:
        return self.patches.num_frames or 1  # None: patches know no time

    def _sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of patches."""
        return shape[-3] // self.patches.patch_size, shape[-2] // self.patches.patch_size

    def _num_moments(self, shape: Sequence[int]) -> int:
        return shape[0] // self._num_frames if len(shape) == 4 else 1

    def _units(self, rows: int, columns: int) -> np.ndarray:
        """Numbers of what becomes one feature, as a pass has them; -1: padding."""
        rows, columns = rows // self.merge, columns // self.merge
        numbers = np.arange(rows * columns).reshape(rows, columns)
        if (window := self.window) is None:
            return numbers.reshape(-1)
        filled = np.pad(numbers, ((0, -rows % window), (0, -columns % window)), constant_values=-1)
        bands = filled.reshape(filled.shape[0] // window, window, filled.shape[1] // window, window)
        return bands.transpose(0, 2, 1, 3).reshape(-1)

    def _by_unit(self, x: Tensor, order: Tensor) -> Tensor:
        """x `[patches, ...]` in the order of blocks -> in that of a pass."""
        units = x.unflatten(0, (-1, self.merge**2))
        found = units[order.clamp(min=0)]
        found[order < 0] = 0
        return found.flatten(0, 1)
