# ruff: noqa: B023
"""Attention over latents (MLA) on a GPU at DeepSeek's sizes: checked against the definition, then measured.

    python bench/cuda_latent.py [--heads 16,128] [--tune] [--json FILE]

Times are of captured calls that go through several layers, so that nothing is still in the cache of the chip.
Decoding: the whole op, its kernels by name, and the time in which the cached tokens could be read at 4.2 TB/s. Prompts:
with keys and values for each head, and absorbed as captured steps do it, with the arithmetic they need per second. Then
the router, and the products of heads beside torch's. `--tune` tries other tiles, too.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from text_generation_inference.bench.floor import RATES, graph_ms
from text_generation_inference.kernels import latent as reference
from text_generation_inference.kernels.batch import PREFILL_TILE, Batch, PagedMeta
from text_generation_inference.kernels.routing import SigmoidRouting, SoftmaxRouting
from text_generation_inference.kernels.triton.latent import LatentChoice, TritonLatentAttention
from text_generation_inference.kernels.triton.ops import latent_in_flight
from text_generation_inference.kernels.triton.routing import route

CUDA = torch.device("cuda")
BYTES_PER_S = RATES["NVIDIA H200"].read_bytes_per_s
PLAIN, ROPE, VALUE, LATENT, SIZE = 128, 64, 128, 512, 16
QUERY, WIDTH = PLAIN + ROPE, LATENT + ROPE
SCALE = QUERY**-0.5
DECODE = [
    (1, 600), (1, 1000), (1, 8000), (4, 600), (16, 600), (32, 600), (64, 600), (64, 1000), (96, 600), (128, 600),
    (256, 600), (256, 1000), (512, 400), (64, 8000),
]  # fmt: skip
PROMPTS = [(1, 200), (16, 200), (1, 1024), (8, 1024), (1, 8192), (1, 32768)]
LAYERS_BYTES = 400 << 20
OP = TritonLatentAttention(
    torch.cuda.get_device_properties(0).multi_processor_count, torch.cuda.get_device_capability()
)
IN_FLIGHT = latent_in_flight(torch.cuda.get_device_capability())  # with copies in its own hands, beside the usual one


@dataclass
class Work:
    """One layer's inputs."""

    down: Tensor
    up: Tensor
    norm: tuple[Tensor, float]
    cos_sin: Tensor
    batch: Batch
    cache: Tensor

    def __call__(self, op: Callable[..., Tensor] = OP, batch: Batch | None = None) -> Tensor:
        q, latent = self.down[:, :-WIDTH].unflatten(1, (-1, QUERY)), self.down[:, -WIDTH:]
        return op(q, latent, self.up, self.norm, self.cos_sin, batch or self.batch, self.cache, SCALE)

    def exact(self) -> tuple[Tensor, Tensor]:
        """What the definition gives in float32, and what the cache holds then."""
        wide = replace(self, down=self.down.float(), up=self.up.float(), cache=self.cache.float())
        wide.norm = (self.norm[0].float(), self.norm[1])
        return wide(define), wide.cache


def define(
    q: Tensor, latent: Tensor, up: Tensor, norm: tuple[Tensor, float], cos_sin: Tensor, batch: Batch, cache: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """The definition, row by row: it takes much memory for each."""
    meta: PagedMeta = batch.meta
    parts: list[Tensor] = []
    reference.latent_cache(q[..., PLAIN:], latent, *norm, cos_sin, batch, cache)
    absorbed = reference.absorb(q, up[:, :PLAIN])
    for row, start in enumerate([*[None] * meta.num_decode, *meta.chunk_starts_cpu]):
        end, token = int(batch.seq_lens[row]), sum(len(part) for part in parts)
        count, spans = (1, ([], [])) if start is None else (end - start, ([start], [end]))
        alone = PagedMeta(meta.block_tables[row, None], int(start is None), *spans, end)
        one = replace(batch, seq_lens=batch.seq_lens[row, None], meta=alone)
        parts.append(reference.attend(absorbed[token : token + count], cache, one, scale, LATENT))
    return reference.expand_values(torch.cat(parts), up[:, PLAIN:])


def make(heads: int, decode: list[int], chunks: list[tuple[int, int]]) -> Work:
    """Rows with so many tokens each, then chunks (start, end), in blocks all over the cache."""
    spans = [(length - 1, length) for length in decode] + chunks
    counts = [-(-end // SIZE) for _, end in spans]
    ids = (torch.randperm(sum(counts)) + 1).split(counts)
    tables = torch.zeros((len(spans), max(counts)), dtype=torch.int32)
    positions, index, tiles, token = [], [], [], len(decode)
    for row, (start, end) in enumerate(spans):
        tables[row, : counts[row]] = ids[row]
        at = torch.arange(start, end)
        positions.append(at)
        index.append(ids[row][at // SIZE] * SIZE + at % SIZE)
        for first in range(start, end, PREFILL_TILE) if row >= len(decode) else ():
            tiles.append([row, token, first, min(PREFILL_TILE, end - first), start])
            token += tiles[-1][3]
    tiles.sort(key=lambda tile: tile[4] == 0)
    meta = PagedMeta(
        tables.to(CUDA), len(decode), [start for start, _ in chunks], [end for _, end in chunks],
        max(end for _, end in spans), torch.arange(len(spans), dtype=torch.int32, device=CUDA),
        torch.tensor(tiles, dtype=torch.int32, device=CUDA) if tiles else None, sum(tile[4] > 0 for tile in tiles),
    )  # fmt: skip
    joined = torch.cat(positions).to(CUDA)
    lengths = torch.tensor([end for _, end in spans], dtype=torch.int32, device=CUDA)
    batch = Batch(torch.zeros_like(joined), joined, torch.cat(index).to(CUDA), lengths, meta)
    angles = torch.rand(int(joined.max()) + 1, ROPE // 2, device=CUDA) * 6

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)

    return Work(
        random(len(joined), heads * QUERY + WIDTH),
        random(heads, PLAIN + VALUE, LATENT) / math.sqrt(LATENT),
        (torch.rand(LATENT, device=CUDA).bfloat16() + 0.5, 1e-6),
        torch.cat((angles.cos(), angles.sin()), -1),
        batch,
        random(sum(counts) + 1, SIZE, 1, WIDTH),
    )


def captured(work: Work) -> Batch:
    """Its batch as a captured pass has it: only tiles say what its prompts are."""
    meta: PagedMeta = work.batch.meta
    assert meta.prefill_tiles is not None
    return replace(
        work.batch,
        meta=replace(meta, chunk_starts_cpu=[], chunk_ends_cpu=[], num_prefix_tiles=len(meta.prefill_tiles)),
    )


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def check(heads: int) -> None:
    rows = [1, 63, 64, 65, 1000, 5000]
    works: list[tuple[list[int], list[tuple[int, int]]]] = [
        ([1], []), ([900], []), ([5000] * 4, []), (rows, []), (rows * 8, []), (rows * 25, []),
        ([], [(0, 1), (0, 700), (0, 128)]), ([40, 2000], [(0, 300), (1000, 1200), (16, 17), (0, 129)]),
    ]  # fmt: skip
    worst = 0.0
    for decode, chunks in works:
        for is_captured in (False, True) if chunks else (False,):
            work = make(heads, decode, chunks)
            expected, cache = work.exact()
            found = work(batch=captured(work) if is_captured else None)
            worst = max(worst, error(found, expected), error(work.cache, cache))
            assert not found.isnan().any()
    print(f"{heads} heads: largest relative error {worst:.4f} {'ok' if worst < 0.01 else 'WRONG'}", flush=True)


def layer_us(layers: list[Work], run: Callable[[Work], Any]) -> float:
    def all_layers() -> None:
        for layer in layers:
            run(layer)

    return 1e3 * graph_ms(all_layers) / len(layers)


def kernels_us(layers: list[Work], run: Callable[[Work], Any]) -> dict[str, float]:
    """Time of each kernel of a call, by the device's own clock."""
    for layer in layers:
        run(layer)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for layer in layers:
            run(layer)
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in recorded.events() or []:
        if event.device_type.name != "CUDA":
            continue
        times[event.name] += (event.time_range.end - event.time_range.start) / len(layers)
    return dict(times)


def make_layers(heads: int, decode: list[int], chunks: list[tuple[int, int]]) -> list[Work]:
    first = make(heads, decode, chunks)
    count = max(2, min(24, LAYERS_BYTES // (first.cache.nbytes + first.up.nbytes)))
    return [first] + [make(heads, decode, chunks) for _ in range(count - 1)]


def measure_decode(heads: int, results: list[dict[str, Any]]) -> None:
    print(f"\ndecoding, {heads} heads: us per layer\n{'rows':>6}{'tokens':>8}{'floor':>8}{'all':>8}  kernels")
    for rows, length in DECODE:
        layers = make_layers(heads, [length] * rows, [])
        floor = 1e6 * (rows * length * WIDTH * 2 + layers[0].up.nbytes) / BYTES_PER_S
        time, parts = layer_us(layers, lambda work: work()), kernels_us(layers, lambda work: work())
        shown = "  ".join(f"{name} {part:.1f}" for name, part in parts.items())
        if IN_FLIGHT is not None:
            OP.in_flight = IN_FLIGHT
            parts_of = kernels_us(layers, lambda work: work())
            OP.in_flight = None
            shown += "  |  " + "  ".join(f"{name} {part:.1f}" for name, part in parts_of.items() if "flight" in name)
        print(f"{rows:>6}{length:>8}{floor:>8.1f}{time:>8.1f}  {shown}", flush=True)
        results.append({"heads": heads, "rows": rows, "tokens": length, "floor": floor, "us": time, "kernels": parts})


def tune(heads: int) -> None:
    """Other tiles and numbers of parts."""
    for rows, length in ((1, 1000), (16, 600), (64, 600), (256, 600)):
        layers = make_layers(heads, [length] * rows, [])
        found: list[tuple[float, Any, int]] = []
        for choice in (
            LatentChoice(16, 64, 4, 2), LatentChoice(16, 64, 4, 3), LatentChoice(16, 64, 8, 3),
            LatentChoice(16, 32, 4, 3), LatentChoice(16, 32, 4, 4), LatentChoice(32, 64, 8, 3),
        ):  # fmt: skip
            for splits in sorted({1, 2, 3, 4, 8, 16, 32, 64}):
                if 64 <= rows * splits <= 1100 or (rows == 1 and splits >= 8):
                    OP.decode_choice, OP.splits = choice, splits
                    try:
                        found.append((layer_us(layers, lambda work: work()), choice, splits))
                    except Exception as failed:
                        print(f"  {choice}: {str(failed).splitlines()[0][:90]}")
                        break
        OP.decode_choice = OP.splits = None
        print(f"\n{rows} rows of {length}, {heads} heads: ours {layer_us(layers, lambda work: work()):.1f}")
        for time, choice, splits in sorted(found, key=lambda each: each[0])[:6]:
            print(f"  {time:8.1f}  {choice}  {splits} parts", flush=True)


def measure_prompts(heads: int, is_tuned: bool, results: list[dict[str, Any]]) -> None:
    print(f"\nprompts, {heads} heads: us per layer")
    print(f"{'prompts':>8}{'tokens':>8}{'expanded':>10}{'Tflop/s':>9}{'absorbed':>10}")
    for count, length in PROMPTS:
        layers = [make(heads, [], [(0, length)] * count) for _ in range(2)]
        parts = kernels_us(layers, lambda work: work())
        expanded = parts.get("latent_prompts", math.nan)
        rate = count * heads * length**2 * (QUERY + VALUE) / expanded / 1e6
        batches = {id(work): captured(work) for work in layers}
        absorbed = math.nan
        if count * length <= 8192:
            OP.prefill_choice = None
            absorbed = kernels_us(layers, lambda work: work(batch=batches[id(work)])).get("latent_prefill", math.nan)
        print(f"{count:>8}{length:>8}{expanded:>10.1f}{rate:>9.0f}{absorbed:>10.1f}", flush=True)
        print("          " + "  ".join(f"{name[:40]} {time:.1f}" for name, time in parts.items()))
        results.append({"heads": heads, "prompts": count, "tokens": length, "us": parts, "absorbed": absorbed})
        tried = (LatentChoice(64, 64, 8, 2), LatentChoice(32, 64, 4, 2)) if is_tuned and count * length <= 8192 else ()
        for choice in tried:
            OP.prefill_choice = choice
            try:
                time = kernels_us(layers, lambda work: work(batch=batches[id(work)]))["latent_prefill"]
                print(f"          absorbed with {choice}: {time:.1f}")
            except Exception as failed:
                print(f"          {choice}: {str(failed).splitlines()[0][:90]}")
        OP.prefill_choice = None


def measure_others(heads: int) -> None:
    """The products of heads as torch does them, copies included; and the router."""
    print(f"\n{heads} heads: torch's products before and after attention, us")
    for rows in (1, 16, 64, 256):
        layers = [make(heads, [2] * rows, []) for _ in range(8)]
        mixed = torch.randn(rows, heads, LATENT, device=CUDA, dtype=torch.bfloat16)

        def before(work: Work) -> Tensor:
            q = work.down[:, :-WIDTH].unflatten(1, (-1, QUERY))
            return reference.absorb(q, work.up[:, :PLAIN])

        def after(work: Work) -> Tensor:
            return reference.expand_values(mixed, work.up[:, PLAIN:])

        times = layer_us(layers, before), layer_us(layers, after)
        print(f"{rows:>6}{times[0]:>8.1f}{times[1]:>8.1f}", flush=True)
    rules = {
        "64, 6 of them": (64, SoftmaxRouting(6)),
        "160 in 8 groups": (160, SoftmaxRouting(6, factor=16.0, num_groups=8, top_groups=3)),
        "256 in 8 groups, corrected": (256, SigmoidRouting(8, factor=2.5, num_groups=8, top_groups=4)),
    }
    for name, (count, rule) in rules.items():
        correction = torch.randn(count, device=CUDA) if isinstance(rule, SigmoidRouting) else None
        for rows in (1, 256):
            scores = torch.randn(rows, count, device=CUDA)
            found, expected = route(scores, rule, correction), rule(scores, correction)
            same = float((found[0].long() == expected[0]).float().mean())
            time = 1e2 * graph_ms(lambda: [route(scores, rule, correction) for _ in range(10)] and None)
            plain = 1e2 * graph_ms(lambda: [rule(scores, correction) for _ in range(10)] and None)
            print(f"router {name}, {rows} rows: {time:.1f} us, plain torch {plain:.1f}; same experts {same:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    task = parser.parse_args()
    all_heads = [int(each) for each in task.heads.split(",")]
    results: list[dict[str, Any]] = []
    torch.manual_seed(0)
    with torch.inference_mode():
        for heads in all_heads:
            check(heads)
        for heads in all_heads:
            measure_decode(heads, results)
            if task.tune:
                tune(heads)
            measure_prompts(heads, task.tune, results)
            torch.cuda.empty_cache()
        measure_others(all_heads[0])
    if task.json is not None:
        task.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
