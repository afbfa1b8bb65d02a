"""What the peers' scripts share: their rows, the clock and the file. Knows nothing of our packages either."""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

Row = tuple[int, int, int]  # tokens in, tokens out, requests


def read_arguments() -> tuple[str, str, Path, list[Row]]:
    """(folder of the model, precision, file, rows)."""
    folder, precision, file, *rows = sys.argv[1:]
    parsed = [tuple(int(part) for part in row.split("/")) for row in rows]
    return folder, precision, Path(file), [(inputs, outputs, count) for inputs, outputs, count in parsed]


def process_age() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def measure(
    peer: str,
    folder: str,
    file: Path,
    rows: list[Row],
    generate: Callable[[list[list[int]], int], list[int]],  # prompts, new tokens -> tokens that came for each
) -> None:
    """Called when the peer is ready. The file is written anew after each row."""
    found = {"peer": peer, "ready_seconds": round(process_age(), 2), "rows": []}
    print(f"ready after {found['ready_seconds']} s", file=sys.stderr, flush=True)
    file.write_text(json.dumps(found))
    vocab = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    for inputs, outputs, count in rows:
        prompts = [rng.choices(range(5, vocab), k=inputs) for _ in range(count)]
        generate(prompts[:32], min(8, outputs))
        started = time.perf_counter()
        came = generate(prompts, outputs)
        seconds = time.perf_counter() - started
        num_tokens = sum(came)
        assert num_tokens == outputs * count, (num_tokens, outputs * count)
        row = {"inputs": inputs, "outputs": outputs, "requests": count, "seconds": round(seconds, 3)}
        found["rows"].append({**row, "output_tokens_per_s": round(num_tokens / seconds, 1)})
        print(json.dumps(found["rows"][-1]), file=sys.stderr, flush=True)
        file.write_text(json.dumps(found))
