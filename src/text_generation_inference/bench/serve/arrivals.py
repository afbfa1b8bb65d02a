"""When requests are due: at a constant rate, or at random as many independent callers send them.

Pure Python. Times are planned before a phase starts and do not depend on the answers (an open loop).
"""

import random


def constant(rate: float, seconds: float, num_requests: int | None = None) -> list[float]:
    """Seconds from the start of the phase, evenly apart."""
    count = max(1, round(rate * seconds)) if num_requests is None else num_requests
    return [number / rate for number in range(count)]


def poisson(rate: float, seconds: float, rng: random.Random, num_requests: int | None = None) -> list[float]:
    """Independent exponential pauses of 1 / rate on average; the first request is due at once."""
    due, times = 0.0, [0.0]
    while num_requests is None or len(times) < num_requests:
        due += rng.expovariate(rate)
        if num_requests is None and due >= seconds:
            break
        times.append(due)
    return times
