"""All kinds of traffic for as long as asked: is every greedy answer the same, does anything grow?

    python bench/soak.py [--minutes 30] [--at-a-time 12] [--json FILE]

The launcher as a user starts it, on the embedded model. First the engine and the api process are killed, twice each;
then growth per minute is measured, without the first third of the time. Exits with 1 if an answer differed, something
unexpected was answered, or a process grew by more than it may.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "faults"))

from serving import Server
from soaking import Soak

MOST_PER_MINUTE = {"memory_mb": 2.0, "descriptors": 0.5, "threads": 0.2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="how long (%(default)s)")
    parser.add_argument("--at-a-time", type=int, default=12, help="requests in flight (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = Server("--max-total-tokens", "1024", "--max-batch-total-tokens", "16384")
    soak = Soak(server, 60 * options.minutes, ["engine", "api"] * 2, options.at_a_time)
    try:
        asyncio.run(soak.run())
    finally:
        status = server.stop()
    slopes = {
        role: {what: soak.slope_per_minute(role, what) for what in MOST_PER_MINUTE} for role in sorted(soak.samples)
    }
    print(f"{soak.compared} greedy answers compared, {len(soak.wrong)} differ; answers: {soak.answers}")
    print(f"unexpected: {len(soak.unexpected)} {soak.unexpected[:5]}")
    print("back after a kill:", ", ".join(f"{role} {seconds:.1f} s" for role, seconds in soak.recoveries_s))
    print("| process | memory at the end, MB | memory, MB a minute | descriptors a minute | threads a minute |")
    print("|---|---|---|---|---|")
    grew = False
    for role, slope in slopes.items():
        last = soak.samples[role][-1]
        print(
            f"| {role} | {last.memory_mb:.0f} | {slope['memory_mb']:+.2f} | {slope['descriptors']:+.2f}"
            f" | {slope['threads']:+.2f} |"
        )
        grew = grew or any(slope[what] > most for what, most in MOST_PER_MINUTE.items())
    if options.json:
        options.json.write_text(json.dumps({"slopes": slopes, "answers": soak.answers, "compared": soak.compared}))
    return 1 if soak.wrong or soak.unexpected or grew or status else 0


if __name__ == "__main__":
    sys.exit(main())
