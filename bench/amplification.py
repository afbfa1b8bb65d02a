"""What comes back for what is sent, the largest over all routes and parameters, and what it costs the api process.

    python bench/amplification.py [--json FILE]

The launcher as a user starts it, on the embedded model; the requests of tests/faults/amplifying.py, one at a time.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "faults"))

from amplifying import cases, measure
from serving import Server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = Server("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    try:
        with server.client() as client:
            costs = {case.name: measure(server, client, case) for case in cases()}
    finally:
        server.stop()
    ranked = sorted(costs.items(), key=lambda item: -item[1].amplification)
    print("| request | status | bytes in | bytes out | out / in | api CPU, ms | api memory, MB |")
    print("|---|---|---|---|---|---|---|")
    for name, cost in ranked:
        print(
            f"| {name} | {cost.status} | {cost.bytes_in:,} | {cost.bytes_out:,} | {cost.amplification:.1f}"
            f" | {1000 * cost.api_cpu_s:.0f} | {cost.api_growth_mb:+.1f} |"
        )
    if options.json:
        options.json.write_text(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1))


if __name__ == "__main__":
    main()
