"""A process that decodes one picture at a time and prepares it as the model's family wants it. Run by `pool`.

It has a limit on memory, a timer of processor time for each picture, and an environment without secrets: what a
hostile file makes of a decoder ends with it. Over a socket come a `PictureJob` and the picture's bytes. Pixels leave as
a file that the owner named; the answer is what others need to know of them.
"""

import hashlib
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Generator
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image

from text_generation_inference import failpoints
from text_generation_inference.config import failpoints_asked
from text_generation_inference.errors import ValidationError
from text_generation_inference.files import read_json_object
from text_generation_inference.pictures.data_uri import decode_base64
from text_generation_inference.pictures.decode import check_size, decode, open_animation
from text_generation_inference.pictures.frames import (
    MAX_FRAMES,
    OUT_OF_MEMORY,
    FrameJob,
    PictureJob,
    PictureRefused,
    PreparedPicture,
    WorkerSettings,
    receive_job,
    send,
)
from text_generation_inference.pictures.rule import PictureLayout, PictureRule
from text_generation_inference.pictures.rules import find_rule

DEFAULT_FPS = 2.0  # of frames that nobody says a time of, which models are trained with
_LEAST_FPS, _MOST_FPS = 0.01, 1000.0

VERSION = 1  # of digests: another one whenever the same pixels may come to mean other features
_MAX_OPEN = 64  # files
_MAX_DETAIL = 300  # characters, for the log


def prepare(rule: PictureRule, job: PictureJob, data: bytes | bytearray, max_pixels: int) -> PreparedPicture:
    """Raises `ValidationError`."""
    if job.frames:
        (width, height), layout, pixels = prepare_video(rule, job, data, max_pixels)
    else:
        image = _decode(job, data, max_pixels)
        failpoints.failpoint("picture.decode")
        width, height = image.size
        layout = rule.layout(width, height)
        pixels = rule.pixels(image, layout)
    pixels = np.ascontiguousarray(pixels)
    if pixels.dtype != np.uint8 or pixels.shape != layout.shape:
        raise TypeError(f"{type(rule).__name__} makes {pixels.dtype} of {pixels.shape} and says {layout.shape}")
    _write(job.output, pixels)
    digest = digest_of(rule, layout, pixels)
    return PreparedPicture(digest, width, height, layout.shape, layout.grid, layout.expansion, pixels.nbytes)


def _decode(job: PictureJob | FrameJob, data: bytes | bytearray, max_pixels: int) -> Image.Image:
    if job.size is not None:
        check_size(*job.size, max_pixels)
        return Image.frombytes("RGB", job.size, data)
    return decode(decode_base64(data) if job.is_base64 else data, job.format, max_pixels)


def prepare_video(
    rule: PictureRule, job: PictureJob, data: bytes | bytearray, max_pixels: int
) -> tuple[tuple[int, int], PictureLayout, np.ndarray]:
    """Size of a frame, layout and pixels. Frames are decoded one after the other: few are in memory at a time."""
    if job.fps is not None and not _LEAST_FPS <= job.fps <= _MOST_FPS:
        raise ValidationError(f"`fps` must be from {_LEAST_FPS:g} to {_MOST_FPS:g}. Given: {job.fps:g}")
    if not job.is_animation:
        size, count = None, len(job.frames)
        frames = _each_frame(job.frames, data, max_pixels)
        first = next(frames)
        size = first.size
        layout = _lay_out(rule, size, count, job.fps or DEFAULT_FPS, max_pixels)
        return size, layout, rule.video_pixels(chain([first], frames), layout)
    encoded = decode_base64(data) if job.frames[0].is_base64 else data
    with open_animation(encoded, max_pixels) as animation:
        size, count = animation.size, animation.num_frames
        layout = _lay_out(rule, size, count, job.fps or DEFAULT_FPS, max_pixels)
        pixels = rule.video_pixels(animation.frames(), layout)
        fps = min(max(job.fps or animation.fps or DEFAULT_FPS, _LEAST_FPS), _MOST_FPS)
    return size, _lay_out(rule, size, count, fps, max_pixels), pixels


def _lay_out(rule: PictureRule, size: tuple[int, int], count: int, fps: float, max_pixels: int) -> PictureLayout:
    if count > MAX_FRAMES:
        raise ValidationError(f"a video may have at most {MAX_FRAMES} frames. Given: {count}")
    layout = rule.video_layout(*size, count, fps)
    if math.prod(layout.shape) // 3 > max_pixels:
        raise ValidationError(f"a video's frames may have {max_pixels} pixels together: send fewer")
    return layout


def _each_frame(jobs: list[FrameJob], data: bytes | bytearray, max_pixels: int) -> Generator[Image.Image, None, None]:
    start, size = 0, None
    for number, job in enumerate(jobs):
        image = _decode(job, data[start : start + job.num_bytes], max_pixels)
        start += job.num_bytes
        if size is not None and image.size != size:
            raise ValidationError(
                f"frames of a video must have one size: frame {number} has {image.width}x{image.height},"
                f" the first {size[0]}x{size[1]}"
            )
        size = image.size
        yield image


def digest_of(rule: PictureRule, layout: PictureLayout, pixels: np.ndarray) -> str:
    """Of all that decides features. Each part is told from the next by its length."""
    digest = hashlib.sha256()
    for part in (str(VERSION), rule.identity, repr(layout.shape), repr(layout.grid)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    digest.update(pixels.data)
    return digest.hexdigest()


def _write(path: str, pixels: np.ndarray) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        left = pixels.data.cast("B")
        while left:
            left = left[file.write(left) :]


# -- the process ----------------------------------------------------------------------------------------------------


def serve(settings: WorkerSettings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides; at its end the socket closes
    failpoints.configure(failpoints_asked())
    folder = Path(settings.model_folder)
    rule = find_rule(folder, read_json_object(folder / "config.json"))
    if rule is None:
        raise ValueError(f"the model in {folder} takes no pictures")
    _limit(settings.max_bytes)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # decoders must not write into the log
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as connection:
        try:
            while True:
                job, data = receive_job(connection)
                signal.setitimer(signal.ITIMER_PROF, settings.max_cpu_seconds)  # its signal ends the process
                answer = _answer(rule, job, data, settings.max_pixels)
                signal.setitimer(signal.ITIMER_PROF, 0)
                del data
                send(connection, answer)
        except (EOFError, ConnectionError):
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # what a decoder has not given back by now may be much


def _limit(max_bytes: int) -> None:
    """`max_bytes`: of memory, beyond what this process has already, which differs by machine."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN, _MAX_OPEN))
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = in_use + max_bytes if hard == resource.RLIM_INFINITY else min(hard, in_use + max_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(rule: PictureRule, job: PictureJob, data: bytearray, max_pixels: int) -> PreparedPicture | PictureRefused:
    try:
        return prepare(rule, job, data, max_pixels)
    except ValidationError as error:
        return PictureRefused(str(error), repr(error.__cause__)[:_MAX_DETAIL] if error.__cause__ else "")
    except OSError as error:  # decoders' own are `ValidationError` by now
        return PictureRefused("", f"{job.output} cannot be written: {error}"[:_MAX_DETAIL])
    except MemoryError:
        raise
    except Exception as error:  # the rule's
        return PictureRefused("invalid image: it cannot be prepared for the model", repr(error)[:_MAX_DETAIL])


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=WorkerSettings))
