"""Pictures that come in the text itself: `data:image/png;base64,...`, by TGI's rules.

Only the head is looked at here, which is short: what follows has megabytes and is decoded in a worker.
"""

import binascii
import re
from dataclasses import dataclass
from typing import Any

from text_generation_inference.errors import ValidationError
from text_generation_inference.pictures.frames import MAX_FRAMES
from text_generation_inference.types import VideoSource

_MAX_HEAD = 1000  # characters before the comma
_MAX_SHOWN = 60
_PIECE = 1 << 18  # characters
_FORMATS = {  # what a type says is believed: a picture that is something else fails
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/gif": "GIF",
    "image/webp": "WEBP",
    "image/tiff": "TIFF",
}
NO_VIDEO = (
    "invalid video: it is no animated GIF, WebP or PNG. Other formats are not decoded here: send the frames, as a list"
    " of pictures or as data:video/jpeg;base64,FRAME,FRAME"
)
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/=]")


@dataclass(frozen=True, slots=True)
class DataUri:
    format: str | None  # Pillow's name; None: as the first bytes say
    data: bytearray  # base64


def parse_data_uri(source: str) -> DataUri:
    """Raises `ValidationError`. Parameters beside `base64` are passed over."""
    head, comma, _ = source[: _MAX_HEAD + 1].partition(",")
    mime, *parameters = head.removeprefix("data:").split(";")
    if not head.startswith("data:") or not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise invalid_content(source)
    return DataUri(_FORMATS.get(mime.strip().lower()), _encode(source, len(head) + 1))


def split_video(video: VideoSource) -> tuple[list[Any], bool]:
    """Where a video's frames are, and whether there is one with all of them.

    `data:video/jpeg;base64,` and frames with commas between them are frames. Raises `ValidationError` for types that
    are not decoded here.
    """
    source = video.frames[0] if video.is_animation else None
    if not isinstance(source, str) or source[:_MAX_HEAD].lower().partition("data:video/")[1] != "data:video/":
        return video.frames, video.is_animation
    if source[:_MAX_HEAD].partition(",")[0].lower() != "data:video/jpeg;base64":
        raise ValidationError(NO_VIDEO)
    check_frames(source.count(","))
    _, *frames = source.split(",")
    return [f"data:image/jpeg;base64,{frame}" for frame in frames], False


def check_frames(count: int) -> None:
    if not 0 < count <= MAX_FRAMES:
        raise ValidationError(f"a video must have 1 to {MAX_FRAMES} frames. Given: {count}")


def _encode(source: str, start: int) -> bytearray:
    """In pieces: one call over megabytes would hold every other thread up."""
    data = bytearray(len(source) - start)
    for offset in range(0, len(data), _PIECE):
        piece = source[start + offset : start + offset + _PIECE]
        try:
            data[offset : offset + len(piece)] = piece.encode("ascii")
        except UnicodeEncodeError as error:
            raise _bad_symbol(ord(piece[error.start]), offset + error.start) from None
    return data


def _bad_symbol(symbol: int, offset: int) -> ValidationError:
    return ValidationError(f"base64 encoding is invalid: Invalid symbol {symbol}, offset {offset}.")


def invalid_content(source: str) -> ValidationError:
    """Of what is neither a URL nor data. TGI repeats all of it, however long."""
    shown = source if len(source) <= _MAX_SHOWN else source[:_MAX_SHOWN] + "..."
    return ValidationError(f"invalid image content: {shown.encode(errors='replace').decode()}")


def decode_base64(data: bytes | bytearray) -> bytes:
    """The standard alphabet, with padding. Raises `ValidationError`."""
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except binascii.Error:
        found = _NOT_BASE64.search(data)
        if found:
            raise _bad_symbol(data[found.start()], found.start()) from None
        raise ValidationError("base64 encoding is invalid: Invalid padding") from None
