"""Looks at the cluster that `tgi ray` has started, and changes what it serves; run by the Python that has Ray, told by JSON lines.

{"deploy": {args}} -> true, or why not     {"describe": null} -> what each replica says of itself     {"status": null}
"""

import json
import os
import sys
from typing import Any

import ray
from ray import serve

from text_generation_inference.ray_serve import app
from text_generation_inference.ray_serve.command import APP, describe_failure


def status() -> dict[str, int]:
    """Replicas by state."""
    found = serve.status().applications[APP].deployments["Replica"]
    return {str(getattr(state, "value", state)): number for state, number in found.replica_states.items()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints goes with the log
    ray.init(address="auto", log_to_driver=False)
    for line in sys.stdin:
        ((what, given),) = json.loads(line).items()
        answer: Any = True
        if what == "deploy":
            try:
                serve.run(app(given), name=APP, route_prefix="/")
            except RuntimeError:
                answer = describe_failure(serve.status())
        elif what == "describe":
            try:
                answer = serve.get_deployment_handle("Replica", APP).broadcast("describe").results()
            except ray.exceptions.RayActorError:  # one has just died: whoever waits asks again
                answer = []
        elif what == "status":
            answer = status()
        print(json.dumps(answer), file=answers)
    ray.shutdown()


if __name__ == "__main__":
    main()
