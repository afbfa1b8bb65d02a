# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""The op `route`: which experts a token goes to, in one kernel. The definition is `kernels.routing`.

Experts are chosen by whole numbers that are in the order of their values. Equal values have equal numbers, of which the
first one is taken, and what is no number has a place in the order, too: whatever the scores, experts exist, and no two
of a token are the same. A warp finds the greatest of such numbers in one instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.routing import InputRouting, Routed, Routing, SigmoidRouting, SoftmaxRouting
from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before

_MAX_EXPERTS = 1024  # that one program has room for
_KINDS = (SoftmaxRouting, SigmoidRouting, InputRouting)
SOFTMAX, SIGMOID, INPUT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TAKEN = tl.constexpr(-(2**31))  # before every value


@triton.jit
def _order(value):
    """float32 to int32, in the same order."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # two zeros are equal
    return tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), TAKEN + 1)


@triton.jit
def _first_best(order, i, SIZE: tl.constexpr):
    """Where the greatest is; of several the first."""
    return tl.min(tl.where(order == tl.max(order, 0), i, SIZE - 1), 0)


@triton.jit
def _in_best_groups(eligible, G_PAD: tl.constexpr, P_PAD: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr,
                    KIND: tl.constexpr):  # fmt: skip
    """eligible `[G_PAD * P_PAD]` -> whether it is in one of the TOP groups with the greatest values."""
    members = tl.reshape(eligible, (G_PAD, P_PAD))
    values = tl.max(members, 1)
    if KIND == SIGMOID:  # the sum of the two greatest
        p = tl.arange(0, P_PAD)[None, :]
        first = tl.min(tl.where(members == values[:, None], p, P_PAD - 1), 1)
        second = tl.max(tl.where(p == first[:, None], float("-inf"), members), 1)
        values = tl.where(second == float("-inf"), values, values + second)  # a group of one has no second
    g = tl.arange(0, G_PAD)
    order = tl.where(g < GROUPS, _order(values), TAKEN)
    kept = tl.zeros((G_PAD,), tl.int32)
    for _ in tl.static_range(TOP):
        at = _first_best(order, g, G_PAD)
        kept = tl.where(g == at, 1, kept)
        order = tl.where(g == at, TAKEN, order)
    spread = kept[:, None] + tl.zeros((G_PAD, P_PAD), tl.int32)
    return tl.reshape(spread, (G_PAD * P_PAD,)) != 0


@triton.jit
def route_kernel(
    scores, correction, ids, weights, factor, scores_row,
    GROUPS: tl.constexpr, PER: tl.constexpr, G_PAD: tl.constexpr, P_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, KIND: tl.constexpr, CORRECTED: tl.constexpr, NORMALIZED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token. PER experts in each of GROUPS; places `[G_PAD, P_PAD]` that are no experts come last."""
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = G_PAD * P_PAD
    i = tl.arange(0, SIZE)
    is_expert = (i % P_PAD < PER) & (i // P_PAD < GROUPS)
    e = i // P_PAD * PER + i % P_PAD
    if CORRECTED:
        corrections = tl.load(correction + e, mask=is_expert, other=0.0).to(tl.float32)
    wait_for_kernel_before(DEPENDENT)
    score = tl.load(scores + token * scores_row + e, mask=is_expert, other=float("-inf")).to(tl.float32)
    if KIND == SOFTMAX:
        share = tl.exp(score - tl.max(score, 0))
        share = tl.div_rn(share, tl.sum(share, 0) + tl.zeros_like(share))
    else:
        share = 1 / (1 + tl.exp(-score))
    eligible = share
    if KIND == INPUT:
        eligible = score
    if CORRECTED:
        eligible = tl.where(is_expert, share + corrections, float("-inf"))
    if TOP_GROUPS < GROUPS:
        kept = _in_best_groups(
            tl.where(is_expert, eligible, float("-inf")), G_PAD, P_PAD, GROUPS, TOP_GROUPS, KIND
        )  # fmt: skip
        if KIND == SOFTMAX:
            share = tl.where(kept, share, 0.0)
            eligible = share
        else:
            eligible = tl.where(kept, eligible, float("-inf"))
    order = tl.where(is_expert, _order(eligible), TAKEN)
    place = tl.full((SIZE,), TOP_K, tl.int32)
    for number in tl.static_range(TOP_K):
        at = _first_best(order, i, SIZE)
        place = tl.where(i == at, number, place)
        order = tl.where(i == at, TAKEN, order)
    chosen = place < TOP_K
    if NORMALIZED:
        total = tl.sum(tl.where(chosen, share, 0.0), 0)
        if KIND == SIGMOID:
            total += 1e-20
        share = share / total
    tl.store(ids + token * TOP_K + place, e, mask=chosen)
    tl.store(weights + token * TOP_K + place, share * factor, mask=chosen)


def route(scores: Tensor, rule: Routing, correction: Tensor | None = None) -> Routed:
    """See `kernels.routing`. Rules that no family of this size has, as they are defined."""
    tokens, num_experts = scores.shape
    usual = isinstance(rule, _KINDS) and num_experts <= _MAX_EXPERTS and rule.top_k <= num_experts
    if not usual or tokens == 0 or (isinstance(rule, SoftmaxRouting) and rule.p_norm not in (None, 1)):
        return rule(scores, correction)
    groups, top_groups, normalized, factor = 1, 1, False, 1.0
    if not isinstance(rule, InputRouting):
        groups, top_groups, factor = rule.num_groups, rule.top_groups, rule.factor
        normalized = rule.normalized if isinstance(rule, SigmoidRouting) else rule.p_norm is not None
    if top_groups >= groups:
        groups = top_groups = 1
    kind = _KINDS.index(type(rule))
    corrected = kind == SIGMOID.value and correction is not None
    ids = torch.empty((tokens, rule.top_k), dtype=torch.int32, device=scores.device)
    weights = torch.empty((tokens, rule.top_k), dtype=torch.float32, device=scores.device)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    per, dependent = num_experts // groups, dependent_launch(tokens)
    route_kernel[(tokens,)](
        scores, correction if corrected else scores, ids, weights, factor, scores.stride(0), GROUPS=groups, PER=per,
        G_PAD=triton.next_power_of_2(groups), P_PAD=triton.next_power_of_2(per), TOP_GROUPS=top_groups,
        TOP_K=rule.top_k, KIND=kind, CORRECTED=corrected, NORMALIZED=normalized, DEPENDENT=dependent, num_warps=1,
        launch_pdl=dependent,
    )  # fmt: skip
    return ids, weights
