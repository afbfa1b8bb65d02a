"""All layers of a plain decoder as one op, for devices where the calls between small ops cost as much as the ops.

A device that can do this offers `Ops.make_fused_decode`, which makes a `FusedDecode`. Either may return None, for a
model or a batch it is not made for; then, and elsewhere, layers run one by one.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.matrices import Weight
from text_generation_inference.kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """What makes a feed-forward a mixture of experts, whose matrices are as the op `experts` takes them."""

    router: Weight  # [experts, hidden]
    router_bias: Tensor | None
    correction: Tensor | None  # of the rule, where it has one
    routing: Routing
    gate: str  # a word of `experts.GATES`


@dataclass(frozen=True, slots=True)
class FusedLatents:
    """What makes an attention one over latents: what the op `latent_attention` takes."""

    up: Tensor  # [heads, p + v, c]
    norm: tuple[Tensor, float]  # of latents: weight [c] and epsilon
    query_up: Weight | None = None  # of queries that are made of a latent of their own, which `query_norm` is for
    query_norm: tuple[Tensor, float] | None = None


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """What one layer of a pre-norm decoder reads. Matrices are in the form that the device packs them in."""

    input_norm: Tensor  # [hidden]
    qkv: Weight  # [(heads + 2 * kv_heads) * head_dim, hidden]; of latents queries, then latent and shared key
    o: Weight
    post_norm: Tensor  # [hidden]
    gate_up: Weight  # [2 * intermediate, hidden]; of all experts where there are some
    down: Weight
    k_cache: Tensor  # of latents both are the only one
    v_cache: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [head_dim]: each head is normalised before it is rotated
    k_norm: Tensor | None = None
    experts: FusedExperts | None = None
    shared: tuple[Weight, Weight] | None = None  # gates and ups, and downs, that each token passes beside experts
    latents: FusedLatents | None = None
    window: int | None = None
    sinks: Tensor | None = None  # [heads] float32: one more score for each query, of a token without a value
    kv_scales: tuple[float, float] = (1.0, 1.0)  # of a cache in FP8
    # What only some devices fuse.
    attention_out_norm: Tensor | None = None  # [hidden]: of what attention adds to the stream
    mlp_out_norm: Tensor | None = None
    softcap: float | None = None
    cos_sin: Tensor | None = None  # a table of its own, where layers differ

    @property
    def is_plain(self) -> bool:
        more = (self.attention_out_norm, self.mlp_out_norm, self.softcap, self.cos_sin)
        return all(each is None for each in more)


class FusedDecode(Protocol):
    def __call__(self, x: Tensor, batch: Batch) -> Tensor | None:
        """x `[tokens, hidden]` (embeddings) through all layers and the final norm -> `[tokens, hidden]`.

        None: this batch is not one for it.
        """
        ...
