"""Slots on the host: what a plan changes, and reading inputs from them."""

from pathlib import Path

import numpy as np
import torch

from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.kernels import slot_state
from text_generation_inference.kernels.cpu.slots import gather_inputs
from text_generation_inference.kernels.slot_state import SlotState
from text_generation_inference.runner.slots import Slots
from text_generation_inference.types import Admission, GenerationRequest, SamplingParams, StepPlan


def test_inputs_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    state = SlotState(5, 40, 8, torch.device("cpu"))
    state.tokens.random_(0, 1000)
    state.block_tables.random_(0, 90)
    state.lengths.copy_(torch.from_numpy(rng.integers(1, 40, 5)))
    slots = torch.from_numpy(rng.integers(-1, 5, 30).astype(np.int32))
    at = torch.from_numpy(rng.integers(-1, 39, 30).astype(np.int32))
    for given in (None, at):
        expected = slot_state.gather_inputs(state, slots, given)
        for found, wanted in zip(gather_inputs(state, slots, given), expected, strict=True):
            assert found.dtype is wanted.dtype and torch.equal(found, wanted)


def admit(slot: int, tokens: list[int], blocks: list[int]) -> Admission:
    request = GenerationRequest(
        id=slot, token_ids=tokens, sampling=SamplingParams(), max_new_tokens=4, stop_token_ids=[], seed=3
    )
    return Admission(slot, request, [], blocks)


def test_a_block_more_than_fits_stays_out_of_the_next_slot(tmp_path: Path) -> None:
    device = CpuDevice(tmp_path, custom_kernels=False)
    slots = Slots(device, 3, 32, 16)
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
