"""The longest silence of a stream while somebody else's long prompt is computed, with and without `--max-step-ms`.

    python bench/token_gap.py [--prompt 8000] [--limits 0 250 100] [--json FILE]

The launcher as a user starts it, on the embedded model. One stream decodes; a prompt of so many tokens arrives; the
times between two tokens of the stream are taken until the long prompt has its first token. All limits in one run.
"""

import argparse
import asyncio
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))

from serving import Server
from traffic import client_of, counting, follow, native


async def measure(server: Server, num_tokens: int) -> dict[str, float]:
    times: list[float] = []
    async with client_of(server.url) as client:
        stream = asyncio.create_task(
            follow(client, *native(counting(3), 1000), on_event=lambda _: times.append(time.perf_counter()))
        )
        while len(times) < 50:
            await asyncio.sleep(0.01)
        begin = time.perf_counter()
        body = {"prompt": [100 + number % 5000 for number in range(num_tokens)], "max_tokens": 1, "temperature": 0}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        end = time.perf_counter()
        stream.cancel()
    alone = sorted(later - earlier for earlier, later in pairwise(times[10:50]))
    beside = [t for t in times if begin <= t <= end]
    gaps = sorted(later - earlier for earlier, later in pairwise([begin, *beside, end]))
    return {
        "alone_ms": 1000 * alone[len(alone) // 2],
        "first_token_s": end - begin,
        "tokens_meanwhile": len(beside),
        "median_gap_ms": 1000 * gaps[len(gaps) // 2],
        "worst_gap_ms": 1000 * gaps[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt (%(default)s)")
    parser.add_argument("--limits", type=int, nargs="+", default=[0, 250, 100], help="of --max-step-ms (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[int, dict[str, float]] = {}
    for limit in options.limits:
        server = Server("--max-step-ms", str(limit), "--max-batch-total-tokens", "32768")
        try:
            rows[limit] = asyncio.run(measure(server, options.prompt))
        finally:
            server.stop()
    print("| --max-step-ms | token alone, ms | prompt, s | tokens meanwhile | median gap, ms | worst gap, ms |")
    print("|---|---|---|---|---|---|")
    for limit, row in rows.items():
        print(
            f"| {limit} | {row['alone_ms']:.1f} | {row['first_token_s']:.2f} | {row['tokens_meanwhile']}"
            f" | {row['median_gap_ms']:.0f} | {row['worst_gap_ms']:.0f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
