# ruff: noqa: B023
"""Matrix products on a GPU: the libraries' and ours, for the shapes of one model and numbers of rows.

    python bench/cuda_products.py [--only library,fp8,vector,vector8,long,skinny] [--json FILE]

Times are medians over replays of captured calls that go through the weights of several layers, so that no weight is
still in the cache of the chip. Ours are compared with their definition first.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from text_generation_inference.bench.floor import graph_ms
from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.triton import launch, norms_rotary
from text_generation_inference.kernels.triton.gemv import vector_product
from text_generation_inference.kernels.triton.gemv_fp8 import GemvFp8, Shape
from text_generation_inference.kernels.triton.quantize import quantize_rows
from text_generation_inference.kernels.triton.small_gemm import SmallGemm, SmallGemmTiling

LLAMA_3_8B, LLAMA_2_7B = (4096, 14336, 6144, 128256), (4096, 11008, 12288, 32000)  # hidden, width, qkv, vocabulary
NUM_LAYERS = 32
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count
VECTOR_SHAPES = [(1, 4096, 4), (2, 4096, 4), (4, 4096, 4), (4, 4096, 8), (4, 2048, 4), (8, 2048, 4), (8, 1024, 4)]
VECTOR8_SHAPES = [
    None,
    *(Shape(*each) for each in ((4, 3, 4, 2), (4, 3, 4, 3), (2, 4, 4, 4), (1, 3, 8, 2), (2, 3, 8, 2))),
]
SKINNY_TILINGS = [(64, 128, 4), (64, 256, 3), (64, 256, 4), (128, 128, 4)]  # outputs, columns, stages


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def matrices(model: tuple[int, ...]) -> list[tuple[str, int, int]]:
    hidden, width, qkv, _ = model
    return [("qkv", qkv, hidden), ("o", hidden, hidden), ("gate_up", 2 * width, hidden), ("down", hidden, width)]


def describe(name: str, rows: int, n: int, k: int, itemsize: int, ms: float) -> dict[str, Any]:
    return {
        "linear_unscaled": name, "rows": rows, "us": round(1e3 * ms, 1), "tb_s": round(n * k * itemsize / ms / 1e9, 2),
        "tflop_s": round(2 * rows * n * k / ms / 1e9),
    }  # fmt: skip


def library(results: list[dict]) -> None:
    head = ("head", LLAMA_3_8B[3], LLAMA_3_8B[0])
    for name, n, k in [*matrices(LLAMA_3_8B), head]:
        stored = [random(n, k) * 0.02 for _ in range(2 if name == "head" else 4)]
        for rows in (1, 8, 64, 128, 256, 512, 1024, 8192):
            if rows * n < 1 << 30:
                x = random(rows, k)
                ms = graph_ms(lambda: [F.linear(x, w) for w in stored]) / len(stored)
                results.append(describe(f"bf16 {name}", rows, n, k, 2, ms))


def products_fp8(results: list[dict]) -> None:
    one = torch.ones((), device="cuda")
    for name, n, k in matrices(LLAMA_2_7B):
        stored = [fp8.quantize_weight(random(n, k) * 0.02) for _ in range(4)]
        for rows in (1, 16, 64, 96, 176, 256, 1232, 8192):
            x = fp8.quantize_rows(random(rows, k), stored[0])
            options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
            kinds = {
                "without scales": lambda: [torch._scaled_mm(x.data, w.data.t(), one, one, **options) for w in stored],
                "scales by row": lambda: [
                    torch._scaled_mm(x.data, w.data.t(), x.scale[:, None], w.scale[None, :], **options) for w in stored
                ],
            }
            for kind, work in kinds.items():
                results.append(describe(f"fp8 {name} {kind}", rows, n, k, 1, graph_ms(work) / len(stored)))


def vector(results: list[dict]) -> None:
    for name, n, k in matrices(LLAMA_3_8B):
        gate = "silu" if name == "gate_up" else None
        stored = [random(n, k) * 0.02 for _ in range(6)]
        x, gain = random(1, k), random(k)
        norm = (gain, 1e-5) if k == LLAMA_3_8B[0] and name != "o" else None
        y = (reference.rms_norm(x, gain, 1e-5) if norm else x) @ stored[0].t()
        wanted = reference.silu_mul(y) if gate else y
        for shape in VECTOR_SHAPES:
            out = random(1, wanted.shape[1])
            vector_product(x, stored[0], out, norm=norm, gate=gate, shape=shape)
            wrong = error(out, wanted)
            ms = graph_ms(lambda: [vector_product(x, w, out, norm=norm, gate=gate, shape=shape) for w in stored])
            found = describe(f"one row {name}", 1, n, k, 2, ms / len(stored))
            results.append({**found, "shape": shape, "error": round(wrong, 5)})
    chain(results, LLAMA_3_8B, lambda weight: weight, vector_product)


def vector8(results: list[dict]) -> None:
    product = GemvFp8(PROCESSORS)
    for name, n, k in matrices(LLAMA_2_7B):
        gate = "silu" if name == "gate_up" else None
        stored = [fp8.quantize_weight(random(n, k) * 0.02) for _ in range(8)]
        x, gain = random(1, k), random(k)
        norm = (gain, 1e-5) if name in ("qkv", "gate_up") else None
        rows = quantize_rows(norms_rotary.rms_norm(x, gain, 1e-5) if norm else x, stored[0])
        y = fp8.linear(rows, stored[0], None, torch.bfloat16)
        wanted = reference.silu_mul(y) if gate else y
        for shape in VECTOR8_SHAPES:
            out = random(1, wanted.shape[1])
            try:
                product(x, stored[0], out, norm=norm, gate=gate, shape=shape)
            except Exception as problem:  # no room for it
                print(name, shape, type(problem).__name__)
                continue
            wrong = error(out, wanted)
            ms = graph_ms(lambda: [product(x, w, out, norm=norm, gate=gate, shape=shape) for w in stored])
            found = describe(f"fp8 one row {name}", 1, n, k, 1, ms / len(stored))
            results.append({**found, "shape": shape or "chosen", "error": round(wrong, 5)})
    chain(results, LLAMA_2_7B, fp8.quantize_weight, product)


def long(results: list[dict]) -> None:
    """One row of a 70B model's last matrix: whole rows in registers, and on tensor cores."""
    n, k = 8192, 28672
    stored = [fp8.quantize_weight(random(n, k) * 0.02) for _ in range(4)]
    x = random(1, k)
    wanted = fp8.linear(quantize_rows(x, stored[0]), stored[0], None, torch.bfloat16)
    few = SmallGemm(PROCESSORS)
    ways: dict[str, Any] = {
        "in registers": GemvFp8(PROCESSORS),
        "quantised, then few rows": lambda x, weight, out: few(quantize_rows(x, weight), weight, out),
    }
    for way, product in ways.items():
        out = random(1, n)
        product(x, stored[0], out)
        wrong = error(out, wanted)
        ms = graph_ms(lambda: [product(x, weight, out) for weight in stored])
        found = describe("fp8 one long row", 1, n, k, 1, ms / len(stored))
        results.append({**found, "way": way, "error": round(wrong, 5)})


def chain(results: list[dict], model: tuple[int, ...], stored_as: Any, product: Any) -> None:
    """Everything of a decode step of one row but attention and the head."""
    hidden, width, qkv, _ = model
    layers = [[stored_as(random(n, k) * 0.02) for _, n, k in matrices(model)] for _ in range(NUM_LAYERS)]
    gain, h, fused, gated = random(hidden), random(1, hidden), random(1, qkv), random(1, width)

    def work() -> None:
        for w_qkv, w_o, w_gate_up, w_down in layers:
            product(h, w_qkv, fused, norm=(gain, 1e-5))
            product(fused[:, :hidden], w_o, h, add=True)
            product(h, w_gate_up, gated, norm=(gain, 1e-5), gate="silu")
            product(gated, w_down, h, add=True)

    itemsize = 1 if isinstance(layers[0][0], fp8.Fp8Weight) else 2
    num_bytes = itemsize * sum(w.shape[0] * w.shape[1] for layer in layers for w in layer)
    for on in (False, True):
        launch.set_dependent_launch(on)
        ms = graph_ms(work)
        name = f"{NUM_LAYERS} layers of one row of {itemsize} bytes, dependent launch {'on' if on else 'off'}"
        results.append(
            {"linear_unscaled": name, "rows": 1, "us": round(1e3 * ms), "tb_s": round(num_bytes / ms / 1e9, 2)}
        )
    launch.set_dependent_launch(None)


def skinny(results: list[dict]) -> None:
    op = SmallGemm(PROCESSORS)
    for name, n, k in matrices(LLAMA_2_7B):
        stored = [fp8.quantize_weight(random(n, k) * 0.02) for _ in range(5)]
        for rows in (1, 16, 64):
            x = fp8.quantize_rows(random(rows, k), stored[0])
            out = random(rows, n)
            wanted = fp8.linear(x, stored[0], None, torch.bfloat16)
            tilings = [
                SmallGemmTiling(bn, bk, s, stages)
                for bn, bk, stages in SKINNY_TILINGS
                for s in (1, 2, 4)
                if -(-n // bn) * s > 100
            ]
            for tiling in [None, *tilings]:
                op(x, stored[0], out, None, tiling)
                wrong = error(out, wanted)
                ms = graph_ms(lambda: [op(x, w, out, None, tiling) for w in stored]) / len(stored)
                found = describe(f"fp8 few rows {name}", rows, n, k, 1, ms)
                results.append({**found, "tiling": tiling or "chosen", "error": round(wrong, 5)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "library": library,
        "fp8": products_fp8,
        "vector": vector,
        "vector8": vector8,
        "long": long,
        "skinny": skinny,
    }
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--json")
    options = parser.parse_args()
    results: list[dict] = []
    for name in options.only.split(","):
        before = len(results)
        parts[name](results)
        for result in results[before:]:
            print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
