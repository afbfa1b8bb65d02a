"""Steps whose passes all have shapes of a bucket plan, for devices that make one graph for each shape.

Prompts and decode rows of a step are padded passes of their own. Prompts with tokens in the cache before them (a
prefix, or their parts before) are in passes that read those too. A pass is described where the slots are; what of it is
on the host then goes to the device in one copy.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import BlockLists, PromptParts, WholePrompts
from text_generation_inference.models.model import Model
from text_generation_inference.runner.cross_pictures import CrossPictures
from text_generation_inference.runner.device_sampling import DeviceSampling
from text_generation_inference.runner.host_sampling import HostSampling
from text_generation_inference.runner.padded_inputs import describe_decode, describe_following, describe_prefill
from text_generation_inference.runner.padded_passes import PaddedPasses
from text_generation_inference.runner.pictures import Seen, SlotPictures
from text_generation_inference.runner.prompt_scores import OwedScores, PromptScores
from text_generation_inference.runner.shapes import Bucket, BucketPlan
from text_generation_inference.runner.slots import Slots
from text_generation_inference.runner.step_pass import ScoredPrompt, StepPass
from text_generation_inference.runner.tower_passes import TowerPasses
from text_generation_inference.types import BucketStats, Chunk, StepPlan


class BucketedSteps:
    def __init__(
        self,
        device: Device,
        model: Model,
        kv_cache: list[tuple[Tensor, ...]],
        slots: Slots,
        sampling: DeviceSampling | HostSampling,
        owed: OwedScores,
        pictures: SlotPictures | None,
        plan: BucketPlan,
        limit_graphs: bool = False,
    ) -> None:
        self.plan = plan
        self._device, self._slots, self._sampling, self._owed = device, slots, sampling, owed
        self._pictures = pictures
        self._cross = pictures if isinstance(pictures, CrossPictures) else None
        outputs = None
        if slots.on_device:
            num_slots, width = slots.state.rows.shape[0], model.vocabulary.width
            most = max((bucket.batch for bucket in plan.prefill), default=1)
            with device.stream():
                self._decode_logits = torch.zeros((num_slots, width), device=device.torch_device)
                self._prompt_logits = torch.zeros((most, width), device=device.torch_device)
            outputs = self._place_for
        self.passes = PaddedPasses(device, model, kv_cache, plan, limit_graphs, outputs, slots.newest)
        self._tower = pictures.passes if pictures is not None else None
        if self._tower is not None:
            self._tower.stats = self.passes.shape_stats

    @property
    def stats(self) -> BucketStats:
        return self.passes.shape_stats.stats(self.num_captured)

    def take_news(self) -> list[str]:
        """Shapes that warming up has not met, once each."""
        return self.passes.shape_stats.take_news()

    # -- before the first request ----------------------------------------------------------------------------------

    @property
    def num_captured(self) -> int:
        return self.passes.num_captured + (self._tower.num_captured if self._tower is not None else 0)

    def captures(self, bucket: Bucket) -> bool:
        return self._who_runs(bucket).captures(bucket)

    def go_without(self, bucket: Bucket) -> None:
        self._who_runs(bucket).go_without(bucket)

    def _who_runs(self, bucket: Bucket) -> PaddedPasses | TowerPasses:
        return self._tower if self._tower is not None and bucket.phase == "picture" else self.passes

    def warm(self, bucket: Bucket, scored: bool = False) -> None:
        """Meet a shape with a pass that is all padding, and the choice of tokens that follows it.

        Where steps run, as there is what they will find: on some devices each thread has its own.
        """
        # Without a graph few layers load all there is to load, except where passes are compiled as a whole.
        few_layers = self._slots.on_device or not self._device.limits.graphs

        def work() -> None:
            for sees in self._kinds(bucket):
                batch = self._empty_batch(bucket, sees)
                self._sampling.warm(self.passes.warm(bucket, batch, few_layers))
                if scored:
                    prompt = self._prefill_batch(bucket, [], scored=True, sees=sees)
                    found = self.passes.warm_scores(prompt, few_layers)
                    if not self._slots.on_device:
                        found = found.cpu()
                    self._sampling.warm(self.passes.last_logits(found))  # of one row, whatever batches the plan has

        tower = self._tower
        self._run(work if bucket.phase != "picture" or tower is None else lambda: tower.warm(bucket))

    def run_shallow(self, bucket: Bucket) -> None:
        """Run a shape through few layers, without a graph."""
        if bucket.phase != "picture":  # of towers nothing is compiled but what torch has
            self._run(lambda: [self.passes.run_shallow(self._empty_batch(bucket, s)) for s in self._kinds(bucket)])

    def _kinds(self, bucket: Bucket) -> tuple[bool, ...]:
        """Whether passes of this shape read pictures: both ways, if need be."""
        if self._pictures is None or bucket.phase != "prefill":
            return (False,)
        return self._pictures.padded_kinds

    def _run(self, work: Callable[[], object]) -> None:
        def in_step() -> Callable[[], None]:
            with torch.inference_mode():
                work()
            return lambda: None

        self._device.launch(in_step).result()

    def _empty_batch(self, bucket: Bucket, sees: bool) -> Batch:
        if bucket.phase == "prefill":
            return self._prefill_batch(bucket, [], sees=sees)
        return self._decode_batch(bucket, [])

    # -- one step --------------------------------------------------------------------------------------------------

    def compute(self, plan: StepPlan) -> Iterator[StepPass]:
        """What one pass leaves is good until the next one of its phase."""
        if not self._slots.on_device:
            yield from self._each(plan)
            return
        if not plan.chunks and plan.decode and len(self._decode_parts()) == 1:
            made = next(self._each(plan))
            assert made.logits is not None
            size = made.logits.shape[0]
            made.row_slots = self._slots.state.rows[:size]
            self._sampling.take_best(made.logits, made.row_slots)
            yield made
        elif plan.chunks or plan.decode:
            yield self._join(plan)
        else:
            self._slots.send()

    def _each(self, plan: StepPlan) -> Iterator[StepPass]:
        nothing = self._slots.state.rows[:0]
        if plan.decode and self._slots.decode_slots:
            parts = self._decode_parts()
            for slots in parts:
                pictures = self._cross.count_read(slots) if self._cross is not None else 0
                bucket = self.passes.find_decode(len(slots), self._slots.host.used_blocks(slots)[0], pictures)
                logits = self.passes.logits(bucket, self._decode_batch(bucket, slots), len(slots))
                yield StepPass(slots, logits, nothing, is_decode=len(parts) == 1)
        plain = [chunk for chunk in plan.chunks if chunk.slot not in self._owed]
        scored = [chunk for chunk in plan.chunks if chunk.slot in self._owed]
        for chunks in self.passes.group(plain, [self._count_seen(chunk) for chunk in plain]):
            chunks.sort(key=lambda chunk: not chunk.samples)
            sampling = [chunk.slot for chunk in chunks if chunk.samples]
            logits = self._prompt_pass(chunks)
            yield StepPass(sampling, logits if sampling else None, nothing)
        for chunk in scored:
            logits, scores = self._scored_pass(chunk)
            prompt = ScoredPrompt(chunk.slot, chunk.start + 1, [scores])
            if chunk.samples:
                self._owed.release([chunk.slot])
            yield StepPass([chunk.slot][: chunk.samples], logits if chunk.samples else None, nothing, [prompt])

    def _decode_parts(self) -> list[list[int]]:
        """Rows that decode: all in one pass, unless they read more pictures than any shape has."""
        slots = self._slots.decode_slots
        return [slots] if self._cross is None else self._cross.split_rows(slots, self.plan.most_read)

    def _count_seen(self, chunk: Chunk) -> int:
        """Pictures that layers of cross-attention read for a chunk: see `Bucket`."""
        return 0 if self._cross is None else self._cross.count_seen(Seen(chunk.slot, chunk.start, chunk.end, 0))

    def _join(self, plan: StepPlan) -> StepPass:
        """All passes of a step as one to choose from: on the device another shape of the choice costs nothing."""
        parts: list[Tensor] = []
        slots: list[int] = []
        prompts: list[ScoredPrompt] = []
        for made in self._each(plan):
            prompts += made.prompts
            if made.logits is not None:
                slots += made.slots
                logits = made.logits[: len(made.slots)]
                parts.append(logits if made.is_decode else logits.clone())  # the next pass of prompts overwrites it
        if not slots:
            return StepPass(slots, None, self._slots.state.rows[:0], prompts)
        self._slots.put(slots)
        (row_slots,) = self._slots.send()
        return StepPass(slots, self._sampling.take_best(torch.cat(parts), row_slots), row_slots, prompts)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _prompt_pass(self, chunks: list[Chunk]) -> Tensor:
        bucket = self.passes.find_prefill(chunks, max(map(self._count_seen, chunks)))
        batch = self._prefill_batch(bucket, chunks)
        return self.passes.logits(bucket, batch, sum(chunk.end - chunk.start for chunk in chunks))

    def _scored_pass(self, chunk: Chunk) -> tuple[Tensor, PromptScores]:
        """Logits of a chunk's last token `[1, vocab]`, and how likely what follows its tokens is."""
        bucket, count = self.passes.find_prefill([chunk], self._count_seen(chunk)), chunk.end - chunk.start
        num_top = self._owed.num_top(chunk.slot)
        scores = self.passes.score(bucket, self._prefill_batch(bucket, [chunk], scored=True), count, num_top)
        if not self._slots.on_device:
            scores = scores.cpu()  # its parts have shapes of their own
        count -= chunk.samples  # nothing follows a prompt's last token
        return self.passes.read_scores(scores, bucket.length, count, num_top)

    def _prefill_batch(self, bucket: Bucket, chunks: list[Chunk], scored: bool = False, sees: bool = False) -> Batch:
        """`sees`: it reads pictures, although no prompt has one."""
        host = self._slots.host
        arrays = describe_prefill(bucket, chunks, host)
        self._slots.put(arrays.token_slots, arrays.positions, arrays.seq_lens, arrays.last_tokens)
        if arrays.tables is not None:
            self._slots.put(arrays.tables.reshape(-1), arrays.starts)
        if scored:
            self._slots.put(*describe_following(bucket, chunks[0] if chunks else None, host))
        token_slots, at, seq_lens, last_tokens, *more = self._slots.send()
        ids, positions, kv_index, _ = self._slots.look_up(token_slots, at)
        batch = Batch(ids, positions, kv_index, seq_lens, WholePrompts(), last_tokens.long())
        if arrays.tables is not None:
            batch.meta = PromptParts(more[0].view(arrays.tables.shape), more[1])
        if self._slots.newest is not None:
            batch.places = self._places([chunk.slot for chunk in chunks], 1 if scored else bucket.batch)
        if scored:
            batch.following = self._slots.look_up(more[-2], more[-1])[0]
        self._put_pictures(batch, bucket, chunks, sees)
        return batch

    def _put_pictures(self, batch: Batch, bucket: Bucket, chunks: list[Chunk], sees: bool) -> None:
        pictures = self._pictures
        if pictures is None:
            return
        seen = [Seen(chunk.slot, chunk.start, chunk.end, row * bucket.length) for row, chunk in enumerate(chunks)]
        sees = sees or False not in pictures.padded_kinds
        if sees or any(pictures.concerns(row.slot, row.start, row.end) for row in seen):
            pictures.put_into(batch, seen)
        if self._cross is not None and bucket.pictures:
            batch.picture_lists = self._cross.of_padded_prompts(seen, bucket, batch)

    def _decode_batch(self, bucket: Bucket, slots: list[int]) -> Batch:
        arrays = describe_decode(bucket, slots, self._slots.host)
        self._slots.put(arrays.slots, *arrays.lists.values())
        rows, *lists = self._slots.send()
        ids, positions, kv_index, seq_lens = self._slots.look_up(rows, None)
        if self._slots.newest is not None:
            ids = self._places(slots, bucket.batch)
        named = dict(zip(arrays.lists, lists, strict=True))
        meta = BlockLists(
            named.get("block_list"),
            named["block_groups"],
            named["block_usage"],
            named.get("row_starts"),
            named.get("block_numbers"),
        )
        batch = Batch(ids, positions, kv_index, seq_lens, meta)
        if self._cross is not None and bucket.pictures:
            batch.picture_lists = self._cross.of_padded_rows(slots, bucket, batch)
        return batch

    def _places(self, slots: list[int], num_rows: int) -> Tensor:
        """`[rows]` on the host: where the newest token of each is."""
        assert self._slots.newest is not None
        padded = np.full(num_rows, -1, dtype=np.int64)
        padded[: len(slots)] = slots
        return torch.from_numpy(self._slots.newest.places_of(padded))  # pyright: ignore[reportUnknownMemberType]

    def _place_for(self, batch: Batch) -> Tensor:
        """Where the logits of a pass go; what is in the place of the other phase stays."""
        rows = batch.seq_lens.shape[0]
        place = self._decode_logits if isinstance(batch.meta, BlockLists) else self._prompt_logits
        if rows <= place.shape[0]:
            return place[:rows]
        return torch.zeros((rows, place.shape[1]), device=place.device)
