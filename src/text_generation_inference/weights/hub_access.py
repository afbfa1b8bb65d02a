"""How models are fetched, known without the hub's library, which takes a while to import."""

from pathlib import Path

import msgspec


class HubAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the hub; what is None is left to the hub's library."""

    offline: bool = False
    cache_dir: Path | None = None
    endpoint: str | None = None
    token: str | None = None
    code: bool = False  # fetch code that comes with a model
