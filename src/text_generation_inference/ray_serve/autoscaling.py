"""How many replicas there should be: from tokens that wait, and from what those that run have taken.

Requests are no measure: one may have ten prompt tokens or a hundred thousand. Each replica reports the prompt tokens
that wait there, and the share of its cache or of its requests that is taken, whichever is larger. Ray asks a
`TokenPolicy` and applies delays, factors and bounds to the answer.
"""

from collections.abc import Iterable, Mapping
from typing import Any

QUEUED_TOKENS, USAGE = "queued_tokens", "usage"  # what replicas report, by these names


def wanted_replicas(
    queued_tokens: Iterable[float], usages: Iterable[float], target_queued_tokens: float, target_usage: float
) -> float:
    """As many as hold what runs now at the target, and one more for every `target_queued_tokens` that wait."""
    return sum(usages) / target_usage + sum(queued_tokens) / target_queued_tokens


class TokenPolicy:
    """Named in the deployment's autoscaling_config; made and called by Ray's controller."""

    def __init__(self, target_queued_tokens: float = 4_096, target_usage: float = 0.7) -> None:
        self._target_queued_tokens = target_queued_tokens
        self._target_usage = target_usage

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:  # ray.serve.config.AutoscalingContext
        reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        usages = reported.get(USAGE, {})
        if not usages:  # none is up, or none has reported yet
            return context.target_num_replicas, {}
        queued = reported.get(QUEUED_TOKENS, {})
        return wanted_replicas(queued.values(), usages.values(), self._target_queued_tokens, self._target_usage), {}
