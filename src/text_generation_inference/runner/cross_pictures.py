"""Pictures that layers of cross-attention read: keys and values in blocks, and which rows of them each token reads.

Pictures whose tokens stand side by side are read together by what follows, so they are computed and kept together. Of
such a group the rows of real tiles come first, picture by picture, then those of missing tiles: what a token reads of
a group are its first rows. A token reads the last group that has begun before it; those before the first picture read
all rows there are. So all that a request decodes reads the last group, as many rows as its real tiles have: a table of
blocks and a length for each slot, as for tokens, in the place where captured steps find them.

The groups of a request are there before it is admitted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch, CrossMeta, CrossReading, PagedMeta
from text_generation_inference.kernels.block_lists import (
    BlockLists,
    PicturesOfPrompts,
    PicturesOfRows,
    rows_of_pictures,
)
from text_generation_inference.models.model import Caches, Model
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.models.vision.tower import Parts
from text_generation_inference.runner.cross_store import CrossStore
from text_generation_inference.runner.pictures import LOST, EncodeBatch, Seen, SlotPictures
from text_generation_inference.runner.shapes import EXACT, Bucket, ShapePlan
from text_generation_inference.types import Admission, PictureSpan, group_neighbours, name_group


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens of a request that read the same rows of its pictures."""

    start: int  # of the request's tokens
    end: int | None  # None: all that follow
    group: int | None  # None: they come before all pictures, and read every row; the feed-forward passes them by
    end_row: int = 0  # of the group


def find_readings(places: Sequence[int], counts: Sequence[int]) -> list[Reading]:
    """What the tokens of a request read.

    places: of the tokens that stand for pictures. counts: rows of real tiles of each picture.
    """
    readings: list[Reading] = []
    if places and places[0] > 0:
        readings.append(Reading(0, places[0], None))
    group = end_row = 0
    for number, (place, count) in enumerate(zip(places, counts, strict=True)):
        if number and places[number - 1] != place - 1:
            group, end_row = group + 1, 0
        end_row += count
        end = places[number + 1] if number + 1 < len(places) else None
        readings.append(Reading(place, end, group, end_row))
    return readings


@dataclass(frozen=True, slots=True)
class _KeptGroup:
    """On the device."""

    ids: list[int]  # of its blocks
    blocks: Tensor  # the same
    num_real: int  # rows of real tiles
    num_rows: int


@dataclass(frozen=True, slots=True)
class _PictureReader:
    """A request with pictures."""

    spans: list[PictureSpan]
    names: list[str]  # of its groups
    readings: list[Reading]
    image_ids: list[int]  # of the tokens that stand for pictures


class CrossPictures(SlotPictures):
    def __init__(
        self,
        device: Device,
        model: Model,
        sight: Sight,
        folder: Path | None,
        caches: Caches,
        num_slots: int,
        max_pictures: int | None,  # of a request; None: as many as there is room for
        plan: ShapePlan = EXACT,
    ) -> None:
        super().__init__(device, model, sight, folder)
        self._caches, self._on_device = caches, device.limits.runs_ahead
        self._num_blocks, self._block_size = caches[sight.cross_layer][0].shape[:2]
        self._free = list(range(self._num_blocks - 1, 0, -1))  # block 0 is read by those who read nothing
        self._groups: dict[str, _KeptGroup] = {}
        self._coming: _KeptGroup | None = None  # whose keys and values are being computed
        self._readers: dict[int, _PictureReader] = {}  # by slot
        self._lost_groups: set[str] = set()
        self._per_picture = -(-sight.cross_rows // self._block_size)
        width = max(1, self._num_blocks - 1)
        if max_pictures is not None:
            width = min(width, max_pictures * self._per_picture)
        self._cross_store = CrossStore(device, model, caches, self._block_size)
        self.passes = self._pad(plan, self._cross_store)
        home = device.torch_device if self._on_device else torch.device("cpu")
        self._tables = torch.zeros((num_slots, width), dtype=torch.int32, device=home)
        self._lengths = torch.zeros(num_slots, dtype=torch.int32, device=home)

    # -- who is where ----------------------------------------------------------------------------------------------

    def admit(self, admission: Admission) -> None:
        request, spans = admission.request, admission.request.pictures
        if not spans:
            return
        counts = [self._num_real(span) for span in spans]
        self._readers[admission.slot] = _PictureReader(
            spans,
            [name_group(group) for group in group_neighbours(spans)],
            find_readings([span.start for span in spans], counts),
            [request.token_ids[span.start] for span in spans],
        )
        last = self._last_group(admission.slot)
        count = self._num_read(last)
        blocks = last.blocks if self._on_device else torch.tensor(last.ids, dtype=torch.int32)
        self._tables[admission.slot, :count] = blocks[:count].to(self._tables)
        self._lengths[admission.slot] = last.num_real

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._readers.pop(slot, None) is not None:
                self._lengths[slot] = 0

    def forget(self) -> None:
        super().forget()
        self._readers.clear()
        self._groups.clear()
        self._coming = None
        self._lost_groups.clear()
        self._free = list(range(self._num_blocks - 1, 0, -1))
        with self._device.stream():
            self._lengths.zero_()

    def error_of(self, slot: int) -> str | None:
        if not self._lost_groups or slot not in self._readers:
            return None
        return LOST if self._lost_groups.intersection(self._readers[slot].names) else None

    def check(self) -> None:
        """Raise AssertionError unless each block is free or a group's, and slots without pictures read none."""
        coming = [self._coming] if self._coming is not None else []
        used = [block for group in (*self._groups.values(), *coming) for block in group.ids]
        assert sorted([*used, *self._free]) == list(range(1, self._num_blocks)), "blocks of pictures do not balance"
        assert set(self._lengths.nonzero().flatten().tolist()) <= set(self._readers), "a slot reads what it left"
        for reader in self._readers.values():
            assert set(reader.names) <= set(self._groups), "pictures that are read are gone"

    def _num_real(self, span: PictureSpan) -> int:
        """Rows of its tiles; missing ones have as many."""
        return span.grid[1] * span.grid[2] * self._sight.tile_rows

    # -- keys and values -------------------------------------------------------------------------------------------

    def _drop(self, digest: str) -> None:
        group = self._groups.pop(digest, None)
        if group is None:  # under way, and wanted by nobody any more
            group, self._coming, self._batch = self._coming, None, None
        assert group is not None
        self._free += reversed(group.ids)
        self._lost_groups.discard(digest)

    def _begin(self, spans: list[PictureSpan]) -> EncodeBatch:
        """The pictures of a plan are one group."""
        num_rows = len(spans) * self._sight.cross_rows
        ids = [self._free.pop() for _ in range(-(-num_rows // self._block_size))]
        blocks = self._device.send(torch.tensor(ids))
        group = self._coming = _KeptGroup(ids, blocks, sum(map(self._num_real, spans)), num_rows)
        self._lost.clear()
        compute = self._compute if self.passes is None else self._compute_padded
        parts = compute(group, spans, self._take_pixels(spans))
        return EncodeBatch(spans, parts, len(spans) * self._sight.num_parts)

    def _compute(
        self, group: _KeptGroup, spans: Sequence[PictureSpan], pixels: Sequence[Tensor]
    ) -> Parts[list[Tensor]]:
        """Its keys and values, in their blocks; so nothing is left to keep. One picture after the other: so much memory
        is left for it, and missing tiles take as much as others."""
        at, missing_at = 0, group.num_real
        for span, picture in zip(spans, pixels, strict=True):
            count = self._num_real(span)
            given = [self._device.send(picture)]
            (features,) = yield from self._model.encode(given, [tuple(span.grid)])
            self._put(group, features[:count], at)
            self._put(group, features[count:], missing_at)
            at, missing_at = at + count, missing_at + features.shape[0] - count
        # What is behind the last row may be anything that was there before, and masks do not undo what is not finite.
        shape = (len(group.ids) * self._block_size - group.num_rows, self._sight.width)
        self._put(group, torch.zeros(shape, dtype=self._model.dtype, device=group.blocks.device), group.num_rows)
        return []

    def _compute_padded(
        self, group: _KeptGroup, spans: Sequence[PictureSpan], pixels: Sequence[Tensor]
    ) -> Parts[list[Tensor]]:
        """The same in passes of one shape, a picture in each."""
        assert self.passes is not None
        size, at, missing_at = self._block_size, 0, group.num_real
        places = (np.array(group.ids)[:, None] * size + np.arange(size)).reshape(-1)
        self._cross_store.behind = places[group.num_rows :]
        for span, picture in zip(spans, pixels, strict=True):
            count = self._num_real(span)
            missing = self._sight.cross_rows - count
            own = np.concatenate((places[at : at + count], places[missing_at : missing_at + missing]))
            self.passes.encode([picture], [tuple(span.grid)], [own])
            at, missing_at = at + count, missing_at + missing
            yield
        return []

    def _keep(self, spans: Sequence[PictureSpan], made: list[Tensor]) -> None:
        assert self._coming is not None
        name = name_group(spans)
        self._groups[name], self._coming = self._coming, None
        if self._lost:
            self._lost_groups.add(name)

    def _put(self, group: _KeptGroup, features: Tensor, first: int) -> None:
        """Keys and values of features become rows of a group from `first` on."""
        if features.shape[0]:
            places = torch.arange(first, first + features.shape[0], device=features.device)
            blocks, inside = group.blocks[places // self._block_size], places % self._block_size
            self._model.keep_pictures(features, blocks, inside, self._caches)

    # -- passes ----------------------------------------------------------------------------------------------------

    def reads(self, slots: Sequence[int]) -> bool:
        """Whether a pass over tokens of these slots reads pictures."""
        return bool(self._readers) and any(slot in self._readers for slot in slots)

    def concerns(self, slot: int, start: int, end: int) -> bool:
        return slot in self._readers

    @property
    def padded_kinds(self) -> tuple[bool, ...]:
        """Those that read pictures are shapes of the plan: see `Bucket.pictures`."""
        return (False,)

    def put_into(self, batch: Batch, chunks: Sequence[Seen]) -> None:
        """The tokens that stand for pictures, whose ids slots do not know: see `Slots`."""
        ids = np.full(batch.input_ids.shape[0], -1, dtype=np.int64)
        for chunk in chunks:
            reader = self._readers.get(chunk.slot)
            for span, image_id in zip(reader.spans, reader.image_ids, strict=True) if reader is not None else ():
                if chunk.start <= span.start < chunk.end:
                    ids[chunk.token + span.start - chunk.start] = image_id
        known = batch.input_ids  # on the host, where all of a pass goes to the device in one copy
        given = torch.from_numpy(ids) if known.device.type == "cpu" else self._move(ids)  # pyright: ignore[reportUnknownMemberType]
        batch.input_ids = torch.where(given >= 0, given, known)

    def of_rows(self, row_slots: Tensor, is_all: bool) -> CrossMeta:
        """What rows that decode read, of these slots `[rows]`; -1: padding. From what is on the device alone, where the
        slots are there. `is_all`: the batch has no other tokens."""
        device, count = self._device.torch_device, row_slots.shape[0]
        rows = row_slots.clamp(min=0).long()
        lengths = torch.where(row_slots >= 0, self._lengths[rows], 0)
        if self._on_device:
            longest = self._tables.shape[1] * self._block_size
            tables, table_rows = self._tables, row_slots
        else:
            longest = max(1, int(lengths.max()))
            tables, table_rows = self._tables[rows, : -(-longest // self._block_size)].to(device), None
        reads = (lengths > 0)[:, None].to(device)
        seq_lens = lengths.clamp(min=1).to(device)  # who reads nothing looks at one row, and takes nothing of it
        batch = rows_of_pictures(seq_lens, PagedMeta(tables, count, [], [], longest, table_rows))
        tokens = None if is_all else torch.arange(count, device=device)
        return CrossMeta(tokens, reads, reads, batch, count, [])

    def of_chunks(self, row_slots: Tensor, decode: list[int], chunks: Sequence[Seen]) -> CrossMeta:
        """What these chunks read, and the rows before them where they read at all."""
        device = self._device.torch_device
        found = self.of_rows(row_slots, is_all=False) if self.reads(decode) else None
        count = found.num_decode if found is not None else 0
        tokens = list(range(count))
        feeds: list[bool] = []
        readings: list[CrossReading] = []
        for chunk in chunks:
            if (reader := self._readers.get(chunk.slot)) is None:
                continue
            for reading, first, end in _cut(reader.readings, chunk):
                readings.append(CrossReading(len(tokens), len(tokens) + end - first, self._parts(reader, reading)))
                tokens += range(chunk.token + first - chunk.start, chunk.token + end - chunk.start)
                feeds += [reading.group is not None] * (end - first)
        fed = torch.tensor(feeds, dtype=torch.bool, device=device)[:, None]
        reads = torch.ones_like(fed)
        if found is not None:
            fed, reads = torch.cat((found.feeds, fed)), torch.cat((found.reads, reads))
        decode_batch = found.decode if found is not None else None
        return CrossMeta(self._move(np.array(tokens)), reads, fed, decode_batch, count, readings)

    # -- padded passes ---------------------------------------------------------------------------------------------

    def count_read(self, slots: Sequence[int]) -> int:
        """Pictures whose blocks have room for those that rows which decode read."""
        groups = [self._last_group(slot) for slot in slots if slot in self._readers]
        return -(-sum(map(self._num_read, groups)) // self._per_picture)

    def split_rows(self, slots: Sequence[int], most: int) -> list[list[int]]:
        """Rows that decode, in as few parts as read no more pictures than that each."""
        parts, left = [list[int]()], most * self._per_picture
        for slot in slots:
            count = self._num_read(self._last_group(slot)) if slot in self._readers else 0
            if count > left and parts[-1]:
                parts.append([])
                left = most * self._per_picture
            parts[-1].append(slot)
            left -= count
        return parts

    def of_padded_rows(self, slots: Sequence[int], bucket: Bucket, batch: Batch) -> PicturesOfRows:
        """What rows that decode read."""
        size = self._block_size
        lists = np.zeros((3, bucket.pictures * self._per_picture), dtype=np.int32)  # blocks, rows, filled places
        lists[1], lists[2] = -1, 1
        rows = np.zeros((2, bucket.batch), dtype=np.int32)  # lengths, and where in the lists each row begins
        rows[1] = -1
        first = 0
        for row, slot in enumerate(slots):
            if slot not in self._readers:
                continue
            group = self._last_group(slot)
            end = first + self._num_read(group)
            lists[:, first:end] = group.ids[: end - first], [row] * (end - first), [size] * (end - first)
            lists[2, end - 1] = (group.num_real - 1) % size + 1
            rows[:, row] = group.num_real, first
            first = end
        lengths, starts = (self._to_batch(each, batch) for each in rows)
        blocks, groups, usage = (self._to_batch(each, batch) for each in lists)
        return PicturesOfRows(lengths, BlockLists(blocks, groups, usage, starts))

    def count_seen(self, chunk: Seen) -> int:
        """Pictures whose blocks have room for those that a prompt, or a part of it, reads."""
        return -(-sum(len(group.ids) for group in self._seen_by(chunk)[1].values()) // self._per_picture)

    def of_padded_prompts(self, prompts: Sequence[Seen], bucket: Bucket, batch: Batch) -> PicturesOfPrompts:
        """What prompts or parts of them read."""
        size = self._block_size
        width = bucket.pictures * self._per_picture
        lists = np.zeros((2, bucket.batch, width), dtype=np.int32)  # blocks, and their filled places
        lists[1, :, 0] = 1
        tokens = np.zeros((2, bucket.batch, bucket.length), dtype=np.int32)  # first places, and those behind the last
        for row, prompt in enumerate(prompts):
            readings, groups = self._seen_by(prompt)
            first, places = 0, dict[int, int]()
            for number, group in groups.items():
                places[number], end = first * size, first + len(group.ids)
                lists[0, row, first:end], lists[1, row, first:end] = group.ids, size
                lists[1, row, end - 1] = (group.num_rows - 1) % size + 1
                first = end
            for reading, start, end in readings:
                which = slice(start - prompt.start, end - prompt.start)
                if reading.group is None:
                    tokens[0, row, which], tokens[1, row, which] = -1, first * size
                else:
                    place = places[reading.group]
                    tokens[0, row, which], tokens[1, row, which] = place, place + reading.end_row
        blocks, usage = (self._to_batch(each, batch) for each in lists)
        firsts, ends = (self._to_batch(each.reshape(-1), batch) for each in tokens)
        return PicturesOfPrompts(blocks, usage, firsts, ends)

    def _seen_by(self, chunk: Seen) -> tuple[list[tuple[Reading, int, int]], dict[int, _KeptGroup]]:
        """What tokens of a chunk read, from one to another of the request, and the groups in that by number."""
        reader = self._readers.get(chunk.slot)
        if reader is None:
            return [], {}
        readings = list(_cut(reader.readings, chunk))
        read = {reading.group for reading, _, _ in readings}
        groups = [self._groups[name] for name in reader.names]
        return readings, {number: group for number, group in enumerate(groups) if None in read or number in read}

    def _num_read(self, group: _KeptGroup) -> int:
        """Of its blocks, those that are read while decoding."""
        return -(-group.num_real // self._block_size)

    def _last_group(self, slot: int) -> _KeptGroup:
        return self._groups[self._readers[slot].names[-1]]

    def _move(self, array: np.ndarray) -> Tensor:
        return self._device.send(torch.from_numpy(array))  # pyright: ignore[reportUnknownMemberType]

    def _parts(self, reader: _PictureReader, reading: Reading) -> list[tuple[Tensor, int, int]]:
        groups = [self._groups[name] for name in reader.names]
        if reading.group is None:
            return [(group.blocks, 0, group.num_rows) for group in groups]
        return [(groups[reading.group].blocks, 0, reading.end_row)]


def _cut(readings: Sequence[Reading], chunk: Seen) -> Iterator[tuple[Reading, int, int]]:
    """Those of a chunk's tokens: from one to another of the request."""
    for reading in readings:
        first = max(reading.start, chunk.start)
        end = chunk.end if reading.end is None else min(reading.end, chunk.end)
        if first < end:
            yield reading, first, end
