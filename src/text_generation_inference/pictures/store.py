"""The front end's books of prepared pictures: a file of pixels for each digest, and which sources they came from.

A file stays while a request needs it, and after that until others need the room: the least recently used go first. All
files of the folder are named and removed here, under one lock; workers only fill new ones.
"""

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from text_generation_inference.errors import OverloadedError
from text_generation_inference.pictures.frames import PreparedPicture

_OURS = re.compile(r"[0-9a-f]{64}|new-[0-9]+")
MAX_FILES = 1 << 16  # of the smallest pictures there would be millions
_MAX_SOURCES = 64  # of one picture that are remembered


@dataclass(slots=True)
class _PixelFile:
    num_bytes: int
    num_references: int = 0
    sources: list[bytes] = field(default_factory=list[bytes])


class PictureStore:
    """For use by several threads."""

    def __init__(self, folder: Path, max_bytes: int, max_files: int = MAX_FILES) -> None:
        """What an earlier process left in the folder is removed."""
        self.folder, self._max_bytes, self._max_files = folder, max_bytes, max_files
        self._files: OrderedDict[str, _PixelFile] = OrderedDict()  # by digest, least recently used first
        self._sources: dict[bytes, PreparedPicture] = {}  # by digest of what came in
        self._numbers = count()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self._is_closed = False
        self._remove_all()

    def __len__(self) -> int:
        return len(self._files)

    def name_new(self) -> Path:
        """A file for a worker to make; then `add` it, or `discard` it."""
        return self.folder / f"new-{next(self._numbers)}"

    def discard(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def add(self, source: bytes, prepared: PreparedPicture, path: Path) -> None:
        """Raises `OverloadedError` when all the room is taken by requests that run. The new file is gone either way."""
        with self._lock:
            if prepared.digest in self._files:
                self.discard(path)
            else:
                try:
                    self._make_room(prepared.num_bytes)
                    path.rename(self.folder / prepared.digest)
                except BaseException:
                    self.discard(path)
                    raise
                self._files[prepared.digest] = _PixelFile(prepared.num_bytes)
                self.num_bytes += prepared.num_bytes
            file = self._files[prepared.digest]
            self._files.move_to_end(prepared.digest)
            if source not in self._sources:
                if len(file.sources) == _MAX_SOURCES:
                    del self._sources[file.sources.pop(0)]
                file.sources.append(source)
            self._sources[source] = prepared

    def acquire(self, source: bytes) -> PreparedPicture | None:
        """What is known of a source, with a reference to its file; None if it must be prepared."""
        with self._lock:
            prepared = self._sources.get(source)
            if prepared is not None:
                self._files[prepared.digest].num_references += 1
                self._files.move_to_end(prepared.digest)
            return prepared

    def release(self, digests: Iterable[str]) -> None:
        """One reference for each time that a digest is named."""
        with self._lock:
            for digest in digests if not self._is_closed else ():
                file = self._files[digest]
                assert file.num_references > 0
                file.num_references -= 1

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._files.clear()
            self._sources.clear()
            self.num_bytes = 0
            self._remove_all()

    def check(self) -> None:
        """For tests: books and folder agree."""
        with self._lock:
            found = {name: (self.folder / name).stat().st_size for name in os.listdir(self.folder) if len(name) == 64}
            assert found == {digest: file.num_bytes for digest, file in self._files.items()}
            assert self.num_bytes == sum(found.values()) <= self._max_bytes and len(found) <= self._max_files
            by_digest = {source: prepared.digest for source, prepared in self._sources.items()}
            assert by_digest == {source: digest for digest, file in self._files.items() for source in file.sources}

    @property
    def num_references(self) -> int:
        return sum(file.num_references for file in self._files.values())

    def _make_room(self, num_bytes: int) -> None:
        """For one more file. No more of the books is looked at than must be: the event loop waits."""
        num_over = len(self._files) + 1 - self._max_files
        bytes_over = self.num_bytes + num_bytes - self._max_bytes
        going: list[str] = []
        for digest, file in self._files.items():
            if len(going) >= num_over and bytes_over <= 0:
                break
            if not file.num_references:
                going.append(digest)
                bytes_over -= file.num_bytes
        if len(going) < num_over or bytes_over > 0:
            raise OverloadedError("there is no room for more pictures")
        for digest in going:
            file = self._files.pop(digest)
            for source in file.sources:
                del self._sources[source]
            self.num_bytes -= file.num_bytes
            (self.folder / digest).unlink(missing_ok=True)

    def _remove_all(self) -> None:
        with suppress(OSError):
            for name in os.listdir(self.folder):
                if _OURS.fullmatch(name):
                    (self.folder / name).unlink(missing_ok=True)
