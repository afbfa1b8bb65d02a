"""What is counted of each of several engines: series with the label `replica`, beside the sums under TGI's names.

A server with one engine has none of them. `EngineGauges` is what an engine said last, from which the sums are made.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from text_generation_inference.api.metric_series import Family, Scalar


@dataclass(slots=True)
class EngineGauges:
    """The present of one engine."""

    running: int = 0
    max_tokens: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_total: int = 0
    kv_used: int = 0
    heartbeat_age: float = 0.0


class ReplicaSeries:
    """The series of one engine."""

    def __init__(self, families: Mapping[str, Family[Scalar]], number: int) -> None:
        def one(name: str) -> Scalar:
            return families[name].one("replica", str(number))

        self._number = number
        self._requests = families["requests"]
        self.up = one("up")
        self.running = one("batch_current_size")
        self.waiting = one("queue_size")
        self.waiting_tokens = one("queue_tokens")
        self.kv_ratio = one("kv_usage_ratio")
        self.heartbeat_age = one("heartbeat_age_seconds")
        self.prompt_tokens = one("prompt_tokens")
        self.cached_tokens = one("cached_prompt_tokens")
        self.restarts = one("restarts")
        self.up.set(0)
        self.restarts.set(0)

    def route(self, reason: str) -> None:
        self._requests.labelled(replica=str(self._number), reason=reason).add()

    def show(self, gauges: EngineGauges) -> None:
        self.running.set(gauges.running)
        self.waiting.set(gauges.waiting)
        self.waiting_tokens.set(gauges.waiting_tokens)
        self.kv_ratio.set(gauges.kv_used / gauges.kv_total if gauges.kv_total else 0)


FAMILIES = {  # by what follows `tgi_replica_`: type and help
    "up": ("gauge", "Whether the engine takes requests"),
    "requests": (
        "counter",
        "Requests sent to the engine, by what decided: prefix, load or busy",
    ),
    "batch_current_size": ("gauge", "Current batch size of the engine"),
    "queue_size": ("gauge", "Current queue size of the engine"),
    "queue_tokens": ("gauge", "Prompt tokens of the requests that wait in the engine"),
    "kv_usage_ratio": ("gauge", "Share of the engine's KV cache that running requests hold"),
    "heartbeat_age_seconds": ("gauge", "Since the engine's last sign of life"),
    "prompt_tokens": ("counter", "Prompt tokens of requests that the engine admitted"),
    "cached_prompt_tokens": ("counter", "Prompt tokens found in the engine's prefix cache"),
    "restarts": ("counter", "Times the engine was started again"),
}
