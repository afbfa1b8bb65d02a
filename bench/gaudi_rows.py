"""The published FP8 rows of Llama 2 70B on 2 and 4 cards (`gaudi_spawn`) with their own flags, on the stand-in of
`tests/hpu_emulated` (on cards: `--card`): a tiny Llama with measured scales, the published lengths, a small batch.

    .venv/bin/python bench/gaudi_rows.py [--batch 2] [--rows 2048/128 ...]

Whether all tokens are made; nothing is timed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("unit", "models", "devices", "api")]

from gaudi import STAND_IN  # noqa: E402
from gaudi_commands import SPAWNED  # noqa: E402
from gaudi_models import make_model, measure  # noqa: E402

BENCH = "from text_generation_inference.cli import main; import sys; sys.exit(main())"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2, help="requests of a row")
    parser.add_argument("--rows", nargs="*", help="IN/OUT of those to run (default: all four)")
    parser.add_argument("--card", action="store_true", help="with Intel's own software instead of the stand-in")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        model = make_model("Llama", Path(root) / "llama", positions=8192, is_split=True)
        given = {"QUANT_CONFIG": measure("Llama", model, Path(root)), "PT_HPU_LAZY_MODE": "1"}
        if not options.card:
            given |= {"PYTHONPATH": os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])}
        for row in SPAWNED:
            if options.rows is not None and f"{row.inputs}/{row.outputs}" not in options.rows:
                continue
            words = [*row.words(str(model), row.inputs, row.outputs, options.batch), "--device", "hpu"]
            command = [sys.executable, "-c", BENCH, "bench", "offline", *words, "--dry-run", "--quiet"]
            done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
            failed += done.returncode != 0
            print(f"{row.cards} cards: {(done.stdout + done.stderr).strip()}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
