"""Compiles a grammar where it can do no harm: a program of its own, with little time and memory.

llguidance bounds its work while it matches, but not all of its work while it compiles: some short schemas
would take hours and all memory, and nothing can interrupt it. `grammar` runs this program first on what might be such
a one, and compiles only what comes out of it alive. It imports nothing of ours, so that it starts quickly, and gives
way to those who serve.
"""

import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_CPU_SECONDS, MAX_BYTES = 2, 1 << 30
_MAX_SECONDS = 20.0  # on a clock, for a machine that is busy with other things
_NICENESS = 5


Outcome = Literal["survived", "failed", "unfinished"]


class Trial:
    """One grammar on trial. `run` waits for it; `stop` ends it at once, from any other thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, source: str, limits: dict[str, int]) -> Outcome:
        """Whether llguidance is done with the grammar, good or bad, within the bounds; `unfinished` blames nobody."""
        command = [sys.executable, "-P", __file__, json.dumps(limits)]
        with self._lock:
            if self._stopped:
                return "unfinished"
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            process = self._process = subprocess.Popen(command, stdin=pipe, stdout=nothing, stderr=nothing)
        try:
            process.communicate(source.encode(), _MAX_SECONDS)
        except subprocess.TimeoutExpired:  # others have the processor
            self.stop()
            process.communicate()
        if self._stopped:
            return "unfinished"
        return "survived" if process.returncode == 0 else "failed"

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()


class _Bytes:
    """The smallest tokenizer: what a grammar costs to compile hardly depends on the vocabulary."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes([value]) for value in range(256)), b"\xff<eos>"]
    special_token_ids: Sequence[int] = [256]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    limits = LLParserLimits(**json.loads(sys.argv[1]))
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    # The model's tokens are unknown here: unless one stands for all, such a grammar fails before it costs anything.
    source = re.sub(r"<\[\d+\]>", f"<[{_Bytes.eos_token_id}]>", sys.stdin.read())
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()


if __name__ == "__main__":
    main()
