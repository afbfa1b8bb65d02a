"""Fused attention and rotation. Autograd functions take their arguments by position."""

import math
from enum import Enum

import torch
from torch import Tensor

from habana_frameworks.torch._emulation import books

_MODES, _SIDES = ("none", "fast", "fp32"), ("left", "right")


class FusedSDPA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        _require(attn_mask is None or isinstance(attn_mask, Tensor), "attn_mask", attn_mask)
        _require(isinstance(dropout_p, float) and dropout_p == 0.0, "dropout_p", dropout_p)
        _require(isinstance(is_causal, bool), "is_causal", is_causal)
        _require(scale is None or isinstance(scale, float), "scale", scale)
        _require(isinstance(softmax_mode, str) and softmax_mode.lower() in _MODES, "softmax_mode", softmax_mode)
        _require(recompute_mode is None or isinstance(recompute_mode, bool), "recompute_mode", recompute_mode)
        _require(valid_seq_len is None or isinstance(valid_seq_len, Tensor), "valid_seq_len", valid_seq_len)
        side_known = isinstance(seq_padding_type, str) and seq_padding_type.lower() in _SIDES
        _require(side_known, "seq_padding_type", seq_padding_type)
        _require(not return_dropout_mask and not return_attn_probs, "return_...", True)
        if valid_seq_len is not None and (not is_causal or attn_mask is not None):
            raise AssertionError("valid_seq_len needs is_causal and no mask")
        if attn_mask is not None and is_causal:
            raise AssertionError("a mask and is_causal exclude each other")
        if softmax_mode.lower() == "fp32" and q.dtype is not torch.bfloat16:
            raise AssertionError("softmax_mode fp32 is for bfloat16 only")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        recompute = books.recompute if recompute_mode is None else recompute_mode
        mode, side = softmax_mode.lower(), seq_padding_type.lower()
        if recompute:
            op = torch.ops.hpu.sdpa_recomp_fwd
            return op(q, k, v, attn_mask, dropout_p, scale, is_causal, False, mode, valid_seq_len, side)[0]
        return torch.ops.hpu.sdpa_fwd(q, k, v, attn_mask, dropout_p, scale, is_causal, mode, valid_seq_len, side)[0]


def fp8_fused_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softmax_mode: str = "None",
    d_scale_q: Tensor | None = None,
    d_scale_k: Tensor | None = None,
    d_scale_v: Tensor | None = None,
    q_scale_s: Tensor | None = None,
    q_scale_o: Tensor | None = None,
    d_scale_s: Tensor | None = None,
    is_amax_s: bool = False,
    is_amax_o: bool = False,
    valid_seq_len: Tensor | None = None,
    seq_padding_type: str = "left",
    recompute: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales are tensors: older releases take nothing else."""
    needed = {"d_scale_q": d_scale_q, "d_scale_k": d_scale_k, "d_scale_v": d_scale_v}
    needed |= {"q_scale_s": q_scale_s, "d_scale_s": d_scale_s}
    for name, value in needed.items():
        _require(isinstance(value, Tensor), name, value)
    _require(recompute is None or isinstance(recompute, bool), "recompute", recompute)
    _require(softmax_mode.lower() in _MODES and seq_padding_type.lower() in _SIDES, "a mode", softmax_mode)
    if valid_seq_len is not None and (not is_causal or attn_mask is not None):
        raise AssertionError("valid_seq_len needs is_causal and no mask")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return torch.ops.hpu.fp8_sdpa_fwd(
        q, k, v, attn_mask, dropout_p, scale, is_causal, softmax_mode.lower(), d_scale_q, d_scale_k, d_scale_v,
        q_scale_s, q_scale_o, d_scale_s, is_amax_s, is_amax_o, valid_seq_len, seq_padding_type.lower(),
    )  # fmt: skip


def _require(holds: bool, name: str, value: object) -> None:
    if not holds:
        raise TypeError(f"FusedSDPA: {name} cannot be {value!r}")


class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(p: Tensor, *args) -> Tensor:
    """(p, cos, sin, position_ids=None, offset=0, mode=BLOCKWISE), all by position; p `[batch, heads, length, dim]`."""
    if not 2 <= len(args) <= 5:
        raise TypeError("apply_rotary_pos_emb(p, cos, sin, position_ids, offset, mode)")
    cos, sin, position_ids, offset, mode = (*args, *(None, 0, RotaryPosEmbeddingMode.BLOCKWISE)[len(args) - 2 :])
    if not isinstance(mode, RotaryPosEmbeddingMode):
        raise TypeError(f"mode cannot be {mode!r}")
    dtype = torch.float32 if torch.float32 in (p.dtype, cos.dtype, sin.dtype) else p.dtype
    tensors = [tensor.to(dtype) for tensor in (p, sin, cos)]
    return torch.ops.hpu.rotary_pos_embedding(*tensors, position_ids, offset, mode.value)


class RotaryPosEmbeddingHelperV1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Tensor, cos: Tensor, sin: Tensor, offset: int) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, None, offset)


class RotaryPosEmbeddingHelperV2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, position_ids)


__all__ = [
    "FusedSDPA",
    "RotaryPosEmbeddingHelperV1",
    "RotaryPosEmbeddingHelperV2",
    "RotaryPosEmbeddingMode",
    "apply_rotary_pos_emb",
    "fp8_fused_sdpa",
]
