"""Tiny towers with numbers of such sizes that features are those of pictures."""

import re
import zlib
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context
from text_generation_inference.models.vision.families import find_family
from text_generation_inference.models.vision.tower import Tower
from text_generation_inference.weights.declare import Part

CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 3}
CLIP |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 7}
QWEN = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 36, "out_hidden_size": 32, "patch_size": 7}
QWEN |= {"window_size": 28, "fullatt_block_indexes": [1]}
TEXT = {"hidden_size": 32, "model_type": "mistral"}
FAMILIES: dict[str, tuple[str, dict[str, Any], list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        {"text_config": TEXT, "vision_config": CLIP},
        [((1, 28, 28, 3), ())] * 2,
    ),
    "qwen2.5": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {"hidden_size": 32}, "vision_config": QWEN},
        [((56, 42, 3), (1, 8, 6)), ((28, 70, 3), (1, 4, 10)), ((56, 42, 3), (1, 8, 6))],
    ),
}


def fill(tower: Tower, dtype: torch.dtype, device: torch.device) -> None:
    """With numbers of such sizes that features are those of pictures: ones of `load_dummy` would be mostly biases."""

    def draw(name: str, part: Part) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(part.whole_shape, generator=generator)
        if value.ndim > 1:
            value /= value[0].numel() ** 0.5
        else:
            value = 0.1 * value + (1.0 if re.search(r"(norm|ln_)\w*\.weight$", name) else 0.0)
        return value.to(device, dtype)

    for prefix, module in tower.walk():
        for declared in module.declare():
            setattr(module, declared.attribute, declared.storage.make(declared.named(prefix), draw, dtype))
        module.finish()


def make(name: str, ops: Ops, device: torch.device, dtype: torch.dtype) -> Tower:
    architecture, fields, _ = FAMILIES[name]
    config = Config({**fields, "architectures": [architecture]}, "config.json")
    family: Any = find_family(config)
    tower: Tower = family.tower(config, Context(ops, device=device, dtype=dtype))
    fill(tower, dtype, device)
    return tower
