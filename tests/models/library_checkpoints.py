"""Checkpoints that libraries wrote (`tests/data/libraries`), what is read from one, and the model that it stands for."""

import hashlib
import json
from functools import cache
from pathlib import Path

import torch
import transformers
from driving import make_request, random_prompts, reference, run, start
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from text_generation_inference.kernels.low_bit import LowBitWeight, dequantize
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import build, read_config, read_quantization
from text_generation_inference.quant.choose import assign_methods, choose_quantization
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.checkpoint import Checkpoint

DATA = Path(__file__).parents[1] / "data" / "libraries"


@cache
def expected_digests() -> dict[str, dict[str, str]]:
    return json.loads((DATA / "expected.json").read_text())


def check_values(name: str, matrices: dict[str, Tensor]) -> None:
    """They are the library's, bit for bit, in the type that it computes them in."""
    for key, expected in expected_digests()[name].items():
        dtype, _, digest = expected.partition(" ")
        value = matrices[key].to(getattr(torch, dtype)).contiguous().view(torch.uint8)
        assert hashlib.sha256(value.numpy().tobytes()).hexdigest() == digest, key


def library_tensors(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Those of a checkpoint, and what its header says."""
    own = load_file(DATA / name / "model.safetensors")
    plain = load_file(DATA / "plain" / "model.safetensors")
    with safe_open(DATA / name / "model.safetensors", "pt") as opened:
        metadata = opened.metadata()
    matrices = {key for key in plain if key.endswith("_proj.weight")} if name != "plain" else set()
    return {**{key: value for key, value in plain.items() if key not in matrices}, **own}, metadata


def write_folder(folder: Path, config: dict, tensors: dict[str, Tensor], metadata: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata or {"format": "pt"})
    return folder


def whole_checkpoint(name: str, folder: Path, change: dict[str, Tensor | None] | None = None) -> Path:
    """As the library left it, but for some tensors: others, or none."""
    tensors, metadata = library_tensors(name)
    tensors = {key: value for key, value in {**tensors, **(change or {})}.items() if value is not None}
    return write_folder(folder, json.loads((DATA / name / "config.json").read_text()), tensors, metadata)


def read_matrices(folder: Path, quantize: str | None = None) -> tuple[dict[str, Tensor], set[str]]:
    """Every matrix of a folder in float32 by the name of its tensor, and which of them are held in few bits."""
    config, checkpoint = read_config(folder), Checkpoint.open(folder)
    model = build(config, Context())
    model.adapt(checkpoint.names(), checkpoint.are_equal)
    quantization = choose_quantization(quantize, read_quantization(config))
    assert quantization is not None
    assign_methods(model, quantization.named_as_in({name: checkpoint.shape(name) for name in checkpoint.names()}))
    found: dict[str, Tensor] = {}
    held: set[str] = set()
    for prefix, module in model.walk():
        if not isinstance(module, Matrix):
            continue
        value = module.method.read(module.declare()[0].named(prefix), checkpoint, torch.float32, torch.device("cpu"))
        rows = (dequantize(value) if isinstance(value, LowBitWeight) else value).split(
            [part.local_shape[0] for part in module.parts]
        )
        for part, each in zip(module.parts, rows, strict=True):
            found[prefix + part.name] = each.t() if part.transposed else each
            held |= {prefix + part.name} if isinstance(value, LowBitWeight) else set()
    return found, held


def oracle(folder: Path, matrices: dict[str, Tensor]) -> transformers.PreTrainedModel:
    """The model of `transformers` in float32 with these matrices."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    stored = {k: v for k, v in load_file(folder / "model.safetensors").items() if v.is_floating_point()}
    wanted = model.state_dict()
    for key in wanted:
        value = matrices.get(key, stored.get(key))
        if value is not None:
            wanted[key] = value.float()
    model.load_state_dict(wanted)
    return model


def check_tokens(folder: Path, model: transformers.PreTrainedModel, **settings: object) -> None:
    """Greedy tokens of some prompts at once."""
    engine = start(folder, **settings)
    prompts = random_prompts(model.config.vocab_size, [3, 17, 40])
    outputs = run(engine, [make_request(number, prompt, 10) for number, prompt in enumerate(prompts)])
    engine.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, logprobs = reference(model, prompt, 10)
        assert output.token_ids == tokens
        torch.testing.assert_close(torch.tensor(output.logprobs), torch.tensor(logprobs), atol=1e-3, rtol=1e-3)
