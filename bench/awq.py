"""Activation-aware scaling (AWQ), to measure it beside GPTQ: `python bench/perplexity.py --only AWQ`.

After Lin et al., AWQ (2023): inputs that are large in the mean are made larger in the matrix before it is rounded to
the nearest codes, and smaller where they come from, by a power that is searched; then groups are clipped where that
makes less error. Errors are those of products over the text, as GPTQ counts them. What is made small elsewhere (a norm,
rows of the values before `down_proj`) changes no code there: it is not done, and matrices are returned as values.
Inputs that nothing before can be scaled for (`o_proj` with fewer heads of keys) are left out, as AWQ's own programs do.
"""

from dataclasses import dataclass

import torch

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.matrices import plain
from text_generation_inference.make_quantized.passes import Layers, open_model
from text_generation_inference.make_quantized.settings import MakingSettings
from text_generation_inference.make_quantized.solver import Inputs, solve
from text_generation_inference.make_quantized.targets import find_targets
from text_generation_inference.models.registry import read_config
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.source import ModelFolder

POWERS = [step / 20 for step in range(20)]
SHARES = [1 - step / 40 for step in range(20)]


@dataclass(frozen=True)
class AwqSettings:
    symmetric: bool = False
    clip: bool = True
    group_size: int = 128
    bits: int = 4
    scales: bool = True
    fits: bool = False  # GPTQ in place of the nearest codes
    act_order: bool = False

    @property
    def making(self) -> MakingSettings:
        return MakingSettings(self.bits, self.group_size, self.act_order, self.symmetric, static_groups=False)


def make_awq(
    source: ModelFolder, windows: list[list[int]], device: Device, settings: AwqSettings
) -> dict[str, torch.Tensor]:
    """Values of all matrices, by the names of their tensors."""
    checkpoint = Checkpoint.open(source.weights_path)
    model = open_model(read_config(source.path), checkpoint, device.torch_device)
    layers = Layers(model, checkpoint, device, windows, 4)
    layers.embed()
    found: dict[str, torch.Tensor] = {}
    for number in range(len(layers)):
        targets, _ = find_targets(layers.get(number), layers.prefix(number), settings.making)
        for target in targets:
            target.matrix.method = layers.observer
        with layers.loaded(number) as layer:
            for target in targets:  # a dense layer has them in the order in which they are multiplied
                assert target.num_experts is None
                layers.observer.look_at(target)
                layers.look(layer)
                (inputs,) = layers.observer.inputs
                layers.observer.look_away()
                weight = plain(target.matrix.weight)
                may_scale = settings.scales and not target.pieces[0].name.endswith("o_proj")
                weight.copy_(round_matrix(weight, inputs, settings, may_scale))
                for piece in target.pieces:
                    found[f"{piece.name}.weight"] = piece.to_stored(weight[piece.start : piece.end]).clone()
            layers.advance(layer)
    return found


def round_matrix(weight: torch.Tensor, inputs: Inputs, settings: AwqSettings, may_scale: bool) -> torch.Tensor:
    hessian = inputs.total / inputs.count
    sizes = hessian.diagonal().sqrt().clamp(min=1e-4)  # of each input, as a root mean square
    best, least = torch.ones_like(sizes), torch.inf
    for power in POWERS if may_scale else []:
        scale = sizes**power
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = error_of(nearest(weight * scale, None, settings) / scale - weight, hessian)
        if error < least:
            best, least = scale, error
    if settings.fits:
        scaled = Inputs(weight.shape[1], weight.device)
        scaled.total, scaled.count = inputs.total / best / best[:, None], inputs.count
        return solve(weight * best, scaled, settings.making).widen() / best
    return nearest(weight * best, hessian / best / best[:, None] if settings.clip else None, settings) / best


def error_of(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(((difference @ hessian) * difference).sum())


def nearest(weight: torch.Tensor, hessian: torch.Tensor | None, settings: AwqSettings) -> torch.Tensor:
    """With a Hessian: groups are clipped where that makes less error of the products with their own inputs."""
    top, size = settings.making.largest_code, settings.group_size
    found = torch.empty_like(weight)
    for first in range(0, weight.shape[1], size):
        group = weight[:, first : first + size]
        low, high = group.amin(1, keepdim=True).clamp(max=0), group.amax(1, keepdim=True).clamp(min=0)
        if settings.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        least = torch.full_like(high, torch.inf)
        for share in SHARES if hessian is not None else [1.0]:
            scale = ((high - low) * share / top).half().float().clamp(min=2.0**-24)
            zero = (-low * share / scale).round().clamp(0, top)
            if settings.symmetric:
                zero = torch.full_like(scale, (top + 1) // 2)
            rounded = (((group / scale).round() + zero).clamp(0, top) - zero) * scale
            if hessian is None:
                found[:, first : first + size] = rounded
                break
            difference = rounded - group
            own = hessian[first : first + size, first : first + size]
            error = ((difference @ own) * difference).sum(1, keepdim=True)
            found[:, first : first + size] = torch.where(error < least, rounded, found[:, first : first + size])
            least = torch.minimum(error, least)
    return found
