"""What it costs to tell ranks of a step: microseconds on the engine's thread, and until a rank has read the plan.

    python bench/rank_channel.py [ranks ...]

Readers are processes of their own that answer at once; nothing is computed.
"""

import os
import socket
import statistics
import sys
import time

from text_generation_inference.engine.rank_channel import Link, OrderReader, RunStep, encode
from text_generation_inference.types import Admission, Chunk, GenerationRequest, SamplingParams, StepPlan

STEPS = 2000


def make_plans() -> dict[str, StepPlan]:
    request = GenerationRequest(
        id=1, token_ids=[7] * 2048, sampling=SamplingParams(), max_new_tokens=9, stop_token_ids=[], seed=0
    )
    admission = Admission(3, request, [], list(range(128)))
    return {
        "decode": StepPlan(5, [], [], [], [], [], True, []),
        "decode, 64 rows get a block": StepPlan(5, [], [], [], [], [(n, 9, [n]) for n in range(64)], True, []),
        "a prompt of 2,048 tokens": StepPlan(5, [], [admission], [], [], [], True, [Chunk(3, 0, 2048, True)]),
    }


def read_for_ever(stream: socket.socket) -> None:
    link = Link(stream)
    reader = OrderReader(link)
    while (received := reader.receive()) is not None:
        link.send(received[0], b"\xc0")
    os._exit(0)


def measure(num_ranks: int, plan: StepPlan) -> tuple[int, float, float]:
    """Bytes, median microseconds to tell all, median microseconds until all have answered."""
    links: list[Link] = []
    for _ in range(num_ranks - 1):
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            for link in links:
                link.close()
            read_for_ever(theirs)
        theirs.close()
        links.append(Link(ours))
    told: list[float] = []
    answered: list[float] = []
    for number in range(STEPS):
        begin = time.perf_counter()
        payload = encode(RunStep(plan))
        for link in links:
            link.send(number, payload)
        told.append(time.perf_counter() - begin)
        for link in links:
            link.read()
        answered.append(time.perf_counter() - begin)
    for link in links:
        link.close()
    for _ in links:
        os.wait()
    return len(encode(RunStep(plan))), statistics.median(told) * 1e6, statistics.median(answered) * 1e6


def main() -> None:
    for num_ranks in [int(text) for text in sys.argv[1:]] or [2, 4, 8]:
        for name, plan in make_plans().items():
            size, told, answered = measure(num_ranks, plan)
            print(f"{num_ranks} ranks, {name}: {size:,} bytes, {told:.1f} us to tell, {answered:.1f} us with answers")


if __name__ == "__main__":
    main()
