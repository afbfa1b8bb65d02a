"""Tiny random models made from `transformers` configs, saved as a user would have them."""

import pytest
from driving import Tiny, make_tiny

VARIANTS: dict[str, tuple[str, dict]] = {
    "grouped-heads": ("Llama", {}),
    "one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "all-heads": ("Llama", {"num_key_value_heads": 4}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "wide-heads": ("Llama", {"head_dim": 24}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral-window": ("Mistral", {}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2-windows": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="session", params=list(VARIANTS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, overrides = VARIANTS[request.param]
    return make_tiny(family, overrides, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Llama", {}, tmp_path_factory.mktemp("llama"))
