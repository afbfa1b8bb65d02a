"""How late the api process's event loop runs while it is sent everything that is bad for it.

    python bench/loop_lag.py [--rounds 3]

The launcher as a user starts it, on the embedded model. The requests of tests/faults/amplifying.py and the raw bytes of
tests/faults/http_corpus/, all in turn; the server itself looks at its loop every 50 ms and counts how late it is.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "faults"))

from amplifying import cases, measure
from raw_http import CASES, exchange
from serving import Server

BUCKET = re.compile(r'tgi_api_loop_lag_seconds_bucket\{le="(.*)"\}')


def quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """The bound below which so large a share lies."""
    total = buckets[-1][1]
    return next(bound for bound, count in buckets if count >= share * total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    server = Server("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    try:
        for _ in range(options.rounds):
            with server.client() as client:
                for case in cases():
                    measure(server, client, case)
            for case in CASES:
                exchange(server.port, case, len(case.answers))
        found = {BUCKET.fullmatch(name)[1]: value for name, value in server.metrics().items() if BUCKET.fullmatch(name)}
    finally:
        server.stop()
    buckets = sorted((float(bound), count) for bound, count in found.items())
    looks = buckets[-1][1]
    for share in (0.5, 0.99, 0.999, 1.0):
        print(f"{share:.1%} of {looks:.0f} looks: at most {1000 * quantile(buckets, share):.1f} ms late")


if __name__ == "__main__":
    main()
