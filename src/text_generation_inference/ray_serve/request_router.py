"""Ray's side of choosing a replica: Ray asks for each request, the package `router` answers.

It runs in the process of the ingress. Ray knows which replicas there are, and drops those that died or are taken away.
Ray copies this module by value: what must be there once in a process is `routing_books`'.
"""

from typing import Any

from ray.serve.request_router import RequestRouter  # pyright: ignore[reportMissingImports]

from text_generation_inference.ray_serve.prompt_of_body import NO_PROMPT
from text_generation_inference.ray_serve.routing_books import books_of


class RayPrefixRouter(RequestRouter):  # pyright: ignore[reportUntypedBaseClass]
    """Named in the replicas' request_router_config. Requests carry a `PromptKey`, and replicas to avoid."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._books = books_of(self._deployment_id.name)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for name, replica in by_name.items():
            self._books.update(name, replica.replica_metadata, replica.routing_stats or {})
        self._books.keep(by_name)
        avoided = pending_request.kwargs.get("avoid", ())
        among = [name for name in by_name if name not in avoided] or list(by_name)
        key = pending_request.args[0] if pending_request.args else NO_PROMPT
        return [[by_name[name]] for name in self._books.rank(key, among)]
