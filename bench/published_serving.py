"""The published serving table (inference-benchmarker, 200 tokens in, 800 out) on this machine, from one run.

    python bench/published_serving.py --embedded --device cpu [--users 16] [--duration 20s] [--rates 5] [--json FILE]
    python bench/published_serving.py --shape llama-3.1-8b --users 256 --json FILE

Starts the launcher as a user does, then `tgi bench serve` with the profile `fixed-length` in the mode `sweep`, whose
rates go up to 1.2 times what this machine reaches. Published figures are printed below the table.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from cuda_served import Server, make_folder

from text_generation_inference.bench.shapes import SHAPES

PUBLISHED = """Published for one Gaudi 2 (Llama-3.1-8B, bf16), measured by others: one user 104.11 tokens/s, 9.40 ms
between tokens; maximum 3,253.86 tokens/s at 4.30 requests/s; then ten constant rates from 0.52 to 5.16 requests/s."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--embedded", action="store_true", help="the embedded model with its own weights and tokenizer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--users", type=int, default=256, help="of the maximum")
    parser.add_argument("--rates", type=int, default=5)
    parser.add_argument("--duration", default="20s")
    parser.add_argument("--warmup", default="10s")
    parser.add_argument("--json", default="published-serving.json")
    parser.add_argument("--start-limit", type=float, default=180.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.streams, options.inputs, options.outputs = (
        options.users,
        200,
        816,
    )  # a little room for tokenizers that add tokens
    options.engine_args = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(options, Path(name) / "model")
        server = Server(folder, options, Path(name) / "server.log")
        try:
            print(f"server ready after {server.ready_seconds:.1f} s", file=sys.stderr, flush=True)
            command = [
                sys.executable,
                "-m",
                "text_generation_inference.cli",
                "bench",
                "serve",
                "--url",
                f"http://127.0.0.1:{server.port}",
            ]
            command += ["--tokenizer", str(folder), "--profile", "fixed-length", "--max-vus", str(options.users)]
            command += ["--num-rates", str(options.rates), "--duration", options.duration, "--warmup", options.warmup]
            command += ["--seed", "1", "--json", options.json]
            status = subprocess.run(command, check=False).returncode
        finally:
            server.stop()
    print(f"\n{PUBLISHED}")
    return status


if __name__ == "__main__":
    sys.exit(main())
