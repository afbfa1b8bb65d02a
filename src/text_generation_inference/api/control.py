"""What the launcher tells an api process: JSON lines on its standard input."""

import msgspec

from text_generation_inference.config import ServerConfig


class Restarts(msgspec.Struct):
    """What has happened since the launcher started."""

    engine: int = 0  # times it was started again; of several, all together
    engine_hangs: int = 0  # of these: because it hung
    api: int = 0
    api_hangs: int = 0
    by_replica: list[int] = []  # times each engine was started again


class Start(msgspec.Struct, tag="start"):
    """The first line."""

    config: ServerConfig
    listen_fd: int
    heartbeat: str = ""  # file for signs of life, see `engine.heartbeat`


class EngineReady(msgspec.Struct, tag="ready"):
    socket: str
    restarts: Restarts = msgspec.field(default_factory=Restarts)
    replica: int = 0


class EngineLost(msgspec.Struct, tag="lost"):
    reason: str
    restarts: Restarts = msgspec.field(default_factory=Restarts)
    replica: int = 0


FromLauncher = Start | EngineReady | EngineLost
