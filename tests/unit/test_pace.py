"""Chunks whose steps take about as long as asked."""

import random

import pytest

from text_generation_inference.scheduler.pace import StepPace, StepRoom, StepWork, attended

TARGET_S = 0.25


class Device:
    """Takes what the formula says, and some noise."""

    def __init__(self, decode_s: float, per_token: float, per_attended: float, noise: float = 0.0) -> None:
        self.decode_s, self.per_token, self.per_attended, self.noise = decode_s, per_token, per_attended, noise
        self.chance = random.Random(1)

    def seconds(self, work: StepWork) -> float:
        exact = (self.decode_s if work.decode_rows else 0) + (
            work.prompt_tokens * self.per_token + work.attended * self.per_attended
        )
        return exact * (1 + self.noise * self.chance.uniform(-1, 1))


def take(room: StepRoom, start: int, known: int) -> int:
    end = room.reach(start, known)
    room.spend(start, end)
    return end


def compute_prompt(pace: StepPace, device: Device, length: int, start: int = 0, budget: int = 512, decode: int = 1):
    """(tokens, seconds) of each step."""
    steps: list[tuple[int, float]] = []
    while start < length:
        room = pace.room(decode, budget)
        end = take(room, start, length)
        assert end > start
        work = StepWork(decode, end - start, attended(start, end))
        seconds = device.seconds(work)
        pace.on_step(work, seconds)
        steps.append((end - start, seconds))
        start = end
    return steps


def warmed(device: Device, max_step_s: float | None = TARGET_S) -> StepPace:
    """As after a start: a step with a prompt, some that decode."""
    pace = StepPace(max_step_s, 16)
    compute_prompt(pace, device, 512, decode=0)
    for _ in range(5):
        work = StepWork(1, 0, 0)
        pace.on_step(work, device.seconds(work))
    return pace


DEVICES = [
    Device(0.01, 1e-3, 1e-6, 0.1),  # a small model on a CPU: attention takes most of a long prompt's time
    Device(0.01, 1e-3, 0, 0.2),
    Device(0.01, 2e-5, 2e-6, 0.1),  # nearly all attention
    Device(0.02, 2e-5, 1e-9, 0.1),  # a GPU: never near the limit
]


@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_a_long_prompt_take_about_the_target(device):
    pace = warmed(device)
    steps = compute_prompt(pace, device, 8000)
    late = [seconds for tokens, seconds in steps if tokens > 16]
    assert max(late) < 1.6 * TARGET_S, late
    # And no less than the target allows, once the first chunks have told: a step that could be larger was not cut.
    cut = [seconds for tokens, seconds in steps[3:-1] if tokens < 512]
    assert all(seconds > 0.5 * TARGET_S for seconds in cut), cut


def test_without_a_limit_chunks_are_as_large_as_they_may_be():
    device = DEVICES[0]
    pace = warmed(device, None)
    assert {tokens for tokens, _ in compute_prompt(pace, device, 4096)} == {512}


def test_where_nobody_decodes_chunks_are_as_large_as_they_may_be():
    device = DEVICES[0]
    pace = warmed(device)
    assert {tokens for tokens, _ in compute_prompt(pace, device, 4096, decode=0)} == {512}


def test_prompts_get_on_where_decoding_alone_takes_longer_than_the_limit():
    device = Device(1.0, 1e-2, 0)
    pace = warmed(device)
    steps = compute_prompt(pace, device, 1024)
    assert all(seconds <= 2.3 for _, seconds in steps)
    assert len(steps) < 1024 / 16  # larger than the smallest


def test_the_smallest_chunk_is_taken_however_long_it_takes():
    device = Device(0.01, 1.0, 0)
    pace = warmed(device)
    assert compute_prompt(pace, device, 64)[-1][0] == 16


def test_a_single_pause_does_not_stay():
    device = Device(0.01, 1e-3, 0)
    pace = warmed(device)
    pace.on_step(StepWork(1, 128, attended(0, 128)), 30.0)
    steps = compute_prompt(pace, device, 4000)
    assert steps[-2][1] > 0.7 * TARGET_S


def test_after_small_prompts_a_long_one_keeps_to_the_limit():
    """A GPU: small steps are held up by the host, and tell nothing of how long large ones take."""
    for host_s in (0.0, 0.03):
        device = Device(0.005 + host_s, 2.2e-5, 1.5e-9)
        pace = StepPace(0.1, 16)
        for _ in range(20):
            work = StepWork(0, 512, 8 * attended(0, 64))
            pace.on_step(work, max(host_s, device.seconds(work)))
        for _ in range(20):
            pace.on_step(StepWork(64, 0, 0), 0.005)
        steps = compute_prompt(pace, device, 32_000, budget=8192)
        assert max(seconds for _, seconds in steps) < 0.25, steps
        assert sum(tokens for tokens, _ in steps[-6:-1]) / 5 > 500, "chunks stayed small"


def test_several_chunks_share_a_step():
    device = Device(0.0, 1e-3, 0)
    pace = warmed(device)
    room = pace.room(1, 512)
    ends = []
    while room.is_open and len(ends) < 10:
        ends.append(take(room, 0, 60))
    total = sum(ends)
    assert len(ends) > 1
    assert total * 1e-3 <= TARGET_S + 0.02


def test_a_cut_chunk_ends_with_a_block():
    device = Device(0.01, 1e-3, 1e-7)
    pace = warmed(device)
    start = 7 * 16
    end = take(pace.room(1, 512), start, 5000)
    assert end % 16 == 0 and end - start < 512


def test_tokens_behind_a_window_take_no_time():
    for window in (1, 5, 40):
        for start, end in ((0, 3), (0, 90), (3, 41), (40, 41), (70, 90)):
            looked_at = sum(min(position + 1, window) for position in range(start, end))
            assert attended(start, end, window) == looked_at
    device = Device(0.0, 1e-4, 1e-6)
    full, windowed = warmed(device), StepPace(TARGET_S, 16, window=1000)
    for _ in range(5):
        windowed.on_step(StepWork(1, 0, 0), 0.001)
        windowed.on_step(StepWork(1, 500, attended(0, 500)), 500 * 1e-4 + attended(0, 500) * 1e-6)
        windowed.on_step(StepWork(1, 100, attended(900, 1000)), 100 * 1e-4 + attended(900, 1000) * 1e-6)
    near, far = (take(windowed.room(1, 10**6), start, 10**6) - start for start in (1000, 30_000))
    assert abs(near - far) <= 16  # whole blocks
    assert far > 4 * (take(full.room(1, 10**6), 30_000, 10**6) - 30_000)
