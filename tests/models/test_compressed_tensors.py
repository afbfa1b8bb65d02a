"""Checkpoints that the library compressed-tensors wrote: its matrices bit for bit, its model's tokens, ranks, damage.

`tests/data/compressed_tensors/write.py` wrote them, and says what is in the files.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import make_request, run, start
from ranks import logits_of_threads
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

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = Path(__file__).parent.parent / "data" / "compressed_tensors"
DOCUMENT = json.loads((DATA / "forms.json").read_text())
FORMS = DOCUMENT["forms"]
# Matrices that are not held in few bits: parts of different forms, floats of 8 bits whose inputs are not.
WIDENED = {"fp8-weights": {"qkv", "out", "gate_up", "down"}, "mixed": {"qkv", "gate_up"}}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(DATA / "forms.safetensors")


def tensors_of(form: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    for prefix in (FORMS[form]["model"], form):
        found |= {n.removeprefix(f"{prefix}/"): t for n, t in tensors.items() if n.startswith(f"{prefix}/")}
    return found


def write(form: str, tensors: dict[str, Tensor], folder: Path, change: dict[str, Tensor | None] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    config = {**DOCUMENT["models"][FORMS[form]["model"]], "quantization_config": FORMS[form]["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = {**tensors_of(form, tensors), **(change or {})}
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


def digest(matrix: Tensor) -> str:
    return hashlib.sha256((matrix + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:24]


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_the_librarys(form: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(form, tensors, tmp_path)
    model = load(folder, torch.bfloat16)
    found = matrices(model)
    expected = FORMS[form]["matrices"]
    assert {name: digest(found[name][1]) for name in expected} == expected
    layer = model.model.layers[0]
    mlp = layer.mlp
    places = {"qkv": layer.attention.qkv, "out": layer.attention.out, "gate_up": mlp.gate_up, "down": mlp.down}
    assert {name for name, matrix in places.items() if isinstance(matrix.weight, Tensor)} == WIDENED.get(form, set())


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_transformers(form: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    engine = start(write(form, tensors, tmp_path))
    assert any("as the checkpoint has them (compressed-tensors)" in note for note in engine.notes)
    expected = FORMS[form]["generated"]
    requests = [
        make_request(number, prompt, len(each["tokens"]))
        for number, (prompt, each) in enumerate(zip(DOCUMENT["prompts"], expected, strict=True))
    ]
    outputs = run(engine, requests)
    engine.close()
    for output, each in zip(outputs, expected, strict=True):
        assert output.token_ids == each["tokens"]
        # Inputs in integers may be rounded the other way now and then, where sums have another order.
        torch.testing.assert_close(output.logprobs, each["logprobs"], atol=2e-2 if "w8a8" in form else 1e-3, rtol=0)


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form not in ("w8a8", "w8a8-static-asymmetric")]
)  # each rank finds scales of its own half of a row
def test_ranks(form: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(form, tensors, tmp_path)
    whole = logits_of_threads(folder, 1, ops=Ops())
    torch.testing.assert_close(logits_of_threads(folder, 2, ops=Ops()), whole, atol=1e-4, rtol=1e-4)
