"""Configs as the hub has them, each with a trap of its own: read, with the parameters that the model is known to have.

Of each config the fields that the model is made of.
"""

from typing import Any

import pytest
import torch

from text_generation_inference.layers.cache import bytes_per_token, common_window, partial_window
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import build
from text_generation_inference.weights.load import count_parameters

_ID = 4  # bytes of a token in the cache beside keys and values
_YARN_40 = {
    **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
    "original_max_position_embeddings": 4096,
}

# Parameters, bytes of keys and values per token in bfloat16, and the window of all layers, or of some.
Known = tuple[int, int, int | None, int | None]
PUBLISHED: dict[str, tuple[str, dict[str, Any], Known]] = {
    "Llama 4 Scout": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                **{"attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192},
                **{"head_dim": 128, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
                **{"interleave_moe_layer_step": 1, "max_position_embeddings": 10485760, "no_rope_layers": []},
                **{"num_attention_heads": 40, "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_theta": 5e5},
                **{"num_experts_per_tok": 1, "num_local_experts": 16, "use_qk_norm": True, "vocab_size": 202048},
                "rope_scaling": {
                    **{"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
                    "original_max_position_embeddings": 8192,
                },
            },
            "vision_config": {},
        },
        (107_769_861_120, 196_608, None, 8192),
    ),
    "Phi-3.5-MoE": (
        "PhiMoEForCausalLM",
        {
            **{"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01},
            **{"hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32, "vocab_size": 32064},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 131072, "rope_theta": 1e4},
            **{"num_experts_per_tok": 2, "num_local_experts": 16, "max_position_embeddings": 131072},
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                **{"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "type": "longrope"},
                **{"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122},
                "original_max_position_embeddings": 4096,
            },
        },
        (41_873_153_344, 131_072, 131_072, None),
    ),
    "Phi-4-mini": (
        "Phi3ForCausalLM",
        {
            **{"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_hidden_layers": 32},
            **{"num_key_value_heads": 8, "partial_rotary_factor": 0.75, "rope_theta": 1e4, "sliding_window": 262144},
            **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "vocab_size": 200064},
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
            "tie_word_embeddings": True,
        },
        (3_836_021_760, 131_072, 262_144, None),
    ),
    "Gemma 3 1B": (
        "Gemma3ForCausalLM",
        {
            **{"head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768},
            **{"num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "rope_scaling": None},
            **{"rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 512, "vocab_size": 262144},
            **{"query_pre_attn_scalar": 256, "sliding_window_pattern": 6, "attn_logit_softcapping": None},
        },
        (999_885_952, 26_624, None, 512),
    ),
    "Command R+": (
        "CohereForCausalLM",
        {
            **{"hidden_size": 12288, "intermediate_size": 33792, "logit_scale": 0.8333333333333334},
            **{"num_attention_heads": 96, "num_hidden_layers": 64, "num_key_value_heads": 8, "rope_theta": 75e6},
            **{"use_qk_norm": True, "vocab_size": 256000, "max_position_embeddings": 8192, "model_max_length": 131072},
        },
        (103_810_674_688, 262_144, None, None),
    ),
    "Falcon-40B, of the old form": (
        "RWForCausalLM",
        {
            **{"model_type": "RefinedWeb", "alibi": False, "bias": False, "hidden_size": 8192, "n_head": 128},
            **{"n_head_kv": 8, "n_layer": 60, "parallel_attn": True, "vocab_size": 65024},
        },
        (41_303_293_952, 122_880, None, None),
    ),
    "DBRX": (
        "DbrxForCausalLM",
        {
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
            "ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_num_experts": 16, "moe_top_k": 4},
            **{"d_model": 6144, "max_seq_len": 32768, "n_heads": 48, "n_layers": 40, "vocab_size": 100352},
        },
        (131_596_523_520, 163_840, None, None),
    ),
    "GPT-OSS-20B": (
        "GptOssForCausalLM",
        {
            **{"experts_per_token": 4, "head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096},
            **{"intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12},
            **{"num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32},
            **{"rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088},
            "rope_scaling": {
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False},
                "original_max_position_embeddings": 4096,
            },
        },
        (20_914_757_184, 49_152, None, 128),
    ),
    "DeepSeek R1": (
        "DeepseekV3ForCausalLM",
        {
            **{"first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512},
            **{"max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8},
            **{"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128},
            **{"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536},
            **{"num_nextn_predict_layers": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            **{"rope_scaling": _YARN_40, "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 4},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "vocab_size": 129280},
        },
        (671_026_419_200, 70_272, None, None),
    ),
    "InternLM2-7B": (
        "InternLM2ForCausalLM",
        {
            **{"bias": False, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768},
            **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 1000000},
            **{"rope_scaling": {"factor": 2.0, "type": "dynamic"}, "vocab_size": 92544},
        },
        (7_737_708_544, 131_072, None, None),
    ),
    "Baichuan2-13B": (
        "BaichuanForCausalLM",
        {
            **{"hidden_size": 5120, "intermediate_size": 13696, "model_max_length": 4096, "num_attention_heads": 40},
            **{"num_hidden_layers": 40, "vocab_size": 125696, "z_loss_weight": 0},
        },
        (13_896_668_160, 819_200, None, None),
    ),
    "MPT-7B-StoryWriter": (
        "MPTForCausalLM",
        {
            "attn_config": {
                **{"alibi": True, "alibi_bias_max": 16, "attn_type": "multihead_attention", "clip_qkv": 6},
                **{"prefix_lm": False, "qk_ln": False, "softmax_scale": None},
            },
            **{"d_model": 4096, "learned_pos_emb": True, "max_seq_len": 65536, "n_heads": 32, "n_layers": 32},
            **{"no_bias": True, "norm_type": "low_precision_layernorm", "vocab_size": 50432},
        },
        (6_649_286_656, 524_288, None, None),
    ),
    "StableLM-3B, of the old form": (
        "StableLMEpochForCausalLM",
        {
            **{"hidden_size": 2560, "intermediate_size": 6912, "norm_eps": 1e-5, "num_attention_heads": 32},
            **{"num_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rope_pct": 0.25},
            **{"rotary_scaling_factor": 1.0, "vocab_size": 50304},
        },
        (2_795_443_200, 327_680, None, None),
    ),
    "OPT-350m": (
        "OPTForCausalLM",
        {
            **{"do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024, "num_attention_heads": 16},
            **{"num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 512},
        },
        (331_196_416, 98_304, None, None),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_the_model_that_it_is_known_as(name: str) -> None:
    architecture, fields, known = PUBLISHED[name]
    model = build(Config({**fields, "architectures": [architecture]}, "config.json"), Context(dtype=torch.bfloat16))
    caches = model.caches(torch.bfloat16)
    found = (
        count_parameters(model),
        bytes_per_token(caches) - _ID,
        common_window(caches),
        partial_window(caches),
    )
    assert found == known
