"""A cache folder that appears whole or not at all.

`convert` fills one through `publish_folder`; `source` asks `is_complete`. Work happens in a temporary folder beside the
target that is renamed when everything is on disk. A lock per target makes a second process wait for the first and
reuse its result, and makes temporary folders whose lock is free known to be left over from a process that died.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from text_generation_inference.errors import ResourceError

_MANIFEST = "complete.json"  # file name -> size, written last
_ELSEWHERE = "--cache-dir or TGI_CACHE_DIR can name another folder"


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds all that was published, with unchanged sizes."""
    try:
        sizes = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=dict[str, int])
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, msgspec.DecodeError):
        return False


def publish_folder(folder: Path, num_bytes: int, fill: Callable[[Path], None], wait: Callable[[], None]) -> bool:
    """Make `folder` by calling `fill(temporary)`, unless it is complete already. Returns whether `fill` was called.

    `num_bytes` is what `fill` will write; `wait` is called once if another process is at it. Whatever goes wrong,
    the temporary folder is gone afterwards. Raises `ResourceError` when the disk is full or may not be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        lock = FileLock(_lock_path(folder))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            wait()
            lock.acquire()
        try:
            if is_complete(folder):
                return False
            _check_space(folder, num_bytes)
            return _fill_and_rename(folder, fill)
        finally:
            lock.release()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder, num_bytes) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ResourceError(
                f"Cannot write to the cache {folder.parent}: {error.strerror}. {_ELSEWHERE}."
            ) from error
        raise


def _fill_and_rename(folder: Path, fill: Callable[[Path], None]) -> bool:
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
        fill(temporary)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / _MANIFEST).write_bytes(msgspec.json.encode(sizes))
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        if is_complete(folder):
            return False  # the lock did not hold, as on some network file systems: the first one wins
        shutil.rmtree(folder, ignore_errors=True)  # files were removed or changed since it was published
        os.rename(temporary, folder)
        _flush(folder.parent)
        return True
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    for temporary in parent.glob(".*.tmp-*"):
        lock = FileLock(_lock_path(temporary.with_name(temporary.name[1:].rpartition(".tmp-")[0])))
        try:
            with lock.acquire(timeout=0):
                shutil.rmtree(temporary, ignore_errors=True)
        except Timeout:
            continue  # its process is still writing


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _check_space(folder: Path, num_bytes: int) -> None:
    if shutil.disk_usage(folder.parent).free < num_bytes:
        raise _no_space(folder, num_bytes)


def _no_space(folder: Path, num_bytes: int) -> ResourceError:
    free = shutil.disk_usage(folder.parent).free
    return ResourceError(
        f"Not enough disk space in {folder.parent}: converting the model needs {num_bytes / 1e6:.0f} MB, "
        f"{free / 1e6:.0f} MB are free. Free some, or {_ELSEWHERE}."
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
