"""The architectures of GGUF files that can be read: which tensor is which.

`gguf_model` plans tensors and reads what all architectures share. One entry of `ARCHITECTURES` is one architecture as
llama.cpp's converter writes it; what its config.json says beyond the common fields is a function of
`gguf_config_fields`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from text_generation_inference.weights.gguf import GgufFile
from text_generation_inference.weights.gguf_config_fields import (
    chooses_by_sigmoid,
    read_bloom,
    read_cohere2,
    read_command_r,
    read_dbrx,
    read_deepseek2,
    read_falcon,
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_gpt2,
    read_gpt_oss,
    read_gptneox,
    read_granite,
    read_llama,
    read_mixtral,
    read_mpt,
    read_olmo2,
    read_phi2,
    read_phi3,
    read_phimoe,
    read_qwen2_moe,
    read_qwen3_moe,
    read_smollm3,
    read_stablelm,
    read_starcoder,
    read_starcoder2,
)

Fields = dict[str, Any]

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Architecture:
    class_name: str
    model_type: str
    names: Mapping[str, str]  # of a layer's tensors: in the file -> in the Hugging Face model
    experts: Mapping[str, str] = field(default_factory=dict[str, str])  # of an expert's, with a place for its number
    leading: Mapping[str, str] = field(default_factory=dict[str, str])  # of layers before those with experts
    routed: Mapping[str, str] = field(default_factory=dict[str, str])  # and of those with experts
    outside: Mapping[str, str] = field(default_factory=_OUTSIDE.copy)  # of tensors of no layer
    layer: str = "model.layers.{}"
    permutes: bool = False  # query and key rows are stored in llama.cpp's rotary order
    groups: bool = False  # q, k and v, which are one tensor, take turns in the Hugging Face model and not in the file
    biased: tuple[str, ...] = ()
    may_be_biased: tuple[str, ...] = ()  # as the first layer is
    optional: tuple[str, ...] = ()  # what all layers may lack
    norm_offset: float = 0.0  # what the converter has added to the weights of norms
    head_norm: str = ""  # shape of norms of queries and keys, where it is not one head: "all", or "each" head its own
    eps: str = "rms_norm_eps"  # the field of the config
    rotates: bool = True
    scales_positions: bool = True  # knows linear, yarn and Llama 3's scaling, as Llama does
    rotates_part: bool = False  # fewer dimensions of a head than it has may be rotated
    latent: bool = False  # keys and values of all heads are made of one latent
    expert_biases: bool = False  # of all experts in one tensor
    has_factors: bool = False  # two lists of factors of positions, which are in its config
    known: tuple[str, ...] = ()  # of the numbers that files of other architectures are refused for
    read: Callable[[GgufFile, Fields], Fields] = lambda file, config: {}

    @property
    def centres(self) -> bool:
        """Whether its norms subtract a mean."""
        return self.eps != "rms_norm_eps"


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROUTED = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {f"ffn_{part}": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_MIXTRAL_EXPERTS = {
    f"ffn_{part}": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_QKV = ("attn_q", "attn_k", "attn_v")
_NORMS = ("attn_norm", "ffn_norm", "output_norm")
_PLAIN = {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_ONE_NORM = {name: target for name, target in _ATTENTION.items() if name != "ffn_norm"}
_FOUR_TIMES = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_SELF_ATTENTION = {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_OUTSIDE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}

_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", {**_ATTENTION, **_DENSE}, permutes=True, read=read_llama),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", {**_ATTENTION, **_DENSE}, biased=("attn_q", "attn_k", "attn_v")),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**_ATTENTION, **_ROUTED, **_SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        _EXPERTS,
        biased=("attn_q", "attn_k", "attn_v"),
        read=read_qwen2_moe,
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        {**_ATTENTION, **_DENSE, **_HEAD_NORMS},
        read=lambda file, config: {"attention_bias": False},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**_ATTENTION, **_ROUTED, **_HEAD_NORMS}, _EXPERTS, read=read_qwen3_moe
    ),
    "gemma": Architecture(
        "GemmaForCausalLM",
        "gemma",
        {**_ATTENTION, **_DENSE},
        norm_offset=1.0,
        read=read_gemma,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        {**_ATTENTION, **_DENSE, **_SANDWICH},
        norm_offset=1.0,
        read=read_gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_ATTENTION, **_DENSE, **_SANDWICH, **_HEAD_NORMS},
        norm_offset=1.0,
        read=read_gemma3,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        _FUSED,
        scales_positions=False,
        rotates_part=True,
        has_factors=True,
        read=read_phi3,
    ),
    "phimoe": Architecture(
        "PhimoeForCausalLM",
        "phimoe",
        {**_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
        _MIXTRAL_EXPERTS,
        biased=(*_QKV, "attn_output", *_NORMS, "output"),
        scales_positions=False,
        has_factors=True,
        read=read_phimoe,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **{name: target for name, target in _ATTENTION.items() if name != "ffn_norm"},
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        _EXPERTS,
        biased=(*_QKV, "attn_output", "ffn_gate_inp"),
        expert_biases=True,
        read=read_gpt_oss,
    ),
    "granite": Architecture(
        "GraniteForCausalLM", "granite", {**_ATTENTION, **_DENSE}, permutes=True, read=read_granite
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM", "smollm3", {**_ATTENTION, **_DENSE}, permutes=True, read=read_smollm3
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biased=_NORMS,
        may_be_biased=(*_QKV, "attn_output", "ffn_up", "ffn_down"),
        eps="norm_epsilon",
        read=read_starcoder2,
    ),
    "command-r": Architecture(
        "CohereForCausalLM",
        "cohere",
        {**_ONE_NORM, **_DENSE, **_HEAD_NORMS},
        optional=tuple(_HEAD_NORMS),
        head_norm="each",
        eps="layer_norm_eps",
        read=read_command_r,
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", "cohere2", {**_ONE_NORM, **_DENSE}, eps="layer_norm_eps", read=read_cohere2
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        {
            **{name: target for name, target in _ONE_NORM.items() if name != "attn_norm"},
            **_DENSE,
            **_HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        head_norm="all",
        read=read_olmo2,
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        "stablelm",
        {**_ATTENTION, **_DENSE, "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
        biased=_NORMS,
        may_be_biased=_QKV,
        optional=("ffn_norm", "attn_q_norm", "attn_k_norm"),
        head_norm="each",
        eps="layer_norm_eps",
        rotates_part=True,
        read=read_stablelm,
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        "phi",
        {**_ONE_NORM, "attn_output": "self_attn.dense", **_PLAIN},
        outside={**_OUTSIDE, "output_norm": "model.final_layernorm"},
        biased=(*_QKV, "attn_output", *_PLAIN, "attn_norm", "output_norm", "output"),
        eps="layer_norm_eps",
        rotates_part=True,
        read=read_phi2,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            **_FOUR_TIMES,
        },
        outside={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layer="gpt_neox.layers.{}",
        groups=True,
        biased=("attn_qkv", "attn_output", *_FOUR_TIMES, *_NORMS),
        eps="layer_norm_eps",
        rotates_part=True,
        read=read_gptneox,
    ),
    "gpt2": Architecture(
        "GPTBigCodeForCausalLM", "gpt_bigcode", _GPT2, outside=_GPT2_OUTSIDE, layer="transformer.h.{}", groups=True,
        biased=(*_GPT2, "output_norm"), eps="layer_norm_epsilon", rotates=False, read=read_gpt2
    ),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM", "gpt_bigcode", _GPT2, outside=_GPT2_OUTSIDE, layer="transformer.h.{}",
        biased=(*_GPT2, "output_norm"), eps="layer_norm_epsilon", rotates=False, read=read_starcoder
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "bloom",
        {
            "attn_norm": "input_layernorm",
            **_SELF_ATTENTION,
            "ffn_norm": "post_attention_layernorm",
            **_FOUR_TIMES,
        },
        outside={
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer="transformer.h.{}",
        groups=True,
        biased=(*_SELF_ATTENTION, *_FOUR_TIMES, *_NORMS, "token_embd_norm"),
        eps="layer_norm_epsilon",
        rotates=False,
        read=read_bloom,
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        "mpt",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_q_norm": "attn.q_ln",
            "attn_k_norm": "attn.k_ln",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        outside={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        layer="transformer.blocks.{}",
        optional=tuple(_HEAD_NORMS),
        head_norm="all",
        eps="layer_norm_epsilon",
        rotates=False,
        known=("attention.clamp_kqv", "attention.max_alibi_bias"),
        read=read_mpt,
    ),
    "dbrx": Architecture(
        "DbrxForCausalLM",
        "dbrx",
        {
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_qkv": "norm_attn_norm.attn.Wqkv",
            "attn_output": "norm_attn_norm.attn.out_proj",
            "attn_output_norm": "norm_attn_norm.norm_2",
            "ffn_gate_inp": "ffn.router.layer",
        },
        {f"ffn_{part}": f"ffn.experts.{{}}.{name}" for part, name in (("gate", "w1"), ("up", "v1"), ("down", "w2"))},
        outside={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        layer="transformer.blocks.{}",
        eps="layer_norm_epsilon",
        scales_positions=False,
        known=("attention.clamp_kqv",),
        read=read_dbrx,
    ),
    "internlm2": Architecture("LlamaForCausalLM", "llama", {**_ATTENTION, **_DENSE}, permutes=True, read=read_llama),
}  # fmt: skip
ARCHITECTURES["deepseek2"] = Architecture(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
    },
    _EXPERTS,
    leading=_DENSE,
    routed={
        **_ROUTED,
        **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    },
    optional=("attn_q", "attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_b"),
    latent=True,
    read=read_deepseek2,
)
_DEEPSEEK3 = replace(
    ARCHITECTURES["deepseek2"],
    class_name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    routed={**ARCHITECTURES["deepseek2"].routed, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
)
_FALCON = Architecture(
    "FalconForCausalLM",
    "falcon",
    {"attn_norm": "input_layernorm", **_SELF_ATTENTION, **_FOUR_TIMES},
    outside={
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer="transformer.h.{}",
    groups=True,
    biased=("attn_norm", "attn_norm_2", "output_norm"),
    eps="layer_norm_epsilon",
    read=read_falcon,
)
ARCHITECTURES["falcon"] = _FALCON
_FALCON_TWO_NORMS = replace(
    _FALCON, names={"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn", **_SELF_ATTENTION, **_FOUR_TIMES}
)
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    {**_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    _MIXTRAL_EXPERTS,
    permutes=True,
    read=read_mixtral,
)


def find_architecture(file: GgufFile, name: str) -> Architecture | None:
    """By its name in the file; a Llama with experts is a Mixtral, Falcons differ in their norms, and DeepSeeks in how
    they choose experts."""
    if name == "llama" and file.integer("llama.expert_count", 0) > 0:
        return _MIXTRAL
    if name == "falcon" and "blk.0.attn_norm_2.weight" in file.tensors:
        return _FALCON_TWO_NORMS
    if name == "deepseek2" and chooses_by_sigmoid(file):
        return _DEEPSEEK3
    return ARCHITECTURES.get(name)


def layer_shapes(arch: Architecture, config: Fields) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a layer may have, by their names in a file."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key_value = heads * dim, kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("attn_norm", "attn_norm_2", "attn_output_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), (hidden,)
    )
    shapes |= {"attn_q": (query, hidden), "attn_k": (key_value, hidden), "attn_v": (key_value, hidden)}
    shapes |= {"attn_output": (hidden, query), "attn_qkv": (query + 2 * key_value, hidden)}
    shapes |= {"attn_sinks.weight": (heads,)}
    norms = {"": [(dim,)] * 2, "all": [(query,), (key_value,)], "each": [(heads, dim), (kv_heads, dim)]}
    shapes |= dict(zip(("attn_q_norm", "attn_k_norm"), norms[arch.head_norm], strict=True))
    fused = "mlp.gate_up_proj" in arch.names.values()
    shapes |= {
        "ffn_gate": (inner, hidden),
        "ffn_up": ((2 if fused else 1) * inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shared = config.get("n_shared_experts", 0) * config.get("moe_intermediate_size", 0)
    shared = config.get("shared_expert_intermediate_size", shared)
    shapes |= {"ffn_gate_shexp": (shared, hidden), "ffn_up_shexp": (shared, hidden), "ffn_down_shexp": (hidden, shared)}
    shapes |= {"ffn_gate_inp": (count_experts(config), hidden), "ffn_gate_inp_shexp": (1, hidden)}
    shapes["exp_probs_b.bias"] = (count_experts(config),)
    return shapes | (_latent_shapes(config) if arch.latent else {})


def _latent_shapes(config: Fields) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotated, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query, query_rank = heads * (plain + rotated), config["q_lora_rank"] or 0
    return {
        "attn_q": (query, hidden),
        "attn_q_a": (query_rank, hidden),
        "attn_q_a_norm": (query_rank,),
        "attn_q_b": (query, query_rank),
        "attn_kv_a_mqa": (rank + rotated, hidden),
        "attn_kv_a_norm": (rank,),
        "attn_kv_b": (heads * (plain + value), rank),
        "attn_k_b": (heads, rank, plain),
        "attn_v_b": (heads, value, rank),
        "attn_output": (hidden, heads * value),
    }


def outside_shapes(config: Fields) -> dict[str, tuple[int, ...]]:
    """Of the tensors that belong to no layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("token_embd", "output"), (vocab, hidden))
    shapes |= dict.fromkeys(("output_norm", "token_embd_norm"), (hidden,))
    return shapes | {"position_embd": (config["max_position_embeddings"], hidden)}


def count_experts(config: Fields) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((config[name] for name in names if name in config), 0)


def expert_shapes(config: Fields) -> dict[str, tuple[int, int]]:
    """Of one expert's matrices."""
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    return {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
