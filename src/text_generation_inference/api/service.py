"""What all routes share: the model's text side, admission, and the way into the engine.

Owns the tokenizer, the chat template, the worker threads for long texts and grammars, the metrics, and the
present connections to the engines, which the launcher may replace.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from text_generation_inference.api.callers import current_caller
from text_generation_inference.api.engines import Engines, Placement
from text_generation_inference.api.errors import UnavailableError
from text_generation_inference.api.generation import Generation, OutputText
from text_generation_inference.api.grammars import GrammarQueue
from text_generation_inference.api.live import LiveFeed
from text_generation_inference.api.memory import release_memory
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.api.picture_metrics import PictureSeries
from text_generation_inference.api.pictures import Pictures
from text_generation_inference.api.rendering import ChatRenderer
from text_generation_inference.api.responses_store import ResponseStore
from text_generation_inference.api.tenants import make_salt
from text_generation_inference.api.trace import Tracer
from text_generation_inference.api.turns import Turns
from text_generation_inference.api.unknown_fields import UnknownFields
from text_generation_inference.api.validate import CHUNK_TOKENS
from text_generation_inference.config import ServerConfig, payload_limit
from text_generation_inference.engine.client import EngineClient
from text_generation_inference.errors import DeadlineError, OverloadedError, ValidationError
from text_generation_inference.failpoints import failpoint
from text_generation_inference.scheduler.shares import Shares
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.text.ids_as_text import IdsAsText
from text_generation_inference.text.model_folder import read_json
from text_generation_inference.text.picture_prompt import PicturePrompt, PictureWords, SeenPrompt
from text_generation_inference.text.prepare import prepare_request
from text_generation_inference.text.reasoning import detect_reasoning_format
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools import ToolFormat, detect_tool_format
from text_generation_inference.types import EngineLoad, GenerationRequest, Grammar, ModelFacts, SamplingParams
from text_generation_inference.version import __version__

log = logging.getLogger("text_generation_inference.api")

Prompt = str | Sequence[int] | PicturePrompt
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
        self.metrics = Metrics(facts.max_input_tokens, facts.max_total_tokens, config.num_replicas)
        self.engines = Engines(config.num_replicas, self.metrics, config.prefix_caching)
        self.pictures = Pictures.find(config, facts, self.tokenizer, self.metrics)  # None where the model does not see
        if self.pictures is not None:
            self.template.writes_pictures(self.pictures.words.marker)  # found out now: it waits for a process
            self.picture_series = PictureSeries(self.metrics)
        self.payload_limit = payload_limit(config, self.pictures is not None)
        self.chat_renderer = ChatRenderer(self.template, _MAX_WAIT_S, self.metrics)
        self.responses = ResponseStore(config.responses_store)
        self.unknown_fields = UnknownFields(self.metrics.count_unknown_fields)
        self.tracer = tracer or Tracer.start(None, "")
        self.draining = False
        self._shares = Shares(config.max_concurrent_requests)
        self.num_queued_tokens = 0  # prompt tokens of those that have no token yet
        self._max_queued_tokens = _max_queued_tokens(config, [facts])
        self._workers = ThreadPoolExecutor(config.validation_workers, thread_name_prefix="tgi-validate")
        self._turns = Turns(
            config.validation_workers, _MAX_WAIT_S, lambda count: self.metrics.waiting("validate", count)
        )
        self._grammar_queue = GrammarQueue(self.grammars, self.metrics)
        self.generations: set[Generation] = set()
        self.live = LiveFeed(self.metrics, self.engines, self.generations)
        self.model_name = public_name(facts.model_id)
        self.model_type = str(read_json(folder, "config.json").get("model_type") or "unknown")
        self.fingerprint = f"{__version__}-native"
        self.metrics.ranks(config.num_shard or 1)
        self.compute_type = config.compute_type or f"{config.num_shard or 1}-{facts.device}"

    @property
    def num_running(self) -> int:
        """Generations admitted."""
        return self._shares.num_held

    def give_back(self, count: int, caller: str) -> None:
        self._shares.give_back(caller, count)
        self.metrics.in_flight(self.num_running)

    @property
    def healthy(self) -> bool:
        return self.engines.any_usable and not self.draining

    # -- the engines -----------------------------------------------------------------------------------------------

    def attach(self, engine: EngineClient, facts: ModelFacts, replica: int = 0) -> None:
        """Requests go to this engine from now on, or to this one of several."""
        engine.on_step = partial(self.metrics.step, replica=replica)
        engine.on_load = partial(self._on_load, replica)
        engine.on_malformed = self.metrics.drop_message
        engine.on_slow_client = self._on_slow_client
        engine.on_step_failure = self.metrics.fail_step
        self.engines.attach(replica, engine, facts)
        self._take_limits(facts)
        self.metrics.engine_ready(facts, replica)

    def _take_limits(self, facts: ModelFacts) -> None:
        """The limits of another start, and of another engine, may be others: what is let in fits each of them."""
        every = self.engines.facts
        self.facts = msgspec.structs.replace(
            facts,
            max_input_tokens=min(each.max_input_tokens for each in every),
            max_total_tokens=min(each.max_total_tokens for each in every),
        )
        self._max_queued_tokens = _max_queued_tokens(self.config, every)

    def _on_load(self, replica: int, load: EngineLoad) -> None:
        self.metrics.load(load, replica)
        self.engines.report(replica, load)

    def _on_slow_client(self) -> None:
        self.metrics.fail_request("slow_client")
        log.warning("A request was ended: its client did not read what was generated for it")

    def detach(self, reason: str, replica: int = 0) -> EngineClient | None:
        """An engine is lost: its requests in flight end with an error; new ones go to others, or are refused where none
        is left, until the next `attach`."""
        engine = self.engines.links[replica].client
        if engine is not None and engine.num_in_flight and not self.draining:  # it was killed in the middle of a step
            self.metrics.fail_step(prefill=engine.owes_first_token)
        self.engines.detach(replica, reason)
        self.metrics.engine_lost(replica)
        return engine

    def detach_all(self, reason: str) -> list[EngineClient]:
        found = [self.detach(reason, link.number) for link in self.engines.links]
        return [engine for engine in found if engine is not None]

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
        return self.engines.why_unavailable()

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        grammar: Grammar | None = None,
        cache_salt: str | None = None,
        permit: "Permit",
        field: str = "inputs",
    ) -> GenerationRequest:
        """Load pictures, tokenise, check lengths, compile the grammar. Raises `ValidationError`.

        The permit holds the pictures. `field` is where the prompt came from.
        """
        if self.config.ignore_eos_token:
            params = msgspec.structs.replace(params, ignore_eos=True)

        salt = make_salt(cache_salt, self.config.cache_salt_by_key)
        seen = await self.see(prompt, field, permit, salt)
        length = seen.num_characters if isinstance(seen, SeenPrompt) else len(seen)

        def work() -> GenerationRequest:
            failpoint("api.validate")
            try:
                return tokenize()
            finally:
                if isinstance(seen, str | SeenPrompt):
                    release_memory(length)

        def tokenize() -> GenerationRequest:
            return prepare_request(
                0,
                seen,
                params,
                self.tokenizer,
                self.facts,
                add_special_tokens=add_special_tokens,
                truncate=truncate,
                cache_salt=salt,
                chunk=CHUNK_TOKENS,
                grammar=grammar,
                words=self.words,
            )

        request = await self.run_beside(work, length > LONG_TEXT)
        if grammar is not None:  # on threads of its own: texts do not wait behind grammars
            await self._grammar_queue.check(grammar)
        self.metrics.validated(len(request.token_ids), min(request.max_new_tokens, CHUNK_TOKENS))
        return request

    @property
    def words(self) -> PictureWords | None:
        """How prompts show pictures, if the model sees."""
        return None if self.pictures is None else self.pictures.words

    async def see(self, prompt: Prompt, field: str, permit: "Permit", salt: str) -> str | Sequence[int] | SeenPrompt:
        """A prompt with its pictures loaded, if the model sees; the permit holds them. Raises `ValidationError`."""
        if self.pictures is None:
            assert not isinstance(prompt, PicturePrompt)
            return prompt
        if isinstance(prompt, str | PicturePrompt):
            return await self.pictures.see(prompt, field, permit, salt)
        return prompt

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
        """Hand a prepared request to an engine."""
        placement = self.engines.place(request, permit.last_placement)
        engine = placement.client
        changes = {"id": engine.next_id(), "caller": current_caller.get()}
        changes |= {"seed": secrets.randbits(64)} if new_seed else {}
        request = msgspec.structs.replace(request, **changes)
        try:
            stream = engine.submit(request)
        except BaseException:
            placement.end()
            raise
        generation = Generation(
            request, stream, make_text(self.tokenizer, request), self.tokenizer, self.metrics, arrived
        )
        permit.add(generation, placement)
        return generation

    def render_metrics(self) -> bytes:
        if self.pictures is not None:
            loader = self.pictures.loader
            self.picture_series.show(loader.counts, loader.store.num_references)
        return self.metrics.render()

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._grammar_queue.close()
        self.chat_renderer.close()
        if self.pictures is not None:
            self.pictures.loader.close()


def _max_queued_tokens(config: ServerConfig, every: Sequence[ModelFacts]) -> int:
    """Prompt tokens that may wait, in all engines together."""
    pool_tokens = sum((facts.num_blocks - 1) * facts.block_size for facts in every)
    return config.max_queued_tokens or _QUEUE_FACTOR * pool_tokens


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
        self._placements: dict[Generation, Placement] = {}  # where there are several engines
        self.last_placement: Placement | None = None
        self._digests: list[str] = []  # of pictures
        self._is_over = False
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

    def add(self, generation: Generation, placement: Placement) -> None:
        self._generations.append(generation)
        if self._service.engines.are_several:
            self._placements[generation] = self.last_placement = placement
            generation.output_ids = []
        self._queued.add(generation)
        self._service.generations.add(generation)
        self._service.num_queued_tokens += generation.input_length
        generation.on_first_token = self._leave_queue
        if self._expired:
            generation.fail(self._deadline_error())

    def hold(self, digests: Sequence[str]) -> None:
        """Pictures that were loaded for what runs here."""
        self._digests += digests
        if self._is_over:
            self._release()

    def _release(self) -> None:
        digests, self._digests = self._digests, []
        if self._service.pictures is not None:
            self._service.pictures.loader.release(digests)

    def _leave_queue(self, generation: Generation) -> None:
        if generation in self._queued:
            self._queued.discard(generation)
            self._service.num_queued_tokens -= generation.input_length
            placement = self._placements.get(generation)
            if placement is not None:
                placement.first_token()

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
        for generation, placement in self._placements.items():
            placement.end(generation)
        self._is_over = True
        self._release()
        if self._cancelled and self._task is not None:
            is_ours = self._task.uncancel() == 0  # else the client has left as well
            if is_ours and kind is asyncio.CancelledError:
                raise self._deadline_error()
