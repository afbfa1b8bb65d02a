"""The feed-forward part of a mixture of experts on Gaudi: one op for all experts of a rank.

Matrices in FP8 have two forms of it: one takes scales that are known before, of what goes into the first products and
into the second ones; the other has a scale for each row, and finds those of the second products itself.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels import experts as reference
from text_generation_inference.kernels.fp8 import Fp8Weight, dequantize_weight
from text_generation_inference.kernels.hpu.bridge import Bridge
from text_generation_inference.kernels.hpu.fp8 import Fp8Ops
from text_generation_inference.kernels.matrices import Weight

log = logging.getLogger(__name__)
_OF_ALL = (
    "hidden_states",
    "expert_routing_table",
    "router_weights",
    "w12",
    "w3",
    "permuted_weights",
    "activation",
    "experts_min",
    "experts_max",
)
_SCALES = ("d_scale_hidden_states", "d_scale_w12", "d_scale_w3")
_GIVEN = {
    "fp8_fused_weights": {*_OF_ALL, *_SCALES, "d_scale_intermediate_hidden_states"},
    "fp8_fused_weights_dynamic": {*_OF_ALL, *_SCALES},
}
_OLDER, _MOST_IN_OLDER = (1, 20), 64  # software up to this one takes so many experts in one call


class HpuExperts:
    def __init__(self, bridge: Bridge, fp8: Fp8Ops) -> None:
        self._bridge = bridge
        self._fp8 = fp8
        self._forms = {name: _find_form(name, given) for name, given in _GIVEN.items()}
        self._per_call = _MOST_IN_OLDER if () < bridge.version[:2] <= _OLDER else None

    def experts(
        self,
        x: Tensor,  # [tokens, hidden]
        ids: Tensor,  # [tokens, k]
        weights: Tensor,  # [tokens, k] float32
        gate_up: Weight,  # [experts * 2 * width, hidden]
        down: Weight,  # [experts * hidden, width]
        gate: str = "silu",
        biases: tuple[Tensor, Tensor] | None = None,
        scale_inputs: bool = False,
    ) -> Tensor:
        """See `kernels.experts`, which does what the card's op does not: other gates, biases, scaled inputs, few bits.

        Matrices in FP8 that no form takes are widened for each pass, and what goes into them is not rounded: that is
        more precise, needs more memory for a while, and moves many times as much.
        """
        is_known = gate == "silu" and biases is None and not scale_inputs
        count = down.shape[0] // x.shape[1]
        if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
            name = _form_for(x, gate_up, down) if is_known else ""
            form = self._forms.get(name)
            # Without lazy mode what is not compiled is widened: Intel's own tests leave out the op in FP8 there.
            if form is not None and (self._bridge.lazy or torch.compiler.is_compiling()):
                return self._multiply_in_fp8(form, x, ids, weights, gate_up, down)
            if form is None and not torch.compiler.is_compiling():
                _tell_widened(name)
        gate_up, down = (_widen(weight, x.dtype) for weight in (gate_up, down))
        if not is_known or not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
            return reference.experts(x, ids, weights, gate_up, down, gate, biases, scale_inputs)
        lists = {"w12": list(gate_up.chunk(count)), "w3": list(down.chunk(count))}
        return self._call(torch.ops.hpu.mixture_of_experts, x, ids, weights.to(x.dtype), lists, {})

    def _multiply_in_fp8(
        self, form: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Fp8Weight, down: Fp8Weight
    ) -> Tensor:
        rows, count = self._fp8.quantize_rows(x, gate_up), down.shape[0] // x.shape[1]
        lists = {
            "w12": list(gate_up.data.chunk(count)),
            "w3": list(down.data.chunk(count)),
            "d_scale_w12": list(gate_up.scale.chunk(count)),
            "d_scale_w3": list(down.scale.chunk(count)),
        }
        if down.input_scale is not None:
            lists["d_scale_intermediate_hidden_states"] = [down.input_scale] * count
        scales = {"d_scale_hidden_states": rows.scale}
        return self._call(form, rows.data, ids, weights.to(x.dtype), lists, scales)

    def _call(
        self,
        op: Any,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        lists: dict[str, list[Tensor]],
        more: dict[str, Tensor],
    ) -> Tensor:
        """`lists`: what there is of each expert."""
        count = len(lists["w3"])
        step = self._per_call or count
        out: Tensor | None = None
        for start in range(0, count, step):
            end = min(start + step, count)
            part = op(
                hidden_states=x,
                expert_routing_table=ids,
                router_weights=weights,
                **{name: each[start:end] for name, each in lists.items()},
                **more,
                permuted_weights=True,  # weights are [out, in]
                activation="silu",
                experts_min=start,
                experts_max=end - 1,
            )
            out = part if out is None else out + part
        assert out is not None
        return out


def _form_for(x: Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> str:
    """'': none takes them. Results are in bfloat16, and inputs of second products are not clamped."""
    if x.dtype is not torch.bfloat16 or gate_up.by_square or down.by_square:
        return ""
    if gate_up.input_bound is not None or down.input_bound is not None:
        return ""
    known = [weight.input_scale is not None for weight in (gate_up, down)]
    return "fp8_fused_weights" if all(known) else "" if any(known) else "fp8_fused_weights_dynamic"


@cache
def _tell_widened(name: str) -> None:
    """Once for each reason."""
    why = f"this software has no {name} of the form that is known here" if name else "the card's op does not take them"
    log.warning("Experts in FP8 are widened in each pass, which moves 5 to 21 bytes where the op moves 1: %s", why)


def _find_form(name: str, given: set[str]) -> Any:
    """Of the op, if this software has it, and with these arguments."""
    form = getattr(getattr(torch.ops.hpu, "mixture_of_experts", None), name, None)
    if form is None:
        return None
    arguments = form._schema.arguments
    known = {argument.name for argument in arguments}
    needed = {argument.name for argument in arguments if not argument.has_default_value()}
    return form if needed <= given <= known else None


def _widen(weight: Weight, dtype: torch.dtype) -> Weight:
    return dequantize_weight(weight).to(dtype) if isinstance(weight, Fp8Weight) else weight
