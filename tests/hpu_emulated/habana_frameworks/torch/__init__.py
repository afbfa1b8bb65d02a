"""`import habana_frameworks.torch`: registers `torch.hpu` and the ops under `torch.ops.hpu`."""

import sys

import torch

from habana_frameworks.torch import _ops as _ops
from habana_frameworks.torch import core, hpex, hpu, utils
from habana_frameworks.torch._emulation import LAZY

EMULATED = True  # the one name here that the real package does not have

torch.hpu = hpu  # pyright: ignore
sys.modules["torch.hpu"] = hpu
if not LAZY:
    from habana_frameworks.torch import _compile as _compile

__all__ = ["EMULATED", "core", "hpex", "hpu", "utils"]
