"""Pictures from the web: who may be asked (`address`), where each hop leads, how long and how much in all.

A name is resolved once and the address that was checked is dialled; the name stays for Host and for TLS. Redirects are
followed by hand, each through the whole policy. Nothing is taken from the environment: no proxies, no credentials.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address

from text_generation_inference.errors import OverloadedError, ValidationError
from text_generation_inference.files import shorten
from text_generation_inference.pictures.address import (
    AddressError,
    AddressPolicy,
    IpAddress,
    MediaAddress,
    join_address,
    parse_address,
)
from text_generation_inference.pictures.http_get import AnswerHead, AnswerReading, BadAnswerError, write_request
from text_generation_inference.pictures.shared_room import SharedRoom

log = logging.getLogger("text_generation_inference.pictures")

MAX_REDIRECTS = 5
MAX_AT_ONCE = 32  # fetches, in all
MAX_NAMES = 2 * MAX_AT_ONCE  # that are looked up: who goes away leaves a thread that cannot be ended
MAX_BYTES_AT_ONCE = 1 << 30  # of bodies, in all: those that arrive, and those that are not decoded yet
_MAX_DIALLED = 4  # addresses of one name
_REDIRECTS = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], Awaitable[list[IpAddress]]]
Turn = Callable[[], AbstractAsyncContextManager[None]]  # wait for one, and have it for as long as the context lasts


@dataclass(slots=True)
class _Taken:
    """Of the room for bytes, and what is there instead."""

    caller: str
    num_bytes: int = 0
    bodies: list[bytearray] = field(default_factory=list[bytearray])


class Fetcher:
    def __init__(
        self,
        policy: AddressPolicy,
        max_bytes: int,
        timeout_s: float,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        turn: Turn | None = None,
        caller: Callable[[], str] | None = None,
    ) -> None:
        """`max_bytes`: of one picture; `timeout_s`: for one, from its name to its last byte; `turn`: who is next;
        `caller`: whose picture it is. A video is one picture.
        """
        self._policy = policy
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._resolve = resolve or self._ask_system
        self._tls = tls
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._turn = turn or self._slot
        self._room = SharedRoom(MAX_BYTES_AT_ONCE, caller)
        # Threads of our own: names that nobody answers for hold up nobody else's work.
        self._names = SharedRoom(MAX_NAMES, caller)
        self._threads = ThreadPoolExecutor(MAX_NAMES, thread_name_prefix="resolve")

    @property
    def num_bytes(self) -> int:
        """Of bodies that somebody has."""
        return self._room.used

    @asynccontextmanager
    async def fetch(self, *urls: str) -> AsyncGenerator[list[bytearray]]:
        """What is at URLs that belong together, for as long as the context lasts. Raises `ValidationError` with TGI's
        texts. They are one picture to all limits: one turn, one deadline, so many bytes together.
        """
        taken = _Taken(self._room.caller())
        try:
            async with self._turn():
                try:
                    async with asyncio.timeout(self._timeout_s):
                        for url in urls:
                            taken.bodies.append(bytearray())
                            await self._follow(url, taken)
                except TimeoutError:
                    raise ValidationError(
                        f"Could not fetch image: it took longer than {self._timeout_s:g} seconds"
                    ) from None
            yield taken.bodies
        finally:
            self._room.give_back(taken.caller, taken.num_bytes)

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        """First come, first served."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise OverloadedError("too many pictures are being fetched") from None
        try:
            yield
        finally:
            self._slots.release()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, url: str, taken: _Taken) -> None:
        try:
            address = parse_address(url)
            for _ in range(MAX_REDIRECTS + 1):
                location = await self._get(address, taken)
                if location is None:
                    return
                address = join_address(address, location)
        except (AddressError, BadAnswerError) as error:
            raise ValidationError(f"Could not fetch image: {error}") from None
        except UnicodeError:
            raise ValidationError("Could not fetch image: its server redirects to what is no URL") from None
        except OSError as error:  # TLS errors are among them
            log.info("A picture could not be fetched: %s", error)
            what = "its server has no valid certificate" if _is_about_certificates(error) else "the connection failed"
            raise ValidationError(f"Could not fetch image: {what}") from None
        raise ValidationError(f"Could not fetch image: there are more than {MAX_REDIRECTS} redirects")

    async def _get(self, address: MediaAddress, taken: _Taken) -> str | None:
        """Ask one server. Where it redirects to, or None: the body is there."""
        self._policy.check_host(address)
        answers = [address.ip] if address.ip is not None else await self._resolve(address.host, address.port)
        try:
            self._policy.check_answers(answers)
        except AddressError:
            log.info("%s is not asked for a picture: it is at %s", shorten(address.host), answers or "no address")
            raise
        reader, writer = await self._dial(address, answers)
        try:
            write_request(writer, address)
            reading = AnswerReading(reader)
            answer = await reading.read_head()
            if answer.status in _REDIRECTS and answer.location is not None:
                return answer.location.decode()
            self._check(answer)
            try:
                await reading.read_body(lambda part: self._take(taken, part))
            except (BadAnswerError, OSError) as error:
                why = error if isinstance(error, BadAnswerError) else "the connection failed"
                raise ValidationError(f"Failed to read image data: {why}") from None
            return None
        finally:
            writer.transport.abort()  # nothing is owed to the server, and it cannot hold us up

    def _check(self, answer: AnswerHead) -> None:
        if answer.status != 200:
            raise BadAnswerError(f"its server answers with status {answer.status}")
        if any(coding != b"identity" for coding in answer.codings):
            raise BadAnswerError("its server sends the body in a form that was not asked for")
        if answer.length is not None and answer.length > self._max_bytes:
            raise too_large(answer.length, self._max_bytes)

    def _take(self, taken: _Taken, part: bytes) -> None:
        num_bytes = taken.num_bytes + len(part)
        if num_bytes > self._max_bytes:
            raise too_large(num_bytes, self._max_bytes)
        if not self._room.try_take(taken.caller, len(part)):
            raise OverloadedError("too many bytes of pictures are being fetched")
        taken.num_bytes = num_bytes
        taken.bodies[-1] += part

    async def _dial(
        self, address: MediaAddress, answers: list[IpAddress]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first that takes us. Each has its share of the time that is left."""
        tls = await self._context() if address.scheme == "https" else None
        end = asyncio.get_running_loop().time() + self._timeout_s
        tried = answers[:_MAX_DIALLED]
        for left, ip in zip(range(len(tried), 0, -1), tried, strict=True):
            try:
                self._policy.check_connection(_address_towards(ip), ip)
                async with asyncio.timeout((end - asyncio.get_running_loop().time()) / left):
                    reader, writer = await asyncio.open_connection(
                        str(ip), address.port, ssl=tls, server_hostname=address.host if tls else None
                    )
            except AddressError:
                log.info("%s is not asked for a picture: it is at this machine", shorten(address.host))
                raise
            except (OSError, TimeoutError):
                if left == 1:
                    raise
                continue
            return reader, writer
        raise AddressError("the host has no public address")

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:  # the system's certificates: many files
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls

    async def _ask_system(self, host: str, port: int) -> list[IpAddress]:
        loop, caller = asyncio.get_running_loop(), self._names.caller()
        if not self._names.try_take(caller, 1):
            raise OverloadedError("too many names are being looked up")

        def end(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._names.give_back, caller, 1)

        asked = self._threads.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        asked.add_done_callback(end)  # once the thread is done, also if nobody waits for it any more
        try:
            found = await asyncio.wrap_future(asked)
        except (OSError, UnicodeError):
            return []
        return [ip_address(entry[4][0]) for entry in found]


def _address_towards(ip: IpAddress) -> IpAddress:
    """Ours, as who is at `ip` would see it. Nothing is sent."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(ip), 9))  # any port will do
        return ip_address(probe.getsockname()[0])


def too_large(num_bytes: int, max_bytes: int) -> ValidationError:
    return ValidationError(f"Image size {num_bytes} bytes exceeds maximum allowed size of {max_bytes} bytes")


def _is_about_certificates(error: OSError) -> bool:
    return isinstance(error, ssl.SSLCertVerificationError)
