"""What the runner remembers of each request: one row per slot, at home on the device or on the host.

A device that runs ahead keeps the slots, so that a step needs nothing from the host but changes; elsewhere they are on
the host, and a pass is sent what it reads, except tokens that the device has chosen and kept (`newest`). The host
always knows lengths (to size what is not captured) and which slots are in the decode set.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.slot_state import ADJUSTED, DRAWS, FILTERS, NUMBER_FIELDS, PLAIN, SlotState
from text_generation_inference.runner.newest_tokens import NewestTokens
from text_generation_inference.runner.staging import HostStaging, Staging, Words
from text_generation_inference.types import Admission, GenerationRequest, StepPlan


@dataclass(slots=True)
class HostTables:
    """What the host knows of all slots in order to describe a padded pass."""

    lengths: np.ndarray  # [slots]: known tokens
    tables: np.ndarray  # [slots, max_blocks]: blocks
    block_size: int

    def used_blocks(self, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the blocks that the slots' known tokens are in, slot after slot; how many are whose."""
        index = np.array(slots, dtype=np.int64)
        counts = -(-self.lengths[index] // self.block_size)
        tables = self.tables[index, : int(counts.max(initial=0))]
        return tables[np.arange(tables.shape[1]) < counts[:, None]], counts


class Slots:
    def __init__(
        self,
        device: Device,
        num_slots: int,
        max_tokens: int,
        num_blocks: int,  # of the cache
        block_size: int,
        keeps_tables: bool = False,  # block tables are kept on the host, too
        own_pages: bool = False,  # token ids of requests stay when blocks of theirs go
        shift_of: Callable[[GenerationRequest], int] | None = None,  # see `SlotState.shifts`; None: nobody has any
        # Ids from here on stand for pictures and have no scores: slots know them as the one before, for all who look
        # scores up by what a request has seen.
        vocab_size: int | None = None,
        has_beside: bool = False,  # see `SlotState`
        keeps_tokens: bool = False,  # see `Limits`
    ) -> None:
        self.on_device = device.limits.runs_ahead
        self._device = device
        self._shift_of = shift_of
        self._last_id = vocab_size - 1 if vocab_size is not None else np.iinfo(np.int32).max
        self._keeps_tables = keeps_tables and self.on_device
        home = device.torch_device if self.on_device else torch.device("cpu")
        self.state = SlotState(num_slots, max_tokens, num_blocks, block_size, home, own_pages, has_beside)
        self.newest = NewestTokens(device, num_slots) if keeps_tokens else None
        self.decode_slots: list[int] = []  # a new list with every change: steps in flight keep theirs
        if self.on_device:
            self._staging: Staging | HostStaging = Staging(device)
            lengths = np.zeros(num_slots, dtype=np.int64)
            tables = np.zeros(tuple(self.state.block_tables.shape), dtype=np.int32)
        else:
            self._staging = HostStaging(self.state)
            lengths, tables = self.state.lengths.numpy(), self.state.block_tables.numpy()
        self.host = HostTables(lengths, tables, block_size)
        self.rooms = np.zeros(num_slots, dtype=np.int64)  # tokens that each slot's blocks have room for

    @property
    def lengths_cpu(self) -> np.ndarray:
        return self.host.lengths

    def update(self, plan: StepPlan) -> None:
        """Stage the plan's changes to who is where."""
        state = self.state
        if plan.leave or plan.join:
            before = len(self.decode_slots)
            leaving = set(plan.leave)
            self.decode_slots = [slot for slot in self.decode_slots if slot not in leaving] + plan.join
            self._staging.write(state.rows_at, self.decode_slots + [-1] * (before - len(self.decode_slots)))
        if plan.admit:
            self._fill(plan.admit)
            self._write_pages(plan.admit)
        for slot, start, blocks in plan.grow:
            self._put_blocks(slot, start, blocks)
        for slot, start, blocks in plan.grow_beside:
            self._put_beside(slot, start, blocks)

    def put(self, *inputs: Words) -> None:
        """Inputs of the next pass."""
        for words in inputs:
            self._staging.put(words)

    def send(self) -> list[Tensor]:
        """Make the changes; what was `put`, where the slots are, good until the next `send`."""
        return self._staging.send(self.state)

    def look_up(self, token_slots: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """input_ids, positions, kv_index and seq_lens where the slots are: see `kernels.slot_state.gather_inputs`."""
        return self._device.ops.gather_inputs(self.state, token_slots, at)

    def gather(self, token_slots: Tensor, at: Tensor | None) -> list[Tensor]:
        """The same on the device."""
        return self.move(self.look_up(token_slots, at))

    def find_tables(self, row_slots: Tensor, max_seq_len: int) -> tuple[Tensor, Tensor | None]:
        """Block tables on the device, and the row of each among them; None: in order."""
        if self.on_device:
            return self.state.block_tables, row_slots
        return self._pick(self.host.tables, row_slots, max_seq_len), None

    def gather_beside(self, token_slots: Tensor, at: Tensor | None) -> Tensor:
        """`kv_index` in layers that read a window, where they have blocks of their own."""
        assert self.state.beside is not None
        return self.move(self._device.ops.gather_inputs(self.state.beside, token_slots, at)[2:3])[0]

    def find_beside(self, row_slots: Tensor, max_seq_len: int) -> Tensor:
        """Their block tables, in the order of those of `find_tables`."""
        assert self.state.beside is not None
        tables = self.state.beside.block_tables
        return tables if self.on_device else self._pick(tables.numpy(), row_slots, max_seq_len)

    def _pick(self, tables: np.ndarray, row_slots: Tensor, max_seq_len: int) -> Tensor:
        """Rows of tables on the host, on the device."""
        picked = tables[row_slots.numpy(), : -(-max_seq_len // self.state.block_size)]
        return self.move([torch.from_numpy(picked)])[0]  # pyright: ignore[reportUnknownMemberType]

    def move(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From where the slots are to the device."""
        return list(tensors) if self.on_device else [tensor.to(self._device.torch_device) for tensor in tensors]

    def append(self, slots: list[int], token_ids: list[int]) -> None:
        """One sampled token more for each of the slots, which are on the host."""
        self.state.last_tokens.numpy()[slots] = token_ids
        self.host.lengths[slots] += 1

    def forget(self) -> None:
        """Nobody is anywhere. Nothing may be in flight."""
        self.decode_slots = []
        # The old one may hold changes that were not sent.
        self._staging = Staging(self._device) if self.on_device else HostStaging(self.state)
        self._staging.write(self.state.rows_at, [-1] * self.state.rows.shape[0])
        self.send()

    def _fill(self, admissions: Sequence[Admission]) -> None:
        records = _make_records(admissions)
        if self._shift_of is not None:
            records[:, SlotState.SHIFT] = [self._shift_of(admission.request) for admission in admissions]
        np.minimum(records[:, SlotState.LAST], self._last_id, out=records[:, SlotState.LAST])
        slots = np.array([admission.slot for admission in admissions])
        self._staging.write_blocks(slots * SlotState.RECORD, records)
        self.host.lengths[slots] = records.view(np.int64)[:, SlotState.LENGTH // 2]
        for admission in admissions:
            self._put_blocks(admission.slot, 0, admission.block_ids)
            if admission.beside_ids:
                self._put_beside(admission.slot, 0, admission.beside_ids)

    def _write_pages(self, admissions: Sequence[Admission]) -> None:
        """All that the requests know. Shared blocks hold the same already; each one's last, which may not be full, is
        its own."""
        size, max_blocks = self.state.block_size, self.state.block_tables.shape[1]
        blocks: list[int] = []
        firsts: list[int] = []
        for admission in admissions:
            firsts.append(len(blocks) * size)
            length = len(admission.request.token_ids) + len(admission.output_ids)
            count = -(-length // size)
            if self.state.own_pages:
                first = 1 + admission.slot * max_blocks
                blocks += range(first, first + count)
            else:
                blocks += admission.block_ids[:count]
        tokens = np.zeros(len(blocks) * size, dtype=np.int32)
        for first, admission in zip(firsts, admissions, strict=True):
            given, outputs = admission.request.token_ids, admission.output_ids
            tokens[first : first + len(given)] = given
            tokens[first + len(given) : first + len(given) + len(outputs)] = outputs
        np.minimum(tokens, self._last_id, out=tokens)
        places = self.state.pages_at + np.array(blocks, dtype=np.int64) * size
        self._staging.write_blocks(places, tokens.reshape(-1, size))

    def _put_blocks(self, slot: int, start: int, blocks: Sequence[int]) -> None:
        """Requests may hold a block more than their tokens need."""
        max_blocks = self.state.block_tables.shape[1]
        blocks = blocks[: max_blocks - start]
        self.rooms[slot] = (start + len(blocks)) * self.state.block_size
        if blocks:
            self._staging.write(self.state.tables_at + slot * max_blocks + start, blocks)
            if self._keeps_tables:
                self.host.tables[slot, start : start + len(blocks)] = blocks

    def _put_beside(self, slot: int, start: int, blocks: Sequence[int]) -> None:
        max_blocks = self.state.block_tables.shape[1]
        self._staging.write(self.state.beside_at + slot * max_blocks + start, blocks[: max_blocks - start])


def sampling_mode_of(request: GenerationRequest) -> float:
    """How the request's tokens are chosen, see `kernels.slot_state`."""
    params = request.sampling
    if params.samples:
        return DRAWS
    masked = request.grammar is not None or params.thinking is not None or params.min_tokens > 0
    more = masked or params.watermark or params.penalises or params.logit_bias or params.top_n_tokens
    return ADJUSTED if more else PLAIN


_read_filters = attrgetter(*FILTERS[: FILTERS.index("sampling_mode")])
_read_others = attrgetter(*NUMBER_FIELDS[FILTERS.index("sampling_mode") + 1 :])


def _make_records(admissions: Sequence[Admission]) -> np.ndarray:
    """`[admissions, RECORD]`, made together: one by one they take the host twice as long."""
    records = np.zeros((len(admissions), SlotState.RECORD), dtype=np.int32)
    wholes: list[tuple[int, int, int]] = []  # length, prompt, seed
    lasts: list[int] = []
    numbers: list[tuple[float, ...]] = []
    for admission in admissions:
        request, output_ids = admission.request, admission.output_ids
        prompt, seed, params = len(request.token_ids), request.seed, request.sampling
        wholes.append((prompt + len(output_ids), prompt, seed - 2**64 if seed >= 2**63 else seed))
        lasts.append((output_ids or request.token_ids)[-1])
        numbers.append((*_read_filters(params), sampling_mode_of(request), *_read_others(params)))
    records.view(np.int64)[:, :3] = wholes
    records[:, SlotState.LAST] = lasts
    records.view(np.float32)[:, SlotState.NUMBERS :][:, : len(NUMBER_FIELDS)] = numbers
    return records
