"""One generation as the routes see it: pieces of text as they come, and how it ended.

`Generation` joins an engine request's events with its text: detokenising, stop strings, times. Two kinds of
text: TGI's, where every token has its text and stop strings stay, and OpenAI's, where special tokens are silent and
stop strings are cut.
"""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from text_generation_inference.api.metrics import Metrics, Timings
from text_generation_inference.engine.client import TokenEvent, TokenStream
from text_generation_inference.errors import IncompleteError, RequestError, TgiError, ValidationError
from text_generation_inference.text.detokenize import open_stream
from text_generation_inference.text.ids_as_text import IdsAsText
from text_generation_inference.text.output import RequestText
from text_generation_inference.text.reasoning import Splitter
from text_generation_inference.text.stopping import StopStrings
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Finish, GenerationRequest


class Piece(msgspec.Struct, gc=False):
    """One token and what it adds to the text."""

    token_id: int
    text: str
    logprob: float
    special: bool
    top_tokens: list[tuple[int, float]]
    thoughts: str = ""  # what it adds to the text of the model's thinking
    last: bool = False  # nothing comes behind it; the generation's `finish_reason` says why


class OutputText(Protocol):
    """How tokens become text."""

    @property
    def stop_string(self) -> str:
        """The one that ended the text, where stop strings are cut."""
        ...

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text of the next token, and whether a stop string ends the request here."""
        ...

    def take_thoughts(self) -> str:
        """What has come since the last call, where thoughts are told from the text."""
        ...

    def finish(self) -> str:
        """Text still held back, when no more tokens will come."""
        ...


class NativeText:
    """Every token has its text, special ones too. `generated` is the whole without those."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        self._stream = open_stream(tokenizer, request.token_ids)
        stops = request.sampling.stop
        self._stops = StopStrings(stops, include_stop=True, only_at_end=True) if stops else None
        self._pieces: list[str] = []

    @property
    def stop_string(self) -> str:
        return ""

    @property
    def generated(self) -> str:
        return "".join(self._pieces)

    def push(self, token_id: int) -> tuple[str, bool]:
        if token_id in self._tokenizer.skipped_ids:
            text = self._flush() + self._tokenizer.decode([token_id], skip_special_tokens=False)
        else:
            text = self._stream.push(token_id)
            self._pieces.append(text)
        return text, self._stops is not None and self._stops.push(text)[1]

    def take_thoughts(self) -> str:
        return ""

    def finish(self) -> str:
        """Unfinished characters belong to the whole text, but no event has told them."""
        self._flush()
        return ""

    def _flush(self) -> str:
        text = self._stream.flush()
        self._pieces.append(text)
        return text


def openai_text(
    tokenizer: Tokenizer,
    request: GenerationRequest,
    shown_ids: frozenset[int] = frozenset(),
    splitter: Splitter | None = None,
) -> RequestText:
    """Stop strings are cut; special tokens have no text but for `shown_ids`, unless the request wants them.

    The token that ends a text has none, unless the request wants to see what ended it.
    """
    params = request.sampling
    stops = StopStrings(params.stop, params.include_stop, whole_pieces=isinstance(tokenizer, IdsAsText))
    silent = frozenset[int]() if params.include_stop else frozenset(request.stop_token_ids)
    if params.skip_special_tokens:
        silent |= tokenizer.eos_ids
    return RequestText(
        tokenizer, request.token_ids, stops, params.skip_special_tokens, silent, params.min_tokens, shown_ids, splitter
    )


class Generation:
    """A request in the engine, from submission to its end."""

    def __init__(
        self,
        request: GenerationRequest,
        stream: TokenStream,
        text: OutputText,
        tokenizer: Tokenizer,
        metrics: Metrics,
        arrived: float,
    ) -> None:
        self.request = request
        self.text = text
        self.num_tokens = 0
        self.num_thought_tokens = 0
        self._num_held = 0  # tokens since the last one that had text
        self.finish_reason = ""  # set with the last piece
        self.num_cached_tokens: int | None = None
        self.sum_logprobs = 0.0
        self.prompt_logprobs: dict[int, float] = {}  # by position
        self.prompt_top_tokens: dict[int, list[tuple[int, float]]] = {}  # likewise, best first
        self.timings: Timings | None = None
        self.on_first_token: Callable[[Generation], None] | None = None
        self.output_ids: list[int] | None = None  # kept for those who set it to a list
        self.first_token_s: float | None = None  # since its arrival
        self._queue_s: float | None = None
        self._stream = stream
        self._special_ids = tokenizer.special_ids
        self._metrics = metrics
        self.arrived = arrived
        self._submitted = self._last_time = time.perf_counter()

    @property
    def seed(self) -> int | None:
        """The seed, where there is something random."""
        return self.request.seed if self.request.sampling.samples else None

    @property
    def submitted_s(self) -> float:
        """When the engine got it, since its arrival."""
        return self._submitted - self.arrived

    @property
    def admitted_s(self) -> float | None:
        """When it began to run, likewise; None as long as nothing has come from the engine."""
        return None if self._queue_s is None else self.submitted_s + self._queue_s

    @property
    def input_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def engine_responds(self) -> bool:
        return self._stream.engine_responds

    async def take(self) -> list[Piece]:
        """The pieces since the last call; at least one, unless `wake` was called."""
        pieces: list[Piece] = []
        while not pieces:
            events = await self._stream.take()
            if not events:
                break
            self._read(events, pieces)
        if pieces:
            self._observe(len(pieces), time.perf_counter())
        return pieces

    def _read(self, events: list[TokenEvent], pieces: list[Piece]) -> None:
        for event in events:
            if event.admitted is not None:
                self.num_cached_tokens = event.admitted.num_cached_tokens
                self._queue_s = event.admitted.queue_ns / 1e9
            if event.prompt_logprobs:
                for start, values in event.prompt_logprobs:
                    self.prompt_logprobs.update(enumerate(values, start))
                self.prompt_top_tokens.update(event.prompt_top_tokens)
            if event.token_id is not None:
                pieces.append(self._push(event, event.token_id))
            if event.finish is not None and not self.finish_reason:
                self._end(event.finish)
            if self.finish_reason:
                if not pieces:  # refused before the first token
                    raise IncompleteError("Incomplete generation")
                self._finish(pieces[-1])
                break

    async def take_all(self) -> list[Piece]:
        """Every piece to the end."""
        pieces: list[Piece] = []
        while not self.finish_reason:
            pieces += await self.take()
        return pieces

    def wake(self) -> None:
        self._stream.wake()

    def fail(self, error: TgiError) -> None:
        """Let `take` raise this once it has handed out what is there."""
        self._stream.fail(error)

    def close(self) -> None:
        """Free what the engine holds for it, if it has not ended."""
        self._stream.abort()

    def _push(self, event: TokenEvent, token_id: int) -> Piece:
        text, stopped = self.text.push(token_id)
        self.num_tokens += 1
        if self.output_ids is not None:
            self.output_ids.append(token_id)
        self.sum_logprobs += event.logprob
        # TGI looks at the length first; where the stop string is cut, it is what ended the text.
        if stopped and (event.finish is None or not isinstance(self.text, NativeText)):
            self.finish_reason = "stop_sequence"
            self._stream.abort()
        thoughts = self.text.take_thoughts()
        self._num_held += 1
        self._count_held(text, thoughts)
        return Piece(token_id, text, event.logprob, token_id in self._special_ids, event.top_tokens, thoughts)

    def _count_held(self, text: str, thoughts: str) -> None:
        """A token whose text is held back, as white space and the beginning of a mark are, is what it comes with."""
        if thoughts:
            self.num_thought_tokens += self._num_held
        if thoughts or text:
            self._num_held = 0

    def _end(self, finish: Finish) -> None:
        if finish.reason == "refused":
            raise ValidationError(finish.error or "the request cannot be served")
        if finish.reason == "error":
            raise RequestError(finish.error or "the request failed")
        if finish.reason == "aborted":
            raise RequestError("the request was aborted")
        self.finish_reason = finish.reason

    def _finish(self, last: Piece) -> None:
        text, thoughts = self.text.finish(), self.text.take_thoughts()
        last.text += text
        last.thoughts += thoughts
        self._count_held(text, thoughts)
        last.last = True
        now, queue_s = time.perf_counter(), self._queue_s or 0.0
        self.timings = Timings(
            now - self.arrived,
            self._submitted - self.arrived,
            queue_s,
            now - self._submitted - queue_s,
            self.num_tokens,
        )

    def _observe(self, count: int, now: float) -> None:
        metrics = self._metrics
        waited, self._last_time = now - self._last_time, now
        if self.num_tokens == count:
            self.first_token_s = now - self.arrived
            metrics.first_token(self.first_token_s)
            if self.on_first_token is not None:
                self.on_first_token(self)
            count -= 1
            waited = 0.0
        for _ in range(count):
            metrics.inter_token(waited / count)
        metrics.tokens(1)
