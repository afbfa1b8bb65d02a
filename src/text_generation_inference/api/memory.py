"""Gives back to the system what work on a long text took.

The C library keeps freed memory for later; after one long text that may be hundreds of megabytes.
"""

import ctypes
from functools import cache
from typing import Any

_WORTH_IT = 50_000  # characters; giving back costs a few milliseconds


def release_memory(num_characters: int) -> None:
    """After work on a text of that length; called in the thread that did it, others go on meanwhile."""
    trim = _find_trim()
    if trim is not None and num_characters > _WORTH_IT:
        trim(0)


@cache
def _find_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
