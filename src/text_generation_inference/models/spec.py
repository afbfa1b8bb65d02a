"""`DecoderSpec`: what a decoder-only model is composed of, read once from its Hugging Face config.

Layers say which attention and feed-forward they have and how those join, `TensorNames` what a checkpoint calls them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import shorten
from text_generation_inference.kernels.routing import Routing
from text_generation_inference.layers.rotary import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A gated feed-forward: down(activation(gate) * up)."""

    width: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What checkpoints call the parts of a mixture of experts, relative to the feed-forward."""

    router: str = "gate"
    gate_up_down: tuple[str, str, str] = (
        "experts.{}.gate_proj",
        "experts.{}.up_proj",
        "experts.{}.down_proj",
    )  # of each
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts, each of which is a gated feed-forward."""

    num_experts: int
    width: int  # of each
    routing: Routing
    activation: str = "silu"
    router_bias: bool = False
    shared: DenseSpec | None = None  # every token passes it
    shared_gate: bool = False  # its result is scaled by the sigmoid of a product
    names: ExpertNames = ExpertNames()


class Join(StrEnum):
    """How attention and feed-forward join the residual stream."""

    PRE = "pre"  # each normalises the stream and adds to it


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    feed_forward: DenseSpec | ExpertsSpec
    join: Join = Join.PRE


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What checkpoints call the parts of a decoder, each relative to what it is in."""

    decoder: str = "model"
    embedding: str = "embed_tokens"
    layer: str = "layers.{}"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward: str = "mlp"
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    norm: str = "norm"
    head: str = "lm_head"
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)  # patterns: tables that old checkpoints carry


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    rope: RopeSpec
    max_positions: int
    tied: bool = False  # the head is the embedding
    names: TensorNames = TensorNames()


# Far beyond any model, and small enough that what follows from them can be computed before anything is allocated.
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "n_routed_experts": 2**14,
    "moe_intermediate_size": 2**22,
    "shared_expert_intermediate_size": 2**22,
}
_MOST_OF_ANY = 2**62
_LARGEST = 10**30


class Config:
    """A Hugging Face config whose missing or wrong fields are named in the error."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self.fields = fields
        self.source = source

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelFormatError(f"{self.source}: `{name}` must be a positive integer, it is {shorten(value)}")
        most = _MOST.get(name, _MOST_OF_ANY)
        if value > most:
            raise ModelFormatError(f"{self.source}: `{name}` must be at most {most}, it is {shorten(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFormatError(f"{self.source}: `{name}` must be a number, it is {shorten(value)}")
        return float(max(-_LARGEST, min(value, _LARGEST))) if isinstance(value, int) else value  # others overflow

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if not 0 < value < _LARGEST:  # nor may it be NaN
            raise ModelFormatError(f"{self.source}: `{name}` must be > 0 and < {_LARGEST:g}, it is {value}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.fields.get(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        value = None if self.fields.get(name) is None else self.number(name)
        if value is not None and not abs(value) < _LARGEST:
            raise ModelFormatError(f"{self.source}: `{name}` must be finite, it is {value}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.source}: `{name}` must be true or false, it is {shorten(value)}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.fields.get(name)
        return default if value is None else str(value)

    def get(self, name: str) -> Any:
        return self.fields.get(name)

    def with_defaults(self, **values: Any) -> "Config":
        """Where a family's defaults are not those of others: files leave out what equals them."""
        return Config({**values, **self.fields}, self.source)


def read_rope(config: Config, head_dim: int, max_positions: int) -> RopeSpec:
    """Rotary facts from `rope_parameters` (newer configs) or `rope_theta` and `rope_scaling` (older ones)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelFormatError(f"{config.source}: the rotary settings must be an object, they are {shorten(scaling)}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    inner = Config({"rope_theta": config.get("rope_theta"), **scaling}, config.source)
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotary_dim = int(
        head_dim * Config({"partial_rotary_factor": share}, config.source).positive("partial_rotary_factor", 1.0)
    )
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelFormatError(f"{config.source}: {rotary_dim} of {head_dim} dimensions of a head cannot be rotated")
    return RopeSpec(
        kind=kind,
        theta=inner.positive("rope_theta", 10000.0),
        rotary_dim=rotary_dim,
        factor=inner.positive("factor", 1.0),
        original_max_positions=inner.integer("original_max_position_embeddings", max_positions),
        low_freq_factor=inner.positive("low_freq_factor", 1.0),
        high_freq_factor=inner.positive("high_freq_factor", 4.0),
        beta_fast=inner.positive("beta_fast", 32.0),
        beta_slow=inner.positive("beta_slow", 1.0),
        attention_factor=inner.optional_number("attention_factor"),
        mscale=inner.optional_number("mscale"),
        mscale_all_dim=inner.optional_number("mscale_all_dim"),
        truncate=inner.flag("truncate", True),
    )


def read_llama_like(
    config: Config,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    windows: Sequence[int | None] | None = None,  # by layer
) -> DecoderSpec:
    """The fields that Llama and its relatives share, with what differs."""
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    num_layers = config.integer("num_hidden_layers")
    max_positions = config.integer("max_position_embeddings", 2048)
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelFormatError(
            f"{config.source}: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly"
        )
    feed_forward = DenseSpec(
        width=config.integer("intermediate_size"), activation=config.text("hidden_act", "silu"), bias=mlp_bias
    )

    def attention(window: int | None) -> AttentionSpec:
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
        )

    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(
            LayerSpec(attention=attention(window), feed_forward=feed_forward)
            for window in windows or (None,) * num_layers
        ),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim, max_positions),
        max_positions=max_positions,
        tied=config.flag("tie_word_embeddings", False),
    )


def check_experts(config: Config, experts: str, chosen: str) -> tuple[int, int]:
    """How many experts there are and how many each token goes to, from the fields of these names."""
    num_experts, top_k = config.integer(experts), config.integer(chosen)
    if top_k > num_experts:
        raise ModelFormatError(f"{config.source}: `{chosen}` is {top_k}, but `{experts}` only {num_experts}")
    return num_experts, top_k


def with_experts(spec: DecoderSpec, experts: ExpertsSpec, layers: Collection[int] | None = None) -> DecoderSpec:
    """With experts as the feed-forward of these layers, by number; None: of all."""
    changed = (
        replace(layer, feed_forward=experts) if layers is None or number in layers else layer
        for number, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(changed))
