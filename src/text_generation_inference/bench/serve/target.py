"""The server to measure: finds its address, asks what it is, and whether it answers a request at all.

Everything that would make a whole run fail is found here, before it starts, and told in one line.
"""

import http.client
import socket
import ssl
import time
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from text_generation_inference.bench.serve.apis import PATHS, ApiCall
from text_generation_inference.bench.serve.client import Address, Client, Exchange, Place, describe_os_error
from text_generation_inference.errors import StartError
from text_generation_inference.version import __version__

_LOOK_TIMEOUT_S = 10.0
_NOT_FATAL = ("HTTP 429", "error in the stream: Model is overloaded")  # busy is a measurement


class Target(msgspec.Struct, kw_only=True):
    """Where requests go. `base` is the path before the API's own."""

    url: str
    host: str
    port: int
    is_tls: bool
    base: str
    address: Address
    api_key: str | None = None

    def frame(self, api: str, body: bytes) -> bytes:
        """The request as it goes over the wire."""
        lines = [
            f"POST {self.base}{PATHS[api]} HTTP/1.1",
            f"host: {self._host_header()}",
            f"user-agent: tgi-bench/{__version__}",
            "content-type: application/json",
            "accept: text/event-stream",
            f"content-length: {len(body)}",
        ]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        head = "\r\n".join([*lines, "", ""])
        return head.encode() + body

    def _host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON; 0 when there is no answer, None when it is not JSON."""
        if self.is_tls:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=_LOOK_TIMEOUT_S)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=_LOOK_TIMEOUT_S)
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        try:
            connection.request("GET", self.base + path, headers=headers)
            response = connection.getresponse()
            return response.status, msgspec.json.decode(response.read(1 << 20))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return response.status, None
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()


class Server(msgspec.Struct, kw_only=True):
    """What a server says of itself."""

    is_tgi: bool
    model: str | None
    facts: dict[str, Any]


def find_target(url: str, api_key: str | None) -> Target:
    """Raises `StartError` for a URL that makes no sense and for one where nothing listens."""
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(given)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise StartError(f"--url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartError(f"--url {url!r} is no address of a server: give one such as http://localhost:3000")
    if parts.username is not None or parts.query or parts.fragment:
        raise StartError(f"--url {url!r} must be host, port and path alone; a key goes into --api-key")
    base = parts.path.rstrip("/").removesuffix("/v1")
    is_tls = parts.scheme == "https"
    address = _find_address(given, parts.hostname, port, is_tls)
    return Target(
        url=given.rstrip("/"),
        host=parts.hostname,
        port=port,
        is_tls=is_tls,
        base=base,
        address=address,
        api_key=api_key,
    )


def _find_address(url: str, host: str, port: int, is_tls: bool) -> Address:
    """The first address of the host at which something listens."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StartError(f"no host {host!r}: {getattr(error, 'strerror', None) or error}") from None
    problem = "it has no address"
    for family, _, _, _, place in places:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(_LOOK_TIMEOUT_S)
                sock.connect(place)
                if is_tls:
                    with ssl.create_default_context().wrap_socket(sock, server_hostname=host):
                        pass
        except OSError as error:
            problem = "no answer" if isinstance(error, TimeoutError) else describe_os_error(error)
            continue
        return Address(family=int(family), place=cast(Place, place), tls_name=host if is_tls else None)
    raise StartError(f"cannot reach a server at {url}: {problem}. Is it running, and is the port right?")


def ask_server(target: Target) -> Server:
    """TGI's `/info`, and OpenAI's list of models. Either may be missing."""
    status, info = target.get("/info")
    if status == 200 and isinstance(info, dict) and isinstance(info.get("model_id"), str):
        return Server(is_tgi="max_total_tokens" in info, model=info["model_id"], facts=info)
    status, found = target.get("/v1/models")
    model = None
    if isinstance(found, dict) and isinstance(found.get("data"), list) and found["data"]:
        first = found["data"][0]
        model = first.get("id") if isinstance(first, dict) else None
    return Server(is_tgi=False, model=model, facts={"model_id": model} if model else {})


def choose_call(
    target: Target, server: Server, api: str, model: str | None, ignore_eos: bool, timeout_s: float
) -> ApiCall:
    """The API to use, after one short request has shown that it works. Raises `StartError` if none does."""
    if api != "auto":
        choices = [api]
    elif server.is_tgi and not ignore_eos:
        choices = ["generate"]
    else:
        choices = ["completions", "chat"]
    problem = ""
    for choice in choices:
        call = ApiCall(api=choice, model=None if choice == "generate" else model or server.model, ignore_eos=ignore_eos)
        problem = try_call(target, call, timeout_s)
        if problem is None or problem.startswith(_NOT_FATAL):
            return call
        if not problem.startswith(("HTTP 404", "HTTP 405")):
            break
    raise StartError(_explain(problem, target, choices))


def try_call(target: Target, call: ApiCall, timeout_s: float) -> str | None:
    """What went wrong with one short request; None if nothing did."""
    ended: list[Exchange] = []
    client = Client(target.address, call.read_event(), timeout_s, ended.append)
    try:
        client.send(Exchange(0, target.frame(call.api, call.body("Hello", 2)), time.monotonic()))
        while not ended:
            client.poll(0.5)
    finally:
        client.close()
    return ended[0].error


def _explain(problem: str, target: Target, choices: list[str]) -> str:
    paths = " nor ".join(target.base + PATHS[choice] for choice in choices)
    if problem.startswith("HTTP 401") or problem.startswith("HTTP 403"):
        return f"the server refuses the key ({problem}): give the right one with --api-key or API_KEY"
    if problem.startswith(("HTTP 404", "HTTP 405")):
        return f"there is no {paths} at {target.url} ({problem}): check --url, or choose another --api"
    return f"a first request to {target.base}{PATHS[choices[0]]} failed: {problem}"
