"""`torch.ops.hpu`: declared with the bridge's schemas, so that torch itself checks every call."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from habana_frameworks.torch._card import to_card, to_host
from habana_frameworks.torch._emulation import FP8_MAX, GENERATION, books

_library = torch.library.Library("hpu", "DEF")
_E4M3 = torch.float8_e4m3fn


def _on_card(name: str, function):
    """Computed on the host in the card's memory."""

    def given(value):
        if not isinstance(value, Tensor):
            return value
        if value.device.type != "hpu":
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but hpu::{name} got one on {value.device}"
            )
        return to_host(value)

    @torch.compiler.disable  # torch 2.7 would compile it, too, where it is called from what was compiled
    def run(*args, **kwargs):
        books.own_ops.add(name)
        out = function(*tree_map(given, args), **tree_map(given, kwargs))
        return tree_map(lambda value: to_card(value) if isinstance(value, Tensor) else value, out)

    return run


def _op(schema: str):
    def register(function):
        name = schema.split("(", 1)[0]
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")  # so that torch.compile knows its shapes, too
        _library.impl(name, _on_card(name, function), "HPU")
        return function

    return register


# -- FP8 ----------------------------------------------------------------------------------------------------


def _cast(input: Tensor, scale, dtype: torch.dtype | None, is_amax: bool) -> tuple[Tensor, Tensor]:
    if GENERATION == "Gaudi":
        raise RuntimeError("FP8 needs Gaudi2 or later")
    if dtype not in (_E4M3, torch.float8_e5m2):
        raise RuntimeError(f"cast_to_fp8_v2 to {dtype}")
    amax = input.abs().amax().float() if is_amax else input.new_empty(0)
    wide = input.float() if scale is None else input.float() * scale
    largest = FP8_MAX if dtype is _E4M3 else torch.finfo(dtype).max
    beyond = wide.abs() > largest * (1 + 1 / 31)  # what rounds to more: clipped or no number, which nobody may rely on
    return wide.clamp(-largest, largest).masked_fill(beyond, torch.nan).to(dtype), amax


def _widen(input: Tensor) -> Tensor:
    """Beyond the card's range the exponent means infinity or no number."""
    wide = input.float()
    return wide.masked_fill(wide.abs() > FP8_MAX, torch.nan) if input.dtype is _E4M3 else wide


@_op("cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, bool is_amax=False, ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)")  # fmt: skip
def cast_to_fp8_v2(input, scale=None, stochastic_rounding=False, is_amax=False, dtype=None, scale_shape=None):
    return _cast(input, scale, dtype, is_amax)


@_op("cast_to_fp8_v2.scalar(Tensor input, float scale, bool stochastic_rounding=False, bool is_amax=False, ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)")  # fmt: skip
def cast_to_fp8_v2_scalar(input, scale, stochastic_rounding=False, is_amax=False, dtype=None, scale_shape=None):
    return _cast(input, scale, dtype, is_amax)


@_op("cast_from_fp8(Tensor input, Tensor? scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor")
def cast_from_fp8(input, scale, out_dtype, scale_shape=None):
    wide = _widen(input)
    return (wide if scale is None else wide * scale).to(out_dtype, copy=True)


@_op("cast_from_fp8.scalar(Tensor input, float scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor")
def cast_from_fp8_scalar(input, scale, out_dtype, scale_shape=None):
    return (_widen(input) * scale).to(out_dtype, copy=True)


@_op("fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor")  # fmt: skip
def fp8_gemm_v2(A, trans_A, B, trans_B, D, out_dtype, A_scale_inv=None, B_scale_inv=None, bias=None, accumulate=False, B_scale_shape=None):  # fmt: skip
    if A.dtype is not _E4M3 or B.dtype is not _E4M3:
        raise RuntimeError(f"fp8_gemm_v2 of {A.dtype} and {B.dtype}")
    left, right = (_widen(A).mT if trans_A else _widen(A)), (_widen(B).mT if trans_B else _widen(B))
    out = left @ right
    for scale, sizes in ((A_scale_inv, (1, left.shape[-2])), (B_scale_inv, (1, right.shape[-1]))):
        if scale is not None:
            if scale.numel() not in sizes:
                raise RuntimeError(f"fp8_gemm_v2: a scale of {tuple(scale.shape)}, one or one per row or column needed")
            out = out * scale.float()
    return (out if bias is None else out + bias.float()).to(out_dtype)


@_op("fp8_gemm_v2.scalar(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, float A_scale_inv, float B_scale_inv, Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor")  # fmt: skip
def fp8_gemm_v2_scalar(A, trans_A, B, trans_B, D, out_dtype, A_scale_inv, B_scale_inv, bias=None, accumulate=False, B_scale_shape=None):  # fmt: skip
    scales = torch.tensor(A_scale_inv), torch.tensor(B_scale_inv)
    return fp8_gemm_v2(A, trans_A, B, trans_B, D, out_dtype, *scales, bias)


# -- 4 bits -------------------------------------------------------------------------------------------------


def _unpack(words: Tensor) -> Tensor:
    return (words[..., None] >> 4 * torch.arange(8, device=words.device) & 15).flatten(-2)


@_op("convert_from_uint4(Tensor input, Tensor scale, Tensor zero_point, ScalarType out_dtype) -> Tensor")
def convert_from_uint4(input, scale, zero_point, out_dtype):
    """input int32 `[in, out / 8]`, scale `[groups, out]`, zero_point int32 `[groups, out / 8]` -> `[in, out]`."""
    if input.dtype is not torch.int32 or zero_point.dtype is not torch.int32 or scale.dtype is not out_dtype:
        raise RuntimeError(f"convert_from_uint4 of {input.dtype} with scales of {scale.dtype}")
    codes, zeros = _unpack(input), _unpack(zero_point)
    times, rest = divmod(codes.shape[0], scale.shape[0])
    if rest or zeros.shape != scale.shape or codes.shape[1] != scale.shape[1]:
        raise RuntimeError("convert_from_uint4: groups are not whole")
    spread = [each.repeat_interleave(times, 0) for each in (zeros, scale)]
    return (codes - spread[0]).to(out_dtype) * spread[1]


# -- norms and rotation --------------------------------------------------------------------------------------------


def _rms_norm(data_in: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = data_in.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gamma * (wide * inverse).to(data_in.dtype), inverse


_op("rms_norm(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)")(_rms_norm)
_op("rms_norm_fast(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)")(_rms_norm)


@_op("rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode) -> Tensor")
def rotary_pos_embedding(input, sin, cos, position_ids, offset, mode):
    if not input.dtype == sin.dtype == cos.dtype:
        raise RuntimeError("rotary_pos_embedding: types differ")
    if cos.shape[-1] != input.shape[-1]:
        raise RuntimeError(f"rotary_pos_embedding: {cos.shape[-1]} cosines for a rotary width of {input.shape[-1]}")
    if position_ids is not None:
        cos, sin = (table.flatten(0, -2)[position_ids].unsqueeze(1) for table in (cos, sin))
    elif offset:
        cos, sin = (table[..., offset : offset + input.shape[-2], :] for table in (cos, sin))
    if mode == 0:
        first, second = input.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-input[..., 1::2], input[..., ::2]), dim=-1).flatten(-2)
    return input * cos + turned * sin


# -- attention -----------------------------------------------------------------------------------------------------


def _sdpa(q, k, v, mask, scale, is_causal, valid_seq_len, side) -> Tensor:
    rows, heads, queries, _ = q.shape
    keys = k.shape[-2]
    if k.shape[:2] != v.shape[:2] or heads % k.shape[1]:
        raise RuntimeError(f"sdpa: {heads} heads over {tuple(k.shape)} keys and {tuple(v.shape)} values")
    if is_causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries).expand(rows, 1, -1, -1)
        if valid_seq_len is not None:
            if valid_seq_len.dtype is not torch.int32 or valid_seq_len.shape != (rows,):
                raise RuntimeError("sdpa: valid_seq_len is int32 and has one length per row")
            tokens = torch.arange(keys, device=q.device)
            real = tokens < valid_seq_len[:, None] if side == "right" else tokens >= keys - valid_seq_len[:, None]
            mask = mask & real[:, None, None, :]
    elif mask is not None and (mask.dim() != 4 or mask.shape[0] != rows or mask.shape[1] not in (1, heads)):
        raise RuntimeError(f"sdpa: a mask of {tuple(mask.shape)}")
    nothing = None
    if mask is not None and mask.dtype is torch.bool:
        nothing = ~mask.any(-1, keepdim=True)  # a row that sees nothing gives zeros rather than no number
        mask = mask | nothing
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out if nothing is None else out.masked_fill(nothing, 0)


@_op("sdpa_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float dropout_p, float scale, bool is_causal, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type) -> (Tensor, Tensor, Tensor)")  # fmt: skip
def sdpa_fwd(q, k, v, attention_mask, dropout_p, scale, is_causal, softmax_mode, valid_seq_len, seq_padding_type):
    out = _sdpa(q, k, v, attention_mask, scale, is_causal, valid_seq_len, seq_padding_type)
    return out, q.new_empty(0), q.new_empty(0)


@_op("sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float dropout_p, float scale, bool is_causal, bool requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type) -> (Tensor, Tensor, Tensor, Tensor)")  # fmt: skip
def sdpa_recomp_fwd(q, k, v, attention_mask, dropout_p, scale, is_causal, requires_backward, softmax_mode, valid_seq_len, seq_padding_type):  # fmt: skip
    out = _sdpa(q, k, v, attention_mask, scale, is_causal, valid_seq_len, seq_padding_type)
    return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)


@_op("fp8_sdpa_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float dropout_p, float scale, bool is_causal, str softmax_mode, Tensor d_scale_q, Tensor d_scale_k, Tensor d_scale_v, Tensor q_scale_s, Tensor? q_scale_o, Tensor d_scale_s, bool is_amax_s, bool is_amax_o, Tensor? valid_seq_len, str seq_padding_type) -> (Tensor, Tensor, Tensor)")  # fmt: skip
def fp8_sdpa_fwd(q, k, v, attention_mask, dropout_p, scale, is_causal, softmax_mode, d_scale_q, d_scale_k, d_scale_v, q_scale_s, q_scale_o, d_scale_s, is_amax_s, is_amax_o, valid_seq_len, seq_padding_type):  # fmt: skip
    """Without `q_scale_o` the result is in bfloat16."""
    if any(x.dtype is not _E4M3 for x in (q, k, v)):
        raise RuntimeError(f"fp8_sdpa of {q.dtype}, {k.dtype} and {v.dtype}")
    if any(scale.dtype is not torch.float32 or scale.numel() != 1 for scale in (d_scale_q, d_scale_k, d_scale_v, q_scale_s, d_scale_s)):  # fmt: skip
        raise RuntimeError("fp8_sdpa: a scale is one number in float32")
    wide = _widen(q) * d_scale_q, _widen(k) * d_scale_k, _widen(v) * d_scale_v
    weights = _sdpa(*wide[:2], torch.eye(k.shape[-2], device=q.device).expand(*k.shape[:2], -1, -1), attention_mask, scale, is_causal, valid_seq_len, seq_padding_type)  # fmt: skip
    relative = weights / weights.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    rounded = _widen(_cast(relative, q_scale_s, _E4M3, False)[0]) * d_scale_s
    groups = q.shape[1] // k.shape[1]
    out = rounded @ wide[2].repeat_interleave(groups, 1) / relative.sum(-1, keepdim=True).clamp(min=1)
    if q_scale_o is not None:
        return _cast(out, q_scale_o, _E4M3, False)[0], q.new_empty(0), q.new_empty(0)
    return out.to(torch.bfloat16), out.new_empty(0), out.new_empty(0)


@_op("block_softmax_adjustment(Tensor block_max, Tensor block_sums, Tensor block_groups, int batch_size) -> Tensor")
def block_softmax_adjustment(block_max, block_sums, block_groups, batch_size):
    if GENERATION != "Gaudi3":
        raise RuntimeError("block_softmax_adjustment is there on Gaudi3 only")
    if block_max.dtype is not torch.bfloat16:
        raise RuntimeError("block_softmax_adjustment in float32 is skipped by Intel's own tests")
    if block_max.dtype is not block_sums.dtype or block_max.shape != block_sums.shape:
        raise RuntimeError("block_softmax_adjustment: maxima and sums differ in type or shape")
    known = block_groups.device.type != "meta"
    if known and (int(block_groups.min()) < 0 or int(block_groups.max()) >= batch_size):
        raise RuntimeError(f"block_softmax_adjustment: a group outside 0 ... {batch_size - 1}")
    groups = block_groups.long()
    shape = (batch_size, *block_max.shape[1:])
    index = groups.view(-1, *[1] * (block_max.dim() - 1)).expand_as(block_max)
    wide_max, wide_sums = block_max.float(), block_sums.float()
    largest = wide_max.new_full(shape, -torch.inf).scatter_reduce(0, index, wide_max, "amax")
    factor = (wide_max - largest[groups]).exp()
    total = wide_max.new_zeros(shape).scatter_add(0, index, factor * wide_sums)
    return (factor / total[groups]).to(block_max.dtype)


# -- experts -------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


@_op("mixture_of_experts(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w1, Tensor[] w2, Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor")  # fmt: skip
def mixture_of_experts(hidden_states, expert_routing_table, router_weights, w1, w2, w3, permuted_weights, activation, experts_min, experts_max):  # fmt: skip
    joined = [torch.cat(pair, 0 if permuted_weights else 1) for pair in zip(w1, w2, strict=True)]
    return fused_experts(hidden_states, expert_routing_table, router_weights, joined, w3, permuted_weights, activation, experts_min, experts_max)  # fmt: skip


@_op("mixture_of_experts.fused_weights(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor")  # fmt: skip
def fused_experts(hidden_states, expert_routing_table, router_weights, w12, w3, permuted_weights, activation, experts_min, experts_max):  # fmt: skip
    if len(w12) != experts_max - experts_min + 1 or len(w3) != len(w12):
        raise RuntimeError(f"mixture_of_experts: {len(w12)} matrices for the experts {experts_min} to {experts_max}")
    if router_weights.dtype is not hidden_states.dtype:
        raise RuntimeError("mixture_of_experts: router_weights have another type than hidden_states")
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in range(experts_min, experts_max + 1):
        first, last = w12[expert - experts_min], w3[expert - experts_min]
        if not permuted_weights:
            first, last = first.mT, last.mT
        gate, up = F.linear(hidden_states, first).chunk(2, dim=-1)
        share = (router_weights * (expert_routing_table == expert)).sum(-1, keepdim=True)
        out += F.linear(_ACTIVATIONS[activation](gate) * up, last).float() * share.float()
    return out.to(hidden_states.dtype)


def _experts_in_fp8(rows: Tensor, routing: tuple[Tensor, Tensor], matrices, scales, within, of_all) -> Tensor:
    """`within`: for each expert the scale of what goes into its second product; None: one for each row, found here."""
    table, shares = routing
    permuted_weights, activation, first, last = of_all
    if any(x.dtype is not _E4M3 for x in (rows, *matrices[0], *matrices[1])):
        raise RuntimeError("mixture_of_experts in FP8: one of its matrices is in another type")
    if shares.dtype is not torch.bfloat16 or table.dtype is not torch.int64:
        raise RuntimeError(f"mixture_of_experts in FP8: shares in {shares.dtype}, numbers in {table.dtype}")
    counts = {len(each) for each in (*matrices, *scales[1:], within or matrices[0])}
    if counts != {last - first + 1}:
        raise RuntimeError(f"mixture_of_experts in FP8: {counts} matrices and scales for experts {first} to {last}")
    if scales[0].numel() not in (1, len(rows)):
        raise RuntimeError(f"mixture_of_experts in FP8: {tuple(scales[0].shape)} scales of {len(rows)} rows")
    wide = _widen(rows) * scales[0]
    out = torch.zeros_like(wide)
    for number, (one, two, scale_one, scale_two) in enumerate(zip(*matrices, *scales[1:], strict=True)):
        one, two = (_widen(each if permuted_weights else each.mT) for each in (one, two))
        for scale, matrix in ((scale_one, one), (scale_two, two)):
            if scale.dtype is not torch.float32 or scale.numel() not in (1, len(matrix)):
                raise RuntimeError(f"mixture_of_experts in FP8: {tuple(scale.shape)} scales of {len(matrix)} rows")
        gate, up = (F.linear(wide, one) * scale_one).bfloat16().chunk(2, dim=-1)
        gated = _ACTIVATIONS[activation](gate) * up
        if within is None:
            scale = (gated.float().abs().amax(-1, keepdim=True) + 1e-8) / FP8_MAX
        else:
            scale = within[number]
        largest = FP8_MAX * scale
        gated = torch.minimum(torch.maximum(gated.float(), -largest), largest)
        gated = _widen(_cast(gated, 1 / scale, _E4M3, False)[0]) * scale
        share = (shares * (table == first + number)).sum(-1, keepdim=True)
        out += F.linear(gated, two) * scale_two * share.float()
    return out.bfloat16()


@_op("mixture_of_experts.fp8_fused_weights(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, Tensor d_scale_hidden_states, Tensor[] d_scale_intermediate_hidden_states, Tensor[] d_scale_w12, Tensor[] d_scale_w3, bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor")  # fmt: skip
def experts_of_known_scales(hidden_states, expert_routing_table, router_weights, w12, w3, d_scale_hidden_states, d_scale_intermediate_hidden_states, d_scale_w12, d_scale_w3, permuted_weights, activation, experts_min, experts_max):  # fmt: skip
    scales = d_scale_hidden_states, d_scale_w12, d_scale_w3
    of_all = permuted_weights, activation, experts_min, experts_max
    return _experts_in_fp8(hidden_states, (expert_routing_table, router_weights), (w12, w3), scales, d_scale_intermediate_hidden_states, of_all)  # fmt: skip


@_op("mixture_of_experts.fp8_fused_weights_dynamic(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, Tensor d_scale_hidden_states, Tensor[] d_scale_w12, Tensor[] d_scale_w3, bool permuted_weights, str activation, int experts_min, int experts_max, *, int chunk_size=0, int total_experts=0) -> Tensor")  # fmt: skip
def experts_of_found_scales(hidden_states, expert_routing_table, router_weights, w12, w3, d_scale_hidden_states, d_scale_w12, d_scale_w3, permuted_weights, activation, experts_min, experts_max, chunk_size=0, total_experts=0):  # fmt: skip
    scales = d_scale_hidden_states, d_scale_w12, d_scale_w3
    of_all = permuted_weights, activation, experts_min, experts_max
    return _experts_in_fp8(hidden_states, (expert_routing_table, router_weights), (w12, w3), scales, None, of_all)
