"""Towers with Triton's ops against the same towers in plain torch: on the GPU, or through Triton's interpreter."""

import importlib.util

import pytest
import torch
from towers import FAMILIES, make
from triton_interpreter import interpreter_as_hardware  # noqa: F401, a fixture

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.triton.ops import load_ops


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
