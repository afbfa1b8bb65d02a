"""`DecoderSpec`: what a decoder-only model is composed of, read once from its Hugging Face config.

Layers say which attention and feed-forward they have and how those join, `TensorNames` what a checkpoint calls them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.routing import Routing
from text_generation_inference.layers.attention import TemperatureSpec
from text_generation_inference.layers.head_norm import HeadNormSpec
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.layers.rotary import RopeSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.rope_config import read_length, read_rope

# What configs call an activation -> what ops call it. `gelu` alone is exact; all others are its tanh form.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
GATES = ("silu", "gelu", "gelu_tanh")  # those that a feed-forward may gate with


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Keys and values of all heads are made of one latent (MLA)."""

    query_rank: int | None  # queries are made of a latent of their own, of this size; None: of the stream itself
    latent_dim: int
    plain_dim: int  # of a query's and a key's dimensions those that know no positions
    rope_dim: int  # and those that do, which of a key are the same for all heads
    value_dim: int
    norm: NormSpec  # of latents


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec  # `NO_ROTATION` where positions come otherwise, or not at all
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    own_scale: float | None = None  # of the scores, where it is not head_dim ** -0.5
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    qkv_layout: QkvLayout = QkvLayout.SEPARATE
    interleaved: bool = False  # stored so that neighbours are rotated together, not halves
    qk_norm: HeadNormSpec | None = None
    clip: float | None = None  # of q, k and v
    slopes: tuple[float, ...] = ()  # ALiBi, by head
    sinks: str = ""  # the tensor of one more score for each head, without a value
    attention_chunk: int | None = None  # a token sees only tokens of its own run of so many positions
    temperature: TemperatureSpec | None = None
    latent: LatentSpec | None = None  # with heads, scale and rotation alone of the fields above

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.own_scale is None else self.own_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A feed-forward: down(activation(gate) * up), or down(activation(up)) where nothing is gated."""

    width: int
    activation: str = "silu"  # as ops call it
    bias: bool = False
    is_gated: bool = True


class ExpertLayout(StrEnum):
    """How a checkpoint stores the matrices of experts."""

    EACH = "each"  # gate, up and down of each expert; or two matrices, in the first of which gates and ups take turns
    STACKED = "stacked"  # all gates `[experts * width, hidden]`, all ups and, transposed, all downs
    FUSED = "fused"  # gates and ups `[experts, 2 * width, hidden]`, downs `[experts, hidden, width]`
    FUSED_TRANSPOSED = "fused, transposed"  # `[experts, hidden, 2 * width]`, `[experts, width, hidden]`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What checkpoints call the parts of a mixture of experts, relative to the feed-forward."""

    router: str = "gate"
    matrices: tuple[str, ...] = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")
    layout: ExpertLayout = ExpertLayout.EACH
    alternating: bool = False  # of fused ones: gates and ups take turns
    biases: tuple[str, str] | None = (
        None  # of fused ones, in which gates and ups take turns; others are beside matrices
    )
    feed_forward: str = ""  # its own name, where that is not the one of all layers
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


# As `transformers` 5 has them in memory, and in files that it is told to write so.
FUSED_EXPERTS = ExpertNames(matrices=("experts.gate_up_proj", "experts.down_proj"), layout=ExpertLayout.FUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts, each of which is a gated feed-forward."""

    num_experts: int
    width: int  # of each
    routing: Routing
    activation: str = "silu"  # as ops call it
    router_bias: bool = False
    router_correction: bool = False  # decides with the scores who is chosen, but not with which weight
    shared: DenseSpec | None = None  # every token passes it
    shared_gate: bool = False  # its result is scaled by the sigmoid of a product
    scale_inputs: bool = False  # the weights of experts are multiplied with what goes into them
    names: ExpertNames = ExpertNames()
    other_names: tuple[ExpertNames, ...] = (FUSED_EXPERTS,)  # that a checkpoint may have instead


class Join(StrEnum):
    """How attention A and feed-forward M join the residual stream x; n are norms."""

    PRE = "pre"  # x += A(n1 x); x += M(n2 x)
    PARALLEL = "parallel"  # x += A(n x) + M(n x)
    PARALLEL_TWO = "parallel, two norms"  # x += A(n1 x) + M(n2 x)
    SANDWICH = "sandwich"  # x += n2 A(n1 x); x += n4 M(n3 x)
    POST = "post"  # x += n1 A(x); x += n2 M(x)
    NORMED_STREAM = "normed stream"  # x = n1(x + A x); x = n2(x + M x)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    feed_forward: DenseSpec | ExpertsSpec
    join: Join = Join.PRE
    residual_factor: float = 1.0  # on what joins the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What checkpoints call the parts of a decoder, each relative to what it is in."""

    decoder: tuple[str, ...] = ("model",)  # the first that a checkpoint has counts; "" for none
    embedding: str = "embed_tokens"
    embedding_norm: str = ""
    positions: str = ""
    project_in: str = "project_in"
    project_out: str = "project_out"
    layer: str = "layers.{}"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one for all
    out: str = "o_proj"
    attention_out_norm: str = "post_attention_layernorm"  # of joins with norms after the parts
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # or one for both; that of `up` where nothing is gated
    down: str = "down_proj"
    feed_forward_out_norm: str = "post_feedforward_layernorm"
    norm: str = "norm"
    head: tuple[str, ...] = ("lm_head",)  # the first that a checkpoint has counts
    transposed: bool = False  # matrices of layers are stored `[in, out]`
    further: str = ""  # what layers have that are behind the computed ones and predict further tokens: not needed
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)  # patterns: tables that old checkpoints carry


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_positions: int
    tied: bool = False  # the head is the embedding
    ties_without_head: bool = False  # also where a checkpoint has no head, whatever its config says
    has_final_norm: bool = True
    learned_positions: int | None = None  # rows before that of position 0 in a table of `max_positions`; None: no table
    embedding_size: int | None = None  # where it is not hidden_size: projected on the way in and out
    embedding_factor: float = 1.0  # rounded to the model's type
    logits_factor: float = 1.0
    logits_softcap: float | None = None
    head_bias: bool = False
    exceeds_float16: bool = False  # its hidden states grow beyond what that type holds
    normed_head: bool = False  # rows of the head are divided by their length
    names: TensorNames = TensorNames()

    @property
    def may_be_longer(self) -> bool:
        """Than `max_positions`: ALiBi knows distances alone."""
        return self.learned_positions is None and all(layer.attention.slopes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What most configs say in the same words."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    positions: int


def read_sizes(config: Config, kv_heads: int | None = None) -> Sizes:
    """`kv_heads`: where a family knows them otherwise."""
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.optional_integer("head_dim") or hidden // heads
    if not head_dim:
        raise config.wrong("num_attention_heads", f"is {heads}, more than there are hidden dimensions ({hidden})")
    kv_heads = kv_heads or config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelFormatError(
            f"{config.source}: {heads} attention heads cannot share {kv_heads} key/value heads evenly"
        )
    layers = config.integer("num_hidden_layers")
    return Sizes(hidden, heads, kv_heads, head_dim, layers, config.integer("max_position_embeddings", 2048))


def read_activation(config: Config, name: str = "hidden_act", default: str | None = None, is_gated: bool = True) -> str:
    """As ops call it."""
    known = [each for each, op in ACTIVATIONS.items() if not is_gated or op in GATES]
    return ACTIVATIONS[config.choice(name, known, default)]


def read_llama_like(
    config: Config,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    windows: Sequence[int | None] | None = None,  # by layer
    qk_norm: HeadNormSpec | None = None,
    theta: float = 10000.0,
    share: float = 1.0,  # of a head that is rotated
    activation: str = "hidden_act",  # the field
    is_gated: bool = True,
    norm: NormSpec | None = None,
) -> DecoderSpec:
    """The fields that Llama and its relatives share, with what differs."""
    sizes = read_sizes(config)
    feed_forward = DenseSpec(
        width=config.integer("intermediate_size"),
        activation=read_activation(config, activation, "silu", is_gated),
        bias=mlp_bias,
        is_gated=is_gated,
    )
    rope = read_rope(config, sizes.head_dim, sizes.positions, theta=theta, share=share)

    def attention(window: int | None) -> AttentionSpec:
        return AttentionSpec(
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            rope=rope,
            window=window,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
        )

    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden,
        layers=tuple(
            LayerSpec(attention=attention(window), feed_forward=feed_forward)
            for window in windows or (None,) * sizes.layers
        ),
        norm=norm or NormSpec(eps=config.positive("rms_norm_eps", 1e-6)),
        max_positions=read_length(config, rope, sizes.positions),
        tied=config.flag("tie_word_embeddings", False),
    )


def make_layers(attention: AttentionSpec, feed_forward: DenseSpec, count: int, join: Join) -> tuple[LayerSpec, ...]:
    """So many that are alike."""
    return (LayerSpec(attention=attention, feed_forward=feed_forward, join=join),) * count


def with_attention(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """With these fields of the attention of all layers changed."""
    layers = (replace(layer, attention=replace(layer.attention, **changes)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def with_layers(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """With these fields of all layers changed."""
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def check_experts(config: Config, experts: str, chosen: str) -> tuple[int, int]:
    """How many experts there are and how many each token goes to, from the fields of these names."""
    num_experts, top_k = config.integer(experts), config.integer(chosen)
    if top_k > num_experts:
        raise config.wrong(chosen, f"is {top_k}, but `{experts}` only {num_experts}")
    return num_experts, top_k


def with_experts(spec: DecoderSpec, experts: ExpertsSpec, layers: Collection[int] | None = None) -> DecoderSpec:
    """With experts as the feed-forward of these layers, by number; None: of all."""
    changed = (
        replace(layer, feed_forward=experts) if layers is None or number in layers else layer
        for number, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(changed))
