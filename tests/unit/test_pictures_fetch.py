"""Fetching from servers of strangers: real ones on this machine, which lie, stall and redirect."""

import asyncio
import gzip
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from text_generation_inference.errors import OverloadedError, TgiError, ValidationError
from text_generation_inference.pictures import fetch
from text_generation_inference.pictures.address import AddressPolicy, IpAddress, parse_address
from text_generation_inference.pictures.fetch import Fetcher

BODY = os.urandom(300_000)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(
    answer: bytes | Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """One that answers every request alike. Yields its address and the requests it got."""
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            seen.append(request)
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(request, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    started = await asyncio.start_server(handle, host, 0, ssl=tls)
    port = started.sockets[0].getsockname()[1]
    try:
        yield f"http{'s' if tls else ''}://{host}:{port}/x.png", seen
    finally:
        started.close()


def make(allow_private: bool = True, max_bytes: int = 1 << 20, timeout_s: float = 5.0, **more) -> Fetcher:
    policy = more.pop("policy", None) or AddressPolicy(more.pop("allowed", None), allow_private)
    return Fetcher(policy, max_bytes, timeout_s, **more)


async def get(fetcher: Fetcher, url: str) -> bytes:
    try:
        async with fetcher.fetch(url) as (data,):
            return bytes(data)
    finally:
        assert fetcher.num_bytes == 0  # nothing stays taken
        fetcher.close()


async def refusal(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(TgiError) as error:
        await get(fetcher, url)
    assert isinstance(error.value, ValidationError | OverloadedError)
    return str(error.value)


def run_with(answer: bytes | Handler, **settings) -> bytes | str:
    """What comes of a fetch: bytes, or the text of the refusal."""

    async def run() -> bytes | str:
        async with server(answer) as (url, _):
            try:
                return await get(make(**settings), url)
            except (ValidationError, OverloadedError) as error:
                return str(error)

    return asyncio.run(run())


def chunked(body: bytes, size: int = 1000) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return (
        b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nContent-Encoding: gzip\r\n\r\n"
    )


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
        HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY + b"more than it said",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
        HEAD + b"\r\n" + BODY,  # until the connection ends
        HEAD + b"Content-Encoding: identity\r\n\r\n" + BODY,
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.1 103 Early Hints\r\nLocation: /nowhere\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"\r\n" + BODY,
    ],
)
def test_bodies_of_all_framings(answer: bytes) -> None:
    assert run_with(answer) == BODY


def test_the_request_asks_for_nothing_but_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """No coding to inflate, no credentials, no proxy: the environment's is a port that nobody listens on."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def run() -> bytes:
        async with server(HEAD + b"\r\nx") as (url, seen):
            assert await get(make(), url + "?a=%20b") == b"x"
        return seen[0]

    lines = asyncio.run(run()).decode().split("\r\n")
    assert lines[0] == "GET /x.png?a=%20b HTTP/1.1"
    names = {line.partition(":")[0].lower() for line in lines[1:] if line}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert "Accept-Encoding: identity" in lines


async def _endless(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n")
    while True:
        writer.write(bytes(100_000))
        await writer.drain()


async def _endless_head(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-Y: " + bytes(1000).replace(b"\0", b"z") + b"\r\n")
        await writer.drain()


async def _endless_header(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX-Y: ")
    while True:
        writer.write(b"z" * 1000)
        await writer.drain()


async def _endless_interim_answers(_: bytes, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()


async def _slow(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _silent(_: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n<html>", "Could not fetch image: its server answers with status 404"),
        (b"HTTP/1.1 500 Oops\r\n\r\n", "Could not fetch image: its server answers with status 500"),
        (b"HTTP/1.1 206 Partial\r\n\r\nx", "Could not fetch image: its server answers with status 206"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "Could not fetch image: its server answers with status 204"),
        (b"HTTP/1.1 302 Found\r\n\r\n", "Could not fetch image: its server answers with status 302"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(10**6)), "form that was not asked for"),
        (HEAD + b"Content-Encoding: identity, br\r\n\r\nxx", "form that was not asked for"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "form that was not asked for"),
        (HEAD + b"Content-Length: 9\r\n\r\nshort", "Failed to read image data: the connection ended early"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", "Failed to read image data: the connection ended early"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "does not speak HTTP as it should"),
        (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", "does not speak HTTP as it should"),
        (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "not speak HTTP as it should"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "Could not fetch image: its server does not speak HTTP as it should"),
        (b"+OK redis\r\n", "does not speak HTTP as it should"),
        (b"", "Could not fetch image: the connection ended early"),
        (
            HEAD + b"Content-Length: 99999999\r\n\r\n",
            "Image size 99999999 bytes exceeds maximum allowed size of 1048576 bytes",
        ),
        (HEAD + b"Content-Length: 9999999999999999999999\r\n\r\n", "does not speak HTTP as it should"),
        (HEAD + b"X: y\r\n" * 300 + b"\r\nx", "headers without end"),
        (_endless, "exceeds maximum allowed size of 1048576 bytes"),
        (_endless_head, "headers without end"),
        (_endless_header, "headers without end"),
        (_endless_interim_answers, "headers without end"),
    ],
)
def test_answers_that_are_no_picture(answer: bytes | Handler, text: str) -> None:
    found = run_with(answer)
    assert isinstance(found, str)
    assert text in found


@pytest.mark.parametrize("answer", [_slow, _silent])
def test_one_deadline_for_all_of_it(answer: Handler) -> None:
    assert run_with(answer, timeout_s=0.3) == "Could not fetch image: it took longer than 0.3 seconds"


def test_redirects_share_the_deadline() -> None:
    async def hop(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.15)
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: /next\r\n\r\n")

    assert run_with(hop, timeout_s=0.4) == "Could not fetch image: it took longer than 0.4 seconds"


def test_what_belongs_together_is_one_picture_to_all_limits() -> None:
    """Frames of a video: so many bytes together, one deadline, one turn."""
    turns = 0

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        nonlocal turns
        turns += 1
        yield

    async def late(_: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(HEAD + b"\r\nxyz")

    async def run(count: int, **settings) -> list[bytes] | str:
        async with server(late) as (url, seen):
            fetcher = make(turn=turn, **settings)
            try:
                async with fetcher.fetch(*[url] * count) as bodies:
                    assert fetcher.num_bytes == 3 * count
                    return [bytes(body) for body in bodies]
            except ValidationError as error:
                return f"{error}, asked for {len(seen)}"
            finally:
                assert fetcher.num_bytes == 0
                fetcher.close()

    assert asyncio.run(run(3)) == [b"xyz"] * 3
    assert turns == 1
    assert asyncio.run(run(3, max_bytes=9)) == [b"xyz"] * 3
    refused = "Image size 12 bytes exceeds maximum allowed size of 9 bytes, asked for 4"
    assert asyncio.run(run(5, max_bytes=9)) == refused
    found = asyncio.run(run(100, timeout_s=0.35))
    assert isinstance(found, str)
    assert found.startswith("Could not fetch image: it took longer than 0.35 seconds, asked for ")
    assert int(found.split()[-1]) <= 4


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(("hops", "is_found"), [(1, True), (5, True), (6, False)])
def test_redirects_are_followed_five_times(status: int, hops: int, is_found: bool) -> None:
    async def hop(request: bytes, writer: asyncio.StreamWriter) -> None:
        number = int(request.split()[1].removeprefix(b"/").replace(b"x.png", b"0"))
        if number < hops:
            writer.write(b"HTTP/1.1 %d Moved\r\nLocation: /%d\r\n\r\nignored" % (status, number + 1))
        else:
            writer.write(HEAD + b"\r\nx")

    found = run_with(hop)
    assert found == (b"x" if is_found else "Could not fetch image: there are more than 5 redirects")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1"]
)
def test_private_addresses_are_never_dialled(host: str) -> None:
    async def run() -> str:
        async with server(HEAD + b"\r\nx") as (url, seen):
            text = await refusal(make(allow_private=False), url.replace("127.0.0.1", host))
            assert seen == []
            return text

    assert asyncio.run(run()) == "Could not fetch image: the host has no public address"


@pytest.mark.parametrize(
    "location",
    [
        *(
            "http://127.0.0.1:{port}/secret",
            "http://localhost:{port}/",
            "//127.0.0.1:{port}/",
            "http://2130706433:{port}/",
        ),
        *("http://169.254.169.254/latest/meta-data/", "http://[::1]:{port}/", "http://[::ffff:7f00:1]:{port}/"),
        *("file:///etc/passwd", "gopher://127.0.0.1:{port}/", "http://public.example\\@127.0.0.1:{port}/"),
        *("http://u@127.0.0.1:{port}/", "http://\xff/"),
    ],
)
def test_redirects_to_private_addresses_are_not_followed(location: str) -> None:
    """The first hop is allowed (as a public host is), the second is refused without a connection."""

    async def run() -> str:
        async with server(HEAD + b"\r\nx") as (inner, seen):
            port = inner.split(":")[2].partition("/")[0]
            where = location.replace("{port}", port).encode("latin-1")
            async with server(b"HTTP/1.1 302 Found\r\nLocation: " + where + b"\r\n\r\n") as (outer, first):
                text = await refusal(make(policy=_AllowOne(outer)), outer)
                assert len(first) == 1
                assert seen == []
                return text

    assert asyncio.run(run()).startswith("Could not fetch image: ")


class _AllowOne(AddressPolicy):
    """The real policy, but for one port, which stands for a public server."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._port = parse_address(url).port

    def check_host(self, address) -> None:
        self._is_first = address.port == self._port

    def check_answers(self, answers) -> None:
        if not self._is_first:
            super().check_answers(answers)

    def check_connection(self, ours, theirs) -> None:
        if not self._is_first:
            super().check_connection(ours, theirs)


class _AllPublic(AddressPolicy):
    """The real policy on a machine whose addresses are public, loopback ones in their place."""

    def check_answers(self, answers) -> None:
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "pictures.example"])
def test_the_machine_itself_is_not_asked(host: str) -> None:
    """Whatever its address is: a firewall in front of it is no hindrance from here."""

    async def run() -> tuple[str, bytes]:
        async with server(HEAD + b"\r\nx") as (url, seen):
            resolve, _ = _resolver(["127.0.0.1"])
            text = await refusal(make(policy=_AllPublic(), resolve=resolve), url.replace("127.0.0.1", host))
            assert seen == []
            allowed = await get(make(policy=_AllPublic(allow_private=True), resolve=resolve), url)
            return text, allowed

    assert asyncio.run(run()) == ("Could not fetch image: the host has no public address", b"x")


def test_whether_this_machine_listens_is_not_told() -> None:
    async def run() -> str:
        async with server(HEAD) as (url, _):
            pass
        return await refusal(make(policy=_AllPublic()), url)

    assert asyncio.run(run()) == "Could not fetch image: the host has no public address"


def test_other_machines_are_asked() -> None:
    """An address that is not the one we have towards it, which 127.0.0.2 stands for."""

    async def run() -> bytes:
        async with server(HEAD + b"\r\nx", host="127.0.0.2") as (url, _):
            return await get(make(policy=_AllPublic()), url)

    assert asyncio.run(run()) == b"x"


def test_listed_hosts_are_checked_at_each_hop() -> None:
    async def run() -> str:
        async with server(b"HTTP/1.1 302 Found\r\nLocation: http://localhost:1/\r\n\r\n") as (url, _):
            return await refusal(make(allowed=["127.0.0.1"]), url)

    assert asyncio.run(run()) == "Could not fetch image: pictures are not fetched from this host"


def _resolver(*rounds: list[str]) -> tuple[Callable[[str, int], Awaitable[list[IpAddress]]], list[str]]:
    """One that answers differently each time it is asked."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[IpAddress]:
        asked.append(host)
        return [ip_address(ip) for ip in rounds[min(len(asked), len(rounds)) - 1]]

    return resolve, asked


def test_a_name_is_resolved_once_and_dialled_as_it_was_checked() -> None:
    """A name that changes to a private address after the check finds nobody who asks again."""

    async def run() -> None:
        async with server(HEAD + b"\r\nx") as (url, seen):
            resolve, asked = _resolver(["127.0.0.1"], ["10.0.0.1"])
            assert await get(make(resolve=resolve), url.replace("127.0.0.1", "pictures.example")) == b"x"
            assert asked == ["pictures.example"]
            assert b"\r\nHost: pictures.example:" in seen[0]  # the name stays for the server

    asyncio.run(run())


def test_a_name_that_changes_between_hops_is_checked_again() -> None:
    async def run() -> str:
        async with server(b"HTTP/1.1 302 Found\r\nLocation: http://pictures.example/again\r\n\r\n") as (url, seen):
            resolve, asked = _resolver(["127.0.0.1"], ["8.8.8.8", "127.0.0.1"])
            fetcher = make(policy=_AllowOne(url), resolve=resolve)
            text = await refusal(fetcher, url.replace("127.0.0.1", "pictures.example"))
            assert len(asked) == 2
            assert len(seen) == 1
            return text

    assert asyncio.run(run()) == "Could not fetch image: the host has no public address"


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    async def run() -> bytes:
        async with server(HEAD + b"\r\nx") as (url, _):
            resolve, _ = _resolver(["127.0.0.2", "127.0.0.1"])
            return await get(make(resolve=resolve), url.replace("127.0.0.1", "pictures.example"))

    assert asyncio.run(run()) == b"x"


def test_nobody_listens() -> None:
    text = asyncio.run(refusal(make(), "http://127.0.0.1:1/x"))
    assert text == "Could not fetch image: the connection failed"


def test_names_that_nobody_knows() -> None:
    text = asyncio.run(refusal(make(), "http://nobody.invalid/x"))
    assert text == "Could not fetch image: the host has no public address"


def test_fetches_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait too long for a turn are told so; bytes that would not fit are not kept."""
    monkeypatch.setattr(fetch, "MAX_AT_ONCE", 2)

    async def run() -> list[str]:
        async with server(_silent) as (url, seen):
            fetcher = make(timeout_s=0.3)
            texts = await asyncio.gather(*(refusal(fetcher, url) for _ in range(6)))
            assert len(seen) <= 4
            return texts

    texts = asyncio.run(run())
    assert sum("took longer" in text for text in texts) >= 2
    assert sum(text == "too many pictures are being fetched" for text in texts) >= 2
    monkeypatch.setattr(fetch, "MAX_BYTES_AT_ONCE", 100)
    assert run_with(HEAD + b"\r\n" + BODY) == "too many bytes of pictures are being fetched"


def test_names_that_one_caller_left_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking one up cannot be ended: its thread goes on after who asked has gone away."""
    end = threading.Event()
    names: list[str] = []

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        names.append(host)
        if host.startswith("slow"):
            end.wait(20)
        return [(None, None, None, None, ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    caller = ""

    async def run() -> None:
        nonlocal caller
        fetcher = make(caller=lambda: caller)
        async with server(HEAD + b"\r\nx") as (url, _):
            caller = "impatient"
            for _ in range(4):
                tasks = [asyncio.create_task(_take(fetcher, "http://slow.example/x")) for _ in range(fetch.MAX_AT_ONCE)]
                await asyncio.sleep(0.05)
                for task in tasks:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(each, OverloadedError) for each in outcomes)
            assert len(names) == fetch.MAX_NAMES * 3 // 4
            caller = "patient"
            assert await _take(fetcher, url.replace("127.0.0.1", "quick.example")) == b"x"
            end.set()
            caller = "impatient"
            async with asyncio.timeout(5):
                while await _outcome(fetcher, url.replace("127.0.0.1", "quick.example")) != b"x":
                    await asyncio.sleep(0.01)  # until threads have ended
        fetcher.close()

    asyncio.run(run())


async def _outcome(fetcher: Fetcher, url: str) -> bytes | OverloadedError:
    try:
        return await _take(fetcher, url)
    except OverloadedError as error:
        return error


async def _take(fetcher: Fetcher, url: str) -> bytes:
    async with fetcher.fetch(url) as (data,):
        return bytes(data)


def test_cancelling_frees_connection_and_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_AT_ONCE", 1)

    async def run() -> None:
        gone = asyncio.Event()

        async def watch(_: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + b"\r\nabc")
            try:
                while True:
                    await asyncio.sleep(0.01)
                    writer.write(b"x")
                    await writer.drain()
            finally:
                gone.set()

        fetcher = make()
        async with server(watch) as (url, seen):
            task = asyncio.create_task(get(fetcher, url))
            while not seen:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(gone.wait(), 2)
        async with server(HEAD + b"\r\nx") as (url, _):
            assert await get(fetcher, url) == b"x"

    asyncio.run(run())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of pictures.example, key and certificate in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", f"{path}.key", "-out", f"{path}.crt", "-days", "2", "-subj", "/CN=pictures.example"]
    command += ["-addext", "subjectAltName=DNS:pictures.example"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(Path(f"{path}.key").read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.mark.parametrize(("host", "is_valid"), [("pictures.example", True), ("others.example", False)])
def test_certificates_are_checked_for_the_name(certificate: Path, host: str, is_valid: bool) -> None:
    """The address is dialled, the name is what the server must prove to have."""
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate)
    names: list[str | None] = []
    ours.sni_callback = lambda _, name, __: names.append(name)
    trust = ssl.create_default_context(cafile=f"{certificate}.crt")

    async def run() -> bytes | str:
        async with server(HEAD + b"\r\nx", ours) as (url, _):
            resolve, _ = _resolver(["127.0.0.1"])
            fetcher = make(resolve=resolve, tls=trust)
            url = url.replace("127.0.0.1", host)
            return await get(fetcher, url) if is_valid else await refusal(fetcher, url)

    assert asyncio.run(run()) == (b"x" if is_valid else "Could not fetch image: its server has no valid certificate")
    assert names == [host]


def test_strangers_certificates_are_refused_by_default(certificate: Path) -> None:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate)

    async def run() -> str:
        async with server(HEAD + b"\r\nx", ours) as (url, _):
            return await refusal(make(), url)

    assert asyncio.run(run()) == "Could not fetch image: its server has no valid certificate"
