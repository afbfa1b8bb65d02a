"""This tree beside another one (the commit before a change, say) on the ten rows of `cuda_peers`, on one GPU.

    git worktree add ../before COMMIT
    python bench/cuda_before.py ../before/src [--package NAME] [--rows 1,3,7-10] [--json FILE] [--args "..."]

Each tree runs in a process of its own, once per model, in turns. Rates are those of `tgi bench offline`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cuda_peers import MODELS, ROWS

SRC = Path(__file__).resolve().parents[1] / "src"


def run(source: Path, package: str, shape: str, precision: str, rows: list[str], file: Path, more: list[str]) -> dict:
    fp8 = ["--quantize", "fp8", "--kv-cache-dtype", "fp8_e4m3fn"] if precision == "fp8" else ["--dtype", "bfloat16"]
    command = [sys.executable, "-m", f"{package}.cli", "bench", "offline", "--shape", shape, *fp8]
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([*command, "--json", str(file), *more, *rows], env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        print(f"{package} in {source}: exit status {done.returncode}", file=sys.stderr)
    return json.loads(file.read_text()) if file.is_file() else {"rows": []}


def numbers(text: str) -> set[int]:
    bounds = [part.split("-") for part in text.split(",")]
    return {number for part in bounds for number in range(int(part[0]), int(part[-1]) + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the src folder of the other tree")
    parser.add_argument("--package", default="text_generation_inference", help="its import package (%(default)s)")
    parser.add_argument("--rows", type=numbers, default="1-10", help="of cuda_peers (%(default)s)")
    parser.add_argument("--args", type=str.split, default=["--max-batch-prefill-tokens", "16384"], help="for both")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, dict]] = {"before": {}, "after": {}}
    with tempfile.TemporaryDirectory() as folder:
        for shape, precision in MODELS:
            rows = [row for number, name, _, row, _ in ROWS if name == shape and number in options.rows]
            for side, source, package in (
                ("before", options.before.resolve(), options.package),
                ("after", SRC, "text_generation_inference"),
            ):
                if rows:
                    file = Path(folder) / f"{side}-{shape}.json"
                    found[side][shape] = run(source, package, shape, precision, rows, file, options.args)
    if options.json:
        options.json.write_text(json.dumps(found))
    print("| model | in/out x requests | before, tokens/s | after, tokens/s | after / before |\n|---|---|---|---|---|")
    for _, shape, precision, row, _ in ROWS:
        rates = [rate_of(found[side].get(shape, {"rows": []}), row) for side in ("before", "after")]
        if all(rates):
            print(f"| {shape} {precision} | {row} | {rates[0]:,.1f} | {rates[1]:,.1f} | {rates[1] / rates[0]:.3f} |")
    for shape, _ in MODELS:
        ready = [found[side].get(shape, {}).get("ready_seconds") for side in ("before", "after")]
        print(f"{shape}: ready after {ready[0]} s before, {ready[1]} s after")


def rate_of(report: dict, row: str) -> float:
    wanted = dict(zip(("inputs", "outputs", "requests"), map(int, row.split("/")), strict=True))
    match = (found for found in report["rows"] if all(found[name] == value for name, value in wanted.items()))
    return next((found["output_tokens_per_s"] for found in match), 0.0)


if __name__ == "__main__":
    main()
