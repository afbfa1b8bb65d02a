"""Ray's own router by prefixes, its class as it is (`PrefixCacheAffinityRouter`), between doubles of replicas.

For benchmarks that are run by a Python that has Ray (`.venv-ray/bin/python`); no cluster is needed. Two things differ
from Ray's own use, and both flatter it: its tree is in this process and not in an actor that every choice asks and
every request tells (`with_actor` has the actor, for its microseconds), and queue lengths are what they are at that
moment, not what a cache remembers of them.
"""

import asyncio
import math
import uuid
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

EVICTION_INTERVAL_S = 10.0  # Ray's default


class RayPrefixPolicy:
    """`settings` are those of the class: `imbalanced_threshold`, `match_rate_threshold`, `do_eviction` and so on."""

    def __init__(
        self, names: Sequence[str], queue_length: Callable[[str], int], with_actor: bool = False, **settings: Any
    ) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router, prefix_tree
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
        from ray.serve._private.request_router.common import PendingRequest

        self._request_of = lambda text: PendingRequest(
            args=[SimpleNamespace(prompt=text)], kwargs={}, metadata=RequestMetadata(uuid.uuid4().hex, uuid.uuid4().hex)
        )
        self._limit = settings.get("eviction_threshold_chars", 400_000)
        self._target = settings.get("eviction_target_chars", 360_000)
        self._evicts = settings.pop("do_eviction", False)  # by the clock that is handed in: see `place`
        self._evicted_at = 0.0
        self._loop = asyncio.new_event_loop()
        deployment = DeploymentID("Replica")
        replicas = [_ReplicaDouble(ReplicaID(name, deployment), name, queue_length) for name in names]
        self._tree: Any = prefix_tree.PrefixTreeActor.remote() if with_actor else prefix_tree.PrefixTree()  # type: ignore[attr-defined]
        if not with_actor:
            prefix_aware_router.ray = SimpleNamespace(get=lambda value: value)
        self._router = self._loop.run_until_complete(
            _make(prefix_aware_router.PrefixCacheAffinityRouter, deployment, DeploymentHandleSource.REPLICA)
        )
        self._router.initialize_state(tree_actor=self._tree if with_actor else _AtOnce(self._tree), **settings)
        self._loop.run_until_complete(_call(self._router.update_replicas, replicas))

    def place(self, text: str, now: float = 0.0) -> str:
        """The replica that a prompt goes to; it is noted as held there."""
        if self._evicts and now - self._evicted_at >= EVICTION_INTERVAL_S:  # what Ray's thread does, on our clock
            self._evicted_at = now
            for tenant, count in list(self._tree.tenant_to_char_count.items()):
                if count > self._limit:
                    self._tree.evict_tenant_by_lru(tenant, count - self._target)
        return self._loop.run_until_complete(self._place(text))

    async def _place(self, text: str) -> str:
        request = self._request_of(text)
        replica = await self._router._choose_replica_for_request(request)
        self._router.on_request_routed(request, replica.replica_id, None)
        return replica.replica_id.unique_id


class _ReplicaDouble:
    """What Ray's routers ask of a replica."""

    node_id = "node"
    availability_zone = None
    multiplexed_model_ids: frozenset[str] = frozenset()
    max_ongoing_requests = 1_000_000

    def __init__(self, replica_id: Any, name: str, queue_length: Callable[[str], int]) -> None:
        self.replica_id = replica_id
        self._name, self._queue_length = name, queue_length

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self._queue_length(self._name)


class _AtOnce:
    """An object as a handle of an actor: `x.method.remote(...)` calls it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self._target, name))


async def _make(router: Any, deployment: Any, source: Any) -> Any:
    return router(
        deployment_id=deployment,
        handle_source=source,
        self_node_id="node",
        self_actor_id="",
        prefer_local_node_routing=False,
        use_replica_queue_len_cache=False,
        initial_backoff_s=0.0,
        backoff_multiplier=1.0,
        max_backoff_s=math.ulp(0.0),
    )


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
