"""What an engine process tells whoever started it: JSON lines on its standard output, and its exit status.

Never torch.
"""

import msgspec

EXIT_START_FAILED, EXIT_ENGINE_FAILED = 3, 4


class Stage(msgspec.Struct, tag="stage"):
    """How far a long part of the start is."""

    name: str
    done: int
    total: int


class EngineStarted(msgspec.Struct, tag="started"):
    """The socket is there."""

    seconds: dict[str, float]  # of each stage of the start
    notes: list[str]


FromEngineProcess = Stage | EngineStarted
