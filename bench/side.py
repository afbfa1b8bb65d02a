"""A side of a benchmark on a CPU: a process that runs batches when it is told to, and takes turns with others."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any


class Side:
    """It reads lines `level seed out`, and writes a line of JSON with `seconds` when it is ready, and for each."""

    def __init__(self, name: str, command: list[str], threads: int, python_path: str | None = None) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
        if python_path is not None:
            environment["PYTHONPATH"] = python_path
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )
        self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                return json.loads(line)
        self.errors.seek(0)
        sys.exit(f"{self.name} failed:\n{self.errors.read()[-3000:]}")

    def run(self, level: int, seed: int, out: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{level} {seed} {out}\n")
        self.process.stdin.flush()
        return self.read()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
