"""The draw: an id with the probability of its score, from noise that depends on seed, position and id alone.

The best of score + Gumbel noise is such a sample. Whoever draws for the same seed and position draws the same id,
alone or in a batch, on every device.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_INT32_MIX = (-1640531535, -2048144789, -1028477387)  # odd multipliers with well spread bits
NUM_BEST = 256  # scores that `draw_from_best` looks at
FEW = ("top_k", "top_p", "min_p")  # filters that it knows


def noise_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """seeds and positions `[rows]` int64 -> two int32 words of each row, from which its noise follows."""
    key = _mix64(_mix64(seeds) ^ (positions + 1))
    return key.to(torch.int32), (key >> 32).to(torch.int32)


def exponential_noise(low: Tensor, high: Tensor, ids: Tensor) -> Tensor:
    """Exp(1) variates from a hash of (key, id); ids int32 `[rows or 1, any]` -> float32. In 32-bit integers alone."""
    bits = ids * _INT32_MIX[0] + low[:, None]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _INT32_MIX[1]
    bits ^= (bits >> 13) & 0x7FFFF
    bits += high[:, None]
    bits *= _INT32_MIX[2]
    bits ^= (bits >> 16) & 0xFFFF
    uniform = ((bits >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)  # exact in float32, never 0 or 1
    return uniform.log_().neg_()


def add_noise(scores: Tensor, low: Tensor, high: Tensor, start: int = 0) -> Tensor:
    """scores `[rows, ids]` with the Gumbel noise of each id; `start` is the first of them."""
    ids = torch.arange(start, start + scores.shape[1], dtype=torch.int32, device=scores.device)
    return scores - exponential_noise(low, high, ids[None]).log_()


def draw(scores: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """scores `[rows, vocab]` -> ids `[rows]` int64."""
    return add_noise(scores, low, high).argmax(dim=-1)


def draw_from_best(
    scores: Tensor, numbers: Mapping[str, Tensor], low: Tensor, high: Tensor, num_best: int = NUM_BEST
) -> tuple[Tensor, Tensor]:
    """The filters of `FEW` and `draw` on the best scores of each row: (ids, whether that was enough).

    For rows whose filters keep few ids this finds the same without sorting all. One where it is not enough must be
    drawn from all scores.
    """
    k, p, share = (numbers[name] for name in FEW)
    num_best = min(num_best, scores.shape[1])
    best, ids = scores.topk(num_best, dim=-1)
    is_limited = k > 0
    kth = best.gather(1, (k.long() - 1).clamp(0, num_best - 1)[:, None])
    dropped = (best < kth) & is_limited[:, None]
    best_k = best.masked_fill(dropped, -math.inf)
    totals = torch.where(is_limited, best_k.logsumexp(dim=-1), scores.logsumexp(dim=-1))
    probabilities = (best_k - totals[:, None]).exp()
    before = probabilities.cumsum(dim=-1) - probabilities  # mass of the better ones
    dropped = dropped | ((before >= p[:, None]) & (p < 1)[:, None]) | (best == -math.inf)
    least_kept = best.masked_fill(dropped, math.inf).amin(dim=-1, keepdim=True)
    dropped = best < torch.minimum(least_kept, best[:, :1])  # what is as likely as the last one stays
    # Past the last of them nothing is kept, by top-k neither: equals of the k-th best would count among the totals.
    last = best[:, -1]
    ends = ~is_limited | (last < kth[:, 0]) | (last == -math.inf)
    enough = dropped[:, -1] & (k <= num_best) & ends
    dropped = dropped | (best < best[:, :1] + share.log()[:, None])
    noise = exponential_noise(low, high, ids.to(torch.int32)).log_()
    choice = (best - noise).masked_fill(dropped, -math.inf).argmax(dim=-1, keepdim=True)
    return ids.gather(1, choice)[:, 0], enough


def _mix64(x: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit (splitmix64's finaliser); multiplication wraps."""
    x = x ^ ((x >> 30) & 0x3FFFFFFFF)
    x = x * -4658895280553007687
    x = x ^ ((x >> 27) & 0x1FFFFFFFFF)
    x = x * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
