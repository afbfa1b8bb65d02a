"""The checkpoints of tests/data/compressed_tensors as model folders, and what our engine reads of them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.engine.rank import load_model
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.registry import read_config, read_quantization
from text_generation_inference.parallel import Parallel
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.source import ModelFolder

DATA = Path(__file__).parent.parent / "data" / "compressed_tensors"
DOCUMENT = json.loads((DATA / "forms.json").read_text())
FORMS = DOCUMENT["forms"]


@cache
def tensors() -> dict[str, Tensor]:
    return load_file(DATA / "forms.safetensors")


def tensors_of(form: str) -> dict[str, Tensor]:
    found = {"model.embed_tokens.weight": tensors()["model.embed_tokens.weight"]}
    for prefix in (FORMS[form]["model"], form):
        found |= {n.removeprefix(f"{prefix}/"): t for n, t in tensors().items() if n.startswith(f"{prefix}/")}
    return found


def write(
    form: str, folder: Path, change: dict[str, Tensor | None] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """With changed tensors, None taking one away, and with other fields in config.json."""
    folder.mkdir(exist_ok=True)
    said = {**DOCUMENT["models"][FORMS[form]["model"]], "quantization_config": FORMS[form]["quantization_config"]}
    (folder / "config.json").write_text(json.dumps({**said, **(config or {})}))
    found = {**tensors_of(form), **(change or {})}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: torch.dtype) -> Any:
    config = read_config(folder)
    device = CpuDevice(folder / "cache", custom_kernels=False)
    device.ops = Ops()  # which hold matrices in few bits as they are
    source = ModelFolder(model_id="tiny", path=folder, note="")
    quantization = read_quantization(config)
    return load_model(ServerConfig(), source, config, quantization, device, dtype, Parallel(), lambda *_: None)


def matrices(model: Any) -> dict[str, tuple[Matrix, Tensor]]:
    """Each part by its name, with the matrix that it is of and its values."""
    found: dict[str, tuple[Matrix, Tensor]] = {}
    for prefix, module in model.walk():
        if isinstance(module, Matrix):
            weight = module.weight
            wide = low_bit.widen(weight) if isinstance(weight, LowBitWeight) else weight
            assert isinstance(wide, Tensor)
            rows = [part.local_shape[0] for part in module.parts]
            for name, part in zip(module.names(prefix), wide.split(rows), strict=True):
                found[name] = (module, part)
    return found
