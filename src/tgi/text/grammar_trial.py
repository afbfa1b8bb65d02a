"""Compiles a grammar where it can do no harm: a program of its own, with little time and memory.

Level 1. llguidance bounds its work while it matches, but not all of its work while it compiles: some short schemas
would take hours and all memory, and nothing can interrupt it. `grammar` runs this program first on what might be such
a one, and compiles only what comes out of it alive. It imports nothing of ours, so that it starts quickly.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_CPU_SECONDS, MAX_BYTES = 2, 1 << 30
_MAX_SECONDS = 20.0  # on a clock, for a machine that is busy with other things


def survives(source: str, limits: dict[str, int]) -> bool:
    """Whether llguidance is done with a grammar, good or bad, within the bounds."""
    command = [sys.executable, "-P", __file__, json.dumps(limits)]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=_MAX_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


class _Bytes:
    """The smallest tokenizer: what a grammar costs to compile hardly depends on the vocabulary."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes([value]) for value in range(256)), b"\xff<eos>"]
    special_token_ids: Sequence[int] = [256]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    limits = LLParserLimits(**json.loads(sys.argv[1]))
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    matcher = LLMatcher(tokenizer, sys.stdin.read(), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()


if __name__ == "__main__":
    main()
