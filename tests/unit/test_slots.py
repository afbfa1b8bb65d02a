"""Slots, on the host and on a device: what a plan changes, what they take, and reading inputs from them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from queue_on_cpu import QueueOnCpu

from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.kernels import slot_state
from text_generation_inference.kernels.cpu.slots import gather_inputs
from text_generation_inference.kernels.slot_state import SlotState
from text_generation_inference.runner.slots import Slots
from text_generation_inference.types import Admission, GenerationRequest, SamplingParams, StepPlan


@pytest.mark.parametrize("own_pages", [False, True])
def test_inputs_are_those_of_the_definition(own_pages: bool) -> None:
    rng = np.random.default_rng(0)
    state, twin = (SlotState(5, 40, 30, 8, torch.device("cpu"), own_pages) for _ in range(2))
    state.pages.random_(0, 1000)
    state.last_tokens.random_(1000, 2000)
    state.block_tables.copy_(1 + torch.randperm(25).view(5, 5))
    state.lengths.copy_(torch.from_numpy(rng.integers(1, 40, 5)))
    slots = torch.from_numpy(rng.integers(-1, 5, 30).astype(np.int32))
    at = torch.from_numpy(rng.integers(0, 39, 30).astype(np.int32))
    at[slots < 2] = -1  # a slot has its last token in a step or some of a prompt
    for given in (None, at):
        twin.words.copy_(state.words)
        expected = slot_state.gather_inputs(twin, slots, given)
        for found, wanted in zip(gather_inputs(state, slots, given), expected, strict=True):
            assert found.dtype is wanted.dtype and torch.equal(found, wanted)
        assert torch.equal(state.words, twin.words)


def admit(slot: int, tokens: list[int], blocks: list[int], outputs: tuple[int, ...] = ()) -> Admission:
    request = GenerationRequest(
        id=slot, token_ids=tokens, sampling=SamplingParams(), max_new_tokens=4, stop_token_ids=[], seed=3
    )
    return Admission(slot, request, list(outputs), blocks)


def test_slots_take_block_tables_and_little_more() -> None:
    """However long requests may be: what they know is in the pages, of which there are as many as the cache has."""
    long, longer = (SlotState(1024, length, 1000, 16, torch.device("meta")) for length in (131_072, 1_048_576))
    for state in (long, longer):
        assert state.words.numel() - state.block_tables.numel() - 16 * 1000 < 1024 * 32
    assert longer.words.numel() - long.words.numel() == 1024 * (1_048_576 - 131_072) // 16
    assert long.words.nbytes < 34_000_000


@pytest.mark.parametrize("on_device", [False, True])
def test_tokens_are_where_their_keys_are(tmp_path: Path, on_device: bool) -> None:
    """Known from the start, sampled, in a block that came later, shared with another slot, and after a preemption."""
    device = QueueOnCpu(tmp_path) if on_device else CpuDevice(tmp_path, custom_kernels=False)
    slots = Slots(device, 3, 48, 9, 16)
    state = slots.state
    first = list(range(100, 120))
    slots.update(StepPlan(1, [], [admit(2, first, [5, 3])], [], [], [], False, []))
    slots.put([2] * 20, list(range(20)))
    token_slots, at = slots.send()
    assert slots.gather(token_slots, at)[0].tolist() == state.history(2, 20).tolist() == first
    slots.update(StepPlan(2, [], [admit(0, [*first[:16], 7], [5, 8])], [], [2], [], True, []))  # a shared block
    slots.send()
    assert state.history(2, 20).tolist() == first and state.history(0, 17).tolist() == [*first[:16], 7]
    known = list(first)
    for token in range(200, 213):  # into the block that comes with the last ones
        if len(known) == 32:
            slots.update(StepPlan(3, [], [], [], [], [(2, 2, [1])], True, []))
            slots.send()
        state.last_tokens[2], state.lengths[2] = token, len(known) + 1
        known.append(token)
        ids, _, kv_index, _ = slots.gather(state.rows[:3], None)
        assert ids.tolist() == [token, 0, 0] and state.pages.view(-1)[kv_index[0]] == token
    assert state.history(torch.tensor([2, 0]), 33)[0].tolist() == known
    assert state.history(0, 17).tolist() == [*first[:16], 7]
    slots.update(StepPlan(4, [2], [admit(1, first, [4, 2, 6], tuple(known[20:]))], [2], [], [], True, []))
    slots.send()
    assert state.history(1, 33).tolist() == known and state.last_tokens[1] == known[-1]
    device.close()


def test_a_block_more_than_fits_stays_out_of_the_next_slot(tmp_path: Path) -> None:
    device = CpuDevice(tmp_path, custom_kernels=False)
    slots = Slots(device, 3, 32, 10, 16)
    slots.update(StepPlan(1, [], [admit(1, [5, 6], [7, 8])], [], [1], [], True, []))
    slots.update(StepPlan(2, [], [admit(0, list(range(30)), [1, 2, 3])], [], [0], [(1, 1, [9, 4])], True, []))
    assert slots.host.tables.tolist() == [[1, 2], [7, 9], [0, 0]]
    assert slots.decode_slots == [1, 0] and slots.state.rows.tolist() == [1, 0, -1]
    slots.append([1, 0], [77, 78])
    assert slots.lengths_cpu.tolist() == [31, 3, 0]
    ids, positions, _, seq_lens = slots.gather(slots.state.rows[:3], None)
    assert ids.tolist() == [77, 78, 0] and positions.tolist() == [2, 30, 0] and seq_lens.tolist() == [3, 31, 0]
    slots.forget()
    assert slots.decode_slots == [] and slots.state.rows.tolist() == [-1, -1, -1]
    device.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_tokens_stay_when_their_blocks_go(tmp_path: Path, on_device: bool) -> None:
    """Where slots have pages of their own: two slots exchange a block, and each knows all of its tokens."""
    device = QueueOnCpu(tmp_path) if on_device else CpuDevice(tmp_path, custom_kernels=False)
    slots = Slots(device, 3, 48, 5, 16, own_pages=True)
    state = slots.state
    assert state.pages.shape[0] == 1 + 3 * 3  # whatever the cache has
    first, second = list(range(100, 140)), list(range(200, 220))
    slots.update(StepPlan(1, [], [admit(2, first, [4, 3])], [], [], [], False, []))  # a block is still to come
    slots.update(StepPlan(2, [], [admit(0, second, [4, 2])], [], [], [(2, 2, [1])], False, []))  # which another had
    slots.put([2] * 8 + [0] * 20, [*range(32, 40), *range(20)])
    token_slots, at = slots.send()
    ids, _, kv_index, _ = slots.gather(token_slots, at)
    assert ids.tolist() == first[32:] + second
    assert kv_index.tolist() == [*range(16, 24), *range(64, 80), *range(32, 36)]
    assert state.history(2, 40).tolist() == first and state.history(0, 20).tolist() == second
    state.last_tokens[0], state.lengths[0] = 7, 21
    assert slots.gather(torch.tensor([0, -1], dtype=torch.int32), None)[0].tolist() == [7, 0]
    assert state.history(0, 21).tolist() == [*second, 7]
    device.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_requests_of_one_plan_have_their_own_numbers(tmp_path: Path, on_device: bool) -> None:
    device = QueueOnCpu(tmp_path) if on_device else CpuDevice(tmp_path, custom_kernels=False)
    slots = Slots(device, 4, 48, 9, 16)
    asked = [
        SamplingParams(temperature=0.5, top_k=3, top_p=0.75, typical_p=0.25, min_p=0.125, top_n_sigma=2.0),
        SamplingParams(
            repetition_penalty=1.5, frequency_penalty=-0.5, presence_penalty=0.25, frequency_by_length=False
        ),
        SamplingParams(),
    ]
    admissions: list[Admission] = []
    for number, (slot, sampling) in enumerate(zip((3, 0, 2), asked, strict=True)):
        request = GenerationRequest(
            id=slot,
            token_ids=list(range(10, 27 + number)),
            sampling=sampling,
            max_new_tokens=4,
            stop_token_ids=[],
            seed=2**64 - 1 - number,
        )
        admissions.append(Admission(slot, request, [7] * number, [2 * number + 1, 2 * number + 2]))
    slots.update(StepPlan(1, [], admissions, [], [], [], False, []))
    slots.send()
    state = slots.state
    modes = (slot_state.DRAWS, slot_state.ADJUSTED, slot_state.PLAIN)
    for number, (admission, mode) in enumerate(zip(admissions, modes, strict=True)):
        slot, known = admission.slot, [*admission.request.token_ids, *admission.output_ids]
        values = {name: float(getattr(asked[number], name, mode)) for name in slot_state.NUMBER_FIELDS}
        assert {name: column[slot].item() for name, column in state.numbers.items()} == values
        assert (state.lengths[slot], state.num_prompt[slot]) == (len(known), 17 + number)
        assert slots.lengths_cpu[slot] == len(known) and state.last_tokens[slot] == known[-1]
        assert state.seeds[slot] == -1 - number and state.history(slot, len(known)).tolist() == known
    assert not state.records[1].any()
    device.close()
