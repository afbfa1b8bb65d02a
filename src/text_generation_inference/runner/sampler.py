"""Chooses the next token of each row.

The order of processors is TGI's: watermark, repetition, frequency and presence penalty, logit bias, grammar
mask, temperature, top-k, top-p, typical-p, min-p, choice. Log-probabilities are of the distribution before the filters
(top-k to min-p). A processor touches only the rows that ask for it: a batch of plain greedy requests is one pass over
the logits.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.kernels import sampling
from text_generation_inference.kernels.slot_state import PENALTIES, penalise
from text_generation_inference.runner.grammar import RowMasks
from text_generation_inference.types import Admission, SamplingParams, TopTokens

_NUM_BEST = 256  # scores that the short way of drawing looks at


class KnownTokens(Protocol):
    """What the sampler reads of the slots."""

    device: torch.device
    tokens: Tensor
    lengths: Tensor
    num_prompt: Tensor
    lengths_cpu: np.ndarray


@dataclass(slots=True)
class Chosen:
    token_ids: Tensor  # [rows] int64
    logprobs: Tensor  # [rows] float32
    top_tokens: list[TopTokens]


@dataclass(slots=True)
class Groups:
    """Which rows ask for what; None where nobody does."""

    watermark: list[int]
    penalty: Tensor | None
    penalised: list[int]  # the same on the host
    bias: list[int]
    temperature: Tensor | None
    draw: Tensor | None  # by the long way
    draw_from_best: Tensor | None  # whose filters keep few ids
    top_k: bool
    top_p: bool
    typical_p: bool
    min_p: bool
    top_n: list[tuple[int, int]]  # (row, how many)

    @property
    def plain(self) -> bool:
        return not self.draws and not self.adjusts and not self.top_n

    @property
    def draws(self) -> bool:
        return self.draw is not None or self.draw_from_best is not None

    @property
    def adjusts(self) -> bool:
        """Whether anything changes the scores before the temperature."""
        return self.penalty is not None or bool(self.watermark or self.bias)


class Sampler:
    def __init__(self, ops: Ops, slots: KnownTokens, num_slots: int, gamma: float, delta: float) -> None:
        self.ops = ops
        self.slots = slots
        self.gamma, self.delta = gamma, delta
        device = slots.device
        self.params: list[SamplingParams] = [SamplingParams()] * num_slots
        self.numbers = {
            name: torch.zeros(num_slots, dtype=torch.float32, device=device)
            for name in (
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
                "frequency_by_length",
                "temperature",
                "top_k",
                "top_p",
                "typical_p",
                "min_p",
            )
        }
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.biases: dict[int, tuple[Tensor, Tensor]] = {}  # slot -> ids, values
        self._rows: list[int] | None = None
        self._groups: Groups | None = None

    def admit(self, admission: Admission) -> None:
        """Take over a slot's parameters."""
        slot, params = admission.slot, admission.request.sampling
        for name, values in self.numbers.items():
            values[slot] = float(getattr(params, name))
        seed = admission.request.seed
        self.seeds[slot] = seed - 2**64 if seed >= 2**63 else seed
        self.params[slot] = params
        self.biases.pop(slot, None)
        if params.logit_bias:
            device = self.slots.device
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
            self.biases[slot] = (ids, values)
        self._rows = None

    def choose(self, logits: Tensor, rows: list[int], index: Tensor, masks: RowMasks | None = None) -> Chosen:
        """logits `[rows, vocab]` float32, which is overwritten; `rows` are slots and `index` the same on the device."""
        groups = self.group(rows)
        if groups.plain:
            # A mask does not make the batch less plain: the free rows take the same way with and without it.
            _mask(logits, masks)
            token_ids, logprobs = self.ops.greedy(logits)
            return Chosen(token_ids, logprobs, [])
        self._process(logits, rows, index, groups, masks)
        totals = logits.logsumexp(dim=-1)
        token_ids = logits.argmax(dim=-1)
        if groups.draw is not None:
            token_ids[groups.draw] = self._draw(logits[groups.draw], index[groups.draw], groups)
        if groups.draw_from_best is not None:
            rows_best = groups.draw_from_best
            token_ids[rows_best] = self._draw_from_best(logits[rows_best], index[rows_best], groups)
        logprobs = logits.gather(1, token_ids[:, None])[:, 0] - totals
        tops = [top_tokens(row, count, logits[row] - totals[row]) for row, count in groups.top_n]
        return Chosen(token_ids, logprobs, tops)

    def group(self, rows: list[int]) -> Groups:
        if self._groups is None or rows != self._rows:
            self._rows, self._groups = list(rows), self._make_groups([self.params[slot] for slot in rows])
        return self._groups

    def _make_groups(self, params: list[SamplingParams]) -> Groups:
        def rows_where(condition: list[bool]) -> Tensor | None:
            found = [row for row, holds in enumerate(condition) if holds]
            return torch.tensor(found, dtype=torch.int64, device=self.slots.device) if found else None

        drawing = [p for p in params if p.samples]
        penalised = [p.penalises for p in params]
        return Groups(
            watermark=[row for row, p in enumerate(params) if p.watermark],
            penalty=rows_where(penalised),
            penalised=[row for row, holds in enumerate(penalised) if holds],
            bias=[row for row, p in enumerate(params) if p.logit_bias],
            temperature=rows_where([p.temperature != 1 for p in params]),
            draw=rows_where([p.samples and not keeps_few(p) for p in params]),
            draw_from_best=rows_where([p.samples and keeps_few(p) for p in params]),
            top_k=any(p.top_k > 0 for p in drawing),
            top_p=any(p.top_p < 1 for p in drawing),
            typical_p=any(p.typical_p < 1 for p in drawing),
            min_p=any(p.min_p > 0 for p in drawing),
            top_n=[(row, p.top_n_tokens) for row, p in enumerate(params) if p.top_n_tokens],
        )

    def _process(self, logits: Tensor, rows: list[int], index: Tensor, groups: Groups, masks: RowMasks | None) -> None:
        """Everything before the filters, in place."""
        self.adjust(logits, rows, index, groups, masks)
        if groups.temperature is not None:
            logits[groups.temperature] /= self.numbers["temperature"][index[groups.temperature], None]

    def adjust(self, logits: Tensor, rows: list[int], index: Tensor, groups: Groups, masks: RowMasks | None) -> None:
        """Everything before the temperature, in place."""
        for row in groups.watermark:
            slot = rows[row]
            last = int(self.slots.tokens[slot, self.slots.lengths[slot] - 1])
            sampling.watermark(logits[row], last, self.gamma, self.delta)
        if groups.penalty is not None:
            longest = int(self.slots.lengths_cpu[[rows[row] for row in groups.penalised]].max())
            penalised = self._penalise(logits[groups.penalty], index[groups.penalty], longest)
            logits[groups.penalty] = penalised
        for row in groups.bias:
            ids, values = self.biases[rows[row]]
            logits[row].index_add_(0, ids, values)
        _mask(logits, masks)

    def _penalise(self, scores: Tensor, index: Tensor, longest: int) -> Tensor:
        slots = self.slots
        numbers = {name: self.numbers[name][index] for name in PENALTIES}
        known = (slots.tokens[index, :longest], slots.lengths[index], slots.num_prompt[index])
        return penalise(scores, *known, numbers)

    def _draw_from_best(self, scores: Tensor, index: Tensor, groups: Groups) -> Tensor:
        """The short way for rows whose filters keep few ids; the long way for those where they do not."""
        num_best = min(_NUM_BEST, scores.shape[1])
        numbers = self.numbers
        ids, enough = sampling.draw_from_best(
            scores,
            numbers["top_k"][index],
            numbers["top_p"][index],
            numbers["min_p"][index],
            self.seeds[index],
            self.slots.lengths[index],
            num_best,
        )
        if not bool(enough.all()):
            rest = ~enough
            ids[rest] = self._draw(scores[rest], index[rest], groups)
        return ids

    def _draw(self, scores: Tensor, index: Tensor, groups: Groups) -> Tensor:
        numbers = self.numbers
        if groups.top_k:
            scores = sampling.top_k(scores, numbers["top_k"][index])
        if groups.top_p:
            scores = sampling.top_p(scores, numbers["top_p"][index])
        if groups.typical_p:
            scores = sampling.typical_p(scores, numbers["typical_p"][index])
        if groups.min_p:
            scores = sampling.min_p(scores, numbers["min_p"][index])
        return sampling.draw(scores, self.seeds[index], self.slots.lengths[index])


def _mask(logits: Tensor, masks: RowMasks | None) -> None:
    if masks is not None and masks.rows.shape[0]:
        sampling.allow_only(logits, masks.rows, masks.allowed)


def keeps_few(params: SamplingParams) -> bool:
    """Whether top-k or top-p are likely to keep at most `_NUM_BEST` ids. Depends on the request alone."""
    return params.typical_p == 1 and (0 < params.top_k <= _NUM_BEST or params.top_p < 1)


def top_tokens(row: int, count: int, logprobs: Tensor) -> TopTokens:
    """The ids at least as likely as the count-th best, best first, lower ids first among equals.

    Ties may make it more than `count`, but never more than `sampling.MORE_TIES` more.
    """
    most = count + sampling.MORE_TIES
    count = min(count, logprobs.shape[0])
    threshold = logprobs.topk(count).values[-1]
    ids = ((logprobs >= threshold) & (logprobs > -math.inf)).nonzero()[:, 0]  # a mask may leave fewer than `count`
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return TopTokens(row, ids[order[:most]].tolist(), values[:most].tolist())
