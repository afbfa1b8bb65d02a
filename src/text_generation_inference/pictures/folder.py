"""The folder through which pixels go to the engine: in memory where there is room, else on disk."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from text_generation_inference.private_folder import PrivateFolder

_MEMORY = Path("/dev/shm")
_LEAST_ROOM = 1 << 30  # bytes; a container has 64 MB there unless it is told otherwise
_MOST_KEPT = 4 << 30  # bytes


def make_picture_folder() -> PrivateFolder:
    """For its maker alone; `remove` it at the end."""
    if _room(_MEMORY) >= _LEAST_ROOM and os.access(_MEMORY, os.W_OK):
        with suppress(OSError):
            return PrivateFolder(_MEMORY)
    return PrivateFolder(Path(tempfile.gettempdir()))


def bytes_to_keep(folder: Path) -> int:
    """How much of pictures a folder may hold: others write to the same disk or memory."""
    return min(_MOST_KEPT, _room(folder) // 2)


def _room(path: Path) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
