# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""The noise that draws are made of, and floats as numbers that sort. Definitions: `sampling.draw`."""

import triton
import triton.language as tl


@triton.jit
def sortable(x):
    """float32 -> uint32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def from_sortable(key):
    bits = key.to(tl.int32, bitcast=True) ^ -2147483648
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mix64(x):
    x = x ^ ((x >> 30) & 0x3FFFFFFFF)
    x = x * -4658895280553007687
    x = x ^ ((x >> 27) & 0x1FFFFFFFFF)
    x = x * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def noise_key(seed, position):
    return _mix64(_mix64(seed) ^ (position + 1))


@triton.jit
def gumbel(key, ids):
    """Gumbel noise of ids (int32): the same bits as `sampling.draw.exponential_noise`."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    bits = ids * -1640531535 + low
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * -2048144789
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits + high
    bits = bits * -1028477387
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    uniform = (((bits >> 9) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))
