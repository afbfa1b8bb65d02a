# pyright: reportPrivateUsage=false
"""Makes a runner forget every request, after a step that failed half way.

The scheduler then admits everybody anew, which fills the slots again. Nothing may be in flight.
"""

import torch

from text_generation_inference.runner.queued import QueuedRunner
from text_generation_inference.runner.resident import Staging


def forget_slots(runner: QueuedRunner) -> None:
    runner._last = None  # a failed one holds tensors
    device, slots = runner.device, runner.slots
    num_slots = slots.state.rows.shape[0]
    runner.grammars.release(range(num_slots))
    runner.sampling_needs.release(list(range(num_slots)))
    runner._prompt_logprobs.clear()
    slots.decode_slots = []
    device.free_bytes()  # gives back what torch keeps for later
    with torch.inference_mode(), device.stream():
        runner._staging = Staging(device)  # the old one may hold changes that were not sent
        runner._staging.write(slots.state.rows_at, [-1] * num_slots)
        runner._staging.send(slots.state)
