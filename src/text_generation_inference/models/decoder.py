"""The decoder that most families share: embedding, layers of attention and feed-forward, norm, head.

A family describes itself with a `DecoderSpec`; what no spec can say is a module of its own file.
"""

from copy import copy
from dataclasses import replace
from typing import Self, cast

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.fused_decode import FusedDecode, FusedLayer
from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.layers.attention import Attention, HeadLayout
from text_generation_inference.layers.cache import CacheSpec
from text_generation_inference.layers.embedding import VocabWeight
from text_generation_inference.layers.experts import Experts, Router, SharedExpert, StackedMatrix, expert_parts
from text_generation_inference.layers.linear import Linear, bias_parts, column_parts, row_linear
from text_generation_inference.layers.norm import RMSNorm
from text_generation_inference.layers.rotary import build_table
from text_generation_inference.models.model import Caches, Context, Model
from text_generation_inference.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    ExpertsSpec,
    Join,
    LayerSpec,
    TensorNames,
)
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import Module, Part

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as configs and as ops call them


class GatedMlp(Module):
    def __init__(self, context: Context, spec: DenseSpec, hidden_size: int, names: TensorNames) -> None:
        ops, parallel, width = context.ops, context.parallel, spec.width
        self.name = names.feed_forward
        kept = parallel.split(width, "the feed-forward width")
        parts, sizes, ranges = list(names.gate_up), [width, width], [kept, kept]
        biases = bias_parts(parts, sizes, ranges) if spec.bias else None
        self.gate_up = Linear(ops, column_parts(parts, sizes, hidden_size, ranges), biases)
        self.down = row_linear(ops, parallel, names.down, width, hidden_size, kept, spec.bias)
        if spec.activation not in _ACTIVATIONS:
            raise ModelFormatError(f"activation {spec.activation!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
        self.activate = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_tanh_mul}[_ACTIVATIONS[spec.activation]]

    @property
    def input_form(self) -> InputForm:
        return self.gate_up.input_form

    @property
    def kind(self) -> object:
        return (self.gate_up.kind, self.down.kind, self.down.shape)

    def forward(self, x: Rows) -> Product:
        gated = self.activate(self.gate_up.linear_unscaled(x), quantize_for=self.down.input_form)
        return self.down.linear_unscaled(gated)


def build_feed_forward(
    context: Context, spec: DenseSpec | ExpertsSpec, hidden_size: int, names: TensorNames
) -> GatedMlp | Experts:
    if isinstance(spec, DenseSpec):
        return GatedMlp(context, spec, hidden_size, names)
    ops, parallel = context.ops, context.parallel
    if spec.activation not in _ACTIVATIONS:
        raise ModelFormatError(f"activation {spec.activation!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    shared = None
    if spec.shared is not None:
        dense = GatedMlp(context, spec.shared, hidden_size, replace(names, feed_forward=spec.names.shared))
        dense.down.reduce = None  # what ranks have is summed once, with what the experts give
        gate = Linear(ops, [Part(f"{spec.names.shared_gate}.weight", (1, hidden_size))]) if spec.shared_gate else None
        shared = SharedExpert(dense, gate)
    kept = parallel.split(spec.width, "the width of an expert")
    gate_up, down = expert_parts(spec.names.gate_up_down, spec.num_experts, spec.width, hidden_size, kept)
    return Experts(
        ops,
        parallel,
        names.feed_forward,
        Router(ops, spec.names.router, spec.num_experts, hidden_size, spec.routing, spec.router_bias),
        StackedMatrix(ops, gate_up, spec.num_experts, spec.routing.top_k),
        StackedMatrix(ops, down, spec.num_experts, spec.routing.top_k),
        shared,
        _ACTIVATIONS[spec.activation],
    )


def build_attention(context: Context, spec: AttentionSpec, hidden_size: int, names: TensorNames) -> Attention:
    """Split by head."""
    ops, parallel, dim = context.ops, context.parallel, spec.head_dim
    heads = parallel.split(spec.num_heads, "the number of attention heads")
    kv_heads = parallel.split_kv_heads(spec.num_kv_heads)
    sizes = [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim]
    ranges = [(start * dim, end * dim) for start, end in (heads, kv_heads, kv_heads)]
    parts = list(names.qkv)
    biases = bias_parts(parts, sizes, ranges) if spec.qkv_bias else None
    qkv = Linear(ops, column_parts(parts, sizes, hidden_size, ranges), biases)
    out = row_linear(ops, parallel, names.out, sizes[0], hidden_size, ranges[0], spec.out_bias)
    layout = HeadLayout(heads[1] - heads[0], kv_heads[1] - kv_heads[0], dim, spec.scale, spec.window)
    return Attention(ops, names.attention, qkv, out, layout)


class PreNormLayer(Module):
    """Attention and feed-forward each read the normalised stream and add to it."""

    def __init__(self, context: Context, spec: DecoderSpec, layer: LayerSpec, number: int) -> None:
        ops, names, hidden_size = context.ops, spec.names, spec.hidden_size
        self.name = names.layer.format(number)
        self.number = number  # its cache is the one with this number
        self.attention_norm = RMSNorm(ops, names.attention_norm, hidden_size, spec.norm_eps)
        self.attention = build_attention(context, layer.attention, hidden_size, names)
        self.mlp_norm = RMSNorm(ops, names.feed_forward_norm, hidden_size, spec.norm_eps)
        self.mlp = build_feed_forward(context, layer.feed_forward, hidden_size, names)

    def forward(
        self,
        x: Product,
        residual: Tensor | None,
        batch: Batch,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        wanted: Tensor | None = None,
    ) -> tuple[Product, Tensor]:
        """x is what the layer before adds to the residual stream; the first layer gets the stream itself as x.

        Of tokens that are not `wanted` only keys and values come about.
        """
        if residual is None:
            residual = cast(Tensor, x)
            normed = self.attention_norm.forward(residual, self.attention.qkv.input_form)
        else:
            normed, residual = self.attention_norm.add(x, residual, self.attention.qkv.input_form)
        x = self.attention.forward(normed, batch, cos_sin, k_cache, v_cache, wanted)
        if wanted is not None:
            residual = residual[wanted]
        normed, residual = self.mlp_norm.add(x, residual, self.mlp.input_form)
        return self.mlp.forward(normed), residual

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of the same kind run the same kernels."""
        return (self.attention.heads, self.attention.qkv.kind, self.attention.out.kind, self.mlp.kind)

    def as_fused_layer(self, k_cache: Tensor, v_cache: Tensor) -> FusedLayer:
        attention, mlp = self.attention, self.mlp
        assert isinstance(mlp, GatedMlp)
        return FusedLayer(
            input_norm=self.attention_norm.weight,
            qkv=attention.qkv.weight,
            o=attention.out.weight,
            post_norm=self.mlp_norm.weight,
            gate_up=mlp.gate_up.weight,
            down=mlp.down.weight,
            k_cache=k_cache,
            v_cache=v_cache,
            qkv_bias=attention.qkv.bias,
            o_bias=attention.out.bias,
            gate_up_bias=mlp.gate_up.bias,
            down_bias=mlp.down.bias,
            window=attention.heads.window,
            kv_scales=attention.cache_scales.of(k_cache.dtype),
        )


_LAYERS = {Join.PRE: PreNormLayer}


class Decoder(Module):
    def __init__(self, context: Context, spec: DecoderSpec) -> None:
        ops, parallel, names = context.ops, context.parallel, spec.names
        self.name = names.decoder
        self.embedding = VocabWeight(ops, parallel, names.embedding, spec.vocab_size, spec.hidden_size, spec.tied)
        self.layers = [_LAYERS[layer.join](context, spec, layer, number) for number, layer in enumerate(spec.layers)]
        # Nothing after it evens its errors out: half of what FP8 cost SmolLM2 in perplexity is its last layer.
        self.layers[-1].mlp.down.is_delicate = True
        self.norm = RMSNorm(ops, names.norm, spec.hidden_size, spec.norm_eps)


class CausalLM(Model):
    """A decoder with its head."""

    def __init__(self, spec: DecoderSpec, context: Context) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.max_positions = spec.max_positions
        self.ops = context.ops
        self.parallel = context.parallel
        self.device = context.device
        self.fused_decode: FusedDecode | None = None  # all layers as one op, where the device can
        self._computes_all = False  # else the last layer computes what logits need
        self.model = Decoder(context, spec)
        self.head = None
        self.ignored = spec.names.ignored
        if spec.tied:
            self.ignored = (*self.ignored, f"{spec.names.head}.weight*")
        else:
            self.head = VocabWeight(
                self.ops, self.parallel, spec.names.head, spec.vocab_size, spec.hidden_size, is_head=True
            )
        self.cos_sin: Tensor  # positions that are served, set by `bind`

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def caches(self, dtype: torch.dtype) -> list[CacheSpec]:
        return [layer.attention.cache_spec(dtype) for layer in self.model.layers]

    def shallow(self) -> Self:
        """With the last layer, which may compute less, and one of each kind before it."""
        *others, last = self.model.layers
        kinds = {layer.kind: layer for layer in reversed(others)}
        found = copy(self)
        found.model = copy(self.model)
        found.model.layers = [*reversed(kinds.values()), last]
        return found

    def without_shortcuts(self) -> None:
        self.fused_decode = None
        self._computes_all = True

    def bind(self, caches: Caches, num_positions: int) -> None:
        self.cos_sin = build_table(self.spec.rope, num_positions, self.device)
        self.fused_decode = self._fuse(caches)

    def unbind(self) -> None:
        self.fused_decode = None

    def _fuse(self, caches: Caches) -> FusedDecode | None:
        """All layers as one op, if the device has one and the layers differ in nothing but windows and caches."""
        layouts = {(layer.attention.heads.num_heads, layer.attention.heads.scale) for layer in self.model.layers}
        activations = {layer.feed_forward.activation for layer in self.spec.layers}
        capped = any(layer.attention.heads.softcap is not None for layer in self.model.layers)
        is_dense = all(isinstance(layer.feed_forward, DenseSpec) for layer in self.spec.layers)
        is_uniform = len(layouts) == len(activations) == 1 and not capped and is_dense  # no fused pass caps its scores
        if self.ops.make_fused_decode is None or self.parallel.world > 1 or not is_uniform:
            return None
        (heads, scale), activation = layouts.pop(), activations.pop()
        return self.ops.make_fused_decode(
            [layer.as_fused_layer(*caches[layer.number]) for layer in self.model.layers],
            self.model.norm.weight,
            self.cos_sin,
            heads=heads,
            eps=self.spec.norm_eps,
            scale=scale,
            activation=_ACTIVATIONS[activation],
        )

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        x = self.model.embedding.look_up(batch.input_ids)
        if self.fused_decode is not None:
            done = self.fused_decode(x, batch)
            if done is not None:
                return done if batch.logit_tokens is None else done[batch.logit_tokens]
        residual = None
        last = self.model.layers[-1]
        for layer in self.model.layers:
            k_cache, v_cache = caches[layer.number]
            wanted = batch.logit_tokens if layer is last and not self._computes_all else None
            x, residual = layer.forward(x, residual, batch, self.cos_sin, k_cache, v_cache, wanted)
        assert residual is not None
        normed = cast(Tensor, self.model.norm.add(x, residual)[0])
        return normed[batch.logit_tokens] if self._computes_all and batch.logit_tokens is not None else normed

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return (self.head or self.model.embedding).logits(hidden, out)
