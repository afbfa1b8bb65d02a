"""Pictures of the requests in the slots: their features, computed when the plan says so, and what a pass reads of them.

Features are computed apart from passes: those of a batch of pictures, a part of the tower's pass after the other, as
many in a step as its plan says.

Pixels are files of one folder, named by digest, which whoever sends a request keeps for as long as it is under way. A
file that is not there fails the requests that need it and nobody else: what is computed on are zeros. Where there are
several ranks the first one reads, and shows the others what it has read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.models.model import Model
from text_generation_inference.models.vision.sight import Sight, place_pictures
from text_generation_inference.models.vision.tower import Parts, run_parts
from text_generation_inference.runner.feature_store import FeatureStore
from text_generation_inference.runner.shapes import EXACT, BucketPlan, ShapePlan
from text_generation_inference.runner.tower_graphs import TowerGraphs, captures_towers
from text_generation_inference.runner.tower_passes import Store, TowerPasses
from text_generation_inference.types import Admission, GenerationRequest, PictureSpan, StepPlan

LOST = "an image of the request is not there any more"


@dataclass(frozen=True, slots=True)
class Seen:
    """Tokens of a slot in a pass."""

    slot: int
    start: int
    end: int
    token: int  # of the pass, where they begin


@dataclass(slots=True)
class _Seeing:
    spans: list[PictureSpan]
    positions: np.ndarray | None  # [3, prompt] where pictures have rows and columns of them
    num_prompt: int


class EncodeBatch:
    """Pictures whose features are being computed together."""

    def __init__(self, spans: Sequence[PictureSpan], parts: Parts[list[Tensor]], num_parts: int) -> None:
        self.spans, self._parts, self._left = spans, parts, num_parts

    def advance(self, count: int) -> list[Tensor] | None:
        """By so many parts. The features, if these were the last."""
        self._left -= count
        assert self._left >= 0, "more parts than there are"
        if not self._left:
            return run_parts(self._parts)
        for _ in range(count):
            next(self._parts)
        return None


class SlotPictures:
    def __init__(
        self,
        device: Device,
        model: Model,
        sight: Sight,
        folder: Path | None,
        max_features: int = 0,  # that are kept
        plan: ShapePlan = EXACT,
    ) -> None:
        self._device, self._model, self._sight, self._folder = device, model, sight, folder
        self._requests: dict[int, _Seeing] = {}  # by slot, of those with pictures, or all with `whole_prompts`
        self._store = FeatureStore(device, max_features, sight.width, model.dtype)
        self.passes = self._pad(plan, self._store)  # of the tower, where they are padded
        self.graphs: TowerGraphs | None = None  # where they are captured
        if captures_towers(device, plan):
            self.graphs = TowerGraphs(device, model)
        self._batch: EncodeBatch | None = None  # under way
        self._lost: set[str] = set()  # digests whose features are zeros
        self._shown: dict[str, bytes] = {}  # pixels that another has read

    def _pad(self, plan: ShapePlan, store: Store) -> TowerPasses | None:
        tower = self._model.padded_tower
        if not isinstance(plan, BucketPlan) or not plan.pictures or tower is None:
            return None
        return TowerPasses(self._device, tower, store, plan)

    def shift_of(self, request: GenerationRequest) -> int:
        """What positions after the prompt are more than places."""
        if not request.pictures or not self._sight.rope_axes:
            return 0
        return place_pictures(len(request.token_ids), request.pictures, self._sight.merge)[1]

    def admit(self, admission: Admission) -> None:
        request, sight = admission.request, self._sight
        if request.pictures or sight.whole_prompts:
            count, positions = len(request.token_ids), None
            if sight.rope_axes and request.pictures:
                positions, _ = place_pictures(count, request.pictures, sight.merge)
            self._requests[admission.slot] = _Seeing(request.pictures, positions, count)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._requests.pop(slot, None)

    def forget(self) -> None:
        self._requests.clear()
        self._store.clear()
        self._batch = None
        if self.graphs is not None:
            self.graphs.forget()
        self._lost.clear()
        self._shown.clear()

    def take_news(self) -> list[str]:
        return self.graphs.take_news() if self.graphs is not None else []

    def error_of(self, slot: int) -> str | None:
        """Why what was computed for a slot means nothing."""
        if not self._lost or slot not in self._requests:
            return None
        return LOST if any(span.digest in self._lost for span in self._requests[slot].spans) else None

    def encode(self, plan: StepPlan) -> None:
        """Drop and compute features as the plan says."""
        for digest in plan.drop_features:
            self._drop(digest)
        if plan.encode:
            assert self._batch is None, "pictures are under way"
            self._batch = self._begin(plan.encode)
        batch = self._batch
        if batch is None or (made := batch.advance(plan.encode_parts)) is None:
            return
        self._batch = None
        self._keep(batch.spans, made)

    def _drop(self, digest: str) -> None:
        if not self._store.drop(digest):
            self._batch = None  # under way, and wanted by nobody any more
        self._lost.discard(digest)

    def _keep(self, spans: Sequence[PictureSpan], made: list[Tensor]) -> None:
        for span, features in zip(spans, made, strict=True):
            assert features.shape == (span.num_features, self._sight.width), (features.shape, span)
            self._store.write(self._store.take(span.digest, span.num_features), features)

    def _begin(self, spans: list[PictureSpan]) -> EncodeBatch:
        pixels, grids = self._take_pixels(spans), [tuple(span.grid) for span in spans]
        if (passes := self.passes) is not None and passes.hold(spans):
            return EncodeBatch([], self._encode_padded(passes, spans, pixels, grids), self._sight.num_parts)
        if self.graphs is not None:
            parts = self.graphs.encode(pixels, grids)
        else:
            parts = self._model.encode([self._device.send(each) for each in pixels], grids)
        return EncodeBatch(spans, parts, self._sight.num_parts)

    def _encode_padded(
        self,
        passes: TowerPasses,
        spans: Sequence[PictureSpan],
        pixels: Sequence[Tensor],
        grids: Sequence[tuple[int, ...]],
    ) -> Parts[list[Tensor]]:
        """In one part, into the store: nothing is left to keep."""
        yield
        passes.encode(pixels, grids, [self._store.take(span.digest, span.num_features) for span in spans])
        return []

    def show(self, digest: str, pixels: bytes) -> None:
        """Instead of a file, in the step that begins to compute this picture; none: they are not there."""
        self._shown[digest] = pixels

    def read(self, span: PictureSpan) -> bytes:
        """The pixels of a picture; none if they are not there."""
        try:
            found = (self._folder / span.digest).read_bytes() if self._folder is not None else b""
        except OSError:
            return b""
        return found if len(found) == math.prod(span.shape) else b""

    def _take_pixels(self, spans: Sequence[PictureSpan]) -> list[Tensor]:
        found = [self._pixels_of(span) for span in spans]
        for span in spans:  # one may be there several times
            self._shown.pop(span.digest, None)
        return found

    def _pixels_of(self, span: PictureSpan) -> Tensor:
        pixels = self._shown.get(span.digest)
        if pixels is None:
            pixels = self.read(span)
        if not pixels:
            self._lost.add(span.digest)
            return torch.zeros(span.shape, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(span.shape)

    # -- passes ----------------------------------------------------------------------------------------------------

    def concerns(self, slot: int, start: int, end: int) -> bool:
        """Whether a pass over these tokens of a slot reads more than ids and places."""
        request = self._requests.get(slot)
        if request is None:
            return False
        if self._sight.whole_prompts:
            return start < request.num_prompt
        if request.positions is not None and start < request.spans[-1].end:
            return True
        return any(span.start < end and span.end > start for span in request.spans)

    @property
    def padded_kinds(self) -> tuple[bool, ...]:
        """Whether padded passes of prompts read pictures: always, but for models in which that takes a mask."""
        return (False, True) if self._sight.whole_runs else (True,)

    def put_into(self, batch: Batch, chunks: Sequence[Seen]) -> None:
        """What a pass over these chunks reads of pictures."""
        num_tokens = batch.input_ids.shape[0]
        index = np.full(num_tokens, -1, dtype=np.int64)
        ends = np.full(num_tokens, -1, dtype=np.int64)
        places = np.full((3, num_tokens), -1, dtype=np.int64)
        for chunk in chunks:
            request = self._requests.get(chunk.slot)
            ends[chunk.token : chunk.token + chunk.end - chunk.start] = np.arange(chunk.start + 1, chunk.end + 1)
            if request is None:
                continue
            shift = chunk.token - chunk.start
            if request.positions is not None:
                end = min(chunk.end, request.num_prompt)
                places[:, chunk.start + shift : max(chunk.start, end) + shift] = request.positions[:, chunk.start : end]
            if self._sight.whole_prompts and chunk.start < request.num_prompt:
                ends[shift + chunk.start : shift + request.num_prompt] = request.num_prompt
            for span in request.spans:
                at = 0
                for start, length in span.runs:
                    first, after = max(start, chunk.start), min(start + length, chunk.end)
                    if first < after:
                        wanted = slice(at + first - start, at + after - start)
                        index[first + shift : after + shift] = self._store.places_of(span.digest)[wanted]
                        if self._sight.whole_runs:
                            ends[first + shift : after + shift] = start + length
                    at += length
        batch.features = self._store.rows
        batch.feature_index = self._to_batch(index, batch)
        if self._sight.whole_runs or self._sight.whole_prompts:
            batch.visible_ends = self._to_batch(ends, batch)
        if self._sight.rope_axes:
            given = self._to_batch(places, batch)
            batch.grid_positions = torch.where(given >= 0, given, batch.positions)

    def _to_batch(self, array: np.ndarray, batch: Batch) -> Tensor:
        """To where the batch is: on the host, where a pass is still to be sent."""
        tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
        return tensor if batch.positions.device == tensor.device else self._device.send(tensor)
