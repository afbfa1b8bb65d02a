# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Whether our kernels are launched while the kernel before them still ends (programmatic dependent launch).

Level 1. The one switch on the host, and the lines that each kernel starts with. Needs capability 9.0 or later. Every
program of a kernel that is launched this way waits, so "the kernel before has ended" means all before it have.
"""

import torch
import triton
import triton.language as tl

_dependent = False


def set_dependent_launch(on: bool) -> bool:
    """Returns what holds from now on: never on where the GPU cannot. Captured graphs keep what they were made with."""
    global _dependent
    _dependent = on and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return _dependent


def dependent_launch() -> bool:
    return _dependent


@triton.jit
def wait_for_kernel_before(DEPENDENT: tl.constexpr = True):
    """Before this, only what no kernel writes (weights, tables of constants) may be read, and nothing written."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        # Programs of the next kernel come in once all of ours run: they take no place from ours.
        tl.extra.cuda.gdc_launch_dependents()
