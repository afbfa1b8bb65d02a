"""Files that somebody else wrote: which may be opened, and JSON in them.

A model folder may hold anything: a pipe that nobody writes to, a device without an end, a file of terabytes
that takes no room on the disk, JSON nested without end. Whatever is read of one is looked at here first.
"""

import json
import stat
from pathlib import Path
from typing import Any, cast

from text_generation_inference.errors import ModelFormatError

MAX_JSON_BYTES = 256 << 20  # tokenizers of the largest vocabularies have 35 MB
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
_MAX_SHOWN = 60  # characters


def special_kind(mode: int) -> str | None:
    """What is no plain file, by its mode, in words; None: it is one."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def check_plain_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise `ModelFormatError` for anything but a file of a sensible size, before it is opened. Links are followed."""
    status = path.stat()
    if (kind := special_kind(status.st_mode)) is not None:
        raise ModelFormatError(f"{path}: is {kind}, not a file. Download or copy the model again.")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelFormatError(
            f"{path}: has {status.st_size} bytes, and such a file has at most {max_bytes}. Download the model again."
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelFormatError`, or `FileNotFoundError` or `NotADirectoryError`."""
    try:
        check_plain_file(path, MAX_JSON_BYTES)
        value: object = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error.strerror}. Check the file's permissions.") from error
    except RecursionError:
        raise ModelFormatError(
            f"{path} is not valid JSON: it is nested too deeply. Download the model again."
        ) from None
    except ValueError as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error}. Download the model again.") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} must hold a JSON object. Download the model again.")
    return cast(dict[str, Any], value)


def shorten(value: object) -> str:
    """A value out of a file, for an error of one line."""
    if isinstance(value, int) and abs(value) > 10**_MAX_SHOWN:  # thousands of digits cannot even be written down
        return f"beyond {10**_MAX_SHOWN:.0e}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
