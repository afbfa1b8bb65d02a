"""The text of one request from its tokens: detokenising, thoughts and stop strings together.

Last step of the text package on the way out; what comes from here goes to the client. The engine decides when a request
ends for reasons of tokens (length, EOS); only stop strings end it here.
"""

import math
from collections.abc import Sequence

from text_generation_inference.text.detokenize import open_stream
from text_generation_inference.text.ids_as_text import IdsAsText
from text_generation_inference.text.reasoning import Inserted, Splitter
from text_generation_inference.text.stopping import StopStrings
from text_generation_inference.text.tokenizer import Tokenizer


class RequestText:
    """The output text of one request as it grows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: StopStrings,
        skip_special_tokens: bool = True,
        silent_ids: frozenset[int] | None = None,
        min_tokens: int = 0,
        shown_ids: frozenset[int] = frozenset(),
        splitter: Splitter | None = None,
    ) -> None:
        """`silent_ids` have no text, whether or not the tokenizer flags them as special.

        When they are not given they are the tokenizer's EOS ids, unless special tokens are kept. Stop strings are
        looked for behind the first `min_tokens` tokens, and behind the thoughts that `splitter` tells from the text.
        `shown_ids` are special tokens with a text that is needed further on.
        """
        self._stream = open_stream(tokenizer, prompt_ids, skip_special_tokens)
        self._stops = stops
        if silent_ids is None:
            silent_ids = tokenizer.eos_ids if skip_special_tokens else frozenset[int]()
        self._silent_ids = frozenset[int]() if isinstance(tokenizer, IdsAsText) else silent_ids
        self._num_unsearched = min_tokens
        self._shown_ids = shown_ids - self._silent_ids if skip_special_tokens else frozenset[int]()
        self._tokenizer = tokenizer
        self._splitter = splitter
        self._thoughts = ""  # not yet taken
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.stopped

    @property
    def stop_string(self) -> str:
        """Which one did."""
        return self._stops.found

    def push(self, token_id: int) -> tuple[str, bool]:
        """Take the next token; return the text to give out, and whether a stop string ends the request here."""
        if token_id in self._silent_ids:
            new_text = ""
        elif token_id in self._shown_ids:
            new_text = self._stream.flush() + self._tokenizer.decode([token_id], skip_special_tokens=False)
        else:
            new_text = self._stream.push(token_id)
        parts = [new_text] if self._splitter is None else self._answer_in(self._splitter.push(new_text))
        if self._num_unsearched:
            self._num_unsearched -= 1
            piece = "".join(parts)
        else:
            piece = self._search(parts)
        self._pieces.append(piece)
        return piece, self._stops.stopped

    def take_thoughts(self) -> str:
        """The thoughts since the last call."""
        thoughts, self._thoughts = self._thoughts, ""
        return thoughts

    def finish(self) -> str:
        """The text still held back, when no more tokens will come."""
        parts = [self._stream.flush()]
        if self._splitter is not None:
            parts = self._answer_in(self._splitter.push(parts[0])) + self._answer_in(self._splitter.finish())
        piece = self._search(parts)
        if not self._stops.stopped:
            piece += self._stops.flush()
        self._pieces.append(piece)
        return piece

    def _search(self, parts: Sequence[str]) -> str:
        """What may be given out of the next parts of the answer. Stop strings are looked for in the model's words."""
        stops = self._stops
        return "".join(stops.insert(part) if isinstance(part, Inserted) else stops.push(part)[0] for part in parts)

    def _answer_in(self, parts: tuple[str, list[str]]) -> list[str]:
        thoughts, answer = parts
        self._thoughts += thoughts
        return answer


def pick_best(mean_logprobs: Sequence[float]) -> int:
    """The index of the highest mean log-probability; the first of equal ones. NaN is worse than any number."""
    if not mean_logprobs:
        raise ValueError("there is nothing to pick from")
    return max(range(len(mean_logprobs)), key=lambda i: (not math.isnan(mean_logprobs[i]), mean_logprobs[i]))
