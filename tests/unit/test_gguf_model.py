"""GGUF metadata and tensors as a Hugging Face model, checked against `transformers`."""

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tiny_gguf
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from text_generation_inference.errors import ModelNotFoundError
from text_generation_inference.weights.convert import convert_gguf
from text_generation_inference.weights.embedded import find_embedded
from text_generation_inference.weights.gguf import GgufFile
from text_generation_inference.weights.gguf_model import plan_tensors, read_config, read_generation_config

STORED = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"}
STORED |= {f"{name}_proj": f"attn_{name}" for name in "qkv"}
STORED |= {f"{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}


def stored_tensors(model: torch.nn.Module, permutes: bool) -> dict[str, np.ndarray]:
    """The weights of a `transformers` model as llama.cpp stores them."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        parts = name.split(".")
        if parts[1] == "layers":
            kind = STORED[parts[-2]]
            heads = {"attn_q": tiny_gguf.HEADS, "attn_k": tiny_gguf.KV_HEADS}.get(kind)
            value = tiny_gguf.permute_rows(value, heads) if permutes and heads else value
            tensors[f"blk.{parts[2]}.{kind}.{parts[-1]}"] = value
        else:
            whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
            tensors[whole.get(name, "output.weight")] = value
    return tensors


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": tiny_gguf.HIDDEN,
        "intermediate_size": tiny_gguf.INNER,
        "num_hidden_layers": tiny_gguf.LAYERS,
        "num_attention_heads": tiny_gguf.HEADS,
        "num_key_value_heads": tiny_gguf.KV_HEADS,
        "vocab_size": len(tiny_gguf.TOKENS),
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    } | changes


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "qwen2":
        model: torch.nn.Module = Qwen2ForCausalLM(Qwen2Config(**tiny_config(tie_word_embeddings=False)))
    else:
        config = LlamaConfig(
            **tiny_config(attention_bias=kind == "llama-bias", tie_word_embeddings=kind == "llama-tied")
        )
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama-bias", "qwen2"])
def test_converted_model_computes_the_same(tmp_path: Path, kind: str) -> None:
    model = make_model(kind)
    arch = kind.partition("-")[0]
    tensors = stored_tensors(model, permutes=arch == "llama")
    if kind == "llama-tied":
        tensors.pop("output.weight")
    convert_gguf(tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.metadata(arch=arch), tensors), tmp_path / "out")
    loaded, report = cast(Any, AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True))
    assert not any(report.values()), report
    assert loaded.config.tie_word_embeddings == (kind == "llama-tied")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_missing_output_bias_becomes_zero(tmp_path: Path) -> None:
    tensors = stored_tensors(make_model("llama-bias"), permutes=True)
    tensors = {name: value for name, value in tensors.items() if not name.endswith("attn_output.bias")}
    convert_gguf(tiny_gguf.write(tmp_path / "a.gguf", tensors=tensors), tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert not saved["model.layers.1.self_attn.o_proj.bias"].any()
    assert saved["model.layers.1.self_attn.v_proj.bias"].any()


def config_of(tmp_path: Path, changes: dict[str, Any], extra: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    tensors = tiny_gguf.weights() | (extra or {})
    return read_config(GgufFile.open(tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.metadata(changes), tensors)))


def test_config(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"tokenizer.ggml.padding_token_id": 0})
    assert config["rms_norm_eps"] == 1e-5  # not 9.999999747378752e-06
    assert config | {"dtype": None, "torch_dtype": None} == tiny_config(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        head_dim=16,
        rope_scaling=None,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype=None,
        torch_dtype=None,
    )


@pytest.mark.parametrize("token", [len(tiny_gguf.TOKENS), 2**32 - 1])
def test_a_padding_token_that_is_not_there_is_none(tmp_path: Path, token: int) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.metadata({"tokenizer.ggml.padding_token_id": token}))
    convert_gguf(path, tmp_path / "out")
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    said = {name: json.loads((tmp_path / "out" / name).read_text()) for name in names}
    assert said["config.json"]["pad_token_id"] is None
    assert "pad_token_id" not in said["generation_config.json"] and "pad_token" not in said["tokenizer_config.json"]


def test_equal_heads_in_every_layer(tmp_path: Path) -> None:
    changes = {"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2]}
    assert config_of(tmp_path, changes)["num_key_value_heads"] == 2


def test_linear_scaling(tmp_path: Path) -> None:
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_of(tmp_path, changes)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config_of(tmp_path, {"llama.rope.scale_linear": 2.0})["rope_scaling"]["factor"] == 2.0


def test_yarn_scaling(tmp_path: Path) -> None:
    changes = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    changes["llama.rope.scaling.original_context_length"] = 64
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config_of(tmp_path, changes)["rope_scaling"] == expected


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling(tmp_path: Path, factor: float) -> None:
    """The curve that `transformers` computes is recognised, so the converted model computes it again."""
    theta, head_dim = 500000.0, tiny_gguf.HIDDEN // tiny_gguf.HEADS
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    scaled = LlamaForCausalLM(LlamaConfig(**tiny_config(rope_theta=theta, rope_scaling=dict(scaling))))
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    curve = (plain / scaled.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert math.isclose(curve.max(), factor, rel_tol=1e-5) and curve.min() == pytest.approx(1.0)
    curve[-1] = factor
    config = config_of(tmp_path, {"llama.rope.freq_base": theta}, {"rope_freqs.weight": curve})
    assert config["rope_scaling"] == scaling
    unscaled = config_of(tmp_path, {}, {"rope_freqs.weight": np.ones(8, np.float32)})
    assert unscaled["rope_scaling"] is None


def test_generation_config_has_every_end(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    file = GgufFile.open(tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.metadata(changes)))
    assert read_generation_config(file, 269) == {"eos_token_id": [0, 2], "bos_token_id": 1}


@pytest.fixture(scope="module")
def embedded() -> GgufFile:
    try:
        return GgufFile.open(find_embedded())
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def test_embedded_model(embedded: GgufFile, tmp_path: Path) -> None:
    config = read_config(embedded)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert {plan.name: plan.shape for plan in plan_tensors(embedded, config)} == expected
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
