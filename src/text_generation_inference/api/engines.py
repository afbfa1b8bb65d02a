"""The engines behind one HTTP port: which there are, which of them take requests, and which one a request goes to.

With one engine there is nothing to choose and nothing is remembered. With several, `router` chooses by prefix and load;
here is where it learns of engines, of requests and of their ends.
"""

from dataclasses import dataclass, field

from text_generation_inference.api.errors import UnavailableError
from text_generation_inference.api.generation import Generation
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.engine.client import EngineClient
from text_generation_inference.errors import EngineError
from text_generation_inference.router import (
    PrefixRouter,
    PromptKey,
    ReplicaLoad,
    ReplicaState,
    Ticket,
    key_of_tokens,
)
from text_generation_inference.scheduler.prefix import root_of
from text_generation_inference.types import EngineLoad, GenerationRequest, ModelFacts


@dataclass(eq=False)
class EngineLink:
    """One of the engines, whichever process it is at present."""

    number: int
    client: EngineClient | None = None
    facts: ModelFacts | None = None  # of the last one that was ready
    unavailable: str = "the engine is starting"  # why, while there is none
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = str(self.number)

    @property
    def is_usable(self) -> bool:
        client = self.client
        return client is not None and client.failure is None and client.responds

    @property
    def state(self) -> str:
        if self.is_usable:
            return "up"
        if self.client is None and self.facts is None:
            return "starting"
        return "down" if self.client is None or self.client.failure is not None else "not responding"

    def why_unavailable(self) -> str:
        return self.unavailable if self.client is None or self.client.responds else "the engine does not respond"


class Placement:
    """Where a request goes. Whoever has it calls `first_token` and `end`."""

    __slots__ = ("_engines", "_key", "_ticket", "client", "link", "request")

    def __init__(
        self,
        engines: "Engines",
        request: GenerationRequest,
        link: EngineLink,
        ticket: Ticket | None = None,
        key: PromptKey | None = None,
    ) -> None:
        assert link.client is not None
        self._engines, self._ticket, self._key = engines, ticket, key
        self.request, self.link, self.client = request, link, link.client

    @property
    def key(self) -> PromptKey | None:
        return self._key

    def first_token(self) -> None:
        if self._ticket is not None:
            self._ticket.first_token()

    def end(self, generation: Generation | None = None) -> None:
        """What was generated can be found in that engine's cache, as its prompt can, unless it has started again."""
        if self._ticket is None:
            return
        self._ticket.end()
        output_ids = generation.output_ids if generation is not None else None
        if output_ids and self.link.client is self.client:
            self._engines.note(self.link, self.request, output_ids)


class Engines:
    def __init__(self, count: int, metrics: Metrics, prefix_caching: bool = True) -> None:
        self.links = [EngineLink(number) for number in range(count)]
        self._metrics = metrics
        self._prefix_caching = prefix_caching
        self._router = PrefixRouter() if count > 1 else None

    @property
    def are_several(self) -> bool:
        return self._router is not None

    @property
    def any_usable(self) -> bool:
        return any(link.is_usable for link in self.links)

    @property
    def facts(self) -> list[ModelFacts]:
        """Of those that are there."""
        return [link.facts for link in self.links if link.client is not None and link.facts is not None]

    def why_unavailable(self) -> str:
        """Of one that is gone rather than of one that has not been there yet."""
        links = [link for link in self.links if link.facts is not None] or self.links
        return links[0].why_unavailable()

    # -- engines ---------------------------------------------------------------------------------------------------

    def attach(self, number: int, client: EngineClient, facts: ModelFacts) -> None:
        link = self.links[number]
        link.client, link.facts = client, facts
        if self._router is not None:
            pool_tokens = (facts.num_blocks - 1) * facts.block_size
            self._router.add(link.name, pool_tokens if self._prefix_caching else 0)

    def detach(self, number: int, reason: str) -> EngineClient | None:
        """It is lost: its requests in flight end with an error."""
        link = self.links[number]
        client, link.client = link.client, None
        link.unavailable = reason
        if self._router is not None and link.facts is not None:
            self._router.set_state(link.name, ReplicaState.DOWN)
        if client is not None:
            client.fail(EngineError(reason))
        return client

    def report(self, number: int, load: EngineLoad) -> None:
        """How full its cache is; what it has to do is known from what was sent to it."""
        link = self.links[number]
        if self._router is not None and link.facts is not None and link.client is not None:
            total = link.facts.num_blocks - 1
            self._router.set_load(link.name, ReplicaLoad(kv_usage=(total - load.num_free_blocks) / total))

    def work_of(self, link: EngineLink) -> tuple[int, int]:
        """(requests, prompt tokens that wait) of one of several."""
        if self._router is None or link.client is None:
            return 0, 0
        return self._router.running(link.name), self._router.queued_tokens(link.name)

    # -- requests --------------------------------------------------------------------------------------------------

    def place(self, request: GenerationRequest, beside: Placement | None = None) -> Placement:
        """Where a request goes. Generations of one prompt (`beside`: the last that was placed) stay together and share
        what is computed for it. Raises `UnavailableError`.
        """
        router = self._router
        if router is None:
            link = self.links[0]
            if link.client is None:
                raise UnavailableError(link.unavailable)
            return Placement(self, request, link)
        usable = [link for link in self.links if link.is_usable]
        if not usable:
            raise UnavailableError(self.why_unavailable())
        if beside is not None and beside.request.token_ids is request.token_ids and beside.link.is_usable:
            key = beside.key
            assert key is not None
            self._metrics.route(beside.link.number, "prefix")
            return Placement(self, request, beside.link, router.place_on(beside.link.name, key), key)
        key = key_of_tokens(request.token_ids, root_of(request))
        ticket = router.place(key, {link.name for link in usable})
        choice = ticket.choice
        reason = "busy" if choice.fell_back else "prefix" if choice.by_prefix else "load"
        self._metrics.route(int(choice.name), reason)
        return Placement(self, request, self.links[int(choice.name)], ticket, key)

    def note(self, link: EngineLink, request: GenerationRequest, output_ids: list[int]) -> None:
        if self._router is not None:
            computed = request.token_ids + output_ids[:-1]  # the last one was not computed
            self._router.note(link.name, key_of_tokens(computed, root_of(request)))
