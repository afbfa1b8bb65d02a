"""What the runner remembers of each request: one row per slot in arrays on the device.

A plan carries changes; these arrays are the rest. The host keeps only lengths (to size a batch without asking
the device) and which slots are in the decode set.
"""

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.types import Admission, StepPlan


class Slots:
    def __init__(self, num_slots: int, max_tokens: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        max_blocks = -(-max_tokens // block_size)
        self.tokens = torch.zeros((num_slots, max_tokens), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)  # known tokens
        self.block_tables = torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device)
        self.num_prompt = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.lengths_cpu = np.zeros(num_slots, dtype=np.int64)
        self.decode_slots: list[int] = []
        self.decode_index = torch.zeros(0, dtype=torch.int64, device=device)  # `decode_slots` on the device

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's changes to who is where."""
        if plan.leave or plan.join:
            leaving = set(plan.leave)
            self.decode_slots = [slot for slot in self.decode_slots if slot not in leaving] + plan.join
            self.decode_index = torch.tensor(self.decode_slots, dtype=torch.int64, device=self.device)
        for admission in plan.admit:
            self._fill(admission)
        for slot, start, blocks in plan.grow:
            self.block_tables[slot, start : start + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def _fill(self, admission: Admission) -> None:
        slot, request = admission.slot, admission.request
        known = request.token_ids + admission.output_ids
        self.tokens[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.lengths[slot] = self.lengths_cpu[slot] = len(known)
        self.num_prompt[slot] = len(request.token_ids)
        blocks = admission.block_ids
        self.block_tables[slot].zero_()
        self.block_tables[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def append(self, slots: list[int], index: Tensor, token_ids: Tensor) -> None:
        """One sampled token more for each of the slots; `index` is `slots` on the device."""
        self.tokens[index, self.lengths[index]] = token_ids.to(torch.int32)
        self.lengths[index] += 1
        self.lengths_cpu[slots] += 1
