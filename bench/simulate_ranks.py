"""SIMULATION, not a measurement of several cards: Llama 70B in bf16 split over 2, 4 and 8 H200.

    python bench/simulate_ranks.py                 # from the figures below
    python bench/simulate_ranks.py --measure       # on one GPU: rank 0's part of a few layers, captured, without a link

A step = what one rank's kernels take (measured with `--measure`: layers are timed by what a few more of them add), and
what 2 sums a layer take over NVLink (published figures of one- and two-shot kernels between H100s; NCCL's beside
them). The sums are taken to wait for nothing: ranks that are not in step with each other add to this.
"""

import argparse
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

LAYERS, HIDDEN = 80, 8192
ROWS, CONTEXT = (1, 64), 600
RANKS = (2, 4, 8)
FEW = (2, 6)  # layers that are timed
BYTES_PER_US = 4.2e6  # that kernels reach of an H200's 4.8 TB/s

# Microseconds of a sum, by ranks, at bytes: custom kernels on H100 (sglang PR 2904); between them a line.
LINK = {
    2: ((512, 3.7), (262144, 7.9), (1048576, 19.9)),
    4: ((512, 4.8), (262144, 13.9), (1048576, 31.1)),
    8: ((512, 5.9), (262144, 16.7), (1048576, 33.8)),
}
# NCCL in a graph, at bytes (vllm PR 42324; ranks not told); below, latency alone: taken as nearly as much.
NCCL = ((512, 22.0), (524288, 24.0), (1048576, 25.0))
# Milliseconds of one rank's kernels: (the rest of a step, one layer), by ranks and rows. `--measure` on an H200.
MEASURED: dict[int, dict[int, tuple[float, float]]] = {
    2: {1: (0.1005, 0.23151), 64: (0.0897, 0.27187)},
    4: {1: (0.0921, 0.13002), 64: (0.0625, 0.15541)},
    8: {1: (0.0466, 0.08568), 64: (0.0495, 0.0941)},
}


def on_line(points: tuple[tuple[int, float], ...], size: int) -> float:
    for (low, low_us), (high, high_us) in pairwise(points):
        if size <= high:
            return low_us + (high_us - low_us) * max(0, size - low) / (high - low)
    (low, low_us), (high, high_us) = points[-2:]
    return high_us + (high_us - low_us) * (size - high) / (high - low)


def read_bytes(world: int, rows: int) -> float:
    """That one rank reads in a step: its weights, and keys and values of the context, in bf16."""
    layer = (2 * HIDDEN + 2 * 1024 + 3 * 28672) * HIDDEN * 2
    cache = rows * CONTEXT * LAYERS * 2 * 1024 * 2
    return (LAYERS * layer + 32000 * HIDDEN * 2 + cache) / world


def simulate() -> None:
    print("SIMULATION of Llama 70B, bf16, H200, 600 tokens of context a row; ms per step, tokens/s of all rows")
    print("ranks  rows |  kernels    sums      step   tokens/s |  tokens/s, NCCL alone | bytes at 4.2 TB/s")
    for world in RANKS:
        for rows in ROWS:
            floor = read_bytes(world, rows) / BYTES_PER_US / 1e3
            found = MEASURED.get(world, {}).get(rows)
            kernels = floor if found is None else found[0] + LAYERS * found[1]
            size = rows * HIDDEN * 2
            nccl = (2 * LAYERS + 1) * on_line(NCCL, size) / 1e3
            sums = min(nccl, (2 * LAYERS + 1) * on_line(LINK[world], size) / 1e3)  # the faster one is chosen by size
            mark = " " if found is not None else "*"
            print(
                f"{world:>5}{rows:>6} |{kernels:>8.2f}{mark}{sums:>8.2f}{kernels + sums:>10.2f}"
                f"{1e3 * rows / (kernels + sums):>11.1f} |{1e3 * rows / (kernels + nccl):>16.1f}      |{floor:>10.2f}"
            )
    if any(world not in MEASURED for world in RANKS):
        print("*: not measured, the floor of the bytes stands for it")


class Unlinked:
    """Sums that end at once: the link's part of a step is not measured here."""

    def __init__(self, world: int) -> None:
        self._world = world

    def all_reduce(self, x: Any) -> Any:
        return x

    def all_gather(self, x: Any) -> list[Any]:
        return [x] * self._world

    def all_reduce_add_rms_norm(self, ops: Any, x: Any, *about: Any) -> Any:
        return ops.add_rms_norm(x, *about)


def measure(device_name: str, small: bool) -> None:
    """Of rank 0, which has as much as any other."""
    import torch

    from text_generation_inference.bench.floor import graph_ms
    from text_generation_inference.bench.shapes import write_shape
    from text_generation_inference.config import ServerConfig
    from text_generation_inference.devices.device import choose_device
    from text_generation_inference.engine.rank import load_model
    from text_generation_inference.kernels.batch import Batch, PagedMeta
    from text_generation_inference.models.registry import read_config
    from text_generation_inference.parallel import Parallel
    from text_generation_inference.runner import kv_cache
    from text_generation_inference.weights.source import ModelFolder

    device = choose_device(device_name, Path(tempfile.gettempdir()), not small, 1)
    at, dtype = device.torch_device, torch.float32 if small else torch.bfloat16
    found: dict[int, dict[int, tuple[float, float]]] = {}
    settings = ServerConfig(load_format="dummy", device=device_name)
    for world in RANKS:
        times: dict[tuple[int, int], float] = {}
        for layers in FEW:
            with tempfile.TemporaryDirectory() as name:
                write_shape("llama-2-70b", Path(name))
                path = Path(name) / "config.json"
                fields = {**json.loads(path.read_text()), "num_hidden_layers": layers}
                if small:
                    fields |= {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512}
                path.write_text(json.dumps(fields))
                source = ModelFolder(model_id="70b", path=Path(name), note="")
                config = read_config(Path(name))
                parallel: Any = Parallel(0, world, Unlinked(world))
                model = load_model(settings, source, config, None, device, dtype, parallel, lambda *_: None)
            size = device.limits.block_size
            blocks = -(-CONTEXT // size)
            cache = kv_cache.allocate(device, model.caches(dtype), num_blocks=max(ROWS) * blocks + 1)
            model.bind(cache, 2048)
            for rows in ROWS:
                tables = (1 + torch.arange(rows * blocks, dtype=torch.int32, device=at)).view(rows, blocks)
                last = (CONTEXT - 1) // size
                batch = Batch(
                    input_ids=torch.arange(rows, device=at),
                    positions=torch.full((rows,), CONTEXT - 1, device=at),
                    kv_index=tables[:, last].long() * size + (CONTEXT - 1) % size,
                    seq_lens=torch.full((rows,), CONTEXT, dtype=torch.int32, device=at),
                    meta=PagedMeta(tables, rows, [], [], CONTEXT, torch.arange(rows, dtype=torch.int32, device=at)),
                )

                def work(batch: Any = batch, model: Any = model, cache: Any = cache) -> None:
                    model.logits(model.forward(batch, cache))

                with torch.inference_mode():
                    times[layers, rows] = _host_ms(work) if small else graph_ms(work)
            del model, cache
            if not small:
                torch.cuda.empty_cache()
        few, more = FEW
        found[world] = {}
        for rows in ROWS:
            layer = (times[more, rows] - times[few, rows]) / (more - few)
            found[world][rows] = (round(times[few, rows] - few * layer, 4), round(layer, 5))
        print(f"{world} ranks, rank 0: {found[world]}", flush=True)
    MEASURED.update(found)


def _host_ms(work: Any) -> float:
    import time

    work()
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--measure", action="store_true")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tries the program, small")
    asked = options.parse_args()
    if asked.measure:
        measure(asked.device, asked.device == "cpu")
    simulate()


if __name__ == "__main__":
    main()
