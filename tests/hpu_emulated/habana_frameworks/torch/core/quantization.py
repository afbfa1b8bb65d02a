"""Constants of a graph."""

import torch


def _mark_params_as_const(model: torch.nn.Module, only_scales: bool = False) -> None:
    for name, parameter in model.named_parameters():
        if not only_scales or "scale" in name:
            parameter.is_const = True  # pyright: ignore


def _check_params_as_const(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "is_const", False):
            raise AssertionError(f"{name} is not marked as a constant")
