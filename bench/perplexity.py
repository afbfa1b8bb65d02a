"""What quantisation costs: perplexity of the embedded model on a fixed text, by method and bits.

    python bench/perplexity.py [--only NAME ...] [--out FOLDER] [--window 512] [--device cpu] [--json FILE]

The text of `bench/data` is cut in two: GPTQ calibrates on the first part, everything is scored on the second, in
windows, in float32 with the ops that define what a model computes. Checkpoints are made with `make_quantized` into
FOLDER (kept if it is given, and used again) and loaded as any other; what is put into codes on loading is what
`--quantize` does. The embedded model is itself stored in Q4_1 (blocks of 32), so that methods with small blocks and
zero points find most of its values as they were: compare rows of one kind of groups.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from awq import AwqSettings, make_awq
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from text_generation_inference.bench.tables import markdown
from text_generation_inference.config import ServerConfig, cache_folder
from text_generation_inference.devices.device import Device, choose_device
from text_generation_inference.errors import TgiError
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.make_quantized.make import Maker, Source
from text_generation_inference.make_quantized.output import Output
from text_generation_inference.make_quantized.passes import make_batch
from text_generation_inference.make_quantized.settings import MakingSettings
from text_generation_inference.make_quantized.solver import round_to_nearest
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import build, read_config, read_quantization
from text_generation_inference.quant.choose import assign_methods, choose_quantization
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.runner import kv_cache
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.declare import Parts, Read, read_plain
from text_generation_inference.weights.load import load_checkpoint
from text_generation_inference.weights.source import ModelFolder, find_model

TEXT = Path(__file__).parent / "data/perplexity.txt"
CALIBRATION_SHARE = 0.6
Round = Callable[[torch.Tensor], torch.Tensor]


class Rounded(Method):
    """Values that a format has, in plain matrices."""

    def __init__(self, round_matrix: Round) -> None:
        self._round = round_matrix

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        return self.make(parts, lambda name, part: read_plain(name, part, checkpoint, device), dtype)

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        return torch.cat([self._round(make(name, part).to(dtype)) for name, part in parts])


class RoundedMatrices(Quantization):
    """All matrices of layers."""

    def __init__(self, round_matrix: Round) -> None:
        self._method = Rounded(round_matrix)

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        return self._method if matrix.may_round and matrix.is_multiplied else None


class Given(Method):
    """Values by the names of their tensors."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values = values

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        return torch.cat([part.arrange_rows(self._values[name]).to(device, dtype) for name, part in parts])


class GivenMatrices(Quantization):
    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values, self._method = values, Given(values)

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        return self._method if all(f"{name}.weight" in self._values for name in names) else None


def nearest(**settings: Any) -> Quantization:
    chosen = MakingSettings(**settings)
    return RoundedMatrices(lambda weight: round_to_nearest(weight, chosen).widen())


def blocks(kind: Kind) -> Quantization:
    def round_matrix(weight: torch.Tensor) -> torch.Tensor:
        values = dequantize(quantize(weight.cpu().numpy().astype(np.float32), kind), kind)
        return torch.from_numpy(values).to(weight.device)

    return RoundedMatrices(round_matrix)


def round_to_nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits with a scale in e4m3 for 16 inputs, and one in float32 for the matrix; weight `[out, in]`."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = weight.float().unflatten(1, (-1, 16))
    largest = blocks.abs().amax(2, keepdim=True)
    whole = largest.max() / (6 * 448)
    scales = (largest / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    shares = (blocks / scales.clamp(min=1e-30)).clamp(-6, 6)
    codes = torch.bucketize(shares.abs(), (numbers[1:] + numbers[:-1]) / 2)
    return (numbers[codes] * shares.sign() * scales).flatten(1)


# To the nearest codes: with scales that hold the largest weight, or those with the least error.
NEAREST: dict[str, dict[str, Any]] = {
    "int8 g128 nearest": {"bits": 8, "clip": False},
    "int4 g128 nearest": {"clip": False},
    "int4 g128 nearest, least error": {},
    "int4 g128 nearest, zero points": {"symmetric": False},
    "int4 g32 nearest": {"group_size": 32, "clip": False},
    "int4 g32 nearest, least error": {"group_size": 32},
    "int3 g128 nearest, least error": {"bits": 3},
    "int2 g128 nearest, least error": {"bits": 2},
}
# Without a word about it, inputs are rounded in their order.
GPTQ: dict[str, dict[str, Any]] = {
    "GPTQ int8 g128": {"bits": 8},
    "GPTQ int4 g128": {},
    "GPTQ int4 g128, largest weight": {"clip": False},
    "GPTQ int4 g128 act-order": {"act_order": True},
    "GPTQ int4 g128 static groups": {"static_groups": True},  # what is made by default
    "GPTQ int4 g128 zero points": {"symmetric": False},
    "GPTQ int4 g64": {"group_size": 64},
    "GPTQ int4 g64 act-order": {"group_size": 64, "act_order": True},
    "GPTQ int4 g64 static groups": {"group_size": 64, "static_groups": True},
    "GPTQ int4 g32": {"group_size": 32},
    "GPTQ int3 g128": {"bits": 3},
    "GPTQ int3 g128 act-order": {"bits": 3, "act_order": True},
    "GPTQ int2 g128": {"bits": 2},
    "GPTQ int2 g128 act-order": {"bits": 2, "act_order": True},
}
# Nothing but measured: bench/awq.py.
AWQ = {
    "AWQ int4 g128, zero points": AwqSettings(),
    "AWQ int4 g128, symmetric": AwqSettings(symmetric=True),
    "AWQ int4 g128, no clipping": AwqSettings(clip=False),
    "AWQ and GPTQ act-order int4 g128": AwqSettings(symmetric=True, fits=True, act_order=True),
}
BLOCKS = {"Q4_0": Kind.Q4_0, "Q5_0": Kind.Q5_0, "Q8_0": Kind.Q8_0, "MXFP4": Kind.MXFP4}
ON_LOADING = ("fp8", "eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4")


def cut(ids: list[int], window: int) -> list[list[int]]:
    return [ids[first : first + window] for first in range(0, len(ids), window) if len(ids[first : first + window]) > 1]


@torch.inference_mode()
def score(folder: Path, quantization: Quantization | None, windows: list[list[int]], device: Device) -> float:
    """The perplexity of all tokens but the first of each window."""
    checkpoint, config = Checkpoint.open(folder), read_config(folder)
    model = build(config, Context(Ops(), device=device.torch_device))
    model.adapt(checkpoint.names(), checkpoint.are_equal)
    if quantization is not None:
        quantization = quantization.named_as_in({name: checkpoint.shape(name) for name in checkpoint.names()})
    assign_methods(model, quantization)
    ignored = (*model.ignored, *(quantization.may_leave if quantization is not None else ()))
    load_checkpoint(model, checkpoint, torch.float32, device.torch_device, ignored)
    most = max(map(len, windows))
    caches = kv_cache.allocate(device, model.caches(torch.float32), 2 + most // device.limits.block_size)
    model.bind(caches, most)
    total, count = 0.0, 0
    for window in windows:
        logits = model.logits(model.forward(make_batch([window], device), caches))
        wanted = torch.tensor(window[1:], device=logits.device)
        total += float(torch.nn.functional.cross_entropy(logits[:-1].float(), wanted, reduction="sum"))
        count += len(wanted)
    return math.exp(total / count)


def make_checkpoint(
    source: ModelFolder, folder: Path, windows: list[list[int]], device: Device, window: int, **settings: Any
) -> None:
    if (folder / "config.json").exists():
        return
    chosen = MakingSettings(sequence_length=window, num_samples=len(windows), **settings)
    Maker(Source(source.path, source.weights_path), Output(folder), chosen, device).run(windows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--only", nargs="*", default=[], help="rows, by the beginnings of their names")
    parser.add_argument("--folder", action="append", default=[], help="score this checkpoint, too")
    parser.add_argument("--out", type=Path, help="where checkpoints are made and kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = ServerConfig(model_id=options.model_id)
    device = choose_device(options.device, cache_folder(config), False, None)
    source = find_model(config)
    ids = Tokenizer.load(source.path).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    split = int(len(ids) * CALIBRATION_SHARE)
    calibration, held_out = cut(ids[:split], options.window), cut(ids[split:], options.window)
    rows: list[dict[str, Any]] = []

    def add(name: str, find: Callable[[], tuple[Path, Quantization | None]]) -> None:
        names = ("float32", *(Path(folder).name for folder in options.folder), *options.only)
        if options.only and not any(name.startswith(each) for each in names):
            return
        started = time.perf_counter()
        try:
            folder, quantization = find()
            made = time.perf_counter()
            found = score(folder, quantization, held_out, device)
        except (TgiError, AssertionError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            return
        against = found / rows[0]["perplexity"] - 1 if rows else 0.0
        rows.append({"method": name, "perplexity": found, "loss": against, "seconds to make": round(made - started)})
        print(f"{name}: {found:.4f} ({100 * against:+.2f}%), {time.perf_counter() - started:.0f} s", file=sys.stderr)

    def load_made(out: Path, name: str, settings: dict[str, Any]) -> tuple[Path, Quantization | None]:
        folder = out / name.replace(" ", "-").replace(",", "")
        make_checkpoint(source, folder, calibration, device, options.window, **{"static_groups": False, **settings})
        return folder, read_quantization(read_config(folder))

    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        add("float32", lambda: (source.weights_path, None))
        for name, settings in NEAREST.items():
            add(name, lambda settings=settings: (source.weights_path, nearest(**settings)))
        for name, settings in GPTQ.items():
            add(name, lambda name=name, settings=settings: load_made(out, name, settings))
        for name, chosen in AWQ.items():
            made = lambda chosen=chosen: GivenMatrices(make_awq(source, calibration, device, chosen))  # noqa: E731
            add(name, lambda made=made: (source.weights_path, made()))
        for name, kind in BLOCKS.items():
            add(name, lambda kind=kind: (source.weights_path, blocks(kind)))
        add("NVFP4", lambda: (source.weights_path, RoundedMatrices(round_to_nvfp4)))
        for name in ON_LOADING:
            add(f"--quantize {name}", lambda name=name: (source.weights_path, choose_quantization(name, None)))
        for folder in map(Path, options.folder):
            add(folder.name, lambda folder=folder: (folder, read_quantization(read_config(folder))))
    about = f"{len(calibration)} windows to calibrate on, {len(held_out)} to score, of {options.window} tokens"
    print(about)
    table = [
        [row["method"], f"{row['perplexity']:.3f}", f"{100 * row['loss']:+.2f}%", str(row["seconds to make"])]
        for row in rows
    ]
    print(markdown(["Method", "Perplexity", "Against float32", "Seconds to make"], table))
    if options.json:
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
