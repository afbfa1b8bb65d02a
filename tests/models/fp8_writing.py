"""Writes a tiny model's matrices in FP8, in the ways that checkpoints do, and says what such a model computes.

The oracle is the model of `transformers` in float32, with dequantised weights, and with inputs that are quantised and
widened again before each product. It shares no code with the project.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from driving import Tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
Rounding = Callable[[Tensor], Tensor]


def round_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(E4M3).float() * scale


def round_rows(x: Tensor, pieces: int = 1) -> Tensor:
    """Each row by its own largest value; with several pieces each piece of a row."""
    return torch.cat([round_fp8(p, p.abs().amax(-1, keepdim=True) / 448) for p in x.chunk(pieces, -1)], -1)


def round_groups(x: Tensor) -> Tensor:
    """Every 128 columns by their own largest value."""
    return torch.cat([round_fp8(g, g.abs().amax(-1, keepdim=True) / 448) for g in x.split(128, -1)], -1)


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(E4M3), scale


def by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(E4M3), scale


def by_square(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (math.ceil(size / 128) for size in weight.shape)
    scale = torch.stack(
        [
            torch.stack([weight[128 * r : 128 * r + 128, 128 * c : 128 * c + 128].abs().max() for c in range(columns)])
            for r in range(rows)
        ]
    )
    scale = scale / 448
    return (weight / spread(scale, weight.shape)).to(E4M3), scale


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    if scale.numel() == 1 or scale.shape[0] == shape[0]:
        return scale
    rows, columns = (torch.arange(size) // 128 for size in shape)
    return scale[rows][:, columns]


def is_matrix(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def write_fp8(
    tiny: Tiny,
    folder: Path,
    quantization: dict,
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
    scale_name: str = "weight_scale",
    shape: tuple[int, ...] | None = None,  # of a scale for the whole tensor
    input_scale: Callable[[str], float] | None = None,
    input_scale_name: str = "input_scale",
    keep: Callable[[str], bool] = lambda name: False,  # names that stay as they are
    also: Callable[[str], bool] = lambda name: False,  # names that are quantised besides
    extra: dict[str, Tensor] | None = None,
    config: dict | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fields = json.loads((tiny.folder / "config.json").read_text())
    fields.update({"quantization_config": quantization, **(config or {})})
    (folder / "config.json").write_text(json.dumps(fields))
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(tiny.folder / "model.safetensors").items():
        if not (is_matrix(name) or also(name)) or keep(name):
            tensors[name] = value
            continue
        tensors[name], scale = quantize(value)
        base = name.removesuffix("weight")
        tensors[base + scale_name] = scale if shape is None else scale.reshape(shape)
        if input_scale is not None:
            tensors[base + input_scale_name] = torch.tensor(input_scale(base)).reshape(shape or ())
    tensors.update(extra or {})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_oracle(
    tiny: Tiny,
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
    rounding: Callable[[str], Rounding | None],
    keep: Callable[[str], bool] = lambda name: False,
    also: Callable[[str], bool] = lambda name: False,  # names that are quantised besides
) -> transformers.PreTrainedModel:
    """`rounding` says for the name of a layer what happens to its inputs."""
    model = type(tiny.model)(tiny.model.config).eval().float()
    model.load_state_dict(tiny.model.state_dict())
    for name, layer in model.named_modules():
        weight = f"{name}.weight"
        if not (is_matrix(weight) or also(weight)) or keep(weight):
            continue
        assert isinstance(layer, torch.nn.Linear)
        data, scale = quantize(layer.weight.data)
        layer.weight.data = data.float() * spread(scale, data.shape)
        if (change := rounding(name)) is not None:
            layer.register_forward_pre_hook(lambda _, inputs, change=change: (change(inputs[0]),))
    return model


def prompt_scores(model: transformers.PreTrainedModel, prompt: list[int]) -> Tensor:
    """Log-probabilities of the tokens of a prompt, from the second one on."""
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
