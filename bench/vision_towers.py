"""How long a tower takes for a picture, in the shapes of published models with random weights.

    python bench/vision_towers.py [--only smolvlm-256m,...] [--device cpu|cuda] [--dtype float32] [--pictures 1,4]
        [--rounds 5] [--beside]

`--beside` times the tower of `transformers` in turns with ours, on the same pixels and in the same type.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from text_generation_inference.config import ServerConfig, cache_folder
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context
from text_generation_inference.models.vision.families import find_family
from text_generation_inference.models.vision.tower import Tower
from text_generation_inference.weights.load import load_dummy

CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
CLIP |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14}
SMOL = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
SMOL |= {"image_size": 512, "patch_size": 16, "model_type": "idefics3_vision"}
QWEN = {"hidden_size": 1280, "out_hidden_size": 3584}
# architecture, config, shape of the pixels of a picture, grid
SHAPES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "smolvlm-256m, a tile": (
        "Idefics3ForConditionalGeneration",
        {"text_config": {"hidden_size": 576}, "vision_config": SMOL, "scale_factor": 4},
        (1, 512, 512, 3),
        (0, 0),
    ),
    "smolvlm-256m, 13 tiles": (
        "Idefics3ForConditionalGeneration",
        {"text_config": {"hidden_size": 576}, "vision_config": SMOL, "scale_factor": 4},
        (13, 512, 512, 3),
        (3, 4),
    ),
    "llava-next-7b, 672x672": (
        "LlavaNextForConditionalGeneration",
        {"text_config": {"model_type": "mistral"}, "vision_config": CLIP},
        (5, 336, 336, 3),
        (2, 2, 48, 48),
    ),
    "qwen2.5-vl-7b, 672x672": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {"hidden_size": 3584}, "vision_config": QWEN},
        (672, 672, 3),
        (1, 48, 48),
    ),
    "qwen2.5-vl-7b, 1092x1932": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {"hidden_size": 3584}, "vision_config": QWEN},
        (1092, 1932, 3),
        (1, 78, 138),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pictures", default="1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", action="store_true")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    ops = CpuDevice(cache_folder(ServerConfig(model_id="none"))).ops if device.type == "cpu" else Ops()
    print(f"{args.device}, {args.dtype}, {torch.get_num_threads()} threads; medians of {args.rounds} rounds, ms")
    for name, (architecture, fields, shape, grid) in SHAPES.items():
        if args.only and not any(each in name for each in args.only.split(",")):
            continue
        tower = make(architecture, fields, Context(ops, device=device, dtype=dtype))
        for count in map(int, args.pictures.split(",")):
            pixels = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(count)]
            works: dict[str, Callable[[], object]] = {"ours": partial(tower.encode, pixels, [grid] * count)}
            if args.beside:
                works["transformers"] = beside(architecture, fields, pixels, device, dtype)
            times = measure(works, args.rounds, device)
            said = ", ".join(f"{who} {statistics.median(each) * 1e3:,.1f}" for who, each in times.items())
            print(f"{name}, {count} at once: {said}", flush=True)


def make(architecture: str, fields: dict[str, Any], context: Context) -> Tower:
    config = Config({**fields, "architectures": [architecture]}, "config.json")
    family = find_family(config)
    assert family is not None
    tower: Tower = family.tower(config, context)
    load_dummy(tower, context.dtype, context.device, 0)
    return tower


def beside(
    architecture: str, fields: dict[str, Any], pixels: list[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """The encoder of `transformers` alone, without what joins it to a decoder."""
    import transformers

    if "Idefics3" not in architecture and "LlavaNext" not in architecture:
        raise SystemExit("`--beside` is for towers of tiles: choose them with --only")
    vision = getattr(transformers, architecture).config_class(**fields).vision_config
    with torch.device(device):
        if "Idefics3" in architecture:
            from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

            model: Any = Idefics3VisionTransformer._from_config(vision, dtype=dtype)
        else:
            model = transformers.CLIPVisionModel._from_config(vision, dtype=dtype)
    model.eval()

    def run() -> object:
        tiles = torch.cat(pixels).permute(0, 3, 1, 2)
        return model(((tiles.float() / 255 - 0.5) / 0.5).to(dtype))

    return run


@torch.inference_mode()
def measure(works: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """In turns, after one round that does not count."""
    times: dict[str, list[float]] = {who: [] for who in works}
    for number in range(rounds + 1):
        for who, work in works.items():
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:
                times[who].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
