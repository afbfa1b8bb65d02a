"""What all routes share: the model's text side, admission, and the way into the engine.

Owns the tokenizer, the chat template, the worker threads for long texts and grammars, the metrics, and the
present connection to the engine, which the launcher may replace.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from text_generation_inference.api.callers import current_caller
from text_generation_inference.api.errors import UnavailableError
from text_generation_inference.api.generation import Generation, OutputText
from text_generation_inference.api.grammars import GrammarQueue
from text_generation_inference.api.memory import release_memory
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.api.rendering import ChatRenderer
from text_generation_inference.api.tenants import make_salt
from text_generation_inference.api.trace import Tracer
from text_generation_inference.api.turns import Turns
from text_generation_inference.api.unknown_fields import UnknownFields
from text_generation_inference.api.validate import CHUNK_TOKENS
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.client import EngineClient
from text_generation_inference.errors import DeadlineError, EngineError, OverloadedError, ValidationError
from text_generation_inference.failpoints import failpoint
from text_generation_inference.scheduler.shares import Shares
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.text.ids_as_text import IdsAsText
from text_generation_inference.text.prepare import prepare_request
from text_generation_inference.text.reasoning import detect_reasoning_format
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools import ToolFormat, detect_tool_format
from text_generation_inference.types import GenerationRequest, Grammar, ModelFacts, SamplingParams
from text_generation_inference.version import __version__

log = logging.getLogger("text_generation_inference.api")

Prompt = str | Sequence[int]
T = TypeVar("T")
LONG_TEXT = 2_000  # characters; longer ones are worked on beside the event loop
_MAX_WAIT_S = 30.0  # for one of the threads that work on long texts
_MANY_ITEMS = 2_000  # tokens in an answer, some 20 ms of work
_QUEUE_FACTOR = 4  # prompt tokens that may wait, in multiples of the KV cache


class Service:
    def __init__(self, config: ServerConfig, facts: ModelFacts, tracer: Tracer | None = None) -> None:
        self.config = config
        self.facts = facts
        folder = Path(facts.folder)
        self.tokenizer = IdsAsText.load(folder) if config.skip_tokenizer_in_tgi else Tokenizer.load(folder)
        lacking = sorted(token_id for token_id in self.tokenizer.eos_ids if token_id >= facts.vocab_size)
        if lacking:
            log.warning("The model's files end texts with token ids that it lacks, which are ignored: %s", lacking)
        template_path = Path(config.tokenizer_config_path) if config.tokenizer_config_path else None
        self.template = ChatTemplate.load(folder, template_path)
        self.tool_format: ToolFormat = detect_tool_format(self.template, self.tokenizer)
        self.reasoning_format = detect_reasoning_format(self.template, self.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer, facts.vocab_size)
        if not config.disable_grammar_support:
            with suppress(ValidationError):  # a tokenizer that cannot be constrained: each request is told so
                self.grammars.prepare()
        self.metrics = Metrics(facts.max_input_tokens, facts.max_total_tokens)
        self.chat_renderer = ChatRenderer(self.template, _MAX_WAIT_S, self.metrics)
        self.unknown_fields = UnknownFields(self.metrics.count_unknown_fields)
        self.tracer = tracer or Tracer.start(None, "")
        self.engine: EngineClient | None = None
        self.unavailable = "the engine is starting"  # why, while there is no engine
        self.engine_responds = True  # as far as its signs of life tell
        self.draining = False
        self._shares = Shares(config.max_concurrent_requests)
        self.num_queued_tokens = 0  # prompt tokens of those that have no token yet
        pool_tokens = (facts.num_blocks - 1) * facts.block_size
        self._max_queued_tokens = config.max_queued_tokens or _QUEUE_FACTOR * pool_tokens
        self._workers = ThreadPoolExecutor(config.validation_workers, thread_name_prefix="tgi-validate")
        self._turns = Turns(
            config.validation_workers, _MAX_WAIT_S, lambda count: self.metrics.waiting("validate", count)
        )
        self._grammar_queue = GrammarQueue(self.grammars, self.metrics)
        self.generations: set[Generation] = set()
        self.model_name = public_name(facts.model_id)
        self.fingerprint = f"{__version__}-native"
        self.compute_type = config.compute_type or f"1-{facts.device}"

    @property
    def num_running(self) -> int:
        """Generations admitted."""
        return self._shares.num_held

    def give_back(self, count: int, caller: str) -> None:
        self._shares.give_back(caller, count)
        self.metrics.in_flight(self.num_running)

    @property
    def healthy(self) -> bool:
        alive = self.engine is not None and self.engine.failure is None and self.engine_responds
        return alive and not self.draining

    # -- the engine ------------------------------------------------------------------------------------------------

    def attach(self, engine: EngineClient, facts: ModelFacts) -> None:
        """Requests go to this engine from now on."""
        self.facts = facts  # the limits of another start may be others
        engine.on_step = self.metrics.step
        engine.on_load = self.metrics.load
        engine.on_malformed = self.metrics.drop_message
        engine.on_slow_client = self._on_slow_client
        engine.on_step_failure = self.metrics.fail_step
        self.engine = engine
        self.metrics.engine_ready(self.facts)

    def _on_slow_client(self) -> None:
        self.metrics.fail_request("slow_client")
        log.warning("A request was ended: its client did not read what was generated for it")

    def detach(self, reason: str) -> EngineClient | None:
        """The engine is lost: requests in flight end with an error, new ones are refused, until the next `attach`."""
        engine, self.engine = self.engine, None
        self.unavailable = reason
        if engine is not None:
            if engine.num_in_flight and not self.draining:  # it was killed in the middle of a step
                self.metrics.fail_step(prefill=engine.owes_first_token)
            engine.fail(EngineError(reason))
        return engine

    # -- requests --------------------------------------------------------------------------------------------------

    def admit(self, count: int = 1) -> "Permit":
        """Leave to run `count` generations. Raises `OverloadedError` or `UnavailableError` at once."""
        if not self.healthy:
            raise UnavailableError(self._why_unavailable())
        caller = current_caller.get()
        self._shares.see(caller, time.monotonic_ns())
        if self.num_queued_tokens > self._max_queued_tokens and not self._shares.is_small(caller, count):
            raise OverloadedError("Model is overloaded")
        if not self._shares.may_take(caller, count):
            raise OverloadedError("Model is overloaded")
        self._shares.take(caller, count)
        return Permit(self, count, caller)

    def _why_unavailable(self) -> str:
        if self.draining:
            return "the server is shutting down"
        return self.unavailable if self.engine is None or self.engine_responds else "the engine does not respond"

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        grammar: Grammar | None = None,
        cache_salt: str | None = None,
    ) -> GenerationRequest:
        """Tokenise, check lengths, compile the grammar. Raises `ValidationError`."""
        if self.config.ignore_eos_token:
            params = msgspec.structs.replace(params, ignore_eos=True)

        salt = make_salt(cache_salt, self.config.cache_salt_by_key)

        def work() -> GenerationRequest:
            failpoint("api.validate")
            try:
                return tokenize()
            finally:
                if isinstance(prompt, str):
                    release_memory(len(prompt))

        def tokenize() -> GenerationRequest:
            return prepare_request(
                0,
                prompt,
                params,
                self.tokenizer,
                self.facts,
                add_special_tokens=add_special_tokens,
                truncate=truncate,
                cache_salt=salt,
                chunk=CHUNK_TOKENS,
                grammar=grammar,
            )

        request = await self.run_beside(work, len(prompt) > LONG_TEXT)
        if grammar is not None:  # on threads of its own: texts do not wait behind grammars
            await self._grammar_queue.check(grammar)
        self.metrics.validated(len(request.token_ids), min(request.max_new_tokens, CHUNK_TOKENS))
        return request

    async def run_beside(self, work: Callable[[], T], long: bool) -> T:
        """Run something that may take a while in a worker thread, or at once if it will not.

        Callers take turns. Raises `OverloadedError` when no thread is free for long.
        """
        if not long:
            return work()
        try:
            return await self._turns.run(self._workers, work)
        except OverloadedError:
            self.metrics.refuse_waiting("validate")
            raise

    async def build(self, make: Callable[[], T], num_items: int) -> T:
        """Put an answer together: in a thread if it has so much to tell that others would notice."""
        return await asyncio.to_thread(make) if num_items > _MANY_ITEMS else make()

    def start(
        self,
        request: GenerationRequest,
        make_text: Callable[[Tokenizer, GenerationRequest], OutputText],
        arrived: float,
        permit: "Permit",
        new_seed: bool = False,
    ) -> Generation:
        """Hand a prepared request to the engine."""
        engine = self.engine
        if engine is None:
            raise UnavailableError(self.unavailable)
        changes = {"id": engine.next_id(), "caller": current_caller.get()}
        changes |= {"seed": secrets.randbits(64)} if new_seed else {}
        request = msgspec.structs.replace(request, **changes)
        stream = engine.submit(request)
        generation = Generation(
            request, stream, make_text(self.tokenizer, request), self.tokenizer, self.metrics, arrived
        )
        permit.add(generation)
        return generation

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._grammar_queue.close()
        self.chat_renderer.close()


def public_name(model_id: str) -> str:
    """A model as callers know it: of one that is a file or a folder here, the last part of its path."""
    path = Path(model_id).expanduser()
    is_path = path.is_absolute() or model_id.startswith(".") or model_id.count("/") > 1 or path.exists()
    return path.name or "model" if is_path else model_id


class Permit:
    """Leave to run some generations; a context that gives everything back however it is left.

    With a `request_timeout_s` whatever runs in it then ends with a `DeadlineError`: the generations if there are any,
    else the task that prepares them.
    """

    def __init__(self, service: Service, count: int, caller: str) -> None:
        self._service = service
        self._count, self._caller = count, caller
        self._generations: list[Generation] = []
        self._queued: set[Generation] = set()  # those without a token yet
        self._expired = self._cancelled = False
        self._timer: asyncio.TimerHandle | None = None
        limit_s = service.config.request_timeout_s
        if limit_s is not None:
            self._task = asyncio.current_task()
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._expire)
        service.metrics.in_flight(service.num_running)

    def _expire(self) -> None:
        self._expired = True
        for generation in self._generations:
            generation.fail(self._deadline_error())
        if not self._generations:
            assert self._task is not None
            self._cancelled = self._task.cancel()

    def _deadline_error(self) -> DeadlineError:
        return DeadlineError(f"the request took longer than {self._service.config.request_timeout_s:g} s")

    def add(self, generation: Generation) -> None:
        self._generations.append(generation)
        self._queued.add(generation)
        self._service.generations.add(generation)
        self._service.num_queued_tokens += generation.input_length
        generation.on_first_token = self._leave_queue
        if self._expired:
            generation.fail(self._deadline_error())

    def _leave_queue(self, generation: Generation) -> None:
        if generation in self._queued:
            self._queued.discard(generation)
            self._service.num_queued_tokens -= generation.input_length

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._service.give_back(self._count, self._caller)
        for generation in self._generations:
            generation.close()
            generation.on_first_token = None  # which is this permit's: no cycle of the two
            self._service.generations.discard(generation)
            self._leave_queue(generation)
        if self._cancelled and self._task is not None:
            is_ours = self._task.uncancel() == 0  # else the client has left as well
            if is_ours and kind is asyncio.CancelledError:
                raise self._deadline_error()
