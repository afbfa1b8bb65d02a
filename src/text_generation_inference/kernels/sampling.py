"""Every step from logits to a chosen token, in plain torch: the definition that faster kernels are tested against.

All scores are float32 `[rows, vocab]`; per-row parameters are `[rows]`. Filters set dropped scores to -inf.
"""

import math
from functools import cache

import torch
from torch import Tensor

MORE_TIES = 8  # best ids that a row may report beyond those asked for, because they are as likely as the last one
_GREEN_LIST_KEY = 15485863
_INT32_MIX = (-1640531535, -2048144789, -1028477387)  # odd multipliers with well spread bits


def repetition_penalty(scores: Tensor, seen_ids: Tensor, penalty: Tensor) -> None:
    """In place, once per id in seen_ids `[rows, any]` (repeats do not count): negative scores grow, others shrink."""
    penalty = penalty[:, None]
    seen = scores.gather(1, seen_ids)
    scores.scatter_(1, seen_ids, torch.where(seen < 0, seen * penalty, seen / penalty))


def frequency_penalty(scores: Tensor, ids: Tensor, amounts: Tensor) -> None:
    """In place: subtract amounts `[rows, any]` from the scores of ids, once per occurrence."""
    scores.scatter_add_(1, ids, -amounts)


def presence_penalty(scores: Tensor, ids: Tensor, counts: Tensor, penalty: Tensor) -> None:
    """In place: subtract the penalty once from each id that occurs where counts `[rows, any]` is true."""
    present = torch.zeros_like(scores).scatter_add_(1, ids, counts.float()) > 0
    scores -= present * penalty[:, None]


def watermark(scores: Tensor, last_token: int, gamma: float, delta: float) -> Tensor:
    """Favour the ids that the last token makes green. scores `[vocab]`."""
    generator = torch.Generator().manual_seed(_GREEN_LIST_KEY * last_token)
    vocab_size = scores.shape[0]
    green = torch.randperm(vocab_size, generator=generator)[: int(vocab_size * gamma)]
    scores[green.to(scores.device)] += delta
    return scores


def allow_only(scores: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """In place: drop what the masks of some rows do not allow; the other rows are not touched.

    rows `[masked]` int64, allowed `[masked, words]` int32: bit i of word j is id 32 j + i.
    """
    bytes_ = allowed.view(torch.uint8).flatten().to(torch.int32)
    drops = _drops_by_byte(scores.device).index_select(0, bytes_).view(rows.shape[0], -1)
    scores.index_add_(0, rows, drops[:, : scores.shape[1]])


@cache
def _drops_by_byte(device: torch.device) -> Tensor:
    """`[256, 8]`: for each byte of a mask what is added to the scores of its eight ids, 0 or -inf."""
    is_set = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.zeros((256, 8)).masked_fill_(is_set == 0, -math.inf).to(device)


def top_k(scores: Tensor, k: Tensor) -> Tensor:
    """Drop scores strictly below the k-th best; ties with it stay. k <= 0 keeps all."""
    vocab_size = scores.shape[1]
    wanted = torch.where(k <= 0, vocab_size, k.clamp(max=vocab_size)).long()
    limited = wanted < vocab_size
    if not bool(limited.any()):
        return scores
    best = scores.topk(int(wanted[limited].max()), dim=-1).values
    threshold = best.gather(1, (wanted - 1).clamp(max=best.shape[1] - 1)[:, None])
    return scores.masked_fill((scores < threshold) & limited[:, None], -math.inf)


def top_p(scores: Tensor, p: Tensor) -> Tensor:
    """Drop the least likely ids whose probabilities add up to at most 1 - p; the best always stays."""
    ordered, order = scores.sort(dim=-1)
    dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - p)[:, None]
    dropped[:, -1] = False
    return scores.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped) & (p < 1)[:, None], -math.inf)


def typical_p(scores: Tensor, mass: Tensor) -> Tensor:
    """Keep the ids whose information is closest to the entropy, until they hold the mass; ties with the last stay."""
    logprobs = scores.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -torch.nansum(logprobs * probabilities, dim=-1, keepdim=True)
    surprise = (-logprobs - entropy).abs()
    ordered, order = surprise.sort(dim=-1)
    cumulated = probabilities.gather(1, order).cumsum(dim=-1)
    last = (cumulated < mass[:, None]).sum(dim=-1).clamp(max=scores.shape[1] - 1)
    threshold = ordered.gather(1, last[:, None])
    return scores.masked_fill((surprise > threshold) & (mass < 1)[:, None], -math.inf)


def min_p(scores: Tensor, share: Tensor) -> Tensor:
    """Drop ids less likely than a share of the likeliest."""
    floor = scores.amax(dim=-1, keepdim=True) + share.log()[:, None]
    return scores.masked_fill(scores < floor, -math.inf)


def draw(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample an id per row with probability softmax(scores), from noise that depends on seed and position alone.

    seeds `[rows]` int64, positions `[rows]` int64 -> `[rows]` int64. The best of score + Gumbel noise is such a sample.
    """
    ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    return (scores - exponential_noise(seeds, positions, ids[None]).log_()).argmax(dim=-1)


def draw_from_best(
    scores: Tensor, k: Tensor, p: Tensor, share: Tensor, seeds: Tensor, positions: Tensor, num_best: int
) -> tuple[Tensor, Tensor]:
    """`top_k`, `top_p`, `min_p` and `draw` on the `num_best` best scores of each row: (ids, whether that was enough).

    A row where the filters may keep more than that must take the long way.
    """
    best, ids = scores.topk(num_best, dim=-1)
    limited = k > 0
    kth = best.gather(1, (k.long() - 1).clamp(0, num_best - 1)[:, None])
    dropped = (best < kth) & limited[:, None]
    best_k = best.masked_fill(dropped, -math.inf)
    totals = torch.where(limited, best_k.logsumexp(dim=-1), scores.logsumexp(dim=-1))
    probabilities = (best_k - totals[:, None]).exp()
    before = probabilities.cumsum(dim=-1) - probabilities  # mass of the better ones
    dropped |= (before >= p[:, None]) & (p < 1)[:, None]
    dropped |= best == -math.inf  # what a mask dropped
    dropped[:, 0] = False
    enough = dropped[:, -1] & (k <= num_best)
    dropped |= best < best[:, :1] + share.log()[:, None]
    noise = exponential_noise(seeds, positions, ids.to(torch.int32)).log_()
    choice = (best - noise).masked_fill_(dropped, -math.inf).argmax(dim=-1, keepdim=True)
    return ids.gather(1, choice)[:, 0], enough


def exponential_noise(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Exp(1) variates from a counter-based hash of (seed, position, id); ids int32 `[rows or 1, any]` -> float32."""
    key = _mix64(_mix64(seeds) ^ (positions + 1))
    low, high = key.to(torch.int32)[:, None], (key >> 32).to(torch.int32)[:, None]
    bits = ids * _INT32_MIX[0] + low
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _INT32_MIX[1]
    bits ^= (bits >> 13) & 0x7FFFF
    bits += high
    bits *= _INT32_MIX[2]
    bits ^= (bits >> 16) & 0xFFFF
    uniform = ((bits >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)  # exact in float32, never 0 or 1
    return uniform.log_().neg_()


def _mix64(x: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit (splitmix64's finaliser); multiplication wraps."""
    x = x ^ ((x >> 30) & 0x3FFFFFFFF)
    x = x * -4658895280553007687
    x = x ^ ((x >> 27) & 0x1FFFFFFFFF)
    x = x * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
