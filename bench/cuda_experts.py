# ruff: noqa: B023
"""Mixtures of experts on a GPU at the sizes of known models: checked against the definition, then measured.

    python bench/cuda_experts.py [--models mixtral,qwen3,deepseek] [--forms bf16,fp8,squares] [--json FILE]
    python bench/cuda_experts.py --one-row       one row of a layer: its kernels one by one, beside the fused ones
    python bench/cuda_experts.py --tune          the best tiles, as lines of `kernels/triton/expert_tiles.py`

Tokens are routed at random, evenly; `--tune` takes the mean over that and routings that like some experts better. Times
are of captured calls that go through several layers, so that no matrix is still in the cache of the chip: of the whole
op by pair and sorted (`*` marks what the op chooses), of torch's grouped products with the same sorting done
beforehand, and the time in which the matrices of the experts that were chosen could be read at 4.2 TB/s. `--tune`
compiles all candidates first, in many processes: the better part of a minute for each model.
"""

import argparse
import json
import math
import time as clock
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from text_generation_inference.bench.floor import RATES, graph_ms
from text_generation_inference.kernels import experts as reference
from text_generation_inference.kernels import fp8
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.fused_decode import FusedExperts
from text_generation_inference.kernels.routing import SoftmaxRouting
from text_generation_inference.kernels.triton import norms_rotary
from text_generation_inference.kernels.triton.compile_ahead import compile_only
from text_generation_inference.kernels.triton.compile_workers import Workers
from text_generation_inference.kernels.triton.expert_tiles import Tiling, choose_tiling
from text_generation_inference.kernels.triton.experts import Groups, Operands, TritonExperts
from text_generation_inference.kernels.triton.linear import logits
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


def make_rows(model: tuple[int, ...], rows: int, lead: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """`lead`: what all rows have in common, and which makes some experts better liked, beside what they differ in."""
    count, top_k, hidden, _ = model
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    scores = torch.randn(rows, count, device="cuda") + lead * torch.randn(1, count, device="cuda")
    ids, weights = route(scores, SoftmaxRouting(top_k, p_norm=1))
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
        worst = max(worst, error(OP(x, ids, weights, *layer, by_pair=False), expected))
        if rows < 20:
            worst = max(worst, error(OP(x, ids, weights, *layer, by_pair=True), expected))
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


def layer_us(layers: Sequence[Any], work: Any) -> float | None:
    def run() -> None:
        for layer in layers:
            work(layer)

    try:
        return 1e3 * graph_ms(run) / len(layers)
    except (RuntimeError, OutOfResources) as failed:  # a library, or a tile that finds no room
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


def measure(name: str, form: str, results: list[dict[str, Any]]) -> None:
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


def one_row(name: str, form: str) -> None:
    """From the stream to what is added to it: norm, router, choice, experts."""
    model = MODELS[name]
    count, top_k, hidden, _ = model
    layers = make_layers(model, form)
    routers = [torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16) / 8 for _ in layers]
    gain, rule = torch.rand(hidden, device="cuda").bfloat16() + 0.5, SoftmaxRouting(top_k, p_norm=1)
    x = torch.randn(1, hidden, device="cuda", dtype=torch.bfloat16)

    def by_op(layer: Layer, router: Tensor) -> Tensor:
        normed, _ = norms_rotary.add_rms_norm(x, x, gain, 1e-6)
        ids, weights = route(logits(normed, router), rule)
        return OP(normed, ids, weights, *layer)

    def fused(layer: Layer, router: Tensor, stream: Tensor) -> Tensor:
        OP.add_to_row(stream, (gain, 1e-6), FusedExperts(router, None, None, rule, "silu"), *layer, None)
        return stream

    doubled = x + x
    expected = doubled + by_op(layers[0], routers[0])
    limit = 0.01 if form == "bf16" else 0.03
    away = error(fused(layers[0], routers[0], doubled.clone()), expected)
    print(f"{name}: relative error {away:.4f} {'ok' if away < limit else 'WRONG'}")
    read = 2 * count * hidden + top_k * 3 * hidden * model[3] * (2 if form == "bf16" else 1)
    shown = [f"{name}: one row, us per layer: floor {1e6 * read / BYTES_PER_S:.1f}"]
    for words, work in (("by op", by_op), ("fused", lambda *layer: fused(*layer, doubled))):
        pairs = list(zip(layers, routers, strict=True))
        time = layer_us(pairs, lambda pair: work(*pair))
        shown.append(f"{words} {time or -1:.1f}")
    print("; ".join(shown), flush=True)


Candidate = tuple[int, int, int, int]  # rows of a matrix, columns, warps, stages
CANDIDATES: tuple[Candidate, ...] = (
    (64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 4), (64, 256, 4, 2), (32, 128, 4, 4), (32, 256, 4, 3),
    (128, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3), (128, 128, 4, 2), (256, 64, 8, 3), (256, 128, 8, 2),
)  # fmt: skip
LEADS = (0.0, 0.5, 1.0)
TUNED_ROWS = (8, 16, 64, 128, 256, 1024)
FEW_ROWS = (1, 2, 4, 8)
SHARED_MEMORY = 220 << 10
BULK = (False, True) if torch.cuda.get_device_capability() >= (9, 0) else (False,)


def tilings(bm: int, gated: bool, form: str) -> list[Tiling]:
    found: list[Tiling] = []
    for bn, bk, warps, stages in CANDIDATES:
        for swap in (True, False) if bm <= 128 else (False,):
            room = (bm + bn * (2 if gated else 1)) * bk * stages * (2 if form == "bf16" else 1)
            too_many = bm * bn * (2 if gated else 1) > 128 * 256 or (swap and bn < 64)
            if room <= SHARED_MEMORY and not too_many and (form != "squares" or (bk == 128 and bn <= 128)):
                found += [Tiling(bm, bn, bk, warps, stages, swap, bulk=bulk) for bulk in BULK]
    return found


def sizes_of_blocks(pairs: int, count: int) -> list[int]:
    usual = choose_tiling(pairs, count, True, "16 bits").bm
    return sorted({max(16, usual // 2), usual, min(128, usual * 2)})


def tune(name: str, form: str) -> None:
    """Each product by itself; both have the same blocks of pairs."""
    model = MODELS[name]
    count, top_k, hidden, width = model
    layers = make_layers(model, form)

    def products(rows: int, bm: int, candidates: list[tuple[Tiling, bool]], measured: bool) -> list[float | None]:
        """Means over routings, which are the same for all candidates."""
        torch.manual_seed(0)
        x, *_ = make_rows(model, rows)
        routings = [Groups.of(make_rows(model, rows, lead)[1], count, bm) for lead in LEADS]
        pairs = rows * top_k
        gated, made = (torch.randn(pairs, n, device="cuda", dtype=torch.bfloat16) for n in (width, hidden))
        both = [(Operands.of(x, layer[0]), Operands.of(gated, layer[1])) for layer in layers]

        def run(operands: tuple[Operands, Operands], tile: Tiling, is_gate: bool) -> None:
            for groups in routings if measured else routings[:1]:
                if is_gate:
                    groups.multiply(operands[0], None, gated, tile, 1, top_k)
                else:
                    groups.multiply(operands[1], None, made, tile, 0, 1)

        if not measured:
            for tile, is_gate in candidates:
                run(both[0], tile, is_gate)
            return []
        times = [layer_us(both, lambda operands: run(operands, tile, is_gate)) for tile, is_gate in candidates]
        return [None if time is None else time / len(routings) for time in times]

    blocks = sorted({bm for rows in TUNED_ROWS for bm in sizes_of_blocks(rows * top_k, count)})
    by_size = {bm: [(tile, gated) for gated in (True, False) for tile in tilings(bm, gated, form)] for bm in blocks}
    began = clock.perf_counter()
    with compile_only(16, Workers(), load=False):
        # Kernels for few rows are launched while others end, which is compiled into them.
        for few, bm in sorted({(rows <= 16, bm) for rows in TUNED_ROWS for bm in sizes_of_blocks(rows * top_k, count)}):
            products(16 if few else 64, bm, by_size[bm], False)
    word = {"bf16": "16 bits", "fp8": "fp8", "squares": "fp8 by square"}[form]
    print(f"\n{name} {form}: compiled in {clock.perf_counter() - began:.0f} s; best tiles")
    print(f"    ({count}, {hidden}, {width}, {word!r}): (", flush=True)
    for rows in TUNED_ROWS:
        pairs = rows * top_k
        usual = [(choose_tiling(pairs, count, gated, word), gated) for gated in (True, False)]
        before = sum(time or math.inf for time in products(rows, usual[0][0].bm, usual, True))
        best: tuple[float, Tiling, Tiling] | None = None
        for bm in sizes_of_blocks(pairs, count):
            candidates = by_size[bm]
            times = products(rows, bm, candidates, True)
            found = sorted(
                (each, str(tile), gated, tile)
                for each, (tile, gated) in zip(times, candidates, strict=True)
                if each is not None
            )
            first, second = (next(each for each in found if each[2] is gated) for gated in (True, False))
            if best is None or first[0] + second[0] < best[0]:
                best = first[0] + second[0], first[3], second[3]
        assert best is not None
        print(f"        ({rows}, {best[1]}, {best[2]}),  # {best[0]:.1f} us, by the rule {before:.1f}", flush=True)
    print("    ),")
    if form == "bf16":
        x, ids, weights = make_rows(model, 1024)
        ours = layer_us(layers, lambda layer: OP(x, ids, weights, *layer))
        theirs = layer_us(layers, lambda layer: whole_grouped(model, x, ids, weights, layer))
        print(f"    # 1024 rows, the whole op: ours {ours or -1:.1f}, torch's products {theirs or -1:.1f}", flush=True)


def whole_grouped(model: tuple[int, ...], x: Tensor, ids: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    """The op with torch's products, sorting and gathering counted in."""
    count, top_k, hidden, width = model
    pairs = ids.reshape(-1)
    order = pairs.sort(stable=True).indices
    ends = torch.searchsorted(pairs[order], torch.arange(count, device=x.device, dtype=pairs.dtype), right=True).int()
    product = F.grouped_mm(x[order // top_k], layer[0].view(count, 2 * width, hidden).transpose(1, 2), offs=ends)
    gated = norms_rotary.silu_mul(product)
    made = F.grouped_mm(gated, layer[1].view(count, hidden, width).transpose(1, 2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (made[back].view(-1, top_k, hidden).float() * weights[..., None]).sum(1).to(x.dtype)


def compare_few(name: str, form: str) -> None:
    """Few rows: each pair by itself, and sorted."""
    model = MODELS[name]
    layers = make_layers(model, form)
    for rows in FEW_ROWS:
        made = make_rows(model, rows)
        line = f"{name} {form} {rows} rows: floor {floor_us(model, made[1], form):.1f}"
        for words, by_pair in (("pairs", True), ("sorted", False)):
            time = layer_us(layers, lambda layer: OP(*made, *layer, by_pair=by_pair))
            line += f", {words} {time or -1:.1f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--forms", default="", help="bf16, fp8, squares; all, or bf16 with --one-row and --tune")
    parser.add_argument("--one-row", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    task = parser.parse_args()
    forms = task.forms or ("bf16" if task.one_row or task.tune else "bf16,fp8,squares")
    results: list[dict[str, Any]] = []
    torch.manual_seed(0)
    with torch.inference_mode():
        pairs = [(name, form) for name in task.models.split(",") for form in forms.split(",")]
        for name, form in pairs:
            check(name, form)
            torch.cuda.empty_cache()
        if task.one_row or task.tune:
            for name, form in pairs:
                for work in (compare_few, tune) if task.tune else (one_row,):
                    work(name, form)
                    torch.cuda.empty_cache()
            return
        for name, form in pairs:
            measure(name, form, results)
            torch.cuda.empty_cache()
    if task.json is not None:
        task.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
