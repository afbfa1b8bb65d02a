"""Towers with Triton's ops against the same towers in plain torch: on the GPU, or through Triton's interpreter."""

import importlib.util
import re
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_interpreter import interpreter_as_hardware  # noqa: F401, a fixture

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.triton.ops import load_ops
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FAMILIES))
@torch.inference_mode()
def test_features_are_those_of_plain_torch(name: str, dtype: torch.dtype, device_name: str) -> None:
    device, ops = torch.device(device_name), load_ops(1)
    assert isinstance(ops, Ops) and ops.fast_multiple > 1
    shapes, grids = zip(*FAMILIES[name][2], strict=True)
    torch.manual_seed(1)
    pixels = [torch.randint(0, 256, shape, dtype=torch.uint8).to(device) for shape in shapes]
    expected = make(name, Ops(), device, torch.float32).encode(pixels, grids)
    found = make(name, ops, device, dtype).encode(pixels, grids)
    assert (expected[0] - expected[-1]).norm() > 0.2 * expected[0].norm()  # else they say nothing of pictures
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is dtype
        assert (ours.float() - theirs).norm() < (1e-5 if dtype is torch.float32 else 0.02) * theirs.norm()
