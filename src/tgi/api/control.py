"""What the launcher tells an api process: JSON lines on its standard input.

Level 8.
"""

import msgspec

from tgi.config import ServerConfig


class Start(msgspec.Struct, tag="start"):
    """The first line."""

    config: ServerConfig
    listen_fd: int


class EngineReady(msgspec.Struct, tag="ready"):
    socket: str


class EngineLost(msgspec.Struct, tag="lost"):
    reason: str


FromLauncher = Start | EngineReady | EngineLost
