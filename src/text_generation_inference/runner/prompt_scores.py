"""Log-probabilities of prompt tokens, and of the best ids in their places."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from text_generation_inference.sampling.tops import in_order
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, Chunk, PromptLogprobs

LOGIT_ROWS = 128  # prompt positions whose logits are held at a time


class PromptScores(NamedTuple):
    """Of some tokens of a prompt, on the device."""

    logprobs: Tensor  # [tokens]
    num_top: int = 0  # best ids that were asked for
    top_ids: Tensor | None = None  # [tokens, so many or more], equals in any order
    top_logprobs: Tensor | None = None  # the same


def score(scores: Tensor, targets: Tensor, num_top: int, vocabulary: VocabularyPart) -> PromptScores:
    """scores `[tokens, vocab]` float32 of this rank's ids, targets `[tokens]`: what came in each place."""
    logprobs = vocabulary.score(scores, targets)
    return PromptScores(logprobs, num_top, *vocabulary.tops(scores, num_top)) if num_top else PromptScores(logprobs)


def score_padded(scores: Tensor, targets: Tensor, num_top: int, vocabulary: VocabularyPart) -> Tensor:
    """`score` as one tensor `[tokens, 1 + 2 * num_top]` float32, which holds ids up to 2^24: see `take_padded`."""
    ids, logprobs = vocabulary.tops(scores, num_top)
    return torch.cat((vocabulary.score(scores, targets)[:, None], logprobs, ids.to(logprobs.dtype)), dim=-1)


def take_padded(found: Tensor, num_top: int) -> PromptScores:
    """What was asked for of what `score_padded` found."""
    most = (found.shape[1] - 1) // 2
    if not num_top:
        return PromptScores(found[:, 0])
    return PromptScores(found[:, 0], num_top, found[:, 1 + most :].long(), found[:, 1 : 1 + most])


def read_scores(row: int, start: int, parts: list[PromptScores]) -> PromptLogprobs:
    """Parts that follow each other, as data. Waits for the device."""
    result = PromptLogprobs(row, start, [])
    for part in parts:
        result.logprobs.extend(part.logprobs.tolist())
        if part.top_ids is not None and part.top_logprobs is not None:
            ids, logprobs = in_order(part.top_ids.cpu(), part.top_logprobs.cpu())
            result.top_ids.extend(ids[:, : part.num_top].tolist())
            result.top_logprobs.extend(logprobs[:, : part.num_top].tolist())
    return result


class OwedScores:
    """Whose prompts are to be scored, and how."""

    def __init__(self) -> None:
        self._owed: dict[int, tuple[int, int]] = {}  # slot -> prompt tokens, how many of the best ids in their places

    def __contains__(self, slot: int) -> bool:
        return slot in self._owed

    def admit(self, admission: Admission) -> None:
        request = admission.request
        if request.sampling.decoder_input_details and not admission.output_ids:
            self._owed[admission.slot] = (len(request.token_ids), request.sampling.prompt_top_n_tokens)

    def num_top(self, slot: int) -> int:
        return self._owed[slot][1]

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._owed.pop(slot, None)

    def forget(self) -> None:
        self._owed.clear()

    def score_chunk(
        self,
        chunk: Chunk,
        hidden: Tensor,  # [chunk tokens, hidden]
        logits: Callable[[Tensor], Tensor],
        vocabulary: VocabularyPart,  # which ids these logits are of
        targets: Tensor,  # [>= chunk end + 1]: the slot's first tokens
    ) -> list[PromptScores]:
        """Of the prompt tokens that follow each token of the chunk."""
        num_tokens, num_top = self._owed[chunk.slot]
        last = min(chunk.end, num_tokens - 1)
        parts: list[PromptScores] = []
        for start in range(chunk.start, last, LOGIT_ROWS):
            end = min(start + LOGIT_ROWS, last)
            scores = logits(hidden[start - chunk.start : end - chunk.start]).float()
            following = targets[start + 1 : end + 1].to(scores.device).long()
            parts.append(score(scores, following, num_top, vocabulary))
        if chunk.samples:
            del self._owed[chunk.slot]
        return parts
