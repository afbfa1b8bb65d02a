"""Which experts a token goes to, and with which weights: one rule per way that families do it, in plain torch.

A rule takes the router's scores and gives the chosen experts, best first, with their weights. Shapes are static and
nothing is read back, so it may be captured. Of equal scores the expert with the lower number comes first.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_STABLE_ON_GAUDI = 37  # numbers: a card leaves a stable sort of more to the host
Routed = tuple[Tensor, Tensor]  # experts [tokens, k] int64, weights [tokens, k] float32


class Routing(Protocol):
    """A frozen dataclass, so that rules may be compared."""

    @property
    def top_k(self) -> int: ...

    def __call__(self, scores: Tensor, correction: Tensor | None = None) -> Routed:
        """scores `[tokens, experts]` float32, `correction` `[experts]` float32 where the rule has one."""
        ...


def route(scores: Tensor, rule: Routing, correction: Tensor | None = None) -> Routed:
    """The op: a device may have a faster one for some rules."""
    return rule(scores, correction)


def choose_best(values: Tensor, count: int) -> Routed:
    """The greatest `count` of each row: places and values."""
    places = None
    if values.device.type == "hpu" and values.shape[-1] > _STABLE_ON_GAUDI >= count:
        places = _greatest(values, count)
        values = values.gather(-1, places)
    ordered = values.sort(dim=-1, descending=True, stable=True)
    chosen = ordered.indices[:, :count]
    return chosen if places is None else places.gather(-1, chosen), ordered.values[:, :count]


def _greatest(values: Tensor, count: int) -> Tensor:
    """Their places in order, the first ones among equals of the last; any where a row has what is no number."""
    last = values.topk(count, dim=-1).values[:, -1:]
    better, equal = values > last, values == last
    room = count - better.sum(-1, keepdim=True)
    chosen = better | (equal & (equal.float().cumsum(-1) <= room))
    numbers = torch.arange(values.shape[-1], device=values.device, dtype=torch.float32)
    found = -torch.where(chosen, -numbers, -math.inf).topk(count, dim=-1).values
    return found.clamp(max=values.shape[-1] - 1).long()


@dataclass(frozen=True, slots=True)
class SoftmaxRouting:
    """Shares of a softmax over all experts (Mixtral, Qwen, DeepSeek V2, DBRX; GPT-OSS: over the chosen ones)."""

    top_k: int
    p_norm: float | None = None  # weights are divided by this norm of them; 1: by their sum
    factor: float = 1.0
    num_groups: int = 1  # only experts of the groups with the greatest shares may be chosen
    top_groups: int = 1

    def __call__(self, scores: Tensor, correction: Tensor | None = None) -> Routed:
        shares = scores.softmax(-1)
        eligible = shares
        if self.top_groups < self.num_groups:
            best = shares.view(len(shares), self.num_groups, shares.shape[1] // self.num_groups).amax(-1)
            eligible = shares.masked_fill(~_in_groups(best, self.top_groups, shares.shape[1]), 0.0)
        ids, weights = choose_best(eligible, self.top_k)
        if self.p_norm is not None:
            weights = weights / weights.pow(self.p_norm).sum(-1, keepdim=True).pow(1 / self.p_norm)
        return ids, weights * self.factor


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Each expert by itself; a learned correction decides who is chosen, but not with which weight (DeepSeek V3)."""

    top_k: int
    normalized: bool = True
    factor: float = 1.0
    num_groups: int = 1  # only experts of the groups whose two best have the greatest sums may be chosen
    top_groups: int = 1

    def __call__(self, scores: Tensor, correction: Tensor | None = None) -> Routed:
        shares = scores.sigmoid()
        eligible = shares if correction is None else shares + correction
        if self.top_groups < self.num_groups:
            best = choose_best(eligible.view(-1, eligible.shape[1] // self.num_groups), 2)[1].sum(-1)
            chosen = _in_groups(best.view(-1, self.num_groups), self.top_groups, shares.shape[1])
            eligible = eligible.masked_fill(~chosen, -math.inf)
        ids = choose_best(eligible, self.top_k)[0]
        weights = shares.gather(1, ids)
        if self.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.factor


@dataclass(frozen=True, slots=True)
class InputRouting:
    """The sigmoid of the best scores, which families that have this multiply the expert's input with (Llama 4)."""

    top_k: int = 1

    def __call__(self, scores: Tensor, correction: Tensor | None = None) -> Routed:
        ids, best = choose_best(scores, self.top_k)
        return ids, best.sigmoid()


@dataclass(frozen=True, slots=True)
class SparseMixerRouting:
    """The best expert, then the best of the others; each weighs its share of a softmax over those near it (PhiMoE)."""

    jitter: float
    top_k: int = 2

    def __call__(self, scores: Tensor, correction: Tensor | None = None) -> Routed:
        left, ids, weights = scores, list[Tensor](), list[Tensor]()
        for _ in range(self.top_k):
            best, chosen = left.max(-1, keepdim=True)
            far = (best - scores) / torch.maximum(scores.abs(), best) > 2 * self.jitter
            ids.append(chosen)
            weights.append(left.masked_fill(far, -math.inf).softmax(-1).gather(1, chosen))
            left = left.scatter(1, chosen, -math.inf)
        return torch.cat(ids, 1), torch.cat(weights, 1)


def _in_groups(values: Tensor, count: int, num_experts: int) -> Tensor:
    """values `[tokens, groups]` -> bool `[tokens, experts]`: is it in one of the `count` groups with the greatest."""
    groups = choose_best(values, count)[0]
    kept = torch.zeros_like(values, dtype=torch.bool).scatter(1, groups, True)
    return kept.repeat_interleave(num_experts // values.shape[1], 1)
