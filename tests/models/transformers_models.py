"""Tiny models of families that have no file of their own."""

from pathlib import Path
from typing import Any

import torch
import transformers
from driving import Tiny, spread_weights

from text_generation_inference.models.registry import ARCHITECTURES

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Olmo": {"clip_qkv": 1.5},  # norms without weights
    "Olmo3": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "Exaone4": {"sliding_window": 24, "sliding_window_pattern": 3},  # a layer without positions
    "Glm": {},  # interleaved rotation of half a head
    "Nemotron": {"partial_rotary_factor": 0.5},  # a feed-forward without a gate
    "NanoChat": {},  # caps its logits
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "GraniteMoeSWA": {  # sinks
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "GraniteMoeHybrid": {  # without a recurrent layer, as the small Granite 4; its file has an infinite number
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "layer_types": ["attention", "attention", "attention"],
        "position_embedding_type": "rope",
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "MiMoV2Flash": {  # sinks on some layers, and values of another width
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "v_head_dim": 12,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "MiniCPM3": {
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}


def make(family: str, folder: Path, **changes: Any) -> Tiny:
    fields = {**SIZES, **FAMILIES.get(family, {}), **changes}
    if family == "MiniCPM3":  # keys and values of different widths
        fields |= {"num_key_value_heads": 4, "head_dim": 8}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**fields)).eval()
    spread_weights(model)
    model.save_pretrained(folder)
    assert f"{family}ForCausalLM" not in ARCHITECTURES  # else it has a test of its own
    return Tiny(folder, model)
