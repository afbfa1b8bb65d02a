"""Vision towers on a GPU: how near features are to plain torch in float32, milliseconds per picture, and where they go.

    python bench/cuda_tower.py [--shapes llava-next-7b,qwen2.5-vl-7b] [--pictures 1,8,32] [--dtype bfloat16]
    python bench/cuda_tower.py --tiny --device cpu          the script itself, tried out

Random weights, pictures of 672x672. `queued`: until the host has queued a pass; `done`: until it has been computed.
Where both are alike, the host is what is waited for. Then the same by kind of kernel, from torch's profiler, in
microseconds per picture and launches per pass; the first pass over pictures of sizes that were never seen; and
attention over runs beside `scaled_dot_product_attention`. `plain`: the same tower with ops in plain torch; `captured`:
as the engine computes it when the same shapes come again, through graphs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from text_generation_inference.devices.device import Device, choose_device
from text_generation_inference.kernels import segments as definition
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import read_config
from text_generation_inference.models.vision.families import find_family
from text_generation_inference.models.vision.tower import Tower, run_parts
from text_generation_inference.pictures.rule import PictureLayout
from text_generation_inference.pictures.rules import find_rule
from text_generation_inference.runner.tower_graphs import TowerGraphs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench" / "peers"), str(ROOT / "tests" / "devices")]
from picture_shapes import write_seeing  # noqa: E402
from towers import fill  # noqa: E402

MOST_AT_ONCE = 4  # pictures whose features are compared
SIDES = ((700, 420), (336, 980), (1064, 644), (448, 448), (252, 1260))  # that nobody has seen
KINDS = {  # by words in the names of kernels, the first that fits
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "rotation": ("rotate_heads",),
    "norms": ("_norm_kernel", "layer_norm", "rms_norm"),
    "gates": ("_gate_kernel", "silu", "gelu", "sigmoid"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "addmm", "aten::mm", "splitk"),
    "moves": ("memcpy", "memset", "copy", "catarray", "index", "gather", "scatter", "aten::cat"),
}


class Bench:
    def __init__(self, device: Device, folder: Path, given: argparse.Namespace) -> None:
        self.device, self.given = device, given
        self.config = read_config(folder)
        rule = find_rule(folder, json.loads((folder / "config.json").read_text()))
        assert rule is not None
        self.rule = rule
        self.layout = rule.layout(given.size, given.size)

    def make(self, ops: Ops, dtype: torch.dtype) -> Tower:
        """The same numbers each time, but for rounding."""
        family = find_family(self.config)
        assert family is not None
        where = self.device.torch_device
        tower: Tower = family.tower(self.config, Context(ops, device=where, dtype=dtype))
        with self.device.stream():
            fill(tower, dtype, where)
        return tower

    def draw(self, layouts: Sequence[PictureLayout]) -> tuple[list[Tensor], list[tuple[int, ...]]]:
        with self.device.stream():
            where = self.device.torch_device
            pixels = [torch.randint(0, 256, each.shape, dtype=torch.uint8, device=where) for each in layouts]
        self.device.event().wait()
        return pixels, [tuple(each.grid) for each in layouts]

    @torch.inference_mode()
    def encode(self, tower: Tower, layouts: Sequence[PictureLayout]) -> list[Tensor]:
        torch.manual_seed(0)
        pixels, grids = self.draw(layouts)
        with self.device.stream():
            made = [each.float() for each in tower.encode(pixels, grids)]
        self.device.event().wait()
        return made

    def compare(self, tower: Tower) -> None:
        """Relative errors of features, of pictures of one size and of several."""
        dtype = getattr(torch, self.given.dtype)
        layouts = [self.layout, self.layout, *(self.rule.layout(*side) for side in SIDES[: MOST_AT_ONCE - 2])]
        exact = self.encode(self.make(Ops(), torch.float32), layouts)
        apart = float((exact[0] - exact[1]).norm() / exact[0].norm())
        print(f"two pictures are {apart:.1e} apart: what errors are small beside", flush=True)
        for what, other in {
            f"ours in {self.given.dtype}": tower,
            f"plain in {self.given.dtype}": self.make(Ops(), dtype),
            "ours in float32": self.make(self.device.ops, torch.float32),
        }.items():
            both = zip(self.encode(other, layouts), exact, strict=True)
            errors = [float((found - wanted).norm() / wanted.norm()) for found, wanted in both]
            print(f"{what}: relative errors {', '.join(f'{each:.1e}' for each in errors)}", flush=True)

    @torch.inference_mode()
    def timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds until the host has queued it, and until it is done."""
        start = time.perf_counter()
        with self.device.stream():
            work()
        queued = time.perf_counter() - start
        self.device.event().wait()
        return 1000 * queued, 1000 * (time.perf_counter() - start)

    def measure(self, work: Callable[[], object]) -> tuple[float, float]:
        found = [self.timed(work) for _ in range(self.given.rounds + 1)][1:]
        return statistics.median(each[0] for each in found), statistics.median(each[1] for each in found)

    def show_times(self, tower: Tower, plain: Tower) -> None:
        for count in self.given.pictures:
            work = partial(tower.encode, *self.draw([self.layout] * count))
            queued, done = self.measure(work)
            _, beside = self.measure(partial(plain.encode, *self.draw([self.layout] * count)))
            print(
                f"{count} at once: {done / count:.2f} ms per picture (queued after {queued:.1f} of {done:.1f} ms);"
                f" plain {beside / count:.2f}",
                flush=True,
            )
            self.show_kinds(work, count)
            self.show_captured(tower, count)

    def show_captured(self, tower: Tower, count: int) -> None:
        """The same as the engine computes it when these shapes come again: pixels come from the host."""
        if not self.device.limits.captures_steps:
            return
        graphs = TowerGraphs(self.device, Seeing(tower))  # pyright: ignore
        pixels, grids = self.draw([self.layout] * count)
        host = [each.cpu() for each in pixels]

        def work() -> list[Tensor]:
            return run_parts(graphs.encode(host, grids))

        first, capturing = (self.timed(work)[1] for _ in range(2))
        if graphs.num_captured:
            queued, done = self.measure(work)
            with torch.inference_mode(), self.device.stream():
                both = zip(work(), tower.encode(pixels, grids), strict=True)
                error = max(
                    float((found.float() - wanted.float()).norm() / wanted.float().norm()) for found, wanted in both
                )
            print(
                f"    captured: {done / count:.2f} ms per picture (queued after {queued:.1f} of {done:.1f} ms), first"
                f" {first:.1f} ms, with capturing {capturing:.1f} ms; relative error {error:.1e}",
                flush=True,
            )
        else:
            print("    too large to be captured, or there was no memory", flush=True)
        graphs.forget()

    @torch.inference_mode()
    def show_kinds(self, work: Callable[[], object], count: int) -> None:
        on_device = self.device.torch_device.type != "cpu"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_device else [])
        with profile(activities=activities) as found:
            with self.device.stream():
                work()
            self.device.event().wait()
        kinds: dict[str, list[float]] = {}
        others: dict[str, float] = {}
        for each in found.key_averages():
            if on_device and each.device_type != DeviceType.CUDA:
                continue
            took: float = each.self_device_time_total if on_device else each.self_cpu_time_total
            name = each.key.lower()
            kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "others")
            so_far = kinds.setdefault(kind, [0.0, 0.0])
            so_far[0], so_far[1] = so_far[0] + took / count, so_far[1] + each.count
            if kind == "others":
                others[each.key[:70]] = took / count
        said = [f"{kind} {took:.0f} ({calls:.0f})" for kind, (took, calls) in sorted(kinds.items(), key=_by_time)]
        print(f"    us per picture (launches): {', '.join(said)}")
        most = sorted(others.items(), key=lambda item: -item[1])[:3]
        if most:
            print(f"    most of the others: {'; '.join(f'{name} {took:.0f}' for name, took in most)}", flush=True)

    def show_new_sizes(self, tower: Tower) -> None:
        said: list[str] = []
        for side in SIDES:
            work = partial(tower.encode, *self.draw([self.rule.layout(*side)]))
            first, again = self.timed(work)[1], self.measure(work)[1]
            said.append(f"{side[0]}x{side[1]} {first:.1f} ({again:.1f})")
        print(f"a picture of a new size, first ms (again): {', '.join(said)}", flush=True)

    def show_attention(self) -> None:
        """The runs of the tower's blocks, four pictures at once, as views of one product."""
        vision = self.config.inner("vision_config")
        is_qwen = "num_heads" in vision.fields
        heads = vision.integer("num_heads" if is_qwen else "num_attention_heads")
        dim = vision.integer("hidden_size") // heads
        runs = {"windows": [64] * 144, "pictures": [2304] * 4, "uneven windows": [64, 48, 32] * 48}
        runs = runs if is_qwen else {"tiles": [577] * 20}
        where, dtype = self.device.torch_device, getattr(torch, self.given.dtype)
        for name, lengths in runs.items():
            if self.given.tiny:
                lengths = lengths[:3]
            with self.device.stream():
                q, k, v = torch.randn(sum(lengths), 3, heads, dim, device=where).to(dtype).unbind(1)
            segments = Segments(lengths, where)
            times = [
                self.measure(partial(_repeat, partial(op, q, k, v, segments)))[1] * 1000 / _REPEATS
                for op in (self.device.ops.segment_attention, definition.segment_attention)
            ]
            print(f"attention over {name} of {heads} heads of {dim}: {times[0]:.0f} us, by torch {times[1]:.0f}")


class Seeing:
    """What graphs ask of a model."""

    def __init__(self, tower: Tower) -> None:
        self.encode, self.lay_out_pictures = tower.in_parts, tower.lay_out


_REPEATS = 20


def _repeat(work: Callable[[], object]) -> None:
    for _ in range(_REPEATS):
        work()


def _by_time(item: tuple[str, list[float]]) -> float:
    return -item[1][0]


def run(device: Device, shape: str, folder: Path, given: argparse.Namespace) -> None:
    print(f"\n{shape}, {given.dtype}", flush=True)
    bench = Bench(device, folder, given)
    dtype: Any = getattr(torch, given.dtype)
    tower = bench.make(device.ops, dtype)
    bench.compare(tower)
    bench.show_new_sizes(tower)
    bench.show_times(tower, bench.make(Ops(), dtype))
    bench.show_attention()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llava-next-7b,qwen2.5-vl-7b")
    parser.add_argument("--pictures", default="1,2,3,4,8,32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--size", type=int, default=672)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="few and small layers, few pictures")
    given = parser.parse_args()
    given.pictures = [int(count) for count in ("1,2" if given.tiny else given.pictures).split(",")]
    if given.tiny:
        given.rounds = 2
    with tempfile.TemporaryDirectory() as name:
        device = choose_device(given.device, Path(name) / "cache", True, None)
        print(f"{device.description}; {device.ops.description}; torch {torch.__version__}")
        try:
            for shape in given.shapes.split(","):
                run(device, shape, write_seeing(shape, Path(name) / shape, given.tiny), given)
        finally:
            device.close()


if __name__ == "__main__":
    main()
