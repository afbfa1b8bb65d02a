"""Log-probabilities of prompt tokens, and of the best ids in their places."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, Chunk, PromptLogprobs

LOGIT_ROWS = 128  # prompt positions whose logits are held at a time


class PromptScores(NamedTuple):
    """Of some tokens of a prompt, on the device."""

    logprobs: Tensor  # [tokens]
    top_ids: Tensor | None = None  # [tokens, asked for]
    top_logprobs: Tensor | None = None  # the same


def score(scores: Tensor, targets: Tensor, num_top: int, vocabulary: VocabularyPart) -> PromptScores:
    """scores `[tokens, vocab]` float32 of this rank's ids, targets `[tokens]`: what came in each place."""
    if not num_top:
        return PromptScores(vocabulary.score(scores, targets))
    scores = vocabulary.gather(scores)
    totals = scores.logsumexp(dim=-1)
    logprobs = scores.gather(1, targets[:, None])[:, 0] - totals
    best = scores.topk(min(num_top, scores.shape[1]), dim=-1)
    return PromptScores(logprobs, best.indices, best.values - totals[:, None])


def read_scores(row: int, start: int, parts: list[PromptScores]) -> PromptLogprobs:
    """Parts that follow each other, as data. Waits for the device."""
    result = PromptLogprobs(row, start, [])
    for part in parts:
        result.logprobs.extend(part.logprobs.tolist())
        if part.top_ids is not None and part.top_logprobs is not None:
            result.top_ids.extend(part.top_ids.tolist())
            result.top_logprobs.extend(part.top_logprobs.tolist())
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
