"""Decoder layers: one class for each way in which attention and feed-forward join the residual stream."""

from abc import abstractmethod
from typing import Any, cast

from torch import Tensor

from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.fp8 import apply_scales
from text_generation_inference.kernels.fused_decode import FusedLayer
from text_generation_inference.kernels.matrices import Product, Rows, Weight
from text_generation_inference.kernels.partial_sum import PartialSum
from text_generation_inference.layers.attention import Attention, SelfAttention
from text_generation_inference.layers.experts import Experts, SharedExpert
from text_generation_inference.layers.latent_attention import LatentAttention
from text_generation_inference.layers.norm import Norm, RMSNorm, make_norm
from text_generation_inference.models.attention import build_attention
from text_generation_inference.models.feed_forward import DenseMlp, build_feed_forward
from text_generation_inference.models.model import Context
from text_generation_inference.models.spec import DecoderSpec, Join, LayerSpec
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import Module

Cache = tuple[Tensor, ...]  # mostly keys and values


class DecoderLayer(Module):
    reads_window = False  # where some do and others read all, these may have blocks of their own

    def __init__(self, context: Context, spec: DecoderSpec, layer: LayerSpec, number: int) -> None:
        ops, names, hidden_size = context.ops, spec.names, spec.hidden_size
        self.name = names.layer.format(number)
        self.number = number  # its cache and its table of positions are those with this number
        self.spec = layer
        self.attention = build_attention(context, layer.attention, hidden_size, names)
        self.reads_window = self.attention.cache_spec(context.dtype).window is not None
        self.mlp = build_feed_forward(context, layer.feed_forward, hidden_size, names)
        for norm, name in self.norm_names(spec).items():
            setattr(self, norm, make_norm(ops, spec.norm, name, hidden_size))

    @staticmethod
    def norm_names(spec: DecoderSpec) -> dict[str, str]:
        """Its norms, by attribute, with the names of their tensors: one for each part, where a join has no others."""
        return {"attention_norm": spec.names.attention_norm, "mlp_norm": spec.names.feed_forward_norm}

    @abstractmethod
    def forward(
        self, x: Product, residual: Tensor | None, batch: Batch, cos_sin: Tensor, cache: Cache, wanted: Tensor | None
    ) -> tuple[Product, Tensor | None]:
        """x is what the layer before adds to the residual stream; where there is none, x is the stream itself.

        Of tokens that are not `wanted` only keys and values come about.
        """

    def keep_pictures(self, features: Tensor, blocks: Tensor, inside: Tensor, cache: Cache) -> None:
        """Of layers that read pictures by cross-attention: see `Model.keep_pictures`."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of the same kind run the same kernels."""
        return (self.attention.kind, self.mlp.kind)

    def as_fused_layer(self, cache: Cache) -> FusedLayer | None:
        """For a pass that fuses all layers; None: it cannot be computed so."""
        return None


class PreNormLayer(DecoderLayer):
    """Attention and feed-forward each read the normalised stream and add to it."""

    attention_norm: Norm
    mlp_norm: Norm

    def forward(
        self, x: Product, residual: Tensor | None, batch: Batch, cos_sin: Tensor, cache: Cache, wanted: Tensor | None
    ) -> tuple[Product, Tensor | None]:
        factor = self.spec.residual_factor
        normed, residual = enter(self.attention_norm, x, residual, self.attention.input_form)
        x = self.attention.forward(normed, batch, cos_sin, cache, wanted)
        if wanted is not None:
            residual = residual[wanted]
        if factor != 1:
            x = apply_scales(x) * factor
        normed, residual = self.mlp_norm.add(x, residual, self.mlp.input_form)
        x = self.mlp.forward(normed)
        return x if factor == 1 else apply_scales(x) * factor, residual

    def as_fused_layer(self, cache: Cache) -> FusedLayer | None:
        return None if self.spec.residual_factor != 1 else _fuse(self, (self.attention_norm, self.mlp_norm), cache)


class ParallelLayer(DecoderLayer):
    """Attention and feed-forward read the same normalised stream."""

    attention_norm: Norm

    @staticmethod
    def norm_names(spec: DecoderSpec) -> dict[str, str]:
        return {"attention_norm": spec.names.attention_norm}

    def forward(
        self, x: Product, residual: Tensor | None, batch: Batch, cos_sin: Tensor, cache: Cache, wanted: Tensor | None
    ) -> tuple[Product, Tensor | None]:
        normed, residual = enter(self.attention_norm, x, residual, None)
        mixed = self.attention.forward(normed, batch, cos_sin, cache, wanted)
        if wanted is not None:
            normed, residual = cast(Tensor, normed)[wanted], residual[wanted]
        return _together(mixed, self.mlp.forward(normed)), residual


class ParallelTwoNormLayer(DecoderLayer):
    """Attention and feed-forward read the same stream, each normalised for it."""

    attention_norm: Norm
    mlp_norm: Norm

    def forward(
        self, x: Product, residual: Tensor | None, batch: Batch, cos_sin: Tensor, cache: Cache, wanted: Tensor | None
    ) -> tuple[Product, Tensor | None]:
        normed, residual = enter(self.attention_norm, x, residual, self.attention.input_form)
        mixed = self.attention.forward(normed, batch, cos_sin, cache, wanted)
        if wanted is not None:
            residual = residual[wanted]
        normed = self.mlp_norm.forward(residual, self.mlp.input_form)
        return _together(mixed, self.mlp.forward(normed)), residual


class SandwichLayer(DecoderLayer):
    """Norms before and after each part."""

    attention_norm: Norm
    attention_out_norm: Norm
    mlp_norm: Norm
    mlp_out_norm: Norm

    @staticmethod
    def norm_names(spec: DecoderSpec) -> dict[str, str]:
        names = spec.names
        return {
            "attention_norm": names.attention_norm,
            "attention_out_norm": names.attention_out_norm,
            "mlp_norm": names.feed_forward_norm,
            "mlp_out_norm": names.feed_forward_out_norm,
        }

    def forward(
        self, x: Product, residual: Tensor | None, batch: Batch, cos_sin: Tensor, cache: Cache, wanted: Tensor | None
    ) -> tuple[Product, Tensor | None]:
        normed, residual = enter(self.attention_norm, x, residual, self.attention.input_form)
        mixed = apply_scales(self.attention.forward(normed, batch, cos_sin, cache, wanted))
        if wanted is not None:
            residual = residual[wanted]
        mixed = cast(Tensor, self.attention_out_norm.forward(mixed))
        normed, residual = self.mlp_norm.add(mixed, residual, self.mlp.input_form)
        return cast(Tensor, self.mlp_out_norm.forward(apply_scales(self.mlp.forward(normed)))), residual

    def as_fused_layer(self, cache: Cache) -> FusedLayer | None:
        norms = (self.attention_norm, self.mlp_norm, self.attention_out_norm, self.mlp_out_norm)
        return _fuse(self, norms, cache)


class PostNormLayer(DecoderLayer):
    """Attention and feed-forward read the stream as it is; what they add is normalised."""

    attention_out_norm: Norm
    mlp_out_norm: Norm

    @staticmethod
    def norm_names(spec: DecoderSpec) -> dict[str, str]:
        return {
            "attention_out_norm": spec.names.attention_out_norm,
            "mlp_out_norm": spec.names.feed_forward_out_norm,
        }

    def forward(
        self, x: Product, residual: Tensor | None, batch: Batch, cos_sin: Tensor, cache: Cache, wanted: Tensor | None
    ) -> tuple[Product, Tensor | None]:
        stream = apply_scales(x) if residual is None else residual + apply_scales(x)
        mixed = apply_scales(self.attention.forward(stream, batch, cos_sin, cache, wanted))
        if wanted is not None:
            stream = stream[wanted]
        stream = stream + cast(Tensor, self.attention_out_norm.forward(mixed))
        return cast(Tensor, self.mlp_out_norm.forward(apply_scales(self.mlp.forward(stream)))), stream


class NormedStreamLayer(DecoderLayer):
    """The stream itself is normalised after each part has been added."""

    attention_norm: Norm
    mlp_norm: Norm

    def forward(
        self, x: Product, residual: Tensor | None, batch: Batch, cos_sin: Tensor, cache: Cache, wanted: Tensor | None
    ) -> tuple[Product, Tensor | None]:
        assert residual is None, "all layers join alike"
        stream = cast(Tensor, x)
        mixed = self.attention.forward(stream, batch, cos_sin, cache, wanted)
        stream = cast(Tensor, self.attention_norm.add(mixed, stream if wanted is None else stream[wanted])[0])
        return cast(Tensor, self.mlp_norm.add(self.mlp.forward(stream), stream)[0]), None


def enter(norm: Norm, x: Product, residual: Tensor | None, form: InputForm) -> tuple[Rows, Tensor]:
    """(normalised, stream) of what a layer is given."""
    if residual is None:
        stream = cast(Tensor, x)
        return norm.forward(stream, form), stream
    return norm.add(x, residual, form)


def _together(mixed: Product, fed: Product) -> Product:
    """What both add to the stream; ranks sum once."""
    if isinstance(mixed, PartialSum) and isinstance(fed, PartialSum):
        return PartialSum(mixed.data + fed.data, mixed.ranks)
    return apply_scales(mixed) + apply_scales(fed)


def _fuse(layer: DecoderLayer, norms: tuple[Norm, ...], cache: Cache) -> FusedLayer | None:
    """`norms` are those before attention and feed-forward, and, where there are such, those after both."""
    mlp, attention = layer.mlp, _fuse_attention(layer.attention, cache)
    if attention is None or not all(isinstance(norm, RMSNorm) for norm in norms):
        return None
    weights = [cast(RMSNorm, norm).weight for norm in norms]
    experts = mlp.as_fused() if isinstance(mlp, Experts) else None
    is_gated = isinstance(mlp, DenseMlp) and mlp.is_gated
    if not isinstance(mlp, DenseMlp | Experts) or (experts is None and not is_gated):
        return None
    beside = mlp.shared if isinstance(mlp, Experts) else None
    shared = None if beside is None else _fuse_shared(beside)
    if beside is not None and shared is None:
        return None
    return FusedLayer(
        input_norm=weights[0],
        post_norm=weights[1],
        gate_up=mlp.gate_up.weight,
        down=mlp.down.weight,
        gate_up_bias=mlp.gate_up.bias,
        down_bias=mlp.down.bias,
        experts=experts,
        shared=shared,
        attention_out_norm=weights[2] if len(weights) > 2 else None,
        mlp_out_norm=weights[3] if len(weights) > 2 else None,
        **attention,
    )


def _fuse_attention(attention: SelfAttention, cache: Cache) -> dict[str, Any] | None:
    """What a fused layer has of it; None: it cannot be computed so."""
    if isinstance(attention, LatentAttention):
        return {
            "qkv": attention.down.weight, "o": attention.out.weight, "k_cache": cache[0], "v_cache": cache[0],
            "qkv_bias": attention.down.bias, "o_bias": attention.out.bias, "latents": attention.as_fused(),
        }  # fmt: skip
    if not isinstance(attention, Attention) or not attention.is_plain:
        return None
    heads, (k_cache, v_cache) = attention.head_norms, cache
    if attention.q_norm is not None and (heads is None or heads.over_all):
        return None
    return {
        "qkv": attention.qkv.weight, "o": attention.out.weight, "k_cache": k_cache, "v_cache": v_cache,
        "qkv_bias": attention.qkv.bias, "o_bias": attention.out.bias,
        "q_norm": None if heads is None else heads.q_weight, "k_norm": None if heads is None else heads.k_weight,
        "window": attention.heads.window, "kv_scales": attention.cache_scales.of(k_cache.dtype),
        "softcap": attention.heads.softcap, "sinks": attention.sinks,
    }  # fmt: skip


def _fuse_shared(shared: SharedExpert) -> tuple[Weight, Weight] | None:
    """The matrices of what each token passes beside experts; None: more than those decides."""
    dense = shared.dense
    if shared.gate is not None or not isinstance(dense, DenseMlp) or not dense.is_gated:
        return None
    has_bias = dense.gate_up.bias is not None or dense.down.bias is not None
    return None if has_bias else (dense.gate_up.weight, dense.down.weight)


LAYERS: dict[Join, type[DecoderLayer]] = {
    Join.PRE: PreNormLayer,
    Join.PARALLEL: ParallelLayer,
    Join.PARALLEL_TWO: ParallelTwoNormLayer,
    Join.SANDWICH: SandwichLayer,
    Join.POST: PostNormLayer,
    Join.NORMED_STREAM: NormedStreamLayer,
}
