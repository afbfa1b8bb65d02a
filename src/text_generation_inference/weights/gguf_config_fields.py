"""What a GGUF file says of the config beyond the fields that all architectures share, one function for each.

A function takes the file and the common fields, and gives those that are added or changed. What no file says, because
llama.cpp has it in its code, stands here too.
"""

import math
from typing import Any

from text_generation_inference.weights.gguf import UNSUPPORTED, GgufFile, to_float32

Fields = dict[str, Any]
_WINDOW, _FULL = "sliding_attention", "full_attention"
_PHIMOE_SCALE = 1.243163121016122
_DBRX_EPS = 1e-5


def read_llama(file: GgufFile, config: Fields) -> Fields:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def read_mixtral(file: GgufFile, config: Fields) -> Fields:
    return {
        "num_local_experts": file.integer("llama.expert_count"),
        "num_experts_per_tok": file.integer("llama.expert_used_count"),
        "sliding_window": None,
    }


def _qwen_experts(file: GgufFile, arch: str, normalised: bool) -> Fields:
    return {
        "num_experts": file.integer(f"{arch}.expert_count"),
        "num_experts_per_tok": file.integer(f"{arch}.expert_used_count"),
        "moe_intermediate_size": _width(file, f"{arch}.expert_feed_forward_length", "blk.0.ffn_down_exps.weight"),
        "norm_topk_prob": normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _width(file: GgufFile, key: str, tensor: str, dim: int = -1) -> int:
    """Older files leave the key out; then it is a dimension of a tensor."""
    found = file.tensors.get(tensor)
    return file.integer(key, found.shape[dim] if found is not None and len(found.shape) >= -dim else None)


def read_qwen2_moe(file: GgufFile, config: Fields) -> Fields:
    shared = _width(file, "qwen2moe.expert_shared_feed_forward_length", "blk.0.ffn_down_shexp.weight")
    return {**_qwen_experts(file, "qwen2moe", False), "shared_expert_intermediate_size": shared}


def read_qwen3_moe(file: GgufFile, config: Fields) -> Fields:
    return {**_qwen_experts(file, "qwen3moe", True), "attention_bias": False}


def read_gemma(file: GgufFile, config: Fields) -> Fields:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _scalar(config: Fields, layers_of_27b: int) -> int:
    """What scores are divided by the root of. Not in the file: llama.cpp knows the largest model by its layers."""
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def read_gemma2(file: GgufFile, config: Fields) -> Fields:
    layers = config["num_hidden_layers"]
    return {
        **read_gemma(file, config),
        "query_pre_attn_scalar": _scalar(config, 46),
        "attn_logit_softcapping": file.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("gemma2.final_logit_softcapping", 30.0),
        "sliding_window": file.integer("gemma2.attention.sliding_window", 4096),
        "layer_types": [_FULL if layer % 2 else _WINDOW for layer in range(layers)],
    }


def read_gemma3(file: GgufFile, config: Fields) -> Fields:
    window = file.integer("gemma3.attention.sliding_window", 0)  # 0: no layer has one
    return {
        **read_gemma(file, config),
        "rope_theta": file.number("gemma3.rope.freq_base", 1e6),
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _scalar(config, 62),
        "sliding_window": window or None,
        "layer_types": [
            _WINDOW if window and (layer + 1) % 6 else _FULL for layer in range(config["num_hidden_layers"])
        ],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.number("gemma3.final_logit_softcapping", 0.0) or None,
    }


def _refuse_scaling(file: GgufFile, arch: str) -> None:
    """Of a family that has none but its lists of factors: what would otherwise be left out in silence."""
    kind = file.text(f"{arch}.rope.scaling.type", "linear")  # as llama.cpp takes it
    factor = file.number(f"{arch}.rope.scaling.factor", file.number(f"{arch}.rope.scale_linear", 1.0))
    if kind == "longrope" and factor != 1.0:
        file.fail(f"`{arch}.rope.scaling.type` is longrope, but the lists of its factors are missing")
    if kind != "none" and factor != 1.0:
        file.fail(f"position scaling {kind[:40]!r} is not known of this architecture", UNSUPPORTED)


def read_phi3(file: GgufFile, config: Fields) -> Fields:
    return {**_share(file, "phi3", config), "attention_bias": False, **_read_lists(file, "phi3", config)}


def read_phimoe(file: GgufFile, config: Fields) -> Fields:
    fields = _read_lists(file, "phimoe", config)
    if (scaling := fields.get("rope_scaling")) is not None:
        # The file has what other models compute from their lengths; those that there are say this.
        scaling |= {"short_mscale": _PHIMOE_SCALE, "long_mscale": _PHIMOE_SCALE}
        scaling.pop("attention_factor", None)
    return {
        **fields,
        "attention_bias": True,
        "lm_head_bias": True,
        "num_local_experts": file.integer("phimoe.expert_count"),
        "num_experts_per_tok": file.integer("phimoe.expert_used_count"),
    }


def _read_lists(file: GgufFile, arch: str, config: Fields) -> Fields:
    """Of factors of positions, one for short texts and one for long ones, and a window."""
    rotated = file.integer(f"{arch}.rope.dimension_count", config["head_dim"])
    original = file.integer(f"{arch}.rope.scaling.original_context_length", config["max_position_embeddings"])
    window = file.integer(f"{arch}.attention.sliding_window", 0)
    fields: Fields = {"original_max_position_embeddings": original, "sliding_window": window or None}
    names = [f"rope_factors_{name}.weight" for name in ("short", "long")]
    lists = [file.tensors[name] for name in names if name in file.tensors]
    if not lists:
        _refuse_scaling(file, arch)
        return fields
    if len(lists) == 1:
        (missing,) = (name for name in names if name not in file.tensors)
        file.fail(f"of the two lists of factors of its positions, the tensor `{missing}` is missing")
    values = [to_float32(file.rows(each), each.type_name).reshape(-1).tolist() for each in lists]
    if any(len(each) != rotated // 2 for each in values):
        file.fail(f"the tensors `rope_factors_short` and `_long` should have {rotated // 2} values")
    if original < 2:
        file.fail(f"`{arch}.rope.scaling.original_context_length` is {original}, which no context is stretched from")
    scaling: Fields = {"rope_type": "longrope", "short_factor": values[0], "long_factor": values[1]}
    stretch = config["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    factor = file.number(f"{arch}.rope.scaling.attn_factor", usual)
    if not math.isclose(factor, usual, rel_tol=1e-5):
        scaling["attention_factor"] = factor
    return {**fields, "rope_scaling": scaling}


def read_gpt_oss(file: GgufFile, config: Fields) -> Fields:
    width = _width(file, "gpt-oss.expert_feed_forward_length", "blk.0.ffn_gate_exps.weight", -2)
    scaling = config["rope_scaling"]
    return {
        "attention_bias": True,
        "intermediate_size": width,
        "num_local_experts": file.integer("gpt-oss.expert_count"),
        "num_experts_per_tok": file.integer("gpt-oss.expert_used_count"),
        "sliding_window": file.integer("gpt-oss.attention.sliding_window", 128),
        "layer_types": [_WINDOW if layer % 2 == 0 else _FULL for layer in range(config["num_hidden_layers"])],
        # The bounds of what is stretched are no whole dimensions in this family.
        "rope_scaling": scaling if scaling is None else {**scaling, "truncate": False},
    }


def read_granite(file: GgufFile, config: Fields) -> Fields:
    return {
        **read_llama(file, config),
        "attention_multiplier": file.number("granite.attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": file.number("granite.embedding_scale", 1.0),
        "residual_multiplier": file.number("granite.residual_scale", 1.0),
        "logits_scaling": file.number("granite.logit_scale", 1.0),
    }


def read_smollm3(file: GgufFile, config: Fields) -> Fields:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {**read_llama(file, config), "no_rope_layers": [int(layer % 4 != 0) for layer in layers]}


def read_starcoder2(file: GgufFile, config: Fields) -> Fields:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
        # Not in the file: llama.cpp lets each token see all others, the models that there are see this many.
        "sliding_window": file.integer("starcoder2.attention.sliding_window", 4096),
    }


def read_command_r(file: GgufFile, config: Fields) -> Fields:
    return {
        "logit_scale": file.number("command-r.logit_scale"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def read_cohere2(file: GgufFile, config: Fields) -> Fields:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        "logit_scale": file.number("cohere2.logit_scale"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": file.integer("cohere2.attention.sliding_window", 4096),
        "layer_types": [_WINDOW if layer % 4 else _FULL for layer in layers],
    }


def read_olmo2(file: GgufFile, config: Fields) -> Fields:
    if "olmo2.attention.sliding_window" in file.metadata:
        file.fail("is an OLMo 3, whose windows cannot be read from GGUF", UNSUPPORTED)
    return {"attention_bias": False}


def read_stablelm(file: GgufFile, config: Fields) -> Fields:
    return {
        **_share(file, "stablelm", config),
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
    }


def read_phi2(file: GgufFile, config: Fields) -> Fields:
    return {**_share(file, "phi2", config), "hidden_act": "gelu_new"}


def read_gptneox(file: GgufFile, config: Fields) -> Fields:
    rotated = file.integer("gptneox.rope.dimension_count", config["head_dim"])
    return {
        "rotary_pct": rotated / config["head_dim"],
        "rotary_emb_base": config["rope_theta"],
        # Not in the file: the model of 20 billion has the approximation, known by its layers.
        "hidden_act": "gelu_fast" if config["num_hidden_layers"] == 44 else "gelu",
        "use_parallel_residual": file.flag("gptneox.use_parallel_residual", True),
    }


def read_gpt2(file: GgufFile, config: Fields) -> Fields:
    """GPT-2 whose matrices lie as others' do is a StarCoder with keys for every head."""
    return {"activation_function": "gelu_new", "multi_query": False, "n_inner": config["intermediate_size"]}


def read_starcoder(file: GgufFile, config: Fields) -> Fields:
    if config["num_key_value_heads"] != 1:
        file.fail("has several key-value heads, which this architecture has not", UNSUPPORTED)
    return {"activation_function": "gelu_pytorch_tanh", "multi_query": True, "n_inner": config["intermediate_size"]}


def read_bloom(file: GgufFile, config: Fields) -> Fields:
    if config["intermediate_size"] != 4 * config["hidden_size"]:
        file.fail(f"`bloom.feed_forward_length` is {config['intermediate_size']}, not 4 times the embedding's")
    return {"seq_length": config["max_position_embeddings"]}


def read_falcon(file: GgufFile, config: Fields) -> Fields:
    kv_heads, has_two = config["num_key_value_heads"], "blk.0.attn_norm_2.weight" in file.tensors
    is_new = has_two or kv_heads > 1
    return {
        "activation": "gelu",
        "num_kv_heads": kv_heads,
        "multi_query": True,
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (2 if has_two else 1) if is_new else None,
        "ffn_hidden_size": config["intermediate_size"],
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    }


def read_mpt(file: GgufFile, config: Fields) -> Fields:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    largest = file.number("mpt.attention.max_alibi_bias", 0.0)
    if not largest > 0:
        file.fail("has learned positions, which are not read of this architecture", UNSUPPORTED)
    ratio = inner / hidden
    if int(ratio * hidden) != inner:
        file.fail(f"`mpt.feed_forward_length` is {inner}, no share of the embedding's {hidden}")
    return {
        "expansion_ratio": ratio,
        "no_bias": True,
        "attn_config": {
            "attn_type": "multihead_attention" if kv_heads == heads else "grouped_query_attention",
            "kv_n_heads": kv_heads,
            "alibi": True,
            "alibi_bias_max": largest,
            "clip_qkv": file.number("mpt.attention.clamp_kqv", 0.0) or None,
            "qk_ln": "blk.0.attn_q_norm.weight" in file.tensors,
        },
    }


def read_dbrx(file: GgufFile, config: Fields) -> Fields:
    if not math.isclose(config["layer_norm_epsilon"], _DBRX_EPS, rel_tol=1e-3):
        file.fail(
            f"`dbrx.attention.layer_norm_epsilon` is {config['layer_norm_epsilon']}, not {_DBRX_EPS}", UNSUPPORTED
        )
    experts = file.integer("dbrx.expert_count")
    return {
        "num_local_experts": experts,
        "attn_config": {
            "kv_n_heads": config["num_key_value_heads"],
            "clip_qkv": file.number("dbrx.attention.clamp_kqv", 0.0) or None,
        },
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "hidden_size": config["hidden_size"],
            "moe_num_experts": experts,
            "moe_top_k": file.integer("dbrx.expert_used_count"),
        },
    }


def read_deepseek2(file: GgufFile, config: Fields) -> Fields:
    """Version 2, or 3 if experts are chosen by sigmoids."""
    rotated = file.integer("deepseek2.rope.dimension_count")
    # Newer files say first what is cached, a latent for all heads, and in keys of their own what a head has.
    whole = file.integer("deepseek2.attention.key_length_mla", config["head_dim"])
    value = file.integer("deepseek2.attention.value_length_mla", file.integer("deepseek2.attention.value_length"))
    if not 0 < rotated < whole:
        file.fail(f"`deepseek2.rope.dimension_count` is {rotated} of the {whole} dimensions of a head")
    experts = file.integer("deepseek2.expert_count")
    # Not in older files: the models that there are choose groups of experts first, known by their number.
    groups, chosen = {160: (8, 3), 256: (8, 4)}.get(experts, (1, 1))
    groups = file.integer("deepseek2.expert_group_count", groups)
    fields: Fields = {
        "head_dim": rotated,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": file.integer("deepseek2.attention.q_lora_rank", 0) or None,
        "kv_lora_rank": file.integer("deepseek2.attention.kv_lora_rank"),
        "qk_nope_head_dim": whole - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "n_routed_experts": experts,
        "n_shared_experts": file.integer("deepseek2.expert_shared_count", 0),
        "num_experts_per_tok": file.integer("deepseek2.expert_used_count"),
        "moe_intermediate_size": file.integer("deepseek2.expert_feed_forward_length"),
        "first_k_dense_replace": file.integer("deepseek2.leading_dense_block_count", 0),
        "routed_scaling_factor": file.number("deepseek2.expert_weights_scale", 1.0),
        "norm_topk_prob": file.flag("deepseek2.expert_weights_norm", False),
        "n_group": groups,
        "topk_group": file.integer("deepseek2.expert_group_used_count", chosen),
    }
    if chooses_by_sigmoid(file):
        fields["num_nextn_predict_layers"] = 0
    else:
        fields["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    if config["rope_scaling"] is not None:
        # How scores grow with the length, a tenth of it, as both of the config's fields have it in all models.
        stretch = round(10 * file.number("deepseek2.rope.scaling.yarn_log_multiplier"), 6)
        fields["rope_scaling"] = {**config["rope_scaling"], "mscale": stretch, "mscale_all_dim": stretch}
    return fields


def chooses_by_sigmoid(file: GgufFile) -> bool:
    """Whether a DeepSeek chooses experts as version 3 does."""
    return file.integer("deepseek2.expert_gating_func", 1) == 2


def _share(file: GgufFile, arch: str, config: Fields) -> Fields:
    """Of a head that is rotated."""
    rotated = file.integer(f"{arch}.rope.dimension_count", config["head_dim"])
    return {"partial_rotary_factor": rotated / config["head_dim"]}
