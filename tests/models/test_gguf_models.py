"""GGUF files through the engine: tokens of `transformers` on the values that their blocks stand for."""

import math
import shutil
from pathlib import Path
from typing import Any

import gguf_writing
import pytest
import tiny_gguf
import torch
from driving import make_request, random_prompts, reference, run, start
from queue_on_cpu import QueueOnCpu
from ranks import PROMPT, check_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.quant.gguf import GgufBlocks, GgufLowBit
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.convert import convert_gguf
from text_generation_inference.weights.gguf import GgufFile
from text_generation_inference.weights.gguf_model import plan_tensors, read_config

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 16
PROMPTS = random_prompts(len(tiny_gguf.TOKENS), [1, 7, 30], seed=5)


def check(folder: Path, oracle: Any, **settings: Any) -> Any:
    """The model of a converted file, all prompts at once and each alone; returns the engine."""
    engine = start(folder, max_batch_prefill_tokens=24, max_total_tokens=64, **settings)
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    found = [*run(engine, requests, arrivals=[0, 0, 2]), *(run(engine, [request])[0] for request in requests)]
    engine.close()
    for output, (tokens, logprobs) in zip(found, 2 * [reference(oracle, each, NEW) for each in PROMPTS], strict=True):
        assert output.token_ids == tokens
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(output.logprobs, logprobs, strict=True))
    return engine


# Architectures all of whose layers are one native op.
FUSED = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3", "smollm3", "internlm2")


# Routers are stored plainly; what makes keys and values of latents is taken apart when it is loaded.
PLAIN = ("gate.weight", "router.weight", "router.layer.weight", "kv_b_proj.weight")


@pytest.mark.parametrize("family", gguf_writing.FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Files as llama.cpp's converter writes them give the model that they were made from."""
    path, model = gguf_writing.make(family, tmp_path)
    convert_gguf(path, tmp_path / "out")
    if "long" in family:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        for length in (40, 200):  # with each list of factors
            tokens = torch.arange(length)[None]
            with torch.no_grad():
                assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    engine = check(tmp_path / "out", model)
    assert (engine.rank.runner.model.fused_decode is not None) == (gguf_writing.FAMILIES[family][0] in FUSED)
    plain = [
        part.name
        for _, module in engine.rank.runner.model.walk()
        if isinstance(module, Matrix) and not isinstance(module.method, GgufBlocks | GgufLowBit)
        for part in module.parts
    ]
    assert all(name.endswith(PLAIN) for name in plain), plain


@pytest.mark.parametrize("family", gguf_writing.FAMILIES)
def test_hostile_numbers(family: str, tmp_path: Path) -> None:
    """Any number in place of one that a file says ends in a refusal or in a model of the file's own tensors."""
    path, _ = gguf_writing.make(family, tmp_path)
    file = GgufFile.open(path)
    size = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    sound = {key: value for key, value in file.metadata.items() if isinstance(value, int | float)}
    for key, value in sound.items():
        for wrong in (0, 1, 3, 2**31, 1e-30, True, None):
            file.metadata[key] = wrong
            if wrong is None:
                del file.metadata[key]
            try:
                plans = plan_tensors(file, read_config(file))
            except ModelFormatError as error:
                assert "\n" not in str(error)
            else:
                assert sum(math.prod(plan.shape) for plan in plans if plan.source is not None) <= size
        file.metadata[key] = value


FORMS = {"Q4_K": (4, 32), "Q5_K": (8, 32), "Q5_0": (8, 32), "IQ4_NL": (4, 32), "Q6_K": (8, 16), "Q3_K": (4, 16)}


@pytest.fixture(scope="module", params=gguf_writing.MIXES)
def mix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path, Any]:
    """The types of a file's matrices, its folder, and the model that it stands for."""
    folder = gguf_writing.write_mix(request.param, tmp_path_factory.mktemp("mix"))
    oracle = AutoModelForCausalLM.from_pretrained(folder).eval().float()
    return gguf_writing.MIXES[request.param], folder, oracle


def test_blocks(mix: tuple[dict[str, str], Path, Any]) -> None:
    """The native kernels compute from blocks, or from codes of few bits."""
    kinds, folder, oracle = mix
    model = check(folder, oracle).rank.runner.model
    layer = model.model.layers[0]
    matrices = [layer.attention.qkv, layer.mlp.gate_up, layer.mlp.down, model.model.embedding]
    found = [_kinds_of(matrix.method) for matrix in matrices]
    qkv = [kinds[""], kinds[""], kinds.get("attn_v", kinds[""])]
    expected = [qkv, [kinds[""]] * 2, [kinds.get("ffn_down", kinds[""])], [kinds["token_embd"]]]
    assert found == [[kind.lower() for kind in each] for each in expected]
    are_blocks = [isinstance(matrix.method, GgufBlocks) for matrix in matrices]
    assert are_blocks == [not {"Q2_K", "Q3_K"} & set(each) for each in expected]


def _kinds_of(method: Any) -> list[str]:
    return list(method.block_types if isinstance(method, GgufBlocks) else method.kinds.values())


def test_few_bits(mix: tuple[dict[str, str], Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ops take no blocks: codes of few bits, made of blocks, of which ranks cut any columns. The values of the
    converted file are never read."""
    kinds, folder, oracle = mix
    few = tmp_path / "few"
    shutil.copytree(folder, few)
    tensors = load_file(folder / "model.safetensors")
    spoiled = {name: value if value.ndim == 1 else torch.full_like(value, math.nan) for name, value in tensors.items()}
    save_file(spoiled, few / "model.safetensors")
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    layer = check(few, oracle).rank.runner.model.model.layers[0]
    assert device.num_replays > 0
    found = [matrix.weight for matrix in (layer.mlp.gate_up, layer.mlp.down)]
    assert [(each.bits, each.group_size) for each in found] == [
        FORMS.get(kind, (4, 16)) for kind in (kinds[""], kinds.get("ffn_down", kinds[""]))
    ]
    known = PROMPT[:7]  # of its vocabulary
    with torch.no_grad():
        expected = oracle(torch.tensor([known])).logits[0]
    for ops in (None, Ops()):  # widened, too
        check_ranks(few, expected, ops)
