"""Model folders that cannot be served: one clear error each, at start."""

import json
from pathlib import Path

import pytest
import torch
from driving import Tiny, start
from safetensors.torch import load_file, save_file

from text_generation_inference.errors import ModelFormatError, ResourceError


def change(tiny: Tiny, folder: Path, config: dict | None = None, tensors: dict | None = None, drop: str = "") -> Path:
    """A copy of the tiny model with some fields or tensors changed."""
    fields = json.loads((tiny.folder / "config.json").read_text())
    fields.update(config or {})
    (folder / "config.json").write_text(json.dumps(fields))
    weights = load_file(tiny.folder / "model.safetensors")
    weights.update(tensors or {})
    weights.pop(drop, None)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
PHIMOE = {**MIXTRAL, "architectures": ["PhiMoEForCausalLM"]}
QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer"),
        ({"num_attention_heads": "four"}, "`num_attention_heads` must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 15}, "15 of 15 dimensions of a head cannot be rotated"),
        ({"rms_norm_eps": -1.0}, "`rms_norm_eps` must be > 0"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be > 0"),
        ({"hidden_act": "swishy"}, "`hidden_act` is 'swishy', which is not supported"),
        ({"tie_word_embeddings": "false"}, "`tie_word_embeddings` must be true or false"),
        ({"architectures": [["a"]]}, "is not supported"),
        ({"architectures": []}, "`architectures` is missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "there is no tensor whose name ends in .qweight"),
        ({"quantization_config": {"quant_method": "vptq"}}, "`quant_method` 'vptq' is not supported"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "`rope_scaling` must be an object"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "`rope_parameters.factor` must be > 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -3}}, "`rope_parameters.rope_theta` must be > 0"),
        ({"rope_parameters": {"rope_type": "linear"}}, "`rope_parameters.factor` must be a number"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "`rope_parameters.factor` must be a number"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "`rope_parameters.factor` must be a number"),
        ({"rope_scaling": {"type": "llama3", "factor": None}}, "`rope_scaling.factor` must be a number"),
        ({"rope_scaling": {"factor": 4.0}}, "`rope_scaling.rope_type` is missing"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "`rope_parameters.low_freq_factor` must be a"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 5, "high_freq_factor": 4}},
            "`rope_parameters.high_freq_factor` is 4.0, `low_freq_factor` is greater",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "`rope_parameters.rope_theta` is 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_slow": 1e-320}},
            "`rope_parameters` gives no finite frequencies as rope type yarn",
        ),
        (
            {
                "original_max_position_embeddings": 1,
                "rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 8},
            },
            "`original_max_position_embeddings` is 1,",
        ),
        ({**PHIMOE, "router_jitter_noise": -1}, "`router_jitter_noise` must be at least 0"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": "x"}},
            "`rope_parameters.partial_rotary_factor` must be a number",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "attention_factor": "x"}},
            "`rope_parameters.attention_factor` must be a number",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -5},
            "`sliding_window` must be a positive integer",
        ),
        ({**MIXTRAL, "num_local_experts": None}, "`num_local_experts` must be a positive integer"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "`num_experts_per_tok` is 9, but `num_local_experts` only 4"),
        ({**MIXTRAL, "hidden_act": "swishy"}, "`hidden_act` is 'swishy', which is not supported"),
        ({**MIXTRAL}, "lacks the tensor model.layers.0.block_sparse_moe.gate.weight"),
        (
            {**PHIMOE, "num_experts_per_tok": 3},
            "`num_experts_per_tok` is 3, but this routing chooses 2",
        ),
        (
            {"architectures": ["DbrxForCausalLM"], "ffn_config": {"moe_num_experts": 2, "moe_top_k": 4}},
            "`ffn_config.moe_top_k` is 4, but `moe_num_experts` only 2",
        ),
        ({"architectures": ["DbrxForCausalLM"], "attn_config": 3}, "`attn_config` must be an object"),
        ({**QWEN2_MOE, "num_experts": 0}, "`num_experts` must be a positive integer"),
        ({**QWEN2_MOE, "mlp_only_layers": [None]}, "`mlp_only_layers` must be a list of numbers"),
        ({**QWEN2_MOE, "norm_topk_prob": 1}, "`norm_topk_prob` must be true or false"),
        ({"vocab_size": 321}, "config.json makes it [321, 64]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_that_make_no_sense(tiny_llama: Tiny, tmp_path: Path, config: dict, text: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        start(change(tiny_llama, tmp_path, config))
    assert text in str(caught.value)


def test_weights_are_strict_both_ways(tiny_llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="lacks the tensor model.layers.1.mlp.up_proj.weight"):
        start(change(tiny_llama, tmp_path, drop="model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelFormatError, match="does not use: model.layers.9.extra"):
        start(change(tiny_llama, tmp_path, tensors={"model.layers.9.extra": torch.ones(2)}))
    with pytest.raises(ModelFormatError, match=r"has shape \[3\]"):
        start(change(tiny_llama, tmp_path, tensors={"model.norm.weight": torch.ones(3)}))


def test_what_may_be_left_over(tiny_llama: Tiny, tmp_path: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    start(change(tiny_llama, tmp_path, tensors=old)).close()


def test_more_slots_than_memory(tiny_llama: Tiny) -> None:
    with pytest.raises(ResourceError, match="Not enough memory"):
        start(tiny_llama.folder, max_batch_size=10**9)


def test_a_model_of_endless_positions_costs_no_endless_table(tiny_llama: Tiny, tmp_path: Path) -> None:
    engine = start(change(tiny_llama, tmp_path, {"max_position_embeddings": 10**12}), max_batch_total_tokens=1024)
    assert engine.facts.max_total_tokens == 1024
    engine.close()
