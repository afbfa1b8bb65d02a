"""A tiny GPT-OSS as it is published: experts in MXFP4."""

import json
from pathlib import Path

import torch
from driving import Tiny, make_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[experts, out, in]` -> blocks and scales as they are stored, and what they stand for."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = (groups[..., None] / exponents.exp2()[..., None, None] - VALUES).abs().argmin(-1)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), (VALUES[codes] * exponents.exp2()[..., None]).flatten(-2)


def write(plain: Path, folder: Path) -> Tiny:
    """Two folders: the second has the experts of the first in MXFP4. The model has what its file stands for."""
    made = make_tiny("GptOss", {}, plain)
    tensors = load_file(made.folder / "model.safetensors")
    parameters = dict(made.model.named_parameters())
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        blocks, scales, values = pack(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
        parameters[name].data.copy_(values.transpose(1, 2))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((made.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return Tiny(folder, made.model)
