"""Chooses the next token of each row of a padded batch, with shapes that depend on the bucket alone.

The same order and meaning as `sampler.Sampler`. There a processor touches the rows that ask for it; here one
that any row asks for touches all of them, with neutral numbers where it is not wanted, because every other number of
rows would be another shape. What depends on tokens seen before (penalties, watermarks) comes from the host.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.kernels import sampling
from text_generation_inference.kernels.slot_state import PENALTIES, penalise
from text_generation_inference.runner.grammar import RowMasks
from text_generation_inference.runner.sampler import Chosen, keeps_few, top_tokens
from text_generation_inference.types import Admission, SamplingParams

_NUM_BEST = 256  # scores that the short way of drawing looks at
_FILTERS = ("temperature", "top_k", "top_p", "typical_p", "min_p")
_NEUTRAL = SamplingParams()


class PaddedSampler:
    def __init__(
        self, ops: Ops, tokens: np.ndarray, lengths: np.ndarray, vocab_size: int, watermark: tuple[float, float]
    ) -> None:
        self._ops = ops
        self._tokens, self._lengths = tokens, lengths  # [slots, max_tokens] and [slots]: what is known of each
        self._vocab_size = vocab_size
        num_slots = len(lengths)
        self._num_prompt = np.zeros(num_slots, dtype=np.int64)
        self._seeds = np.zeros(num_slots, dtype=np.int64)
        self._params: list[SamplingParams] = [_NEUTRAL] * num_slots
        self._gamma, self._delta = watermark

    def admit(self, admission: Admission) -> None:
        slot, request = admission.slot, admission.request
        self._params[slot] = request.sampling
        self._num_prompt[slot] = len(request.token_ids)
        self._seeds[slot] = request.seed - 2**64 if request.seed >= 2**63 else request.seed

    def choose(self, logits: Tensor, rows: list[int], masks: RowMasks | None = None) -> Chosen:
        """logits `[bucket, vocab]` float32, which may be overwritten; `rows` are the slots of the first ones.

        Tokens and log-probabilities are those of all rows of the bucket.
        """
        params = [self._params[slot] for slot in rows] + [_NEUTRAL] * (logits.shape[0] - len(rows))
        penalised = any(p.penalises for p in params)
        marked = [row for row, p in enumerate(params) if p.watermark]
        biased = [row for row, p in enumerate(params) if p.logit_bias]
        drawing = [p for p in params if p.samples]
        tops = [(row, p.top_n_tokens) for row, p in enumerate(params) if p.top_n_tokens]
        masked = masks is not None and bool(masks.rows.shape[0])
        if self._ops.samples_on_host and (penalised or marked or biased or drawing or tops or masked):
            logits = logits.cpu()
        if marked:
            logits = logits + self._dense(logits, {row: self._green(rows[row]) for row in marked})
        if penalised:
            logits = self._penalise(logits, rows, params)
        if biased:
            logits = logits + self._dense(logits, {row: params[row].logit_bias for row in biased})
        if masks is not None and masked:
            logits = _allow_only(logits, masks)
        if not drawing and not tops:
            token_ids, logprobs = self._ops.greedy(logits)
            return Chosen(token_ids, logprobs, [])
        numbers = {name: self._numbers(name, params, logits.device) for name in _FILTERS}
        scores = logits / numbers["temperature"][:, None]
        totals = scores.logsumexp(dim=-1)
        token_ids = scores.argmax(dim=-1)
        if drawing:
            samples = torch.tensor([p.samples for p in params], device=logits.device)
            token_ids = torch.where(samples, self._draw(scores, rows, drawing, samples, numbers), token_ids)
        logprobs = scores.gather(1, token_ids[:, None])[:, 0] - totals
        found = []
        if tops:
            all_logprobs = (scores - totals[:, None]).cpu()
            found = [top_tokens(row, count, all_logprobs[row]) for row, count in tops]
        return Chosen(token_ids, logprobs, found)

    # -- before the filters ----------------------------------------------------------------------------------------

    def _penalise(self, logits: Tensor, rows: list[int], params: list[SamplingParams]) -> Tensor:
        padding = logits.shape[0] - len(rows)
        longest = int(self._lengths[rows].max())
        room = min(1 << (longest - 1).bit_length(), self._tokens.shape[1])  # powers of two: few shapes
        history = np.zeros((logits.shape[0], room), dtype=np.int64)
        history[: len(rows)] = self._tokens[rows, :room]
        lengths, prompts = (
            np.pad(values[rows], (0, padding), constant_values=1) for values in (self._lengths, self._num_prompt)
        )
        device = logits.device
        numbers = {name: self._numbers(name, params, device) for name in PENALTIES}
        known, known_lengths, known_prompts = _to(device, history, lengths, prompts)
        return penalise(logits.clone(), known, known_lengths, known_prompts, numbers)

    def _green(self, slot: int) -> np.ndarray:
        """What the watermark adds to each score."""
        last = int(self._tokens[slot, self._lengths[slot] - 1])
        return sampling.watermark(torch.zeros(self._vocab_size), last, self._gamma, self._delta).numpy()

    def _dense(self, logits: Tensor, added: "dict[int, np.ndarray] | dict[int, dict[int, float]]") -> Tensor:
        values = np.zeros(tuple(logits.shape), dtype=np.float32)
        for row, amounts in added.items():
            if isinstance(amounts, np.ndarray):
                values[row] = amounts
            else:
                values[row, list(amounts)] = list(amounts.values())
        return _to(logits.device, values)[0]

    # -- the choice ------------------------------------------------------------------------------------------------

    def _draw(
        self,
        scores: Tensor,
        rows: list[int],
        drawing: Sequence[SamplingParams],
        samples: Tensor,
        numbers: dict[str, Tensor],
    ) -> Tensor:
        padding = scores.shape[0] - len(rows)
        seeds, positions = _to(
            scores.device, *(np.pad(values[rows], (0, padding)) for values in (self._seeds, self._lengths))
        )
        if all(keeps_few(p) for p in drawing):
            num_best = min(_NUM_BEST, scores.shape[1])
            filters = (numbers["top_k"], numbers["top_p"], numbers["min_p"])
            ids, enough = sampling.draw_from_best(scores, *filters, seeds, positions, num_best)
            if bool((enough | ~samples).all()):
                return ids
        # All of them: each choice among them would be another graph where ops are compiled together.
        scores = sampling.top_p(_top_k(scores, numbers["top_k"]), numbers["top_p"])
        scores = sampling.min_p(sampling.typical_p(scores, numbers["typical_p"]), numbers["min_p"])
        return sampling.draw(scores, seeds, positions)

    def _numbers(self, name: str, params: list[SamplingParams], device: torch.device) -> Tensor:
        values = np.array([float(getattr(p, name)) for p in params], dtype=np.float32)
        return _to(device, values)[0]


def _top_k(scores: Tensor, k: Tensor) -> Tensor:
    """`sampling.top_k` with a shape that does not depend on k."""
    vocab_size = scores.shape[1]
    wanted = torch.where(k <= 0, vocab_size, k.clamp(max=vocab_size)).long()
    threshold = scores.sort(dim=-1, descending=True).values.gather(1, (wanted - 1)[:, None])
    return scores.masked_fill((scores < threshold) & (wanted < vocab_size)[:, None], -math.inf)


def _allow_only(logits: Tensor, masks: RowMasks) -> Tensor:
    """All rows have a mask: that of a free one allows everything."""
    allowed = torch.full((logits.shape[0], masks.allowed.shape[1]), -1, dtype=torch.int32)
    allowed[masks.rows.cpu()] = masks.allowed.cpu()
    rows, allowed = _to(logits.device, np.arange(logits.shape[0]), allowed.numpy())
    logits = logits.clone()
    sampling.allow_only(logits, rows, allowed)
    return logits


def _to(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    return [torch.from_numpy(array).to(device) for array in arrays]  # pyright: ignore[reportUnknownMemberType]
