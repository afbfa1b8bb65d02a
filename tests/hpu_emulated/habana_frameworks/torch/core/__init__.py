"""Lazy execution and set-up for inference."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from habana_frameworks.torch._card import card
from habana_frameworks.torch._emulation import LAZY, books
from habana_frameworks.torch.core import quantization

_environment_set = False
_closures: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
_warned = False


def mark_step(device_str: str = "", sync: bool = False) -> None:
    global _warned
    if not isinstance(device_str, str) or not isinstance(sync, bool):
        raise TypeError(f"mark_step(device_str: str, sync: bool), not {device_str!r}, {sync!r}")
    if not LAZY:
        if not _warned:
            warnings.warn("mark_step has no effect without lazy mode", stacklevel=2)
            _warned = True
        return
    books.mark_steps += 1
    card.mark_step()
    closures = _closures.copy()
    _closures.clear()
    for closure, args in closures:
        closure(*args)


def add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    _closures.append((closure, args))


def hpu_set_env(model: torch.nn.Module | None = None) -> torch.nn.Module | None:
    global _environment_set
    _environment_set = True
    return model


hpu_set_inference_env = hpu_inference_set_env = hpu_set_env


def hpu_initialize(model: torch.nn.Module | None = None, mark_only_scales_as_const: bool = False) -> None:
    if not _environment_set:
        raise RuntimeError("hpu_initialize before hpu_set_env")
    if model is not None:
        quantization._mark_params_as_const(model, mark_only_scales_as_const)


hpu_inference_initialize = hpu_initialize
