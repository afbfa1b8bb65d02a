"""`Ops`: the kernels of a device by name. What each takes and gives is a protocol here.

The defaults are in plain torch, and define each op. A device makes an `Ops` with faster ones in their place, which the
type checker holds against the protocols, as it does all callers. A new op is a protocol, its definition in plain torch
and a field of `Ops`; one that only some devices have is None elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from text_generation_inference.kernels import (
    choice,
    experts,
    fp8,
    latent,
    low_bit,
    reference,
    routing,
    segments,
    slot_state,
)
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.choice import EVERY_FILTER, SamplingNeeds
from text_generation_inference.kernels.fp8 import AttentionScales, Fp8Weight
from text_generation_inference.kernels.fused_decode import FusedDecode, FusedLayer
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import BlockPieces, Product, Rows, Weight
from text_generation_inference.kernels.routing import Routed, Routing
from text_generation_inference.kernels.segments import Segments
from text_generation_inference.kernels.slot_state import SlotState
from text_generation_inference.sampling.ops import ByShapeOp, GreedyOp
from text_generation_inference.sampling.vocabulary import VocabularyPart

# -- matrices ----------------------------------------------------------------------------------------------------------


class PackLinearOp(Protocol):
    def __call__(self, weight: Tensor) -> Weight:
        """Bring a weight `[out, in]` into the form `linear` wants. Called once after loading."""
        ...


class PackFp8Op(Protocol):
    def __call__(self, weight: Fp8Weight) -> Fp8Weight:
        """Like `pack_linear`, of a weight in FP8."""
        ...


class PackBlocksOp(Protocol):
    def __call__(self, pieces: Sequence[tuple[str, Tensor]], in_features: int) -> Weight:
        """Like `pack_linear`, of quantised blocks. Pieces follow each other: one of `block_kinds`, and its blocks
        `[rows, bytes per row]` uint8."""
        ...


class PackLowBitOp(Protocol):
    def __call__(self, weight: LowBitWeight, num_experts: int | None = None) -> Weight:
        """Like `pack_linear`, of a weight in codes of few bits; or like `pack_experts`, of so many experts."""
        ...


class LinearOp(Protocol):
    def __call__(self, x: Rows, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x `[tokens, in]` times weight transposed -> `[tokens, out]` of x's type, or of `dtype`."""
        ...


class LinearUnscaledOp(Protocol):
    def __call__(self, x: Rows, weight: Fp8Weight, dtype: torch.dtype) -> Product:
        """Like `linear` of FP8; scales may be left to the op that comes next."""
        ...


class LogitsOp(Protocol):
    def __call__(self, hidden: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
        """hidden `[tokens, hidden]` times weight `[vocab, hidden]` transposed, into `out` if there is one (float32)."""
        ...


class EmbeddingOp(Protocol):
    def __call__(self, ids: Tensor, weight: Weight) -> Tensor:
        """ids `[tokens]`, weight `[vocab, hidden]` -> `[tokens, hidden]`."""
        ...


# -- between matrices. `quantize_for`: the matrix that the result is quantised for, if it should be --------------------


class RmsNormOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None) -> Rows:
        """x `[tokens, hidden]`, weight `[hidden]`; normalised in float32, rounded to the weight's type, multiplied."""
        ...


class AddRmsNormOp(Protocol):
    def __call__(
        self, x: Product, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
    ) -> tuple[Rows, Tensor]:
        """Add x to the residual, both `[tokens, hidden]`, then normalise: (normalised, new residual)."""
        ...


class LayerNormOp(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, quantize_for: Fp8Weight | None = None
    ) -> Rows:
        """x `[tokens, hidden]`, weight and bias `[hidden]`; its mean subtracted, normalised in float32."""
        ...


class AddLayerNormOp(Protocol):
    def __call__(
        self,
        x: Product,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        quantize_for: Fp8Weight | None = None,
    ) -> tuple[Rows, Tensor]:
        """Add x to the residual, both `[tokens, hidden]`, then normalise: (normalised, new residual)."""
        ...


class ActivationOp(Protocol):
    def __call__(self, x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
        """x `[tokens, width]` -> activation(x)."""
        ...


class GateOp(Protocol):
    def __call__(self, gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
        """gate_up `[tokens, 2 * width]` -> activation(gate) * up `[tokens, width]`."""
        ...


# -- experts -----------------------------------------------------------------------------------------------------------


class PackExpertsOp(Protocol):
    def __call__(self, weight: Tensor | BlockPieces, num_experts: int) -> Weight:
        """Like `pack_linear` or `pack_blocks`, of the matrices of all experts, one below the other, for `experts`."""
        ...


class RouteOp(Protocol):
    def __call__(self, scores: Tensor, rule: Routing, correction: Tensor | None = None) -> Routed:
        """scores `[tokens, experts]` float32, correction `[experts]` -> experts and their weights `[tokens, k]`."""
        ...


class ExpertsOp(Protocol):
    def __call__(
        self,
        x: Tensor,  # [tokens, hidden]
        ids: Tensor,  # [tokens, k]: experts of each token
        weights: Tensor,  # [tokens, k] float32: how much of each
        gate_up: Weight,  # [experts * 2 * width, hidden]: of each expert gates, then values
        down: Weight,  # [experts * hidden, width]
        gate: str = "silu",  # a word of `experts.GATES`
        biases: tuple[Tensor, Tensor] | None = None,  # [experts, 2 * width], [experts, hidden]
        scale_inputs: bool = False,  # the weights are multiplied with what goes into experts, not with what comes out
    ) -> Tensor:
        """-> `[tokens, hidden]`: the weighted sum of what each token's experts make of it."""
        ...


# -- attention. Caches are `[blocks, block_size, kv_heads, head_dim]` --------------------------------------------------


class RotaryAndCacheOp(Protocol):
    def __call__(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, head_dim]
        cos_sin: Tensor,  # [positions, rotary_dim] float32: cosines, then sines
        batch: Batch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: tuple[float, float] = (1.0, 1.0),  # of a cache in FP8
        scales: tuple[Tensor, Tensor] | None = None,  # [tokens], [columns of q, k and v]: still to be applied to them
        norms: HeadNorms | None = None,  # of q and k, before they are rotated
    ) -> Tensor:
        """Rotate q and k by position, write k and v into the cache; return the rotated q. q, k and v may be changed."""
        ...


class AttentionOp(Protocol):
    def __call__(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor | None,  # [tokens, kv_heads, head_dim] that this step has put into the cache, as it holds them:
        v: Tensor | None,  # for kernels that would rather read them here
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,  # a token sees itself and the `window - 1` tokens before it
        softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
        kv_scales: tuple[float, float] = (1.0, 1.0),  # of a cache in FP8
        slopes: Tensor | None = None,  # [heads] float32: times key's minus query's position, added to scores (ALiBi)
        sinks: Tensor | None = None,  # [heads] float32: one more score for each query, of a token without a value
        attention_chunk: int | None = None,  # a token sees only tokens of its own run of so many positions
        in_fp8: AttentionScales | None = None,  # what is multiplied is put into FP8 with these: see `fp8_attention`
    ) -> Tensor:
        """Causal attention of each row's query tokens over its cached tokens -> `[tokens, heads * head_dim]`."""
        ...


class KeepRowsOp(Protocol):
    def __call__(self, values: Tensor, cache: Tensor, blocks: Tensor, inside: Tensor) -> None:
        """values `[rows, kv_heads, head_dim]` go to these blocks `[rows]` of a cache, and places in them."""
        ...


class PictureAttentionOp(Protocol):
    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, mask: Tensor) -> Tensor:
        """Attention of padded prompts over blocks of pictures: q `[tokens, heads, head_dim]`, blocks `[rows, n]`, mask
        `[rows, row length, n * block_size]` bool -> `[tokens, heads * head_dim]`."""
        ...


class RotateHeadsOp(Protocol):
    def __call__(self, q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k `[rows, heads, head_dim]` of towers by their own row of cos_sin `[rows, rotary_dim]` float32
        (cosines, then sines), in float32. q and k may be changed."""
        ...


class SegmentAttentionOp(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        """Attention within runs of rows, without a cache and in both directions: q `[rows, heads, head_dim]`, k and v
        `[key rows, kv_heads, head_dim]` -> `[rows, heads * head_dim]`."""
        ...


class LatentAttentionOp(Protocol):
    def __call__(
        self,
        q: Tensor,  # [tokens, heads, p + r]
        latent: Tensor,  # [tokens, c + r]
        up: Tensor,  # [heads, p + v, c]
        norm: tuple[Tensor, float],  # weight [c] and epsilon
        cos_sin: Tensor,  # [positions, r] float32: cosines, then sines
        batch: Batch,
        cache: Tensor,
        scale: float,
    ) -> Tensor:
        """Attention over latents (MLA), whose letters and cache `kernels.latent` explains: norm them, rotate queries
        and the shared key, write latents and keys into the cache; then causal attention of each row's query tokens over
        its cached tokens -> `[tokens, heads * v]`. q and latent, whose rows may lie apart, may be changed."""
        ...


class MakeFusedDecodeOp(Protocol):
    def __call__(
        self,
        layers: Sequence[FusedLayer],
        norm: Tensor,  # [hidden]: the final one
        cos_sin: Tensor,  # [positions, rotary_dim] float32
        *,
        heads: int,
        eps: float,
        scale: float,
        activation: str,  # silu or gelu_tanh
    ) -> FusedDecode | None:
        """All layers of a decoder as one op; None where something in them has no kernel for that."""
        ...


# -- slots and sampling, without the host ------------------------------------------------------------------------------


class ApplyWritesOp(Protocol):
    def __call__(self, words: Tensor, staged: Tensor, num_writes: int) -> None:
        """Changes of slots: words `[all slots]` int32, staged `[n]` int32. See `slot_state.apply_writes`."""
        ...


class GatherInputsOp(Protocol):
    def __call__(self, state: SlotState, slots: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """slots and at `[tokens]` int32 -> input_ids, positions, kv_index, seq_lens `[tokens]`. See
        `slot_state.gather_inputs`."""
        ...


class GreedyIntoOp(Protocol):
    def __call__(
        self, logits: Tensor, slots: Tensor, state: SlotState, out: Tensor, vocabulary: VocabularyPart | None = None
    ) -> None:
        """logits `[rows, vocab]`, slots `[rows]` int32, out `[2, >= rows]` int32. See `choice.greedy_into`."""
        ...


class ChooseIntoOp(Protocol):
    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        state: SlotState,
        out: Tensor,
        needs: SamplingNeeds = EVERY_FILTER,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        """Like `greedy_into`, for rows that ask for more than their best token. See `choice.choose_into`."""
        ...


def _no_blocks(pieces: Sequence[tuple[str, Tensor]], in_features: int) -> Weight:
    raise AssertionError("this device does not compute from quantised blocks")


@dataclass(slots=True)
class Ops:
    description: str = "reference ops"
    pack_linear: PackLinearOp = reference.pack_linear
    fast_multiple: int = 1  # plain matrices whose sizes are multiples of it are multiplied fastest
    tower_rows: int = 0  # that a block of a tower computes at a time, where fewer stay in the caches; 0: all
    pack_fp8: PackFp8Op = fp8.pack_fp8
    fp8_max: float = fp8.FP8_MAX  # the largest number of the device's e4m3
    fp8_on_host: bool = False  # weights are quantised and widened there, until `pack_fp8` sends them
    fp8_attention: bool = True  # `attention` multiplies in FP8 where it has the scales
    pack_attention_scales: Callable[[AttentionScales], AttentionScales] = fp8.pack_attention_scales
    pack_low_bit: PackLowBitOp = low_bit.pack_low_bit
    # Ops that take matrices in few bits; for others they are widened when they are read.
    low_bit_keeps_wide: bool = False  # `linear` is faster for many rows if it has the values of few bits, too
    low_bit_ops: frozenset[str] = frozenset(("linear", "experts"))
    low_bit_kinds: frozenset[str] = frozenset(low_bit.KINDS)  # and which of them
    pack_blocks: PackBlocksOp = _no_blocks
    block_kinds: frozenset[str] = frozenset()  # quantised blocks that `pack_blocks` takes
    linear: LinearOp = reference.linear
    linear_unscaled: LinearUnscaledOp | None = None
    logits: LogitsOp = reference.logits
    embedding: EmbeddingOp = reference.embedding
    rms_norm: RmsNormOp = reference.rms_norm
    add_rms_norm: AddRmsNormOp = reference.add_rms_norm
    layer_norm: LayerNormOp = reference.layer_norm
    add_layer_norm: AddLayerNormOp = reference.add_layer_norm
    gelu: ActivationOp = reference.gelu
    gelu_tanh: ActivationOp = reference.gelu_tanh
    quick_gelu: ActivationOp = reference.quick_gelu
    relu: ActivationOp = reference.relu
    silu: ActivationOp = reference.silu
    silu_mul: GateOp = reference.silu_mul
    gelu_mul: GateOp = reference.gelu_mul
    gelu_tanh_mul: GateOp = reference.gelu_tanh_mul
    pack_experts: PackExpertsOp = experts.pack_experts
    route: RouteOp = routing.route
    experts: ExpertsOp = experts.experts
    rotary_and_cache: RotaryAndCacheOp = reference.rotary_and_cache
    attention: AttentionOp = reference.attention
    keep_rows: KeepRowsOp = reference.keep_rows
    picture_attention: PictureAttentionOp = reference.picture_attention
    rotate_heads: RotateHeadsOp = reference.rotate_heads
    segment_attention: SegmentAttentionOp = segments.segment_attention
    latent_attention: LatentAttentionOp = latent.latent_attention
    make_fused_decode: MakeFusedDecodeOp | None = None
    apply_writes: ApplyWritesOp = slot_state.apply_writes
    gather_inputs: GatherInputsOp = slot_state.gather_inputs
    greedy: GreedyOp = reference.greedy
    greedy_into: GreedyIntoOp = choice.greedy_into
    choose_into: ChooseIntoOp = choice.choose_into
    by_shape: ByShapeOp | None = None  # for a device that makes a graph for each shape
    graphs_by_shape: bool = True  # False: that device was told to make none, and calls what it is given
    run_layer: Callable[..., Any] | None = None  # (layer, *what its `forward` takes): where layers are compiled
