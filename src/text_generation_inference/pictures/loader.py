"""The way of a picture from a request to the engine: fetched, decoded and prepared in a worker, kept as a file.

The face of `pictures` for the api process (`load`, on its event loop) and for `LLM` (`load_sync`). Whoever loads
pictures holds references to their files until it calls `release`. It knows nothing of prompts and tokens.
"""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import msgspec
from PIL import Image

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import OverloadedError, ValidationError, too_many_pictures
from text_generation_inference.files import special_kind
from text_generation_inference.pictures.address import AddressPolicy
from text_generation_inference.pictures.data_uri import check_frames, invalid_content, parse_data_uri, split_video
from text_generation_inference.pictures.decode import check_size, to_rgb
from text_generation_inference.pictures.fetch import Fetcher, Turn, too_large
from text_generation_inference.pictures.folder import bytes_to_keep
from text_generation_inference.pictures.frames import MAX_FRAMES, FrameJob, PictureJob, PreparedPicture, WorkerSettings
from text_generation_inference.pictures.pool import WorkerPool
from text_generation_inference.pictures.rule import PictureLayout
from text_generation_inference.pictures.shared_room import SharedRoom
from text_generation_inference.pictures.store import PictureStore
from text_generation_inference.types import VideoSource

MAX_UNDER_WAY = 1024  # pictures that are fetched, wait or are decoded, in all; more where prompts may have many
MAX_CPU_SECONDS = 15.0  # of a worker, for one picture; 64 million pixels take about 5
MAX_SECONDS = 30.0  # on a clock, on a machine that is busy with other things
_LEAST_WORKERS, _MOST_WORKERS = 2, 4  # one that hangs does not hold up all others
_BYTES_PER_PIXEL = 24  # of a worker's memory: a picture, its parts and what becomes of it
_OTHER_BYTES = 512 << 20
_DONE_AT_ONCE = 1 << 16  # bytes that take no time worth a thread

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LoadedPicture:
    digest: str  # the name of its file in the picture folder
    layout: PictureLayout
    width: int  # upright, before the family's resizing
    height: int


@dataclass(slots=True)
class PictureCounts:
    """Since the start. `api/metrics` shows them as `tgi_picture_*`."""

    loaded: int = 0  # pictures of requests
    pixels: int = 0  # of these, as they came
    hits: int = 0  # whose bytes were known: nothing was decoded
    refused: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    prepare_seconds: float = 0.0  # in workers, waiting for one included
    workers_lost: int = 0
    kept: int = 0  # files at present
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Pixels:
    """A picture that is decoded already."""

    size: tuple[int, int]
    data: bytes  # RGB


class PictureLoader:
    def __init__(
        self,
        config: ServerConfig,
        model_folder: Path,
        picture_folder: Path,
        fetch_turn: Turn | None = None,
        decode_turn: Turn | None = None,
        caller: Callable[[], str] | None = None,
    ) -> None:
        """Turns: how those who wait to fetch, or for a worker, are put in order; by default as they come.

        `caller`: whose pictures the present task loads, so that others find room beside them.
        """
        self._max_pictures, self._max_pixels = config.max_images_per_request, config.max_image_pixels
        self._fetches = config.media_urls
        # No picture within the limit of pixels needs more bytes than its pixels have.
        self._max_bytes = min(config.max_image_fetch_size, 4 * self._max_pixels + (1 << 20))
        policy = AddressPolicy(config.allowed_media_domains, config.allow_private_media)
        self._fetcher = Fetcher(policy, self._max_bytes, config.image_fetch_timeout, turn=fetch_turn, caller=caller)
        self._decode_turn = decode_turn or nullcontext
        max_memory = _OTHER_BYTES + _BYTES_PER_PIXEL * self._max_pixels
        settings = WorkerSettings(str(model_folder), self._max_pixels, max_memory, MAX_CPU_SECONDS)
        num_workers = num_decoders(config)
        self.pool = WorkerPool(settings, num_workers, MAX_SECONDS)
        self.store = PictureStore(picture_folder, bytes_to_keep(picture_folder))
        self._waiting = ThreadPoolExecutor(num_workers, thread_name_prefix="picture")  # one for each worker
        self._aside_thread = ThreadPoolExecutor(1, thread_name_prefix="picture-bytes")
        self._under_way: dict[bytes, asyncio.Task[None]] = {}  # by source
        self._room = SharedRoom(max(MAX_UNDER_WAY, 2 * self._max_pictures), caller)  # the largest prompt is no overload
        self._counts = PictureCounts()
        self._loop: _LoopThread | None = None

    @property
    def counts(self) -> PictureCounts:
        self._counts.workers_lost = self.pool.num_lost
        self._counts.kept, self._counts.kept_bytes = len(self.store), self.store.num_bytes
        return self._counts

    @property
    def num_under_way(self) -> int:
        """Pictures that are fetched, wait or are decoded."""
        return self._room.used

    async def load(self, sources: Sequence[str | VideoSource], salt: str = "") -> list[LoadedPicture]:
        """Pictures and videos by URL or data URI, in order: all of them, or what is wrong with one is raised.

        Nothing of a picture is shared between different salts: neither its file nor, by its digest, its features.
        """
        return await self._load(sources, salt)

    def load_sync(
        self, sources: Sequence[str | bytes | bytearray | memoryview | Path | Image.Image | VideoSource], salt: str = ""
    ) -> list[LoadedPicture]:
        """The same for a program without an event loop, which may also name files and have pictures of its own."""
        if self._loop is None:
            self._loop = _LoopThread()
        self._check_number(sources)
        return self._loop.run(self._load([self._open_local(source) for source in sources], salt))

    def release(self, digests: Iterable[str]) -> None:
        """Of pictures that were loaded, each as often as it was: the request that needed them has ended."""
        self.store.release(digests)

    def close(self) -> None:
        """Ends the workers and removes the files."""
        self.pool.close()
        self._fetcher.close()
        for threads in (self._waiting, self._aside_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.close()
        self.store.close()

    async def _load(self, sources: "Sequence[str | bytes | _Pixels | VideoSource]", salt: str) -> list[LoadedPicture]:
        self._check_number(sources)
        places = self._take_room(len(sources))
        tasks = [asyncio.create_task(self._load_one(*each, salt)) for each in zip(sources, places, strict=True)]
        for task, place in zip(tasks, places, strict=True):
            task.add_done_callback(lambda _, place=place: place.close())  # one that was cancelled before it began
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException as error:
            if isinstance(error, ValidationError):
                self._counts.refused += 1
            for task in tasks:
                task.cancel()
                task.add_done_callback(self._give_back)
            raise

    def _take_room(self, num_pictures: int) -> list[ExitStack]:
        """For each picture what gives its room back."""
        caller = self._room.caller()
        if not self._room.try_take(caller, num_pictures):
            raise OverloadedError("too many pictures are being loaded")
        places = [ExitStack() for _ in range(num_pictures)]
        for place in places:
            place.callback(self._room.give_back, caller, 1)
        return places

    def _give_back(self, task: "asyncio.Task[LoadedPicture]") -> None:
        if not task.cancelled() and task.exception() is None:
            self.release([task.result().digest])

    def _check_number(self, sources: Sequence[object]) -> None:
        if len(sources) > self._max_pictures:
            raise too_many_pictures(self._max_pictures)
        num_urls = sum(map(_count_urls, sources))
        if num_urls > self._max_pictures:
            raise ValidationError(
                f"At most {self._max_pictures} image(s) of one prompt may be fetched, frames of each `video` included."
                f" Given: {num_urls} URLs. Send frames as data"
            )

    async def _load_one(
        self, source: "str | bytes | _Pixels | VideoSource", place: ExitStack, salt: str
    ) -> LoadedPicture:
        prepared = await self._find(source, place, salt)
        self._counts.loaded += 1
        self._counts.pixels += prepared.width * prepared.height
        return LoadedPicture(prepared.digest, prepared.layout, prepared.width, prepared.height)

    async def _find(self, source: str | bytes | _Pixels | VideoSource, place: ExitStack, salt: str) -> PreparedPicture:
        async with AsyncExitStack() as held:  # room among the pictures, and among the bytes
            held.enter_context(place.pop_all())
            if isinstance(source, VideoSource):
                return await self._prepare(*await self._gather(source, held), held, salt)
            return await self._prepare(*await self._bytes_of(source, held), held, salt)

    async def _gather(self, video: VideoSource, held: AsyncExitStack) -> tuple[PictureJob, bytearray]:
        """All frames of a video, one after the other."""
        sources, is_animation = await self._aside(_DONE_AT_ONCE + 1, lambda: split_video(video))
        check_frames(len(sources))
        urls = [source for source in sources if _is_url(source)]
        bodies = await self._fetch(urls, held) if urls else []
        frames: list[FrameJob] = []
        data = bytearray()
        for source in sources:
            job, part = (PictureJob(""), bodies.pop(0)) if _is_url(source) else await self._read(source)
            frames.append(FrameJob(len(part), job.format, job.is_base64, job.size))
            data += part
            if len(data) > self._max_bytes:
                raise too_large(len(data), self._max_bytes)
        return PictureJob("", frames=frames, is_animation=is_animation, fps=video.fps), data

    async def _bytes_of(
        self, source: str | bytes | _Pixels, held: AsyncExitStack
    ) -> tuple[PictureJob, bytes | bytearray]:
        """What is fetched is there for as long as `held` lasts."""
        if _is_url(source):
            (data,) = await self._fetch([source], held)
            return PictureJob(""), data
        return await self._read(source)

    async def _read(self, source: str | bytes | _Pixels) -> tuple[PictureJob, bytes | bytearray]:
        """What nothing is fetched for."""
        if isinstance(source, _Pixels):
            return PictureJob("", size=source.size), source.data
        if isinstance(source, bytes):
            return PictureJob(""), source
        if not source.startswith("data:"):
            raise invalid_content(source)
        uri = await self._aside(len(source), lambda: parse_data_uri(source))
        return PictureJob("", uri.format, is_base64=True), uri.data

    async def _fetch(self, urls: Sequence[str], held: AsyncExitStack) -> list[bytearray]:
        if not self._fetches:
            raise ValidationError("Could not fetch image: this server fetches none. Send it as a data URI")
        started = time.perf_counter()
        bodies = await held.enter_async_context(self._fetcher.fetch(*urls))
        self._counts.fetched += len(urls)
        self._counts.fetched_bytes += sum(map(len, bodies))
        self._counts.fetch_seconds += time.perf_counter() - started
        return bodies

    async def _prepare(
        self, job: PictureJob, data: bytes | bytearray, held: AsyncExitStack, salt: str
    ) -> PreparedPicture:
        """From the books, or by a worker, which has what is held until it is done, whoever goes away.

        Requests that come with the same bytes at once wait for one.
        """
        source = await self._digest(job, data, salt)
        is_known = True
        while (prepared := self.store.acquire(source)) is None:
            is_known = False
            task, is_ours = self._under_way.get(source), False
            if task is None:
                is_ours = True
                task = asyncio.create_task(self._work(source, job, data, held.pop_all(), salt))
                self._under_way[source] = task
                task.add_done_callback(lambda task: self._forget(source, task))
            try:
                await asyncio.shield(task)  # whoever goes away takes nothing from the others
            except OverloadedError:  # of who began it, which had no turn: we may have one
                if is_ours:
                    raise
        self._counts.hits += is_known
        return prepared

    def _forget(self, source: bytes, task: "asyncio.Task[None]") -> None:
        del self._under_way[source]
        if not task.cancelled():
            task.exception()  # seen, also if all who wanted to know have gone away

    async def _work(
        self, source: bytes, job: PictureJob, data: bytes | bytearray, held: AsyncExitStack, salt: str
    ) -> None:
        path = self.store.name_new()
        job = msgspec.structs.replace(job, output=str(path))
        started = time.perf_counter()
        async with held:
            try:
                async with self._decode_turn():
                    prepared = await _run(self._waiting, lambda: self.pool.prepare(job, data))
                self.store.add(source, _salted(prepared, salt), path)
            finally:
                self.store.discard(path)
                self._counts.prepare_seconds += time.perf_counter() - started

    async def _digest(self, job: PictureJob, data: bytes | bytearray, salt: str) -> bytes:
        """Of bytes, of what they are said to be, and of who shares them."""

        def compute() -> bytes:
            about = (job.format, job.is_base64, job.size, job.frames, job.is_animation, job.fps, salt)
            digest = hashlib.sha256(repr(about).encode() + b"\0")
            digest.update(data)
            return digest.digest()

        return await self._aside(len(data), compute)

    async def _aside(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """What goes over all bytes of a picture: megabytes of them would hold everybody else up."""
        return work() if num_bytes <= _DONE_AT_ONCE else await _run(self._aside_thread, work)

    def _open_local(
        self, source: str | bytes | bytearray | memoryview | Path | Image.Image | VideoSource
    ) -> "str | bytes | _Pixels | VideoSource":
        """What only the program that runs here may hand over."""
        if isinstance(source, VideoSource):
            return msgspec.structs.replace(source, frames=[self._open_local(frame) for frame in source.frames])
        if isinstance(source, Image.Image):
            check_size(*source.size, self._max_pixels)
            try:
                image = to_rgb(source.copy())
            except ValidationError:
                raise
            except Exception as error:  # of one that was opened only: its pixels are read now, if it is still open
                raise ValidationError(f"Failed to read image data: {str(error) or 'the picture is closed'}") from None
            return _Pixels(image.size, image.tobytes())
        if isinstance(source, bytearray | memoryview):
            source = bytes(source)
        if isinstance(source, str) and not _is_url(source) and not source[:5].lower().startswith("data:"):
            source = Path(source)
        if isinstance(source, Path):
            source = self._read_file(source)
        if not isinstance(source, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValidationError(
                f"an image must be a PIL picture, a path, a URL or bytes. Given: {type(source).__name__}"
            )
        if isinstance(source, bytes) and len(source) > self._max_bytes:
            raise too_large(len(source), self._max_bytes)
        return source

    def _read_file(self, path: Path) -> bytes:
        try:
            if (kind := special_kind(path.stat().st_mode)) is not None:
                raise ValidationError(f"Failed to read image data: {path} is {kind}, not a file")
            with path.open("rb") as file:
                return file.read(self._max_bytes + 1)
        except (OSError, ValueError) as error:
            raise ValidationError(f"Failed to read image data: {error}") from None


class _LoopThread:
    """An event loop for callers that have none, or are busy inside their own, as notebooks are."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pictures", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # of the work, or an interrupt of who waits for it
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


def num_decoders(config: ServerConfig) -> int:
    """Pictures that are decoded at a time."""
    return config.image_workers or max(_LEAST_WORKERS, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // 2))


def _salted(prepared: PreparedPicture, salt: str) -> PreparedPicture:
    """A digest of its own for each salt. Workers know none: what a hostile file makes of one cannot tell it."""
    if not salt:
        return prepared
    digest = hashlib.sha256(repr((salt, prepared.digest)).encode()).hexdigest()
    return msgspec.structs.replace(prepared, digest=digest)


def _is_url(source: object) -> TypeGuard[str]:
    """Whether a picture is to be fetched."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def _count_urls(source: object) -> int:
    """In a request. A video with too many frames is refused for that."""
    frames = source.frames[:MAX_FRAMES] if isinstance(source, VideoSource) else [source]
    return sum(map(_is_url, frames))


async def _run(threads: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(threads, function)
