"""Checkpoints as they were written before `transformers` had the family, and what it does not compute."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers
from driving import Tiny, make_request, make_tiny, random_prompts, reference, run, start, tiny_config
from ranks import PROMPT, logits_of_threads
from safetensors.torch import load_file, save_file
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.layers.experts import Experts
from text_generation_inference.models import baichuan, deepseek_v2
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.registry import ARCHITECTURES, build
from text_generation_inference.models.spec import ExpertLayout, ExpertsSpec

Tensors = dict[str, Tensor]


def rewrite(tiny: Tiny, folder: Path, config: dict[str, Any], change: Callable[[Tensors], Tensors]) -> Path:
    """The same model with other fields, and with its tensors changed."""
    fields = {**json.loads((tiny.folder / "config.json").read_text()), **config}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value != "gone"}))
    tensors = change(load_file(tiny.folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def renamed(*pairs: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        for old, new in pairs:
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        return tensors

    return change


def without_prefix_with_masks(tensors: Tensors) -> Tensors:
    tensors = renamed(("transformer.", ""))(tensors)
    return {**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}


def without_head(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}


def pack(tensors: Tensors) -> Tensors:
    """q, k, v as Baichuan's one tensor."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("q_proj", "W_pack")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            found[name] = tensor
    return found


def internlm2(tensors: Tensors) -> Tensors:
    names = renamed(
        ("embed_tokens", "tok_embeddings"), ("input_layernorm", "attention_norm"), ("lm_head", "output"),
        ("post_attention_layernorm", "ffn_norm"), ("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"),
    )  # fmt: skip
    found: Tensors = {}
    for name, tensor in names(tensors).items():
        if "q_proj" in name:
            q, k, v = (
                tensors[name.replace("q_proj", each)].view(2, -1, 16, 64) for each in ("q_proj", "k_proj", "v_proj")
            )
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat((q, k, v), 1).reshape(-1, 64)
        elif "k_proj" not in name and "v_proj" not in name:
            found[name] = tensor
    return found


def with_layers_beyond(tensors: Tensors) -> Tensors:
    """As DeepSeek V3 has them, which predict the token after the next."""
    last = {
        name.replace("layers.2.", "layers.3."): each.clone() for name, each in tensors.items() if "layers.2." in name
    }
    return {**tensors, **last, "model.layers.3.eh_proj.weight": torch.ones(64, 128)}


def expert_by_expert(tensors: Tensors) -> Tensors:
    """As tools that quantise Llama 4 write it."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            parts = (
                {"gate_proj": matrix[:, :32], "up_proj": matrix[:, 32:]} if last == "gate_up_proj" else {last: matrix}
            )
            found |= {f"{stem}.{number}.{each}.weight": part.T for each, part in parts.items()}
    return found


PHIMOE_ROPE = {
    "short_factor": [1.0 + 0.1 * number for number in range(8)],
    "long_factor": [2.0] * 8,
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 128,
}
RW: dict[str, Any] = {
    "architectures": ["RWForCausalLM"],
    **{"n_head": 4, "n_layer": 2, "parallel_attn": True, "alibi": False, "bias": False},
    **dict.fromkeys(
        ("num_attention_heads", "num_hidden_layers", "num_kv_heads", "new_decoder_architecture", "multi_query"), "gone"
    ),
    **dict.fromkeys(("activation", "ffn_hidden_size", "num_ln_in_parallel_attn", "max_position_embeddings"), "gone"),
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {},
        {
            "rope_theta": 10000.0,
            "rope_scaling": {**deepseek_v2.YARN, "type": "yarn", "rope_type": None},
            **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 1},
            "rope_parameters": "gone",
        },
        with_layers_beyond,
    ),
    "gpt2": ("GPT2LMHeadModel", {}, {}, without_prefix_with_masks),
    "bloom": ("BloomForCausalLM", {}, {"n_embed": 96, "hidden_size": "gone"}, renamed(("transformer.", ""))),
    "opt": ("OPTForCausalLM", {}, {}, renamed(("model.decoder.", "decoder."))),
    "mpt": ("MptForCausalLM", {}, {"architectures": ["MPTForCausalLM"]}, dict),
    "falcon-rw": (
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        {
            "architectures": ["RWForCausalLM"],
            **{"n_head": 4, "n_layer": 2, "num_attention_heads": "gone", "num_hidden_layers": "gone"},
        },
        dict,
    ),
    # The fields that the first files of 7B, 40B and RW have, and no others.
    "falcon-7b-old": ("FalconForCausalLM", {}, RW | {"model_type": "RefinedWebModel", "multi_query": True}, dict),
    "falcon-40b-old": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {**RW, "model_type": "RefinedWeb", "n_head_kv": 2},
        dict,
    ),
    "falcon-rw-old": (
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        {**RW, "model_type": "RefinedWebModel", "alibi": True, "bias": True, "parallel_attn": "gone"},
        dict,
    ),
    "falcon-head": ("FalconForCausalLM", {}, {"tie_word_embeddings": False}, without_head),
    "head-only": ("FalconForCausalLM", {}, {}, renamed(("transformer.word_embeddings", "lm_head"))),
    "tied-in-name-only": ("LlamaForCausalLM", {}, {"tie_word_embeddings": True}, dict),
    "stablelm-epoch": (
        "StableLmForCausalLM",
        {},
        {
            "architectures": ["StableLMEpochForCausalLM"],
            **{"rope_parameters": "gone", "rope_pct": 0.25, "norm_eps": 1e-5, "layer_norm_eps": "gone"},
        },
        dict,
    ),
    "neox-old": (
        "GPTNeoXForCausalLM",
        {},
        {"rope_parameters": "gone", "rotary_pct": 0.25, "rotary_emb_base": 10000},
        dict,
    ),
    "baichuan-7b": (
        "LlamaForCausalLM",
        {"num_key_value_heads": 4},
        {"architectures": ["BaiChuanForCausalLM"], "max_position_embeddings": "gone", "model_max_length": 512},
        pack,
    ),
    "mixtral-each": ("MixtralForCausalLM", {}, {}, renamed(("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))),
    "llama4-each": ("Llama4ForConditionalGeneration", {}, {}, expert_by_expert),
    "internlm2": ("LlamaForCausalLM", {}, {"architectures": ["InternLM2ForCausalLM"], "bias": False}, internlm2),
    "phimoe": (
        "PhimoeForCausalLM",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 3e4, **PHIMOE_ROPE}},
        {
            "architectures": ["PhiMoEForCausalLM"],
            "rope_parameters": "gone",
            "rope_theta": 3e4,
            "rope_scaling": {"type": "longrope", **PHIMOE_ROPE},
        },
        dict,
    ),
    "gemma3-old-rope": (
        "Gemma3ForCausalLM",
        {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }},
        {
            "rope_parameters": "gone",
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"type": "linear", "factor": 8.0},
        },
        dict,
    ),
}  # fmt: skip


@pytest.mark.parametrize("tensor", ["weight", "weight_packed", "qweight"])
def test_experts_of_a_quantised_checkpoint_are_found(tensor: str) -> None:
    """In place of a weight there is something else."""
    architecture = "Llama4ForCausalLM"
    model = cast(CausalLM, build(Config({**tiny_config(architecture), "architectures": [architecture]}, "")))
    layer = next(layer for layer in model.model.layers if isinstance(layer.mlp, Experts))
    model.adapt(["model.embed_tokens.weight", f"model.{layer.name}.feed_forward.experts.0.gate_proj.{tensor}"])
    assert cast(Experts, layer.mlp).gate_up.parts[0].name == "experts.0.gate_proj.weight"


@pytest.mark.parametrize("tensor", ["weight", "weight_packed", "qweight", "_weight_qdata"])
def test_layers_that_predict_further_tokens_may_be_quantised(tensor: str) -> None:
    """They are known by a matrix that no other layer has, whatever it is stored in, and by its whole name."""
    architecture = "DeepseekV3ForCausalLM"
    model = cast(CausalLM, build(Config({**tiny_config(architecture), "architectures": [architecture]}, "")))
    count = len(model.spec.layers)
    further = [f"model.layers.{count}.eh_proj.{tensor}", f"model.layers.{count}.mlp.down_proj.{tensor}"]
    others = [f"model.layers.{count + 1}.eh_projection.{tensor}", f"model.layers.{count + 2}.mlp.eh_proj.{tensor}"]
    before = model.ignored
    model.adapt(["model.embed_tokens.weight", "model.layers.0.eh_proj.weight", *further, *others])
    assert set(model.ignored) - set(before) == {f"model.layers.{count}.*"}


@pytest.mark.parametrize("name", CASES)
def test_as_older_files_have_it(name: str, tmp_path: Path) -> None:
    architecture, overrides, config, change = CASES[name]
    tiny = make_tiny(architecture, overrides, tmp_path / "tiny")
    folder = rewrite(tiny, tmp_path / "changed", config, change)
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    for world in (1, 2) if name in ("baichuan-7b", "internlm2", "gpt2", "head-only", "llama4-each") else (1,):
        torch.testing.assert_close(logits_of_threads(folder, world), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_a_layer_that_the_config_does_not_count_is_no_further_one(family: str, tmp_path: Path) -> None:
    """Unlike those that predict further tokens: without it the model would be another."""
    tiny = make_tiny(family, {}, tmp_path / "tiny")
    folder = rewrite(tiny, tmp_path / "changed", {"num_hidden_layers": 2}, dict)
    with pytest.raises(ModelFormatError, match="tensors that this architecture does not use: model.layers.2"):
        logits_of_threads(folder, 1)


def has_experts(architecture: str) -> bool:
    fields = {**tiny_config(architecture), "architectures": [architecture]}
    parts = [layer.feed_forward for layer in cast(CausalLM, build(Config(fields, ""))).spec.layers]
    names = [name for part in parts if isinstance(part, ExpertsSpec) for name in part.other_names]
    return any(name.layout is ExpertLayout.FUSED for name in names)


WITH_EXPERTS = [name for name in ARCHITECTURES if hasattr(transformers, name) and has_experts(name)]


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_all_experts_in_one_tensor(architecture: str, tmp_path: Path) -> None:
    """As `transformers` 5 has them in memory, on one rank and on two, and quantised on loading."""
    tiny = make_tiny(architecture, {}, tmp_path / "tiny")
    tiny.model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "fused" / "model.safetensors"))
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    for world in (1, 2):
        torch.testing.assert_close(logits_of_threads(tmp_path / "fused", world), expected, atol=1e-4, rtol=1e-4)
    small = [logits_of_threads(tmp_path / each, 2, quantize="fp8") for each in ("tiny", "fused")]
    torch.testing.assert_close(*small, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(small[0], expected, atol=1e-2, rtol=1e-2)


def test_longrope_takes_its_long_factors_where_long_sequences_are_served(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + n for n in range(8)],
    }
    changes = {"original_max_position_embeddings": 8, "rope_parameters": rope}  # PROMPT has 9 tokens
    tiny = make_tiny("Phi3ForCausalLM", changes, tmp_path)
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of_threads(tiny.folder, 1), expected, atol=1e-4, rtol=1e-4)


ALIBI: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BloomForCausalLM": ({}, {"seq_length": 32}),
    "MptForCausalLM": ({}, {"max_seq_len": 32}),
    "FalconForCausalLM": (
        {"alibi": True, "multi_query": False, "parallel_attn": False},
        {"max_position_embeddings": 32},
    ),
}


@pytest.mark.parametrize("architecture", ALIBI)
def test_alibi_goes_beyond_the_positions_of_a_config(architecture: str, tmp_path: Path) -> None:
    """Tokens equal where longer sequences are asked for; by default, and of others, the config's number is the limit."""
    overrides, config = ALIBI[architecture]
    tiny = make_tiny(architecture, overrides, tmp_path / "tiny")
    folder = rewrite(tiny, tmp_path / "short", config, dict)
    prompt = random_prompts(320, [70], seed=4)[0]
    engine = start(folder, max_total_tokens=96)
    assert run(engine, [make_request(0, prompt, 8)])[0].token_ids == reference(tiny.model, prompt, 8)[0]
    engine.close()
    engine = start(folder)
    assert engine.facts.max_total_tokens == 32
    engine.close()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, slopes: list[float] | None) -> Tensor:
    """Of tokens `[tokens, heads, head_dim]`, said plainly."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    place = torch.arange(q.shape[0])
    if slopes is not None:
        scores = scores + torch.tensor(slopes)[:, None, None] * (place[None, :] - place[:, None])
    scores = scores.masked_fill(place[None, :] > place[:, None], -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def test_baichuan_13b_and_the_head_of_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_tiny("LlamaForCausalLM", {"num_key_value_heads": 4, "num_hidden_layers": 2}, tmp_path / "tiny")
    folder = rewrite(tiny, tmp_path / "changed", {"architectures": ["BaichuanForCausalLM"]}, pack)
    monkeypatch.setattr(baichuan, "SECOND_VOCAB", 320)
    found = logits_of_threads(folder, 1)
    weights = load_file(folder / "model.safetensors")

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + tiny.model.config.rms_norm_eps).sqrt() * weights[name]

    x = weights["model.embed_tokens.weight"][PROMPT]
    for layer in ("model.layers.0", "model.layers.1"):
        q, k, v = (
            part.view(len(PROMPT), 4, 16)
            for part in (
                norm(x, f"{layer}.input_layernorm.weight") @ weights[f"{layer}.self_attn.W_pack.weight"].T
            ).chunk(3, -1)
        )
        mixed = attend(q, k, v, 0.25, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
        x = x + mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate, up, down = (weights[f"{layer}.mlp.{each}_proj.weight"].T for each in ("gate", "up", "down"))
        x = x + (F.silu(normed @ gate) * (normed @ up)) @ down
    head = weights["lm_head.weight"]
    expected = norm(x, "model.norm.weight") @ (head / head.norm(dim=1, keepdim=True)).T
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("alibi", [True, False])
def test_flags_of_mpt_that_transformers_ignores(alibi: bool, tmp_path: Path) -> None:
    tiny = make_tiny("MptForCausalLM", {"n_layers": 1}, tmp_path / "tiny")
    generator = torch.Generator().manual_seed(1)
    extra = {
        f"transformer.blocks.0.{name}": torch.randn(size, generator=generator) * 0.2
        for name, size in {"attn.Wqkv.bias": 288, "attn.out_proj.bias": 96, "ffn.up_proj.bias": 384, "ffn.down_proj.bias": 96,
                           "norm_1.bias": 96, "norm_2.bias": 96, "attn.q_ln.weight": 96, "attn.q_ln.bias": 96,
                           "attn.k_ln.weight": 96, "attn.k_ln.bias": 96}.items()
    } | {"transformer.norm_f.bias": torch.randn(96, generator=generator)}  # fmt: skip
    if not alibi:
        extra["transformer.wpe.weight"] = torch.randn(512, 96, generator=generator)
    config = {
        "attn_config": {"alibi": alibi, "alibi_bias_max": 16, "qk_ln": True, "softmax_scale": 0.3},
        **{"no_bias": False, "logit_scale": "inv_sqrt_d_model"},
    }
    folder = rewrite(tiny, tmp_path / "changed", config, lambda tensors: {**tensors, **extra})
    found = logits_of_threads(folder, 1)
    weights = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (96,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"blocks.0.{name}.weight"], weights[f"blocks.0.{name}.bias"])

    x = weights["wte.weight"][PROMPT]
    if not alibi:
        x = x + weights["wpe.weight"][: len(PROMPT)]
    q, k, v = linear(norm(x, "blocks.0.norm_1"), "attn.Wqkv").chunk(3, -1)
    q, k = norm(q, "blocks.0.attn.q_ln"), norm(k, "blocks.0.attn.k_ln")
    slopes = [2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16, 2.0**-2, 2.0**-6]
    heads = [part.view(len(PROMPT), 6, 16) for part in (q, k, v)]
    x = x + linear(attend(*heads, 0.3, slopes if alibi else None), "attn.out_proj")
    x = x + linear(F.gelu(linear(norm(x, "blocks.0.norm_2"), "ffn.up_proj")), "ffn.down_proj")
    expected = norm(x, "norm_f") @ weights["wte.weight"].T / 96**0.5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
