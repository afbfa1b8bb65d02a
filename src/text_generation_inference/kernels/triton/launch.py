# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Whether our kernels are launched while the kernel before them still ends (programmatic dependent launch).

The one switch on the host, and the lines that each kernel starts with. Needs capability 9.0 or later. Every
program of a kernel that is launched this way waits, so "the kernel before has ended" means all before it have.
"""

from functools import cache

import torch
import triton
import triton.language as tl

_MAX_ROWS = 16  # with more, kernels that wait take room from those that compute: measured slower
_always: bool | None = None


def has_room(capability: tuple[int, int]) -> bool:
    """Whether processors have as much shared memory as those of data centres from Hopper on; 12.x has less again."""
    return capability in ((9, 0), (10, 0), (10, 3))


@cache
def _supported() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def set_dependent_launch(on: bool | None) -> bool:
    """For measuring: always or never instead of by the number of rows (None). Returns whether `on` holds here."""
    global _always
    _always = None if on is None else on and _supported()
    return bool(_always)


def dependent_launch(rows: int) -> bool:
    return rows <= _MAX_ROWS and _supported() if _always is None else _always


@triton.jit
def wait_for_kernel_before(DEPENDENT: tl.constexpr = True):
    """Before this, only what no kernel writes (weights, tables of constants) may be read, and nothing written."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        # Programs of the next kernel come in once all of ours run: they take no place from ours.
        tl.extra.cuda.gdc_launch_dependents()
