"""From a source to a file of pixels, with real workers; the books of those files."""

import asyncio
import hashlib
import http.server
import io
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures_here import SIDE, as_uri, encoded, noise, write_model
from PIL import Image

from text_generation_inference.config import ServerConfig, decoder_environment
from text_generation_inference.errors import OverloadedError, ValidationError
from text_generation_inference.files import read_json_object
from text_generation_inference.pictures import loader as loader_module
from text_generation_inference.pictures import store as store_module
from text_generation_inference.pictures.decode import decode
from text_generation_inference.pictures.folder import bytes_to_keep, make_picture_folder
from text_generation_inference.pictures.frames import PreparedPicture
from text_generation_inference.pictures.loader import LoadedPicture, PictureLoader
from text_generation_inference.pictures.rules import find_rule
from text_generation_inference.pictures.store import PictureStore
from text_generation_inference.types import VideoSource


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PictureLoader]:
    """One for all tests that leave it as it was."""
    config = ServerConfig(allow_private_media=True, max_images_per_request=4, max_image_pixels=100_000)
    found = PictureLoader(config, model, tmp_path_factory.mktemp("pixels"))
    yield found
    found.close()


@pytest.fixture
def pictures(shared: PictureLoader) -> Iterator[PictureLoader]:
    yield shared
    assert shared.store.num_references == 0
    shared.store.check()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Serves a picture at any path, of the seed that the path ends in; under /late/ after a while."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "late" in self.path:
                time.sleep(0.3)
            data = encoded(noise(int(self.path.rpartition("/")[2])))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "text/html")  # which nobody looks at
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_pixels_are_the_rules(pictures: PictureLoader, model: Path) -> None:
    rule = find_rule(model, read_json_object(model / "config.json"))
    assert rule is not None
    data = encoded(noise(1, 90, 50), "JPEG")
    (found,) = asyncio.run(pictures.load([as_uri(data, "image/jpeg")]))
    assert (found.width, found.height) == (90, 50)
    assert found.layout == rule.layout(90, 50)
    assert found.layout.shape == (1, SIDE, SIDE, 3)
    assert found.layout.num_features == 4
    path = pictures.store.folder / found.digest
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    pixels = np.fromfile(path, np.uint8).reshape(found.layout.shape)
    assert np.array_equal(pixels, rule.pixels(decode(data, None, 10**6), found.layout))
    parts = [b"1", rule.identity.encode(), repr(found.layout.shape).encode(), b"()"]
    expected = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts) + pixels.tobytes())
    assert found.digest == expected.hexdigest()
    pictures.release([found.digest])


def test_known_bytes_are_not_decoded_again(pictures: PictureLoader, site: str) -> None:
    """The same bytes, in whichever form, have one file; other bytes with the same pixels too."""

    async def run() -> list[str]:
        image = noise(2)
        before = pictures.counts
        hits, loaded, fetched = before.hits, before.loaded, before.fetched
        sources = [as_uri(encoded(image)), f"{site}/2", as_uri(encoded(image, "BMP"), "image/bmp")]
        first = await pictures.load(sources)
        again = await pictures.load(sources)
        counts = pictures.counts
        assert counts.hits == hits + 3
        assert counts.loaded == loaded + 6
        assert counts.fetched == fetched + 2  # what is there may have changed
        assert counts.fetch_seconds > 0 and counts.prepare_seconds > 0
        return [picture.digest for picture in (*first, *again)]

    digests = asyncio.run(run())
    assert len(set(digests)) == 1
    pictures.release(digests)


def test_who_comes_at_once_with_the_same_picture_waits_for_one(pictures: PictureLoader) -> None:
    async def run() -> None:
        hits, seconds = pictures.counts.hits, pictures.counts.prepare_seconds
        uri = as_uri(encoded(noise(3)))
        found = await asyncio.gather(*(pictures.load([uri, uri]) for _ in range(10)))
        digests = [picture.digest for pair in found for picture in pair]
        assert len(set(digests)) == 1
        assert pictures.store.num_references == 20
        assert pictures.counts.hits == hits  # they waited for it
        assert pictures.counts.prepare_seconds > seconds
        pictures.release(digests)

    asyncio.run(run())


def test_who_waits_for_somebody_without_a_turn_takes_one(model: Path, tmp_path: Path) -> None:
    """Whoever began with the same bytes may have too much at work; that is nobody else's fault."""
    turns = 0

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        nonlocal turns
        turns += 1
        if turns == 1:
            await asyncio.sleep(0.05)
            raise OverloadedError("too much work is waiting")
        yield

    loader = PictureLoader(ServerConfig(), model, tmp_path, decode_turn=turn)
    loads = [loader.load([as_uri(encoded(noise(4)))]) for _ in range(3)]

    async def run() -> list[list[LoadedPicture] | BaseException]:
        return await asyncio.gather(*loads, return_exceptions=True)

    first, *others = asyncio.run(run())
    assert isinstance(first, OverloadedError) and turns == 2
    for found in others:
        assert isinstance(found, list)
        loader.release(picture.digest for picture in found)
    assert loader.store.num_references == loader.num_under_way == 0
    loader.close()


def test_order_is_kept(pictures: PictureLoader, site: str) -> None:
    sources = [f"{site}/11", as_uri(encoded(noise(12))), as_uri(encoded(noise(13, 7, 300))), f"{site}/12"]
    found = asyncio.run(pictures.load(sources))
    assert [(picture.width, picture.height) for picture in found] == [(40, 30), (40, 30), (7, 300), (40, 30)]
    assert found[1].digest == found[3].digest
    assert len({picture.digest for picture in found}) == 3
    pictures.release(picture.digest for picture in found)
    assert asyncio.run(pictures.load([])) == []


GOOD = as_uri(encoded(noise(4)))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("file:///etc/passwd", "invalid image content: file:///etc/passwd"),
        ("/etc/passwd", "invalid image content: /etc/passwd"),
        ("x" * 100, f"invalid image content: {'x' * 60}..."),
        ("data:image/png;base64,QUJ-", "base64 encoding is invalid: Invalid symbol 45, offset 3."),
        ("data:image/png;base64,", "invalid image: it is not the PNG that it is said to be"),
        (as_uri(b"text", "image/bmp"), "invalid image: it is not PNG, JPEG, GIF, WebP, TIFF or BMP"),
        (as_uri(encoded(noise(1)), "image/jpeg"), "invalid image: it is not the JPEG that it is said to be"),
        (as_uri(encoded(noise(1))[:700]), "invalid image: it is damaged or incomplete"),
        (as_uri(encoded(noise(1, 400, 251))), "invalid image: it has more than the 100000 pixels that are allowed"),
        ("http://127.0.0.1:1/x", "Could not fetch image: the connection failed"),
        ("http://a\\@b/", "Could not fetch image: the URL holds white space, a backslash or control characters"),
    ],
)
def test_one_bad_picture_fails_all_of_its_request(pictures: PictureLoader, source: str, text: str) -> None:
    refused = pictures.counts.refused
    with pytest.raises(ValidationError) as refusal:
        asyncio.run(pictures.load([GOOD, source, GOOD]))
    assert str(refusal.value) == text
    assert pictures.counts.refused == refused + 1


def test_numbers_are_limited(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt, and of all that are under way, where any caller has room for one prompt with as many as there may be."""
    monkeypatch.setattr(loader_module, "MAX_UNDER_WAY", 3)
    loader = PictureLoader(ServerConfig(max_images_per_request=4), model, tmp_path, caller=lambda: "one")
    with pytest.raises(ValidationError, match=r"^At most 4 image\(s\) may be provided in one prompt\.$"):
        asyncio.run(loader.load([GOOD] * 5))
    assert len(asyncio.run(loader.load([GOOD] * 4))) == 4

    async def load_at_once() -> list[object]:
        return list(await asyncio.gather(*(loader.load([GOOD] * 4) for _ in range(2)), return_exceptions=True))

    first, second = asyncio.run(load_at_once())
    assert isinstance(first, list)
    assert isinstance(second, OverloadedError)
    assert "too many pictures" in str(second)
    assert loader.num_under_way == 0
    loader.close()


def test_frames_by_url_are_limited(model: Path, tmp_path: Path, site: str) -> None:
    """All of a request's URLs count, and frames of a video have one deadline; frames as data are not concerned."""
    config = ServerConfig(max_images_per_request=4, allow_private_media=True, image_fetch_timeout=0.5)
    loader = PictureLoader(config, model, tmp_path)
    for sources, given in (
        ([VideoSource([f"{site}/1"] * 5)], 5),
        ([VideoSource([GOOD, f"{site}/1", f"{site}/2"]), VideoSource([f"{site.upper()}/1"] * 2), f"{site}/3"], 5),
        ([VideoSource([f"{site}/1"] * 100_000)], 512),
    ):
        with pytest.raises(
            ValidationError, match=rf"frames of each `video` included\. Given: {given} URLs\. Send frames"
        ):
            asyncio.run(loader.load(sources))
    assert loader.counts.fetched == 0
    started = time.monotonic()
    with pytest.raises(ValidationError, match=r"^Could not fetch image: it took longer than 0\.5 seconds$"):
        asyncio.run(loader.load([VideoSource([f"{site}/late/{number}" for number in range(4)])]))
    assert time.monotonic() - started < 1.0  # four of them take 1.2 seconds
    for frames in ([f"{site}/{number}" for number in range(4)], [GOOD] * 500):
        with pytest.raises(ValidationError, match="^this model takes no videos"):  # they were all there
            asyncio.run(loader.load([VideoSource(frames)]))
    assert loader.counts.fetched == 4
    loader.close()


def test_who_goes_away_leaves_nothing(pictures: PictureLoader) -> None:
    async def run() -> None:
        for pause in (0, 0.001, 0.01):
            task = asyncio.create_task(pictures.load([as_uri(encoded(noise(1000 + int(pause * 1000)))), GOOD]))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                pictures.release(picture.digest for picture in task.result())
        while pictures.num_under_way:  # what was begun ends
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_urls_may_be_forbidden(model: Path, tmp_path: Path) -> None:
    loader = PictureLoader(ServerConfig(media_urls=False), model, tmp_path)
    with pytest.raises(ValidationError, match="^Could not fetch image: this server fetches none"):
        asyncio.run(loader.load(["https://example.com/x.png"]))
    loader.close()


def test_private_addresses_are_refused_by_default(model: Path, tmp_path: Path, site: str) -> None:
    loader = PictureLoader(ServerConfig(), model, tmp_path)
    with pytest.raises(ValidationError, match="^Could not fetch image: the host has no public address$"):
        asyncio.run(loader.load([f"{site}/1"]))
    assert loader.pool.pids == []  # nothing was started for it
    loader.close()


def test_without_an_event_loop(model: Path, tmp_path: Path, site: str) -> None:
    """For `LLM`: pictures, files, bytes, URLs, also from inside somebody's loop."""
    (tmp_path / "pixels").mkdir()
    loader = PictureLoader(ServerConfig(allow_private_media=True), model, tmp_path / "pixels")
    image = noise(5)
    path = tmp_path / "a picture.png"
    path.write_bytes(encoded(image))
    sources = [image, path, str(path), path.read_bytes(), as_uri(path.read_bytes()), f"{site}/5"]
    sources += [bytearray(path.read_bytes()), memoryview(path.read_bytes())]
    found = loader.load_sync(sources)
    assert len({picture.digest for picture in found}) == 1

    async def inside() -> str:
        return loader.load_sync([image])[0].digest

    assert asyncio.run(inside()) == found[0].digest
    assert image.mode == "RGB" and image.size == (40, 30)
    with Image.open(path) as left:
        pass
    closed = Image.open(path)
    closed.close()
    wrong: list[tuple[Any, str]] = [
        (left, "Failed to read image data: the picture is closed"),
        (closed, "Failed to read image data: Operation on closed image"),
        (Image.new("F", (2, 2)), "its pixels are no whole numbers"),
        (tmp_path / "none.png", "Failed to read image data: "),
        (str(tmp_path), "Failed to read image data: .* is a folder, not a file$"),
        (b"", "invalid image: it is not PNG"),
        ("\0", "Failed to read image data: "),
        (Image.open(io.BytesIO(path.read_bytes()[:2000])), "Failed to read image data: image file is truncated"),
        (np.asarray(image), "an image must be a PIL picture, a path, a URL or bytes. Given: ndarray"),
        (5, "Given: int"),
        ([image], "Given: list"),
        (VideoSource([image, None]), "Given: NoneType"),
    ]
    for bad, text in wrong:
        with pytest.raises(ValidationError, match=text):
            loader.load_sync([bad])
    loader.release([picture.digest for picture in found] + [found[0].digest])
    assert loader.store.num_references == 0
    loader.close()
    assert list((tmp_path / "pixels").iterdir()) == []
    loader.release([found[0].digest])  # a request that ends later
    with pytest.raises(OverloadedError, match="shutting down"):
        loader.pool.prepare(loader_module.PictureJob("x"), b"")


def test_settings_of_the_family_are_part_of_a_digest(model: Path, tmp_path: Path) -> None:
    """A picture that is what another setting makes of it too: pixels are equal, digests are not."""
    white = noise(0).point(lambda _: 255)
    digests = []
    for name, side in (("a", 28), ("b", 28), ("c", 56)):
        folder = write_model(tmp_path / name, side)
        if name == "b":
            (folder / "preprocessor_config.json").write_text(
                (folder / "preprocessor_config.json").read_text().replace('"size"', '"resample": 3, "size"')
            )
        (tmp_path / f"{name}-pixels").mkdir()
        loader = PictureLoader(ServerConfig(image_workers=1), folder, tmp_path / f"{name}-pixels")
        digests += [picture.digest for picture in loader.load_sync([white])]
        loader.close()
    assert len(set(digests)) == 3


def test_salts_keep_pictures_apart(pictures: PictureLoader) -> None:
    """A file and a name for each; what is known of one tells nothing about another."""

    async def load(salt: str, number: int = 1) -> tuple[set[str], int]:
        before = pictures.counts.hits
        uri = as_uri(encoded(noise(900)))
        loaded = await asyncio.gather(*(pictures.load([uri], salt) for _ in range(number)))
        digests = [picture.digest for (picture,) in loaded]
        pictures.release(digests)
        return set(digests), pictures.counts.hits - before

    async def run() -> None:
        files = len(pictures.store)
        salts = ["", "one", "two", "('one'", "one"]
        found = [await load(salt) for salt in salts]
        assert [hits for _, hits in found] == [0, 0, 0, 0, 1]
        digests = [digest for (digest,), _ in found]
        assert len(set(digests)) == 4 and digests[1] == digests[4]
        assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
        assert len(pictures.store) == files + 4
        assert len({(pictures.store.folder / digest).read_bytes() for digest in digests}) == 1
        at_once = await asyncio.gather(*(load(salt, 3) for salt in ("three", "four")))
        assert [len(digests) for digests, _ in at_once] == [1, 1] and at_once[0] != at_once[1]

    asyncio.run(run())


# -- the store ------------------------------------------------------------------------------------------------------


def prepared(number: int, num_bytes: int = 10) -> PreparedPicture:
    return PreparedPicture(hashlib.sha256(bytes([number])).hexdigest(), 1, 1, (num_bytes,), (), (1,), num_bytes)


def put(store: PictureStore, number: int, source: bytes | None = None, num_bytes: int = 10) -> str:
    path = store.name_new()
    path.write_bytes(bytes(num_bytes))
    store.add(source or bytes([number]), prepared(number, num_bytes), path)
    store.check()
    assert not path.exists()
    return prepared(number).digest


def test_least_recently_used_files_go_first(tmp_path: Path) -> None:
    store = PictureStore(tmp_path, 30)
    digests = [put(store, number) for number in range(3)]
    assert store.acquire(b"\0") is not None  # used, and in use
    put(store, 3)
    assert store.acquire(b"\1") is None
    assert {path.name for path in tmp_path.iterdir()} == {digests[0], digests[2], prepared(3).digest}
    put(store, 4, num_bytes=20)  # two others go, the one in use stays
    assert len(store) == 2
    with pytest.raises(OverloadedError, match="no room"):
        put(store, 5, num_bytes=21)
    store.check()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("new-")] == []
    store.release([digests[0]])
    put(store, 5, num_bytes=21)
    assert len(store) == 1


def test_the_number_of_files_is_limited(tmp_path: Path) -> None:
    store = PictureStore(tmp_path, 1000, max_files=3)
    digests = [put(store, number) for number in range(3)]
    assert store.acquire(b"\0") is not None
    put(store, 3)
    assert {path.name for path in tmp_path.iterdir()} == {digests[0], digests[2], prepared(3).digest}
    assert store.acquire(b"\2") is not None and store.acquire(b"\3") is not None
    with pytest.raises(OverloadedError, match="no room"):
        put(store, 4)
    store.release([digests[2]])
    put(store, 4)
    assert store.acquire(b"\2") is None and len(store) == 3


class CountingDict(OrderedDict[Any, Any]):
    """Tells how many of its entries were looked at."""

    looked_at = 0

    def items(self) -> Any:
        for item in super().items():
            CountingDict.looked_at += 1
            yield item


def test_adding_looks_at_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is: the event loop waits."""
    monkeypatch.setattr(store_module, "OrderedDict", CountingDict)
    store = PictureStore(tmp_path, 2000)
    for number in range(210):
        put(store, number)
    assert len(store) == 200
    CountingDict.looked_at = 0
    path = store.name_new()
    path.write_bytes(bytes(10))
    store.add(b"new", prepared(250), path)
    assert CountingDict.looked_at <= 2
    with pytest.raises(OverloadedError):
        put(store, 251, num_bytes=2001)
    assert len(store) == 200  # nothing goes for what has no room at all


def test_several_sources_of_one_file(tmp_path: Path) -> None:
    store = PictureStore(tmp_path, 30)
    for number in range(200):  # one pixel more or less at the edge of a file, again and again
        put(store, 1, source=b"source %d" % number)
    assert len(store) == 1
    assert [store.acquire(b"source %d" % number) is not None for number in range(200)] == [False] * 136 + [True] * 64


def test_what_an_earlier_process_left_is_removed(tmp_path: Path) -> None:
    for name in ("a" * 64, "new-7", "launcher.lock"):
        (tmp_path / name).write_bytes(b"x")
    PictureStore(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["launcher.lock"]


def test_the_folder_is_private_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_picture_folder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert bytes_to_keep(folder.path) > 0
    folder.remove()
    assert not folder.path.exists()
    monkeypatch.setattr("text_generation_inference.pictures.folder._MEMORY", tmp_path / "none")
    on_disk = make_picture_folder()
    assert on_disk.path.parent != tmp_path / "none"
    on_disk.remove()


def test_decoders_get_no_secrets() -> None:
    given = {"PATH": "/bin", "PYTHONPATH": "src", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "API_KEY": "x"}
    assert set(decoder_environment(given)) == {"PATH", "PYTHONPATH", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}
