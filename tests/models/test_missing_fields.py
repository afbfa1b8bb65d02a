"""Fields that a config leaves out, or has null, mean what they mean to `transformers`; others are not passed over."""

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
