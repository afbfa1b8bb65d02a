# pyright: basic, reportMissingImports=false
"""Matrix products in FP8 (or integers) of at most 64 rows, where reading the weight is what takes the time.

A program multiplies some rows of the weight with all rows of the input; the weight takes the place of the left
operand, whose tile must be large. Where there are fewer tiles than processors, several programs share one along the
inner dimension, and the last of them to finish adds the parts up in order.
"""

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before

MAX_ROWS = 64  # beyond, the libraries are faster


@triton.jit(do_not_specialize=["rows"])
def _small_gemm_kernel(
    x, weight, x_scale, weight_scale, bias, out, partial, counters, x_row, out_row, rows,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, BULK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BN outputs of all rows, over one of SPLITS parts of K.

    BULK: `x` and `weight` are descriptors of tiles of BK columns, which the copy engine brings; of FP8 only.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    PART: tl.constexpr = ((K + BK * SPLITS - 1) // (BK * SPLITS)) * BK
    start = split * PART
    end = tl.minimum(start + PART, K)
    wait_for_kernel_before(DEPENDENT)
    if not BULK:  # past the end the last row is read again: what comes of it is not stored
        w_at = weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + k[None, :]
        x_at = x + tl.minimum(m, rows - 1)[:, None] * x_row + k[None, :]
    INTEGERS: tl.constexpr = not BULK and x.dtype.element_ty == tl.int8
    acc = tl.zeros((BN, BM), tl.int32 if INTEGERS else tl.float32)
    for k0 in tl.range(start, end, BK, num_stages=STAGES):
        if BULK:
            w_tile = weight.load([tile * BN, k0])
            x_tile = x.load([0, k0])
        elif WHOLE:
            w_tile = tl.load(w_at + k0)
            x_tile = tl.load(x_at + k0)
        else:
            inside = (k0 + k < K)[None, :]
            w_tile = tl.load(w_at + k0, mask=inside, other=0.0)
            x_tile = tl.load(x_at + k0, mask=inside, other=0.0)
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, out_dtype=acc.dtype)
    acc = acc.to(tl.float32)
    if SPLITS > 1:
        at = (tile * BN + tl.arange(0, BN))[:, None] * BM + m[None, :]
        size = tl.num_programs(0) * BN * BM
        tl.store(partial + split.to(tl.int64) * size + at, acc)
        tl.debug_barrier()
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        last = done == SPLITS - 1
        if last:
            tl.debug_barrier()
            acc = tl.zeros((BN, BM), tl.float32)
            for other in range(0, SPLITS):
                acc += tl.load(partial + other * size + at, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            _store(acc, x_scale, weight_scale, bias, out, out_row, rows, n, m, N, BIAS)
    else:
        _store(acc, x_scale, weight_scale, bias, out, out_row, rows, n, m, N, BIAS)


@triton.jit
def _store(acc, x_scale, weight_scale, bias, out, out_row, rows, n, m, N: tl.constexpr, BIAS: tl.constexpr):
    scale = tl.load(x_scale + m, mask=m < rows, other=0.0)
    acc = acc * scale[None, :] * tl.load(weight_scale + n, mask=n < N, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = out + m[None, :] * out_row + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < rows)[None, :] & (n < N)[:, None])


class SmallGemmTiling(NamedTuple):
    outputs: int  # of a program
    columns: int  # at a time
    parts: int  # of a row
    stages: int
    warps: int = 4
    bulk: bool = False  # tiles are brought by the copy engine of capability 9.0 and later


# By outputs and columns of a matrix in FP8: up to so many rows, from _MEASURED_FROM on. Measured on an H200, see
# `bench/cuda_70b.py`; used on GPUs with a copy engine and as much shared memory.
TILINGS: dict[tuple[int, int], tuple[tuple[int, SmallGemmTiling], ...]] = {  # of Llama-2-70B
    (10240, 8192): ((64, SmallGemmTiling(64, 128, 1, 6, bulk=True)),),
    (8192, 8192): ((64, SmallGemmTiling(64, 256, 2, 3, bulk=True)),),
    (57344, 8192): ((32, SmallGemmTiling(64, 128, 1, 4, bulk=True)), (64, SmallGemmTiling(64, 128, 1, 3))),
    (8192, 28672): ((64, SmallGemmTiling(64, 256, 2, 3, bulk=True)),),
}
_MEASURED_FROM = 17


def choose_tiling(rows: int, n: int, k: int, num_processors: int, measured: bool = False) -> SmallGemmTiling:
    """Measured on an H200, see `bench/cuda_products.py`. `measured`: `TILINGS` are for the GPU and the matrix."""
    for most, tiling in TILINGS.get((n, k), ()) if measured and rows >= _MEASURED_FROM else ():
        if rows <= most:
            return tiling
    tiles = triton.cdiv(n, 64)
    splits = 1
    while tiles * splits < num_processors and splits < 4:
        splits *= 2
    if rows <= 16:
        return SmallGemmTiling(64, 256, splits, 4 if splits > 1 else 3)
    return SmallGemmTiling(64, 256, splits, 3) if splits > 1 else SmallGemmTiling(64, 128, 1, 4)


class _Scaled(Protocol):
    """Rows or a matrix, of numbers of 8 bits with a scale for each row."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size: ...


class SmallGemm:
    """The op, with the buffers where parts meet. `measured`: see `choose_tiling`."""

    def __init__(self, num_processors: int, measured: bool = False) -> None:
        self._num_processors, self._measured = num_processors, measured
        self._partial: Tensor | None = None
        self._counters: Tensor | None = None
        self._outgrown: list[Tensor] = []  # captured steps still use them

    def __call__(
        self,
        x: _Scaled,  # [rows, in]
        weight: _Scaled,  # [out, in]
        out: Tensor,  # [rows, out]
        bias: Tensor | None = None,
        tiling: SmallGemmTiling | None = None,
    ) -> None:
        rows, k = x.shape
        n = weight.shape[0]
        chosen = tiling or choose_tiling(rows, n, k, self._num_processors, self._measured)
        bn, bk, splits = chosen.outputs, chosen.columns, chosen.parts
        bm = max(16, triton.next_power_of_2(rows))
        tiles = triton.cdiv(n, bn)
        partial, counters = self._take(out.device, tiles * bn * bm * splits if splits > 1 else 1, tiles)
        dependent = dependent_launch(rows)
        given, matrix = x.data, weight.data
        if chosen.bulk:
            given, matrix = (
                TensorDescriptor.from_tensor(given, [bm, bk]),
                TensorDescriptor.from_tensor(matrix, [bn, bk]),
            )
        _small_gemm_kernel[(tiles, splits)](
            given, matrix, x.scale, weight.scale, x.scale if bias is None else bias, out, partial, counters,
            x.data.stride(0), out.stride(0), rows, N=n, K=k, BM=bm, BN=bn, BK=bk, SPLITS=splits, STAGES=chosen.stages,
            WHOLE=k % bk == 0, BIAS=bias is not None, BULK=chosen.bulk, DEPENDENT=dependent,
            num_warps=chosen.warps, launch_pdl=dependent,
        )  # fmt: skip

    def _take(self, device: torch.device, num_partial: int, num_tiles: int) -> tuple[Tensor, Tensor]:
        if self._partial is None or self._partial.numel() < num_partial:
            self._outgrown += [] if self._partial is None else [self._partial]
            self._partial = torch.empty(num_partial, dtype=torch.float32, device=device)
        if self._counters is None or self._counters.numel() < num_tiles:
            self._outgrown += [] if self._counters is None else [self._counters]
            self._counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        return self._partial, self._counters
