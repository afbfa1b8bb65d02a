"""Writes model.safetensors beside it: matrices packed, and dequantised (`.values`, float16), by the libraries themselves.

python write.py, where gptqmodel 7.7 and autoawq 0.2.9 can be imported. Tests read what it wrote and need neither.
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
INPUTS, GROUP = 96, 32


def find_scales(weight: Tensor, bits: int, symmetric: bool, groups: Tensor) -> tuple[Tensor, Tensor]:
    """`[out, groups]` each."""
    most, found = 2**bits - 1, []
    for number in range(int(groups.max()) + 1):
        some = weight[:, groups == number]
        low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            found.append((2 * high / most, torch.full_like(high, 2 ** (bits - 1))))
        else:
            scale = (high - low) / most
            found.append((scale, (-low / scale).round()))
    scale, zero = (torch.stack(each, 1) for each in zip(*found, strict=True))
    return scale.half().float(), zero


def gptq(name: str, bits: int, symmetric: bool, index: Tensor, version: int) -> dict[str, Tensor]:
    linear = nn.Linear(INPUTS, 32, bias=False)
    scale, zero = find_scales(linear.weight.data, bits, symmetric, index)
    size = INPUTS if int(index.max()) == 0 else GROUP
    packed = TorchLinear(bits, size, symmetric, False, INPUTS, 32, register_buffers=True)
    packed.pack_original(linear, scale, zero, index.int())
    packed.qzero_format(format=2)
    values = packed.eval().dequantize_weight().t().contiguous().half()
    if version == 1:
        convert_gptq_v2_to_v1_format_module(packed, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    tensors = {each: getattr(packed, each) for each in ("qweight", "qzeros", "scales", "g_idx")}
    return {f"{name}.{each}": tensor.contiguous() for each, tensor in {**tensors, "values": values}.items()}


def awq(name: str, size: int) -> dict[str, Tensor]:
    gemm, packing = _load("awq.modules.linear.gemm"), _load("awq.utils.packing_utils")
    linear = nn.Linear(INPUTS, 32, bias=False).half()
    scale, zero = find_scales(linear.weight.data.float(), 4, False, torch.arange(INPUTS) // size)
    made = gemm.WQLinear_GEMM.from_linear(linear, 4, size, False, scale.t().contiguous().half(), zero.t().contiguous())
    values = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, size).t()
    tensors = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales, "values": values}
    return {f"{name}.{each}": tensor.contiguous() for each, tensor in tensors.items()}


def marlin(name: str, size: int) -> dict[str, Tensor]:
    module = _load("awq.modules.linear.marlin")
    linear = nn.Linear(INPUTS, 128, bias=False).half()
    scale, _ = find_scales(linear.weight.data.float(), 4, True, torch.arange(INPUTS) // size)
    spread = scale.repeat_interleave(size, 1)
    values = ((linear.weight.data.float() / spread).round().clamp(-8, 7) * spread).half()
    linear.weight.data = linear.weight.data.float()
    made = module.WQLinear_Marlin.from_linear(linear, 4, size, False, scale)
    return {f"{name}.B": made.qweight, f"{name}.s": made.scales.half(), f"{name}.values": values}


def _load(name: str) -> types.ModuleType:
    """A file of autoawq without its package, which imports what is gone from other libraries."""
    for package in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        sys.modules.setdefault(package, types.ModuleType(package))
    utils = types.ModuleType("awq.utils.module")
    utils.try_import = lambda name: (None, "")
    sys.modules["awq.utils.module"] = utils
    others = types.ModuleType("awq.utils.utils")
    others.get_best_device = lambda: "cpu"
    sys.modules["awq.utils.utils"] = others
    root = next(Path(each) for each in sys.path if (Path(each) / "awq/utils/packing_utils.py").is_file())
    if name != "awq.utils.packing_utils" and "awq.utils.packing_utils" not in sys.modules:
        _load("awq.utils.packing_utils")
    spec = importlib.util.spec_from_file_location(name, root / (name.replace(".", "/") + ".py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    torch.manual_seed(0)
    plain, one = torch.arange(INPUTS) // GROUP, torch.zeros(INPUTS, dtype=torch.long)
    listed = torch.randperm(INPUTS) // GROUP
    tensors: dict[str, Tensor] = {}
    for bits in (2, 3, 4, 8):
        tensors |= gptq(f"gptq{bits}", bits, True, plain, 1)
        tensors |= gptq(f"gptq{bits}-zeros-order-v2", bits, False, listed, 2)
        tensors |= gptq(f"gptq{bits}-zeros", bits, False, plain, 1)
    tensors |= gptq("gptq4-rows", 4, True, one, 1)
    tensors |= awq("awq", GROUP) | awq("awq-rows", INPUTS) | marlin("marlin", GROUP) | marlin("marlin-rows", INPUTS)
    save_file(tensors, HERE / "model.safetensors")


if __name__ == "__main__":
    main()
