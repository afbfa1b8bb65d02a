"""Replicas on Ray Serve: this server, unchanged, once for each replica, behind Ray's HTTP proxies.

```text
client -> Ray's proxy -> Ingress (which replica?) -> api process of that replica -> its engine
```

Two deployments. `replica`: an actor with its cards that runs the launcher (`launcher_process`), so that API, limits and
restarts are those of a single server. `ingress`: reads a request, asks Ray for a replica (`request_router`: the one
that holds the prompt's beginning, unless it has too much to do; by the package `router`) and keeps a slot there while
it hands the answer's bytes on; Ray counts slots, so that a replica is drained before it goes. `autoscaling`: how many
replicas, from tokens that wait. `options`: what `tgi ray` (`command`) and Ray's config files (`app`) may say.

Nothing imports Ray before it is asked for.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """`app`, which Ray's config files name as `import_path: text_generation_inference.ray_serve:app`."""
    if name == "app":
        from text_generation_inference.ray_serve.deployments import app

        return app
    raise AttributeError(name)
