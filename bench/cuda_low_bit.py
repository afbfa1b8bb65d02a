# ruff: noqa: B023
"""Products of matrices in few bits on a GPU: checked against the definition, then measured beside the library's bf16.

    python bench/cuda_low_bit.py [--bits 4] [--group 128] [--asymmetric] [--table] [--wide-scales] [--rows 1,16]
    python bench/cuda_low_bit.py --chain      all products of the layers of an 8B model for one row, and for more
    python bench/cuda_low_bit.py --tune       tiles, splits and stages of few rows; best last
    python bench/cuda_low_bit.py --experts    mixtures of experts, one token to many

Times are of captured calls that go through several matrices, so that none is still in the cache of the chip. The floor
is the time in which codes and scales could be read at 4.2 TB/s.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from text_generation_inference.bench.floor import graph_ms
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.triton import launch
from text_generation_inference.kernels.triton.compile_ahead import compile_only
from text_generation_inference.kernels.triton.compile_workers import Workers
from text_generation_inference.kernels.triton.experts import TritonExperts
from text_generation_inference.kernels.triton.low_bit_codes import TritonLowBit
from text_generation_inference.kernels.triton.low_bit_linear import LowBitLinear, pack_low_bit, widen
from text_generation_inference.kernels.triton.row_low_bit import RowTiling
from text_generation_inference.kernels.triton.small_gemm_low_bit import LowBitGemmTiling, SmallGemmLowBit

SHAPES = [(8192, 8192), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
READ = 4.2e12
CACHE = 256 << 20  # bytes of matrices, beyond any cache
CAPABILITY = torch.cuda.get_device_capability()
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip


def graph_us(work: Callable[[], Any], repeats: int = 12) -> float:
    return 1e3 * graph_ms(work, repeats)


def make(n: int, k: int, options: argparse.Namespace) -> LowBitWeight:
    """Random codes; scales like those of a trained matrix."""
    bits, group = options.bits, options.group or k
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device="cuda")
    shape = (n, -(-k // group))
    scale = (torch.rand(shape, device="cuda") * 1e-3 + 1e-3).to(torch.float32 if options.wide_scales else torch.float16)
    offset = scale.float() * torch.randint(-7, 8, shape, device="cuda") if options.asymmetric else None
    table = torch.tensor(NF4, device="cuda") if options.table else None
    return LowBitWeight(codes, scale, offset, bits, group, k, torch.bfloat16, table)


def make_many(n: int, k: int, options: argparse.Namespace) -> tuple[LowBitWeight, list[TritonLowBit]]:
    first = make(n, k, options)
    count = max(2, min(24, CACHE // (first.codes.numel() + 1)))
    packed = [pack_low_bit(first), *(pack_low_bit(make(n, k, options)) for _ in range(count - 1))]
    assert all(isinstance(each, TritonLowBit) for each in packed)
    return first, packed  # pyright: ignore


def floor_us(weight: TritonLowBit) -> float:
    read = [weight.words, weight.scale, *([] if weight.offset is None else [weight.offset])]
    return 1e6 * sum(each.numel() * each.element_size() for each in read) / READ


def error(found: Tensor, x: Tensor, weight: LowBitWeight) -> float:
    wanted = x.double() @ low_bit.dequantize(weight).double().t()
    return float((found.double() - wanted).norm() / wanted.norm())


def measure(options: argparse.Namespace) -> None:
    op = LowBitLinear(PROCESSORS, CAPABILITY)
    print("    n     k  rows      us  x floor    GB/s    bf16 us  x bf16  few us  wide us  error", flush=True)
    for n, k in options.shapes:
        first, packed = make_many(n, k, options)
        plain = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(3)]
        floor = floor_us(packed[0])
        for rows in options.rows:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            wrong = error(op(x, packed[0], None), x, first)
            us = graph_us(lambda: [op(x, weight, None) for weight in packed]) / len(packed)
            library = graph_us(lambda: [F.linear(x, weight) for weight in plain]) / len(plain)
            out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
            few, wide = float("nan"), float("nan")
            if rows <= op.few.max_rows:
                few = graph_us(lambda: [op.few(x, weight, out) for weight in packed]) / len(packed)
            if rows >= 32:
                wide = graph_us(lambda: [F.linear(x, widen(weight, x.dtype)) for weight in packed]) / len(packed)
            ways = [f"{few:7.1f}", f"{wide:8.1f}"]
            print(
                f"{n:5d} {k:5d} {rows:5d} {us:7.1f} {us / floor:8.2f} {READ * 1e-9 * floor / us:7.0f}"
                f" {library:10.1f} {library / us:7.2f} {' '.join(ways)}  {wrong:.1e}",
                flush=True,
            )


def chain(options: argparse.Namespace) -> None:
    """Everything of a decode step of an 8B model but attention, norms of several rows, and the head."""
    hidden, width, qkv, layers = 4096, 14336, 6144, 32
    shapes = [(qkv, hidden), (hidden, hidden), (2 * width, hidden), (hidden, width)]
    stored: list[list[TritonLowBit]] = [
        [pack_low_bit(make(n, k, options)) for n, k in shapes]  # pyright: ignore
        for _ in range(layers)
    ]
    floor = sum(floor_us(weight) for layer in stored for weight in layer)
    op, linear = (
        SmallGemmLowBit(PROCESSORS, CAPABILITY >= (9, 0), CAPABILITY == (9, 0)),
        LowBitLinear(PROCESSORS, CAPABILITY),
    )
    gain = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def one() -> None:
        for w_qkv, w_o, w_gate_up, w_down in stored:
            op(h, w_qkv, fused, norm=(gain, 1e-5))
            op(fused[:, :hidden], w_o, h, add=True)
            op(h, w_gate_up, gated, norm=(gain, 1e-5), gate="silu")
            op(gated, w_down, h, add=True)

    def several() -> None:
        for w_qkv, w_o, w_gate_up, w_down in stored:
            linear(h, w_qkv, None)
            linear(h, w_o, None)
            linear(h, w_gate_up, None)
            linear(gated, w_down, None)

    for rows in options.rows:
        h = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) * 1e-3
        fused = torch.zeros(rows, qkv, device="cuda", dtype=torch.bfloat16)
        gated = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        if rows == 1:
            for on in (False, True):
                launch.set_dependent_launch(on)
                us = graph_us(one)
                print(f"one row, fused, dependent launch {on}: {us:.0f} us, {us / floor:.2f} x floor", flush=True)
            launch.set_dependent_launch(None)
        us = graph_us(several)
        print(f"chain of {rows} rows: {us:.0f} us, {us / floor:.2f} x floor ({floor:.0f})", flush=True)


def show(tiling: LowBitGemmTiling | RowTiling) -> str:
    if isinstance(tiling, RowTiling):
        return f"(row, {tiling.warps} warps, {tiling.tiles} tiles, ahead {tiling.ahead}, registers {tiling.registers})"
    sizes = f"{tiling.bm}, {tiling.bn}, {tiling.splits}, {tiling.stages}, {tiling.warps}"
    return f"({sizes}{', swap' * tiling.swap}{', paired' * tiling.paired})"


def tune(options: argparse.Namespace) -> None:
    op = SmallGemmLowBit(PROCESSORS, CAPABILITY >= (9, 0), CAPABILITY == (9, 0))
    few = (((32, 4), (64, 4), (128, 4), (128, 8)), (1, 2, 4, 8), (3, 4, 6))
    many = (((64, 4), (128, 8)), (1, 2, 4), (2, 3, 4))
    paired = (((64, 4), (128, 4), (128, 8), (256, 8)), (1, 2, 4, 8))
    may_pair = options.bits == 4 and options.group % 128 == 0 and not options.table
    bounds = (None, 64, 80, 128)
    rowwise = [RowTiling(w, t, r) for w, t, r in itertools.product((8, 16), (1, 2, 4), bounds)]
    rowwise += [RowTiling(w, 1, r, ahead) for w, r, ahead in itertools.product((8, 16), bounds, (2, 4))]

    def fit(rows: int, n: int) -> list[LowBitGemmTiling]:
        """Matrix right for up to 64 rows, and left on the GPUs that have a use for it for more than 16."""
        bm = max(16, 1 << (rows - 1).bit_length())
        found = []
        if 1 < rows <= 64 and CAPABILITY == (9, 0) and may_pair:
            found = [
                LowBitGemmTiling(bm, bn, splits, 3, warps, True, paired=True)
                for (bn, warps), splits in itertools.product(*paired)
            ]
        if rows <= 64:
            found += [
                LowBitGemmTiling(bm, bn, splits, stages, w) for (bn, w), splits, stages in itertools.product(*few)
            ]
        if rows > 16 and CAPABILITY == (9, 0):
            for (bn, warps), splits, stages in itertools.product(*many):
                found += [
                    LowBitGemmTiling(min(m, bm), bn, splits, stages, warps, True) for m in {min(64, bm), min(128, bm)}
                ]
        programs = [-(-n // each.bn) * each.splits * -(-rows // each.bm) for each in found]
        return [each for each, count in zip(found, programs, strict=True) if 96 <= count <= 16 * PROCESSORS]

    for n, k in options.shapes:
        _, packed = make_many(n, k, options)
        for gate in (None, "silu") if n > 16384 else (None,):
            outputs = n // 2 if gate else n
            for rows in options.rows:
                if rows > op.max_rows or (gate and rows > 1):
                    continue
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
                norm = (torch.ones_like(x[0]), 1e-5) if rows == 1 and k == 4096 and n > 4096 else None
                found: list[tuple[float, LowBitGemmTiling | RowTiling]] = []
                tilings: list[LowBitGemmTiling | RowTiling] = [*fit(rows, outputs)]
                if rows == 1 and may_pair and CAPABILITY >= (9, 0):
                    tilings += [each for each in rowwise if k // 128 % (each.warps * each.tiles * each.ahead) == 0]
                with compile_only(16, Workers(), load=False):
                    for tiling in tilings:
                        op(x, packed[0], out, norm=norm, gate=gate, tiling=tiling)
                for tiling in tilings:
                    try:
                        us = graph_us(lambda: [op(x, w, out, norm=norm, gate=gate, tiling=tiling) for w in packed], 5)
                    except OutOfResources:
                        continue
                    found.append((us / len(packed), tiling))
                found.sort(key=lambda each: each[0])
                chosen = graph_us(lambda: [op(x, w, out, norm=norm, gate=gate) for w in packed]) / len(packed)
                best = "; ".join(f"{us:.1f} {show(each)}" for us, each in found[:4])
                what = f"{n} {k} rows {rows}{' gate' if gate else ''}{' norm' if norm else ''}"
                print(f"{what}: chosen {chosen:.1f}, floor {floor_us(packed[0]):.1f}; {best}", flush=True)


def experts(options: argparse.Namespace) -> None:
    op = TritonExperts(CAPABILITY)
    for name, (count, top_k, hidden, width) in {"gpt-oss": (32, 4, 2880, 2880), "qwen3": (128, 8, 2048, 768)}.items():
        layers = [
            [pack_low_bit(make(count * n, k, options), count) for n, k in ((2 * width, hidden), (hidden, width))]
            for _ in range(4)
        ]
        for tokens in (1, 4, 16, 64, 256, 1024):
            x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
            ids = torch.rand(tokens, count, device="cuda").argsort(1)[:, :top_k].to(torch.int32)
            weights = torch.rand(tokens, top_k, device="cuda")
            times = [
                graph_us(lambda: [op(x, ids, weights, *layer, by_pair=by_pair) for layer in layers]) / len(layers)
                for by_pair in (True, False)
            ]
            chosen = ids.unique().numel()
            used = 1e6 * chosen * 3 * hidden * width * options.bits / 8 / READ
            print(f"{name} {tokens} tokens: by pair {times[0]:.1f} us, sorted {times[1]:.1f}, floor {used:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128, help="0: all columns of a row")
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--wide-scales", action="store_true", help="in float32, which take no instruction to unpack")
    parser.add_argument("--rows", default="")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    for part in (chain, tune, experts):
        parser.add_argument(f"--{part.__name__}", dest="part", action="store_const", const=part, default=measure)
    options = parser.parse_args()
    usual = {measure: ROWS, chain: (1, 16, 64, 256), tune: (1, 16, 64, 256), experts: ()}[options.part]
    options.rows = [int(rows) for rows in options.rows.split(",")] if options.rows else usual
    options.shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.shapes.split(",")]
    torch.manual_seed(0)
    options.part(options)


if __name__ == "__main__":
    main()
