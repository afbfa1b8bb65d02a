"""The table of ops for Gaudi; the only entrance.

Whatever is not here is computed by the reference ops, which the card's compiler fuses.
"""

from typing import Any, cast

import torch
from torch import Tensor

from text_generation_inference.kernels import reference
from text_generation_inference.kernels.fp8 import FP8_MAX, Fp8Weight, apply_scales
from text_generation_inference.kernels.hpu.attention import HpuAttention
from text_generation_inference.kernels.hpu.bridge import Bridge
from text_generation_inference.kernels.hpu.experts import HpuExperts
from text_generation_inference.kernels.hpu.fp8 import Fp8Ops
from text_generation_inference.kernels.hpu.pass_memo import PassMemo
from text_generation_inference.kernels.hpu.uint4 import KINDS, Uint4Ops, has_uint4
from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.kernels.ops import ActivationOp, Ops


class _Norms:
    def __init__(self, bridge: Bridge, fp8: Fp8Ops) -> None:
        self._fused: Any = bridge.normalization.FusedRMSNorm
        self._fp8 = fp8

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None) -> Rows:
        if weight.dtype is not x.dtype:  # the op knows one type
            return self._pass_on(cast(Tensor, reference.rms_norm(x, weight, eps)), quantize_for)
        normed = self._fused.apply(x[None], weight, eps)[0]  # the op wants three dimensions
        return normed if quantize_for is None else self._fp8.quantize_rows(normed, quantize_for)

    def add_rms_norm(
        self, x: Product, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
    ) -> tuple[Rows, Tensor]:
        residual = residual + apply_scales(x)
        return self.rms_norm(residual, weight, eps, quantize_for), residual

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, quantize_for: Fp8Weight | None = None
    ) -> Rows:
        return self._pass_on(cast(Tensor, reference.layer_norm(x, weight, bias, eps)), quantize_for)

    def add_layer_norm(
        self,
        x: Product,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        quantize_for: Fp8Weight | None = None,
    ) -> tuple[Rows, Tensor]:
        residual = residual + apply_scales(x)
        return self.layer_norm(residual, weight, bias, eps, quantize_for), residual

    def activation(self, op: ActivationOp) -> ActivationOp:
        """That of the definition, with its result put into FP8 as this card has it: range, and form of the scales."""

        def run(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
            return self._pass_on(cast(Tensor, op(x)), quantize_for)

        return run

    def gelu_mul(self, gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
        return self._pass_on(cast(Tensor, reference.gelu_mul(gate_up)), quantize_for)

    def silu_mul(self, gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
        gate, up = apply_scales(gate_up).chunk(2, dim=-1)
        return self._pass_on(torch.nn.functional.silu(gate) * up, quantize_for)

    def gelu_tanh_mul(self, gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
        gate, up = apply_scales(gate_up).chunk(2, dim=-1)
        return self._pass_on(torch.nn.functional.gelu(gate, approximate="tanh") * up, quantize_for)

    def _pass_on(self, x: Tensor, quantize_for: Fp8Weight | None) -> Rows:
        return x if quantize_for is None else self._fp8.quantize_rows(x, quantize_for)


def load_ops(
    bridge: Bridge,
    description: str = "",
    flash: bool = True,
    recompute: bool = True,
    wide_softmax: bool = True,
    memo: PassMemo | None = None,
    fp8: Fp8Ops | None = None,
) -> Ops:
    """`flash`: prompts through the fused attention op, which may `recompute`. `memo` is cleared after each pass, and
    the constants of `fp8` are marked before graphs are captured."""
    fp8 = fp8 or Fp8Ops(bridge)
    uint4 = Uint4Ops(fp8.linear)
    norms = _Norms(bridge, fp8)
    attention = HpuAttention(bridge, fp8, memo or PassMemo(), flash, recompute, wide_softmax)
    return Ops(
        description,
        pack_fp8=fp8.pack_fp8,
        pack_attention_scales=fp8.pack_attention_scales,
        fp8_max=bridge.fp8_max or FP8_MAX,
        fp8_on_host=bridge.fp8_max < FP8_MAX,
        pack_low_bit=uint4.pack_low_bit,
        low_bit_ops=frozenset(("linear",)) if has_uint4() else frozenset(),
        low_bit_kinds=KINDS,
        linear=uint4.linear,
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        silu_mul=norms.silu_mul,
        gelu_tanh_mul=norms.gelu_tanh_mul,
        gelu_mul=norms.gelu_mul,
        gelu=norms.activation(reference.gelu),
        gelu_tanh=norms.activation(reference.gelu_tanh),
        quick_gelu=norms.activation(reference.quick_gelu),
        relu=norms.activation(reference.relu),
        silu=norms.activation(reference.silu),
        layer_norm=norms.layer_norm,
        add_layer_norm=norms.add_layer_norm,
        experts=HpuExperts(bridge, fp8).experts,
        rotary_and_cache=attention.rotary_and_cache,
        attention=attention.attention,
        keep_rows=attention.keep_rows,
        picture_attention=attention.picture_attention,
        latent_attention=attention.latent_attention,
    )
