# pyright: basic, reportMissingImports=false
"""All layers of a decoder for a single row: six kernels per layer, three more with experts, one more with latents, two
more with shared experts, two more (the norms) in few bits. Most only read weights.

Used where one request decodes alone; with more rows, layers run one by one with the libraries' products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.fused_decode import FusedLatents, FusedLayer
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.matrices import Weight, plain
from text_generation_inference.kernels.ops import AttentionOp, LatentAttentionOp
from text_generation_inference.kernels.triton import norms_rotary
from text_generation_inference.kernels.triton.experts import TritonExperts
from text_generation_inference.kernels.triton.gemv import vector_product
from text_generation_inference.kernels.triton.gemv_fp8 import GemvFp8
from text_generation_inference.kernels.triton.low_bit_codes import TritonLowBit
from text_generation_inference.kernels.triton.small_gemm_low_bit import SmallGemmLowBit


@dataclass(frozen=True, slots=True)
class SingleRowDecode:
    """All layers of a decoder, for a batch that is one row which decodes."""

    layers: Sequence[FusedLayer]
    norm: Tensor
    cos_sin: Tensor
    heads: int
    eps: float
    scale: float
    activation: str
    attention: AttentionOp
    gemv_fp8: GemvFp8
    low_bit: SmallGemmLowBit
    experts: TritonExperts
    latent_attention: LatentAttentionOp

    def __call__(self, x: Tensor, batch: Batch) -> Tensor | None:
        """x `[1, hidden]`, the embedding of the row's token -> its normalised hidden state; None for other batches."""
        meta = batch.meta
        if x.shape[0] != 1 or not isinstance(meta, PagedMeta) or meta.num_decode != 1 or meta.table_rows is None:
            return None
        hidden, windowed = x.clone(), batch.for_windows()
        for layer in self.layers:
            fused = torch.empty((1, layer.qkv.shape[0]), dtype=x.dtype, device=x.device)
            self._product(hidden, layer.qkv, fused, layer.qkv_bias, norm=(layer.input_norm, self.eps))
            mixed = (
                self._look_at_keys(fused, layer, batch if layer.window is None else windowed)
                if layer.latents is None
                else self._look_at_latents(fused, layer.latents, layer.k_cache, batch)
            )
            self._product(mixed, layer.o, hidden, layer.o_bias, add=True)
            if layer.experts is None:
                gated = self._gate(hidden, layer, layer.gate_up, layer.gate_up_bias)
                self._product(gated, layer.down, hidden, layer.down_bias, add=True)
                continue
            # Both read the stream before either adds to it.
            shared = None if layer.shared is None else self._gate(hidden, layer, layer.shared[0], None)
            norm, first, second = (layer.post_norm, self.eps), layer.gate_up_bias, layer.down_bias
            biases = None if first is None or second is None else (first, second)
            self.experts.add_to_row(hidden, norm, layer.experts, layer.gate_up, layer.down, biases)
            if shared is not None and layer.shared is not None:
                self._product(shared, layer.shared[1], hidden, None, add=True)
        return cast(Tensor, norms_rotary.rms_norm(hidden, self.norm, self.eps))  # not quantised

    def _look_at_keys(self, fused: Tensor, layer: FusedLayer, batch: Batch) -> Tensor:
        head_dim, kv_heads = layer.k_cache.shape[3], layer.k_cache.shape[2]
        q, k, v = fused.view(1, -1, head_dim).split((self.heads, kv_heads, kv_heads), dim=1)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = HeadNorms(layer.q_norm, layer.k_norm, self.eps)
        q = norms_rotary.rotary_and_cache(
            q, k, v, self.cos_sin, batch, layer.k_cache, layer.v_cache, layer.kv_scales, norms=norms
        )
        return self.attention(
            q, k, v, layer.k_cache, layer.v_cache, batch, self.scale, layer.window, kv_scales=layer.kv_scales,
            sinks=layer.sinks,
        )  # fmt: skip

    def _look_at_latents(self, fused: Tensor, latents: FusedLatents, cache: Tensor, batch: Batch) -> Tensor:
        width = cache.shape[3]
        queries, latent = fused[:, :-width], fused[:, -width:]
        if latents.query_up is not None:
            made = torch.empty((1, latents.query_up.shape[0]), dtype=fused.dtype, device=fused.device)
            self._product(queries, latents.query_up, made, None, norm=latents.query_norm)
            queries = made
        q = queries.view(1, self.heads, -1)
        return self.latent_attention(
            q, latent, latents.up, latents.norm, self.cos_sin, batch, cache, self.scale
        )  # fmt: skip

    def _gate(self, hidden: Tensor, layer: FusedLayer, weight: Weight, bias: Tensor | None) -> Tensor:
        """The row, normalised, through gates and ups."""
        gated = torch.empty((1, weight.shape[0] // 2), dtype=hidden.dtype, device=hidden.device)
        self._product(hidden, weight, gated, bias, norm=(layer.post_norm, self.eps), gate=self.activation)
        return gated

    def _product(self, x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, **more: Any) -> None:
        if isinstance(weight, Fp8Weight):
            self.gemv_fp8(x, weight, out, bias, **more)
        elif isinstance(weight, TritonLowBit):
            self.low_bit(x, weight, out, bias, **more)
        else:
            vector_product(x, plain(weight), out, bias, **more)


class MakeFusedDecode:
    """The op `make_fused_decode`; `attention`, `latent_attention` and `experts` are the ops of those names, `fp8` says
    whether the GPU has those types, `roomy` whether its processors have more shared memory than 100 KB, `low_bit`
    whether it has tensor cores for codes of few bits."""

    def __init__(
        self,
        attention: AttentionOp,
        latent_attention: LatentAttentionOp,
        experts: TritonExperts,
        num_processors: int,
        fp8: bool,
        roomy: bool = True,
        low_bit: bool = True,
    ) -> None:
        self._attention = attention
        self._latent_attention = latent_attention
        self._experts = experts
        self._gemv_fp8 = GemvFp8(num_processors, roomy)
        self._few_bits = SmallGemmLowBit(num_processors, roomy)
        self._fp8, self._low_bit = fp8, low_bit

    def __call__(
        self,
        layers: Sequence[FusedLayer],
        norm: Tensor,
        cos_sin: Tensor,
        *,
        heads: int,
        eps: float,
        scale: float,
        activation: str,
    ) -> SingleRowDecode | None:
        """None where the products for one row do not take a weight, or layers have more than plain ones have."""
        # The gates of experts are looked at with them.
        is_dense = any(layer.experts is None or layer.shared is not None for layer in layers)
        if is_dense and activation not in ("silu", "gelu_tanh"):
            return None
        if not all(self._can_compute(layer) for layer in layers):
            return None
        return SingleRowDecode(
            layers, norm, cos_sin, heads, eps, scale, activation, self._attention, self._gemv_fp8, self._few_bits,
            self._experts, self._latent_attention,
        )  # fmt: skip

    def _can_compute(self, layer: FusedLayer) -> bool:
        if not layer.is_plain:
            return False
        matrices = [layer.qkv, layer.o, *(layer.shared or ())]
        if layer.latents is not None and layer.latents.query_up is not None:
            matrices.append(layer.latents.query_up)
        if layer.experts is None:
            matrices += [layer.gate_up, layer.down]
        else:
            matrices.append(layer.experts.router)
            num_experts = layer.experts.router.shape[0]
            if not self._experts.can_compute(layer.experts.gate, layer.gate_up, num_experts):
                return False
        return all(self._can_multiply(matrix) for matrix in matrices)

    def _can_multiply(self, weight: Weight) -> bool:
        if isinstance(weight, Fp8Weight):
            return self._fp8 and not weight.by_square and weight.input_bound is None
        if isinstance(weight, TritonLowBit):
            return self._low_bit and not weight.quantizes_inputs and weight.dtype in (torch.bfloat16, torch.float16)
        return isinstance(weight, Tensor) and weight.dtype in (torch.bfloat16, torch.float16)
