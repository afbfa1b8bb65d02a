"""GGUF files through the engine: tokens of `transformers` on the values that their blocks stand for."""

import math
from pathlib import Path
from typing import Any

import gguf_writing
import pytest
import tiny_gguf
import torch
from driving import make_request, random_prompts, reference, run, start
from transformers import AutoModelForCausalLM

from gguf_blocks import random_blocks
from text_generation_inference.kernels.cpu.ops import Packed
from text_generation_inference.quant.gguf import GgufBlocks
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.convert import convert_gguf

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
    # All layers are one native op, but for a shared expert.
    assert (engine.rank.runner.model.fused_decode is None) == (family == "qwen2moe")
    plain = [
        part.name
        for _, module in engine.rank.runner.model.walk()
        if isinstance(module, Matrix) and not isinstance(module.method, GgufBlocks)
        for part in module.parts
    ]
    assert all(name.endswith("gate.weight") for name in plain), plain  # which are stored plainly


# Which type the matrices of a file have; those not named have the first.
MIXES = {
    "Q4_K_M": {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"},
    "Q5_K_S": {"": "Q5_K", "token_embd": "Q8_0"},
    "small blocks": {"": "Q5_0", "attn_v": "Q5_1", "ffn_down": "IQ4_NL", "token_embd": "Q4_1"},
    "widened": {"": "Q2_K", "attn_v": "Q3_K", "ffn_down": "Q3_K", "token_embd": "Q6_K"},
}


@pytest.mark.parametrize("mix", MIXES)
def test_blocks(mix: str, tmp_path: Path) -> None:
    kinds, blocks = MIXES[mix], {}
    tensors = tiny_gguf.weights(hidden=256, inner=256)
    for seed, name in enumerate([name for name, value in tensors.items() if value.ndim == 2]):
        kind = next((kinds[part] for part in kinds if part and part in name), kinds[""])
        blocks[name] = (kind, random_blocks(kind, *tensors.pop(name).shape, seed=seed, largest=0.2))
    sizes = {"llama.embedding_length": 256, "llama.feed_forward_length": 256}
    path = tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.metadata(sizes), tensors, blocks=blocks)
    convert_gguf(path, tmp_path / "out")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval().float()
    model = check(tmp_path / "out", oracle).rank.runner.model
    layer = model.model.layers[0]
    weights = [
        layer.attention.qkv.weight,
        layer.mlp.gate_up.weight,
        layer.mlp.down.weight,
        model.model.embedding.weight,
    ]
    found = [[part.kind for part in iter_pieces(weight)] for weight in weights]
    qkv = [kinds[""], kinds["attn_v"]] if "attn_v" in kinds else [kinds[""]]
    expected = [qkv, [kinds[""]], [kinds.get("ffn_down", kinds[""])], [kinds["token_embd"]]]
    native = [[kind.lower() for kind in pieces] for pieces in expected]
    assert found == [pieces if not {"q2_k", "q3_k"} & set(pieces) else ["float32"] for pieces in native]


def iter_pieces(weight: Any) -> list[Packed]:
    pieces = []
    while weight is not None:
        assert isinstance(weight, Packed)
        pieces.append(weight)
        weight = weight.next
    return pieces
