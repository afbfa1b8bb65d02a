"""Offline use: `LLM(model).generate(prompts)`, without a server.

The engine runs in this process; each call pumps its loop until the answers it waits for are complete. Calls
may be interleaved (a stream that is read while another call generates): tokens are routed by request.
"""

import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from types import TracebackType
from typing import Any, Self

import msgspec

from text_generation_inference.api.pictures import Pictures
from text_generation_inference.config import ENGINE_SETTINGS, ServerConfig, prepare_process, read_environment
from text_generation_inference.drive import run_step
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.errors import EngineError, RequestError, ValidationError
from text_generation_inference.pictures.folder import make_picture_folder
from text_generation_inference.progress import CountBar, StageBars
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.messages import normalise_messages
from text_generation_inference.text.offline_pictures import place_pictures, render_pictures
from text_generation_inference.text.output import RequestText, pick_best
from text_generation_inference.text.picture_prompt import PicturePrompt, SeenPrompt
from text_generation_inference.text.prepare import prepare_request
from text_generation_inference.text.stopping import StopStrings
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Finish, GenerationRequest, Grammar, SamplingParams, TokenOut

Prompt = str | Sequence[int]
_Options = tuple[bool, str, Grammar | None]  # special tokens are added, salt of the prefix cache


class Alternative(msgspec.Struct, frozen=True):
    """One of the best tokens at a position."""

    id: int
    text: str
    logprob: float


class Completion(msgspec.Struct, kw_only=True):
    """What came of one prompt."""

    text: str
    finish_reason: str  # "length", "eos_token", "stop_sequence" or "error"
    token_ids: list[int]
    logprobs: list[float]
    prompt_token_ids: list[int]
    num_cached_tokens: int | None  # prompt tokens that needed no computing; None when a stop string ended it
    seed: int | None = None  # None when greedy
    top_tokens: list[list[Alternative]] = []
    prompt_logprobs: list[float | None] | None = None  # None for the first token
    error: str | None = None
    others: list["Completion"] = []  # the candidates that `best_of` did not choose


class StreamedToken(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a stream. `text` is what it adds, which may be nothing; the last one carries the completion."""

    id: int | None
    text: str
    logprob: float | None
    completion: Completion | None = None


class _Job:
    """A request in progress and what is known of its answer."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        params = request.sampling
        stops = StopStrings(params.stop, params.include_stop)
        silent = frozenset(request.stop_token_ids if params.skip_special_tokens else ())
        self.request = request
        self.text = RequestText(
            tokenizer, request.token_ids, stops, params.skip_special_tokens, silent, params.min_tokens
        )
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_tokens: list[list[Alternative]] = []
        self.prompt_logprobs: dict[int, float] = {}
        self.pieces: list[tuple[int, str, float]] = []  # not yet streamed
        self.completion: Completion | None = None

    def push(self, token_id: int, logprob: float) -> bool:
        """Take a token; True if a stop string ends the request."""
        piece, stopped = self.text.push(token_id)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.pieces.append((token_id, piece, logprob))
        return stopped

    def add_top(self, token_ids: list[int], logprobs: list[float]) -> None:
        decode = self.tokenizer.decode
        pairs = zip(token_ids, logprobs, strict=True)
        self.top_tokens.append([Alternative(i, decode([i], False), logprob) for i, logprob in pairs])

    def finish(self, reason: str, error: str | None = None, num_cached_tokens: int | None = None) -> None:
        rest = self.text.finish()
        if rest and self.pieces:
            token_id, piece, logprob = self.pieces.pop()
            self.pieces.append((token_id, piece + rest, logprob))
        prompt = self.request.token_ids
        self.completion = Completion(
            text=self.text.text,
            finish_reason=reason,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            prompt_token_ids=prompt,
            num_cached_tokens=num_cached_tokens,
            seed=self.request.seed if self.request.sampling.samples else None,
            top_tokens=self.top_tokens,
            prompt_logprobs=[self.prompt_logprobs.get(i) for i in range(len(prompt))]
            if self.request.sampling.decoder_input_details
            else None,
            error=error,
        )

    @property
    def mean_logprob(self) -> float:
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else float("-inf")


class LLM(AbstractContextManager["LLM"]):
    """A model ready to generate.

    `model` is "embedded", a model folder, a .gguf file, or a hub id. Further settings are the fields of `ServerConfig`,
    such as `max_total_tokens`, `dtype` or `load_format`.
    """

    def __init__(self, model: str = "embedded", *, progress: bool = True, **settings: Any) -> None:
        unknown = settings.keys() - {field.name for field in msgspec.structs.fields(ServerConfig)}
        if unknown:
            raise TypeError(f"LLM has no setting {', '.join(sorted(unknown))}")
        # Nobody waits for single tokens here: steps may take as long as is best for all of them.
        given: dict[str, Any] = {
            "max_step_ms": 0,
            **read_environment(only=ENGINE_SETTINGS),
            **settings,
            "model_id": model,
        }
        self.config = ServerConfig(**given)
        prepare_process(self.config)
        self._picture_folder = make_picture_folder()
        self.config = msgspec.structs.replace(self.config, picture_folder=str(self._picture_folder.path))
        self._show_progress = progress
        try:
            with StageBars(enabled=progress) as bars:
                self.engine: Engine = start_engine(self.config, bars.update)
        except BaseException:
            self._picture_folder.remove()
            raise
        self.facts = self.engine.facts
        self.tokenizer = Tokenizer.load(self.engine.folder)
        self.notes = self.engine.notes
        self._template: ChatTemplate | None = None
        self._pictures = Pictures.find(self.config, self.facts, self.tokenizer)
        self._ids = count(1)
        self._jobs: dict[int, _Job] = {}
        self._failure: EngineError | None = None
        self._lock = threading.RLock()  # calls from several threads take turns, step by step

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        images: Any = None,
    ) -> list[Completion]:
        """Complete every prompt, in order. A prompt that fails has `finish_reason` "error"; bad input raises.

        `images`, for models that see: the pictures of a prompt, or a list with those of each of several: PIL pictures,
        paths, URLs or bytes. They stand where the prompt has the model's marker for a picture, or before a text
        without one.
        """
        batch = _as_batch(prompts)
        all_params = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(all_params) != len(batch):
            raise ValidationError(f"{len(batch)} prompts but {len(all_params)} sampling parameters")
        placed = [self._place(prompt, one) for prompt, one in zip(batch, _as_groups(images, len(batch)), strict=True)]
        return self._generate(placed, all_params, (add_special_tokens, cache_salt, grammar))

    def _generate(
        self, batch: Sequence[Prompt | PicturePrompt], all_params: Sequence[SamplingParams], options: _Options
    ) -> list[Completion]:
        with self._see(batch, options) as seen:
            groups = [
                [self._make_job(prompt, p, *options) for _ in range(p.best_of)]
                for prompt, p in zip(seen, all_params, strict=True)
            ]
            jobs = [job for group in groups for job in group]
            with CountBar("prompts", len(jobs), enabled=self._show_progress and len(jobs) > 1) as bar:
                self._run(jobs, bar.update)
        return [_best(group) for group in groups]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        images: Any = None,
    ) -> Iterator[StreamedToken]:
        """Yield tokens as they come. Leaving the loop early ends the request.

        `images`: as for `generate`; they are loaded when the first token is asked for.
        """
        params = params or SamplingParams()
        if params.best_of != 1:
            raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
        placed = self._place(prompt, _as_groups(images, 1)[0])
        options = (add_special_tokens, cache_salt, grammar)
        if isinstance(placed, PicturePrompt) and placed.sources:
            return self._stream_seen(placed, params, options)
        return self._stream(self._make_job(prompt, params, *options))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
        **template: Any,
    ) -> Completion:
        """Answer a conversation: `[{"role": "user", "content": "..."}]`.

        A content may be parts: `{"type": "text", "text": "..."}`, and for models that see
        `{"type": "image", "image": x}` with a PIL picture, a path, a URL or bytes, or OpenAI's
        `{"type": "image_url", "image_url": {"url": "..."}}`.
        """
        prompt = self._render(messages, template)
        return self._generate([prompt], [params or SamplingParams()], (False, "", grammar))[0]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """The conversation as the text the model was trained on, with the model's marker for each picture."""
        prompt = self._render(messages, template)
        if isinstance(prompt, str):
            return prompt
        assert self._pictures is not None
        return self._pictures.words.marker.join(prompt.texts)

    def _render(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> str | PicturePrompt:
        template = self._load_template()
        if self._pictures is None:
            return template.render(normalise_messages(messages, template), **options)
        return render_pictures(template, messages, self._pictures.words, **options)

    def _load_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate.load(self.engine.folder)
        return self._template

    def close(self) -> None:
        """Free the model. The object cannot be used afterwards."""
        with self._lock:
            self._failure = self._failure or EngineError("this LLM is closed")
            self.engine.close()
            if self._pictures is not None:
                self._pictures.loader.close()
            self._picture_folder.remove()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    # -- the loop --------------------------------------------------------------------------------------------------

    def _place(self, prompt: Prompt, images: Sequence[Any]) -> Prompt | PicturePrompt:
        """A prompt with its pictures in their places, if the model sees."""
        if self._pictures is not None and isinstance(prompt, str):
            return place_pictures(prompt, images, self._pictures.words)
        if images:
            why = "the prompt is token ids" if self._pictures is not None else f"{self.facts.model_id} sees no pictures"
            raise ValidationError(f"`images` cannot be given: {why}")
        return prompt

    @contextmanager
    def _see(self, batch: Sequence[Prompt | PicturePrompt], options: _Options) -> Generator[list[Prompt | SeenPrompt]]:
        """Prompts with their pictures loaded, for as long as the context lasts."""
        _, cache_salt, _ = options
        held: list[str] = []
        seen: list[Prompt | SeenPrompt] = []
        try:
            for prompt in batch:
                if isinstance(prompt, PicturePrompt):
                    assert self._pictures is not None
                    found = self._pictures.loader.load_sync(prompt.sources, cache_salt) if prompt.sources else []
                    held += [picture.digest for picture in found]
                    prompt = SeenPrompt(prompt.texts, found)
                seen.append(prompt)
            yield seen
        finally:
            if self._pictures is not None:
                self._pictures.loader.release(held)

    def _make_job(
        self,
        prompt: Prompt | SeenPrompt,
        params: SamplingParams,
        add_special_tokens: bool,
        cache_salt: str,
        grammar: Grammar | None,
    ) -> _Job:
        if grammar is not None:
            self.engine.compile_grammar(grammar)
        request = prepare_request(
            next(self._ids),
            prompt,
            params,
            self.tokenizer,
            self.facts,
            add_special_tokens=add_special_tokens,
            cache_salt=cache_salt,
            grammar=grammar,
            words=None if self._pictures is None else self._pictures.words,
        )
        if params.best_of > 1:
            request = msgspec.structs.replace(request, seed=secrets.randbits(64))
        return _Job(request, self.tokenizer)

    def _run(self, jobs: list[_Job], tell: Callable[[int], None]) -> None:
        """Pump until every job is complete; whatever happens, none of them stays in the engine."""
        try:
            for job in jobs:
                self._start(job)
            num_left = len(jobs)
            while num_left:
                if any(job.completion is None for job in jobs):
                    self._pump()
                num_left = sum(job.completion is None for job in jobs)
                tell(len(jobs) - num_left)
        finally:
            for job in jobs:
                self._drop(job)

    def _stream_seen(self, prompt: PicturePrompt, params: SamplingParams, options: _Options) -> Iterator[StreamedToken]:
        with self._see([prompt], options) as (seen,):
            yield from self._stream(self._make_job(seen, params, *options))

    def _stream(self, job: _Job) -> Iterator[StreamedToken]:
        self._start(job)
        try:
            done = None
            while done is None:
                if not job.pieces and job.completion is None:
                    self._pump()
                done = job.completion  # another call's pumping may have finished it
                pieces, job.pieces = job.pieces, []
                for number, (token_id, text, logprob) in enumerate(pieces, 1):
                    last = done if number == len(pieces) else None
                    yield StreamedToken(id=token_id, text=text, logprob=logprob, completion=last)
                if done is not None and done.finish_reason == "error":
                    raise RequestError(f"Request failed during generation: {done.error}")
        finally:
            self._drop(job)

    def _start(self, job: _Job) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self.engine.loop.add(job.request)
            self._jobs[job.request.id] = job

    def _drop(self, job: _Job) -> None:
        with self._lock:
            if self._jobs.pop(job.request.id, None) is not None:
                self.engine.loop.abort(job.request.id)

    def _pump(self) -> None:
        """One step of the engine, and its tokens to the jobs. Ctrl-C takes effect only while it waits."""
        loop = self.engine.loop
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                run_step(loop, receive=self._deliver)
            except EngineError as error:
                self._failure = error
                raise

    def _deliver(self, out: TokenOut) -> None:
        tops = {top.row: top for top in out.top_tokens}
        ended = {finish.request_id for finish in out.finished}
        for prompt in out.prompt_logprobs:
            if prompt.row in self._jobs:
                self._jobs[prompt.row].prompt_logprobs.update(enumerate(prompt.logprobs, prompt.start))
        after = [*out.request_ids[1:], None]  # whose token comes next
        for row, (request_id, token_id, logprob) in enumerate(
            zip(out.request_ids, out.token_ids, out.logprobs, strict=True)
        ):
            job = self._jobs.get(request_id)
            if job is None:
                continue
            if row in tops:
                job.add_top(tops[row].token_ids, tops[row].logprobs)
            if job.push(token_id, logprob) and (request_id not in ended or after[row] == request_id):
                job.finish("stop_sequence")
                self._drop(job)
        for finish in out.finished:
            self._finish(finish)

    def _finish(self, finish: Finish) -> None:
        job = self._jobs.pop(finish.request_id, None)
        if job is not None:
            job.finish(finish.reason, finish.error, finish.num_cached_tokens)


def _as_batch(prompts: Any) -> list[Any]:
    """One prompt (text, or a list of ids) or several. Arrays and tensors of ids are taken as lists."""
    if isinstance(prompts, str):
        return [prompts]
    batch = [item if isinstance(item, str) else _as_list(item) for item in _as_list(prompts)]
    return [batch] if batch and isinstance(batch[0], int) else batch


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value if isinstance(value, int) else list(value)


def _as_groups(images: Any, num_prompts: int) -> list[list[Any]]:
    """The pictures of each prompt: a list, a single one, or nothing. One prompt needs no list around its own."""
    if images is None:
        return [[] for _ in range(num_prompts)]
    given: list[Any] = list(images) if isinstance(images, list | tuple) else [images]
    if num_prompts == 1 and not (len(given) == 1 and isinstance(given[0], list | tuple)):
        given = [given]
    if len(given) != num_prompts:
        raise ValidationError(f"{num_prompts} prompts but `images` for {len(given)}")
    return [list(one) if isinstance(one, list | tuple) else [] if one is None else [one] for one in given]


def _best(group: list[_Job]) -> Completion:
    best = pick_best([job.mean_logprob for job in group])
    completions = [job.completion for job in group]
    chosen = completions[best]
    assert chosen is not None
    if len(group) > 1:
        chosen.others = [c for number, c in enumerate(completions) if c is not None and number != best]
    return chosen
