# ruff: noqa: B023
"""Mixtures of experts on a GPU at the sizes of known models: checked against the definition, then measured.

    python bench/cuda_experts.py [--models mixtral,qwen3,deepseek] [--forms bf16,fp8,squares] [--tune] [--json FILE]

Tokens are routed at random, evenly. Times are of captured calls that go through several layers, so that no matrix is
still in the cache of the chip: of the whole op by pair and sorted (`*` marks what the op chooses), of torch's grouped
products with the same sorting done beforehand, and the time in which the matrices of the experts that were chosen
could be read at 4.2 TB/s. `--tune` tries other tiles, too.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.bench.floor import RATES, graph_ms
from text_generation_inference.kernels import experts as reference
from text_generation_inference.kernels import fp8
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.routing import SoftmaxRouting
from text_generation_inference.kernels.triton.experts import Tiling, TritonExperts, choose_tiling
from text_generation_inference.kernels.triton.routing import route

MODELS = {  # experts, chosen, hidden, width
    "mixtral": (8, 2, 4096, 14336),
    "qwen3": (128, 8, 2048, 768),
    "deepseek": (64, 6, 2048, 1408),
}
ROWS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
BYTES_PER_S = RATES["NVIDIA H200"].read_bytes_per_s
LAYER_BYTES = 3 << 30  # all layers together, beyond any cache
OP = TritonExperts(torch.cuda.get_device_capability())
Layer = tuple[Any, Any]


def make_layers(model: tuple[int, ...], form: str) -> list[Layer]:
    count, _, hidden, width = model
    per_layer = 3 * count * hidden * width * (2 if form == "bf16" else 1)
    return [make_layer(model, form) for _ in range(max(2, min(6, LAYER_BYTES // per_layer)))]


def make_layer(model: tuple[int, ...], form: str) -> Layer:
    count, _, hidden, width = model
    shapes = ((count * 2 * width, hidden), (count * hidden, width))
    plain = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / math.sqrt(shape[1]) for shape in shapes)
    gate_up, down = plain if form == "bf16" else (fp8.quantize_weight(part, form == "squares") for part in plain)
    return gate_up, down


def make_rows(model: tuple[int, ...], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    count, top_k, hidden, _ = model
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    ids, weights = route(torch.randn(rows, count, device="cuda"), SoftmaxRouting(top_k, p_norm=1))
    return x, ids, weights


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def check(name: str, form: str) -> None:
    """Every way of computing, with few rows and many; and the router."""
    model = MODELS[name]
    layer = make_layer(model, form)
    worst = 0.0
    for rows in (1, 3, 17, 130, 700):
        x, ids, weights = make_rows(model, rows)
        expected = define(x, ids, weights, layer)
        for by_pair in (True, False) if rows < 20 else (False,):
            worst = max(worst, error(OP(x, ids, weights, *layer, by_pair=by_pair), expected))
        again = OP(x, ids, weights, *layer)
        assert torch.equal(again, OP(x, ids, weights, *layer)), "two runs differ"
    scores = torch.randn(333, model[0], device="cuda")
    for rule in (SoftmaxRouting(model[1], p_norm=1), SoftmaxRouting(model[1], factor=2.0)):
        found, expected = route(scores, rule), rule(scores)
        assert torch.equal(found[0].long(), expected[0]), "other experts"
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)
    limit = 0.01 if form == "bf16" else 0.03
    print(f"{name} {form}: largest relative error {worst:.4f} {'ok' if worst < limit else 'WRONG'}", flush=True)


def define(x: Tensor, ids: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    """The definition; of FP8 expert by expert, because widening all of them takes much memory."""
    if isinstance(layer[0], Tensor):
        return reference.experts(x, ids, weights, *layer)
    out = torch.zeros(x.shape, device=x.device)
    count = layer[1].shape[0] // x.shape[1]
    for number in range(count):
        token, place = (ids == number).nonzero(as_tuple=True)
        if len(token):
            first, second = (_part(weight, number, count) for weight in layer)
            gate_up = fp8.linear(fp8.quantize_rows(x[token], first), first, None, x.dtype)
            gated = reference.GATES["silu"](*gate_up.chunk(2, -1))
            made = fp8.linear(fp8.quantize_rows(gated, second), second, None, x.dtype)
            out.index_add_(0, token, made.float() * weights[token, place, None])
    return out.to(x.dtype)


def _part(weight: Fp8Weight, number: int, count: int) -> Fp8Weight:
    rows, scales = weight.shape[0] // count, weight.scale.shape[0] // count
    data, scale = (
        weight.data[number * rows : (number + 1) * rows],
        weight.scale[number * scales : (number + 1) * scales],
    )
    return replace(weight, data=data, scale=scale)


def layer_us(layers: list[Layer], work: Any) -> float | None:
    def run() -> None:
        for layer in layers:
            work(layer)

    try:
        return 1e3 * graph_ms(run) / len(layers)
    except RuntimeError as failed:  # a library, or a tile that finds no room
        print(f"  failed: {str(failed).splitlines()[0][:100]}", flush=True)
        torch.cuda.synchronize()
        return None


def grouped(model: tuple[int, ...], x: Tensor, ids: Tensor, layer: Layer) -> None:
    """torch's products of rows that are already in order."""
    count, top_k, hidden, width = model
    pairs = ids.reshape(-1).long()
    ends = (pairs[:, None] == torch.arange(count, device=x.device)).sum(0).cumsum(0).int()
    rows = x.repeat_interleave(top_k, 0)
    product = F.grouped_mm(rows, layer[0].view(count, 2 * width, hidden).transpose(1, 2), offs=ends)
    F.grouped_mm(product[:, :width], layer[1].view(count, hidden, width).transpose(1, 2), offs=ends)


def floor_us(model: tuple[int, ...], ids: Tensor, form: str) -> float:
    _, _, hidden, width = model
    read = len(ids.unique()) * 3 * hidden * width * (2 if form == "bf16" else 1)
    return 1e6 * read / BYTES_PER_S


def measure(name: str, form: str, tune: bool, results: list[dict[str, Any]]) -> None:
    model = MODELS[name]
    layers = make_layers(model, form)
    print(
        f"\n{name} {form}: us per layer\n{'rows':>6}{'floor':>9}{'by pair':>10}{'sorted':>10}{'torch':>10}{'router':>9}"
    )
    for rows in ROWS:
        x, ids, weights = make_rows(model, rows)
        few = rows * model[1] * 4 <= model[0] or rows == 1
        times = {
            "floor": floor_us(model, ids, form),
            "by_pair": layer_us(layers, lambda layer: OP(x, ids, weights, *layer, by_pair=True))
            if rows <= 16
            else None,
            "sorted": layer_us(layers, lambda layer: OP(x, ids, weights, *layer, by_pair=False)),
            "torch": layer_us(layers, lambda layer: grouped(model, x, ids, layer)) if form == "bf16" else None,
            "router": layer_us(layers, lambda _: route(weights.new_zeros(rows, model[0]), SoftmaxRouting(model[1]))),
        }
        shown = [f"{time:.1f}" if time is not None else "-" for time in times.values()]
        shown[1 if few else 2] += "*"
        print(f"{rows:>6}" + "".join(f"{text:>{width}}" for text, width in zip(shown, (9, 10, 10, 10, 9), strict=True)))
        results.append({"model": name, "form": form, "rows": rows, **times})
        if tune and rows >= 4:
            try_tiles(model, layers, (x, ids, weights), form)


def try_tiles(model: tuple[int, ...], layers: list[Layer], made: tuple[Tensor, ...], form: str) -> None:
    """The best of some, of both products."""
    kind = torch.bfloat16 if form == "bf16" else fp8.FP8
    pairs = made[1].numel()
    chosen = [choose_tiling(pairs, model[0], gated, kind, form == "squares") for gated in (True, False)]
    found: list[tuple[float, Tiling, Tiling]] = []
    for bm in sorted({max(16, chosen[0].bm // 2), chosen[0].bm, min(128, chosen[0].bm * 2)}):
        for swap in (True, False) if bm <= 64 else (False,):
            for bn, bk, warps, stages in (
                (64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 4), (32, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3),
                (128, 64, 8, 3), (128, 64, 8, 4),
            ):  # fmt: skip
                if form == "squares" and bk != 128:
                    continue
                first = Tiling(bm, bn, bk, warps, stages, swap)
                second = replace(first, bn=bn if form == "squares" or bn > 64 else 2 * bn)
                time = layer_us(layers, lambda layer: OP(*made, *layer, by_pair=False, tilings=(first, second)))
                if time is not None:
                    found.append((time, first, second))
    for time, first, second in sorted(found, key=lambda each: each[0])[:3]:
        print(f"      {time:8.1f}  {first}  down bn {second.bn}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--forms", default="bf16,fp8,squares")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    task = parser.parse_args()
    results: list[dict[str, Any]] = []
    torch.manual_seed(0)
    with torch.inference_mode():
        pairs = [(name, form) for name in task.models.split(",") for form in task.forms.split(",")]
        for name, form in pairs:
            check(name, form)
            torch.cuda.empty_cache()
        for name, form in pairs:
            measure(name, form, task.tune, results)
            torch.cuda.empty_cache()
    if task.json is not None:
        task.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
