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
_early_products = 0  # rows up to which products are launched early though what stands between them is not

# How a kernel takes part. One that only releases is launched when all before it have ended, and the one after it comes
# in at once; one that only waits lets nobody in before it has ended.
NOT, BOTH, RELEASES, WAITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


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


def set_early_products(rows: int) -> None:
    """For measuring."""
    global _early_products
    _early_products = rows


def launch_mode(rows: int, product: bool = False) -> int:
    """For kernels of a layer with so many rows."""
    if dependent_launch(rows):
        return BOTH.value
    if rows > _early_products or _always is not None or not _supported():
        return NOT.value
    return (WAITS if product else RELEASES).value


def is_early(mode: int) -> bool:
    """Whether a kernel is launched while the one before still ends."""
    return mode in (BOTH.value, WAITS.value)


@triton.jit
def wait_for_kernel_before(MODE: tl.constexpr = BOTH):
    """Before this, only what no kernel writes (weights, tables of constants) may be read, and nothing written."""
    if (MODE == BOTH) | (MODE == WAITS):
        tl.extra.cuda.gdc_wait()
    if (MODE == BOTH) | (MODE == RELEASES):
        # Programs of the next kernel come in once all of ours run: they take no place from ours.
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(at):
    """Have the lines of 128 bytes around these in the cache of the chip soon; nothing is waited for."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
