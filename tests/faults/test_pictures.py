"""Pictures that hang, kill or fill a worker, and floods of them: only their own request fails, with a status of 4xx."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pictures_here import as_uri, encoded, noise, write_model
from PIL import Image

from text_generation_inference.api.callers import current_caller
from text_generation_inference.api.turns import Turns
from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import OverloadedError, TgiError, ValidationError
from text_generation_inference.pictures import fetch as fetch_module
from text_generation_inference.pictures import loader as loader_module
from text_generation_inference.pictures.fetch import MAX_AT_ONCE, Turn
from text_generation_inference.pictures.loader import PictureLoader

Make = Callable[..., PictureLoader]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Loaders with limits of the test's choice, whose workers do what the file `faults` says."""
    model = write_model(tmp_path / "model")
    monkeypatch.setenv("TGI_FAILPOINTS", f"@{tmp_path / 'faults'}")
    made: list[PictureLoader] = []

    def make_loader(
        *turns: Turn, caller: Callable[[], str] | None = None, private: bool = False, **limits: object
    ) -> PictureLoader:
        """`turns`: to fetch, and for a worker."""
        for name, value in limits.items():
            monkeypatch.setattr(fetch_module if name == "MAX_BYTES_AT_ONCE" else loader_module, name, value)
        folder = tmp_path / f"pixels-{len(made)}"
        folder.mkdir()
        config = ServerConfig(image_workers=2, allow_private_media=private)
        made.append(PictureLoader(config, model, folder, *turns, caller=caller))
        return made[-1]

    yield make_loader
    for loader in made:
        pids = loader.pool.pids
        loader.close()
        assert all(is_gone(pid) for pid in pids)
        assert list(loader.store.folder.iterdir()) == []


def is_gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


async def loads(loader: PictureLoader, seed: int) -> None:
    """As everybody else's request: it succeeds."""
    (found,) = await loader.load([as_uri(encoded(noise(seed)))])
    loader.release([found.digest])


async def fails(loader: PictureLoader, source: str) -> TgiError:
    with pytest.raises((ValidationError, OverloadedError)) as error:
        await loader.load([source])
    assert 400 <= error.value.status < 500
    assert loader.store.num_references == 0
    loader.store.check()
    return error.value


def test_a_picture_that_hangs(make: Make) -> None:
    """Others are prepared meanwhile, and the worker is replaced."""

    async def run() -> None:
        loader = make(MAX_SECONDS=5.0)
        while len(loader.pool.pids) < 2:
            await asyncio.gather(*(loads(loader, random.randrange(10**6)) for _ in range(4)))
        stopped = loader.pool.pids[0]
        os.kill(stopped, signal.SIGSTOP)
        tasks = [asyncio.create_task(loads(loader, seed)) for seed in (1, 2)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [task.exception() for task in done] == [None]
        await loads(loader, 3)
        (failed,) = {*tasks} - done
        assert not failed.done()
        with pytest.raises(OverloadedError, match="^a picture was not prepared within 5 seconds$"):
            await failed
        assert is_gone(stopped)
        assert loader.counts.workers_lost == 1
        await asyncio.gather(*(loads(loader, seed) for seed in range(8)))  # no picture was to blame

    asyncio.run(run())


def test_a_worker_that_is_killed(make: Make, tmp_path: Path) -> None:
    """By the kernel that lacks memory, or by a decoder that crashes: with a picture in hand, and without one."""

    async def run() -> None:
        loader = make()
        (tmp_path / "faults").write_text("picture.decode=kill")
        assert str(await fails(loader, as_uri(encoded(noise(1))))) == "invalid image: it cannot be decoded"
        (tmp_path / "faults").write_text("")
        await loads(loader, 1)
        assert loader.counts.workers_lost == 1
        (idle,) = loader.pool.pids
        os.kill(idle, signal.SIGKILL)
        os.waitid(os.P_PID, idle, os.WEXITED | os.WNOWAIT)
        await loads(loader, 2)
        assert loader.counts.workers_lost == 1

    asyncio.run(run())


def test_a_rule_that_fails(make: Make, tmp_path: Path) -> None:
    async def run() -> None:
        loader = make()
        (tmp_path / "faults").write_text("picture.decode=raise")
        error = await fails(loader, as_uri(encoded(noise(1))))
        assert str(error) == "invalid image: it cannot be prepared for the model"
        (tmp_path / "faults").write_text("")
        await loads(loader, 1)
        assert loader.counts.workers_lost == 0

    asyncio.run(run())


def test_a_picture_that_takes_too_long(make: Make) -> None:
    """Within all limits of size: 14 bytes more for every time that a decoder must go over all pixels again."""
    data = encoded(Image.new("L", (2000, 2000), 99), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    bomb = data[:last] + data[last:-2] * 1000 + data[-2:]

    async def run() -> None:
        loader = make(MAX_CPU_SECONDS=0.4)
        assert len(bomb) < 100_000
        text = str(await fails(loader, as_uri(bomb, "image/jpeg")))
        assert text == "invalid image: it takes more than 0.4 seconds to decode"
        await loads(loader, 1)

    asyncio.run(run())


def test_a_picture_that_takes_too_much_memory(make: Make) -> None:
    async def run() -> None:
        loader = make(_OTHER_BYTES=40 << 20, _BYTES_PER_PIXEL=0)
        await loads(loader, 1)
        large = as_uri(encoded(Image.new("RGBA", (4000, 4000))))
        assert str(await fails(loader, large)) == "invalid image: it takes too much memory to decode"
        await loads(loader, 2)

    asyncio.run(run())


def test_no_room_for_pixels(make: Make) -> None:
    """A folder that cannot be written to is nothing that a client did wrong."""

    async def run() -> None:
        loader = make()
        await loads(loader, 1)
        moved = loader.store.folder.rename(loader.store.folder.with_name("moved"))
        with pytest.raises(OverloadedError, match="no room for more pictures"):
            await loader.load([as_uri(encoded(noise(2)))])
        moved.rename(loader.store.folder)
        await loads(loader, 2)

    asyncio.run(run())


def test_closing_with_pictures_in_hand(make: Make, tmp_path: Path) -> None:
    async def run() -> None:
        loader = make()
        (tmp_path / "faults").write_text("picture.decode=hang")
        tasks = [asyncio.create_task(loader.load([as_uri(encoded(noise(seed)))])) for seed in range(5)]
        async with asyncio.timeout(20):
            while not loader.pool.pids:
                await asyncio.sleep(0.01)
        loader.close()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(isinstance(end, OverloadedError | asyncio.CancelledError) for end in ended), ended

    asyncio.run(run())


def test_workers_end_with_their_owner(tmp_path: Path) -> None:
    """However it ends: the socket closes, and nothing else is needed."""
    program = f"""
import os
from pathlib import Path
from PIL import Image
from text_generation_inference.api.callers import current_caller
from text_generation_inference.api.turns import Turns
from text_generation_inference.config import ServerConfig
from text_generation_inference.pictures.loader import PictureLoader
loader = PictureLoader(ServerConfig(), Path({str(write_model(tmp_path / "model"))!r}), Path({str(tmp_path)!r}))
loader.load_sync([Image.new("RGB", (9, 9))])
print(loader.pool.pids[0], flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert is_gone(int(done.stdout))


def test_workers_have_nothing_to_steal_or_to_say(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No secrets, no file of ours, no way into the log or to the launcher."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    loader = make()
    asyncio.run(loads(loader, 1))
    (pid,) = loader.pool.pids
    assert b"hf_secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    opened = {file.name: os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    assert opened.pop("1") == opened.pop("2") == "/dev/null"
    assert all(name == "/dev/null" or name.startswith("socket:") for name in opened.values()), opened
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (memory,) = [line.split()[3] for line in limits if line.startswith("Max address space")]
    assert 0 < int(memory) < 4 << 30


def test_a_flood_of_bad_pictures_beside_good_ones(make: Make) -> None:
    async def run() -> None:
        loader = make()
        bad = ["data:image/png;base64,AAAA", "http://127.0.0.1/x", "data:x", as_uri(encoded(noise(0))[:300])]
        work = [loads(loader, seed % 5) for seed in range(40)]
        work += [fails_alone(loader, bad[number % len(bad)]) for number in range(80)]
        await asyncio.gather(*work)
        assert loader.counts.refused == 80
        assert loader.counts.workers_lost == 0
        assert len(loader.store) == 5
        assert loader.store.num_references == 0
        loader.store.check()

    asyncio.run(run())


async def fails_alone(loader: PictureLoader, source: str) -> None:
    with pytest.raises(ValidationError):
        await loader.load([source])


def test_callers_take_turns(make: Make) -> None:
    """Whoever floods the workers waits; another caller is next."""

    async def run() -> list[str]:
        ended: list[str] = []
        turn = Turns(2, 30.0).turn
        loader = make(turn, turn)

        async def call(caller: str, seed: int) -> None:
            current_caller.set(caller)
            await loads(loader, seed)
            ended.append(caller)

        flood = [asyncio.create_task(call("flood", seed)) for seed in range(40)]
        await asyncio.sleep(0)
        await asyncio.gather(*flood, *(asyncio.create_task(call(f"other {n}", 100 + n)) for n in range(2)))
        return ended

    ended = asyncio.run(run())
    assert {ended.index("other 0"), ended.index("other 1")} <= set(range(8))


# -- servers that do not answer --------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@asynccontextmanager
async def web() -> AsyncIterator[str]:
    """`/silent` says nothing, `/slow` sends 3000 bytes and no more, `/7` is the picture of seed 7."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        try:
            if path[1:].isdigit():
                writer.write(HEAD + encoded(noise(int(path[1:]))))
            else:
                writer.write(HEAD + bytes(3000) if path == "/slow" else b"")
                await reader.read()  # until the other end goes
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def as_caller(name: str, loader: PictureLoader, *sources: str) -> asyncio.Task[None]:
    async def call() -> None:
        current_caller.set(name)
        loader.release([picture.digest for picture in await loader.load(sources)])

    return asyncio.create_task(call())


async def settle(tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def leave(tasks: list[asyncio.Task[None]]) -> int:
    """Clients go away. How many of them were refused before."""
    for task in tasks:
        task.cancel()
    ended = await settle(tasks)
    assert all(isinstance(each, OverloadedError | asyncio.CancelledError) for each in ended), ended
    return sum(isinstance(each, OverloadedError) for each in ended)


def fetching() -> Turn:
    return Turns(MAX_AT_ONCE, 30.0, most_each=MAX_AT_ONCE * 3 // 4).turn


def test_slow_urls_of_one_caller_leave_room_for_others(make: Make) -> None:
    """A thousand pictures of a server that says nothing: others load theirs, as data and by URL."""

    async def run() -> None:
        loader = make(fetching(), Turns(2, 30.0).turn, caller=current_caller.get, private=True)
        async with web() as url:
            flood = [as_caller("flood", loader, *[f"{url}/silent"] * 32) for _ in range(40)]
            await asyncio.sleep(0.2)
            data = [as_uri(encoded(noise(seed))) for seed in range(31)]
            others = [as_caller(f"other {n}", loader, *data, f"{url}/{n}") for n in range(2)]
            assert await asyncio.wait_for(settle(others), 10) == [None, None]
            assert await leave(flood) == 16  # 24 of its 40 requests are three quarters of all there may be
        assert loader.num_under_way == 0

    asyncio.run(run())


def test_slow_bodies_of_one_caller_leave_room_for_others(make: Make) -> None:
    async def run() -> None:
        assert len(encoded(noise(1))) < 4000
        limits = {"MAX_BYTES_AT_ONCE": 64_000, "caller": current_caller.get, "private": True}
        loader = make(fetching(), Turns(2, 30.0).turn, **limits)
        async with web() as url:
            flood = [as_caller("flood", loader, f"{url}/slow") for _ in range(40)]
            await asyncio.sleep(0.2)
            others = [as_caller("other", loader, f"{url}/1")]
            assert await asyncio.wait_for(settle(others), 10) == [None]
            assert await leave(flood) == 24  # 16 bodies of 3000 bytes are three quarters

    asyncio.run(run())


def test_what_a_worker_has_counts_when_its_caller_has_gone(make: Make, tmp_path: Path) -> None:
    """Else whoever goes away again and again would fill the memory."""

    async def run() -> None:
        loader = make(MAX_BYTES_AT_ONCE=4000, MAX_SECONDS=2.0, private=True)
        (tmp_path / "faults").write_text("picture.decode=hang")
        async with web() as url:
            task = as_caller("", loader, f"{url}/1")
            while not loader.pool.pids:
                await asyncio.sleep(0.01)
            await leave([task])
            assert loader.num_under_way == 1
            with pytest.raises(OverloadedError, match="too many bytes"):
                await loader.load([f"{url}/2"])
            (tmp_path / "faults").write_text("")
            while loader.num_under_way:
                await asyncio.sleep(0.01)
            await as_caller("", loader, f"{url}/2")

    asyncio.run(run())
