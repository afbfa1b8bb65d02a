"""A folder of a server, for sockets or pixels: open to its user only, and gone when the server is.

Who made it holds a lock on a file in it for as long as it lives, however it ends. So the next one to start knows which
folders nobody needs any more, and removes them.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK = "tgi-", "launcher.lock"
_LONGEST = 75  # characters; the path of a unix socket has at most 107


class PrivateFolder:
    def __init__(self, parent: Path | None = None) -> None:
        """`parent`: by default where temporary files are."""
        if parent is None:  # paths of sockets must be short, which not every TMPDIR allows
            usual = tempfile.gettempdir()
            parent = Path(usual if len(usual) <= _LONGEST else "/tmp")
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700
        new = self.path / "new.lock"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # under this name it is never seen without the lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Folders of those that were killed. Never another user's, never what is not a folder of ours."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Raises `OSError` if there is no lock, or if somebody holds it."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
