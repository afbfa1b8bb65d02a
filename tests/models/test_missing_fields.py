"""Fields that a config leaves out, or has null, mean what they mean to `transformers`; others are not passed over."""

import tracemalloc
from typing import Any, cast

import pytest
import transformers

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.registry import ARCHITECTURES, build
from text_generation_inference.models.spec import DecoderSpec

NEEDED = {"DeepseekV2ForCausalLM": "num_experts_per_tok"}  # by families whose default cannot be computed
KNOWN = [name for name in ARCHITECTURES if hasattr(transformers, name) and name not in NEEDED]


def spec_of(architecture: str, fields: dict[str, Any]) -> DecoderSpec:
    return cast(CausalLM, build(Config({**fields, "architectures": [architecture]}, "config.json"))).spec


def defaults_of(architecture: str, **fields: Any) -> transformers.PretrainedConfig:
    return getattr(transformers, architecture).config_class(**fields)


@pytest.mark.parametrize("architecture", KNOWN)
def test_a_config_that_says_nothing_is_the_default_of_its_family(architecture: str) -> None:
    assert spec_of(architecture, {}) == spec_of(architecture, defaults_of(architecture).to_dict())


@pytest.mark.parametrize("architecture", NEEDED)
def test_a_field_without_a_default_is_asked_for(architecture: str) -> None:
    for fields in ({}, defaults_of(architecture).to_dict()):
        with pytest.raises(ModelFormatError, match=f"`{NEEDED[architecture]}` must be"):
            spec_of(architecture, fields)


NUMBERS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "routed_scaling_factor",
    "logit_scale",
)
CHOICES = ("hidden_act", "hidden_activation", "activation", "activation_function", "topk_method")
FLAGS = ("qkv_bias", "norm_topk_prob", "multi_query", "parallel_attn", "use_bias", "use_parallel_residual")
MEANING = {  # where null is a value
    ("DeepseekV3ForCausalLM", "topk_method"): "one is computed, and others are refused",
    ("MptForCausalLM", "logit_scale"): "no factor",
    ("StableLmForCausalLM", "use_parallel_residual"): "false, the default",
    ("Qwen2MoeForCausalLM", "norm_topk_prob"): "false, the default",
    ("Qwen3MoeForCausalLM", "norm_topk_prob"): "false, the default",
}


NULLS = [
    (architecture, name)
    for architecture in KNOWN
    for name in (*NUMBERS, *CHOICES, *FLAGS)
    if name in defaults_of(architecture).to_dict() and (architecture, name) not in MEANING
]


@pytest.mark.parametrize(("architecture", "name"), NULLS)
def test_null_is_no_default(architecture: str, name: str) -> None:
    """Of a number, a word or a flag that is true by default: what a file says is not taken for what it leaves out."""
    with pytest.raises(ModelFormatError, match=f"config.json: `{name}` .*None"):
        spec_of(architecture, {name: None})


PUBLISHED: list[
    tuple[str, list[str]]
] = [  # fields that are null in files, and mean what they mean where they are missing
    ("LlamaForCausalLM", ["num_key_value_heads", "head_dim", "rope_scaling", "attention_bias", "mlp_bias"]),
    ("GemmaForCausalLM", ["hidden_activation", "rope_scaling", "use_bidirectional_attention"]),
    ("MixtralForCausalLM", ["head_dim", "sliding_window", "rope_scaling"]),
    ("GPT2LMHeadModel", ["n_inner", "summary_activation"]),
    ("GPTJForCausalLM", ["n_inner"]),
    ("FalconForCausalLM", ["num_ln_in_parallel_attn", "num_kv_heads", "ffn_hidden_size", "rope_scaling"]),
    ("MptForCausalLM", ["logit_scale", "norm_type", "attn_config"]),
    ("PhiForCausalLM", ["num_key_value_heads", "rope_scaling", "qk_layernorm"]),
    ("Phi3ForCausalLM", ["rope_scaling", "sliding_window", "attention_bias"]),
    ("Qwen2ForCausalLM", ["rope_scaling", "use_sliding_window"]),
    ("Gemma3ForCausalLM", ["final_logit_softcapping", "attn_logit_softcapping", "rope_scaling"]),
    ("DeepseekV3ForCausalLM", ["rope_scaling", "attention_bias", "tie_word_embeddings"]),
    ("StableLmForCausalLM", ["num_key_value_heads", "rope_scaling"]),
]


@pytest.mark.parametrize(("architecture", "names"), PUBLISHED)
def test_nulls_of_published_files(architecture: str, names: list[str]) -> None:
    assert spec_of(architecture, dict.fromkeys(names)) == spec_of(architecture, {})


WINDOWS: dict[str, dict[str, Any]] = {
    "by number": {"sliding_window": 9, "max_window_layers": 3},
    "by type": {"sliding_window": 9, "layer_types": ["sliding_attention", *["full_attention"] * 5]},
    "null": {"sliding_window": None, "max_window_layers": 3},
    "missing": {"max_window_layers": 3},
    "off": {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 3},
}


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM"])
def test_windows_of_qwen(architecture: str, case: str) -> None:
    fields = {"use_sliding_window": True, "num_hidden_layers": 6, **WINDOWS[case]}
    config = defaults_of(architecture, **fields)
    expected = [config.sliding_window if each == "sliding_attention" else None for each in config.layer_types]
    assert [layer.attention.window for layer in spec_of(architecture, fields).layers] == expected


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob"),
    ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 6, "topk_method": "best"}, "topk_method"),
    ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias"),
    ("DeepseekV3ForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads"),
    ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
    ("MptForCausalLM", {"norm_type": "low_precision_rmsnorm"}, "norm_type"),
    ("MptForCausalLM", {"attn_config": {"sliding_window_size": 64}}, "attn_config.sliding_window_size"),
]


@pytest.mark.parametrize(("architecture", "fields", "name"), REFUSED)
def test_what_is_not_computed_is_refused(architecture: str, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelFormatError, match=f"`{name}` is .*not supported"):
        spec_of(architecture, fields)


CONTRADICTORY: dict[str, dict[str, Any]] = {
    "n_group": {"n_group": 7},
    "topk_group": {"topk_group": 9},
    "num_experts_per_tok": {"topk_group": 1, "num_experts_per_tok": 33},
    "qk_rope_head_dim": {"qk_rope_head_dim": 63},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "kv_lora_rank": {"kv_lora_rank": 0},
    "n_shared_experts": {"n_shared_experts": True},
    "first_k_dense_replace": {"first_k_dense_replace": -1},
}


@pytest.mark.parametrize("name", CONTRADICTORY)
def test_what_contradicts_itself_is_refused(name: str) -> None:
    with pytest.raises(ModelFormatError, match=f"config.json: `{name}` "):
        spec_of("DeepseekV3ForCausalLM", CONTRADICTORY[name])


@pytest.mark.parametrize(
    "types",
    [
        [[["global", "local"], 400]],
        [[["global", "local"], 501]],
        [[["global", "window"], 500]],
        [[["global"] * 200000, 1000]],
    ],
    ids=["too few", "too many", "unknown", "endless"],
)
def test_kinds_of_gpt_neo_are_as_many_as_its_layers(types: list[Any]) -> None:
    """However many there are, reading them takes no more memory than the layers do."""
    fields = {"num_layers": 1000, "attention_types": types}
    tracemalloc.start()
    try:
        with pytest.raises(ModelFormatError, match=r"`attention_types` must be lists of .*, 1000 in all"):
            spec_of("GPTNeoForCausalLM", fields)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
