"""The ASGI application: which route a request belongs to, who may call it, and what becomes of failures.

The table is in `routes`. Errors have the shape of the API that was called (`error_shapes`).
"""

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any

from text_generation_inference.api.call import Call
from text_generation_inference.api.callers import caller_of, current_caller
from text_generation_inference.api.connections import BodyBudget
from text_generation_inference.api.error_shapes import ErrorShape, shape_of
from text_generation_inference.api.errors import InternalError, decode_error
from text_generation_inference.api.http import (
    ClientGoneError,
    Connection,
    HttpError,
    HttpRequest,
    Receive,
    Response,
    Send,
)
from text_generation_inference.api.logs import fields
from text_generation_inference.api.refusals import log_refusal
from text_generation_inference.api.routes import ADMIN_ROUTES, OLLAMA_ROUTES, ROUTES, Route, cloud_routes
from text_generation_inference.api.service import Service
from text_generation_inference.api.tenants import current_key, key_of
from text_generation_inference.errors import TgiError, ValidationError
from text_generation_inference.text.panics import reraise_unless_failure

log = logging.getLogger("text_generation_inference.api")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class App:
    """Answers requests once there is a `Service`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._bodies = BodyBudget(service.payload_limit, service.metrics)
        config = service.config
        routes = [*ROUTES, *ADMIN_ROUTES, *cloud_routes(config), *(OLLAMA_ROUTES if config.ollama_api else [])]
        self._exact = {(route.method, route.path): route for route in routes if "{" not in route.path}
        self._patterns = [(_pattern(route.path), route) for route in routes if "{" in route.path]
        self._key = config.api_key.encode() if config.api_key else None
        self._origins = frozenset(config.cors_allow_origin)
        self._calls: set[Call] = set()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = HttpRequest(scope, receive, self.service.payload_limit, self._bodies)
        given_id = request.headers.get("x-request-id", "")
        request.id = given_id if _REQUEST_ID.fullmatch(given_id) else secrets.token_hex(16)
        current_key.set(key_of(request.headers))
        current_caller.set(caller_of(scope, request.headers, self.service.config.client_header))
        headers = [(b"x-request-id", request.id.encode()), *self._cors_headers(request)]
        if request.path.startswith("/v1/messages"):
            headers.append((b"request-id", request.id.encode()))  # Anthropic's name of it
        connection = Connection(send, headers)
        if request.method == "OPTIONS" and "access-control-request-method" in request.headers:
            await connection.respond(Response(200, headers=_PREFLIGHT))
            return
        await self._dispatch(request, connection)
        if log.isEnabledFor(logging.DEBUG):
            extra = fields(request_id=request.id, status=connection.status)
            log.debug("%s %s", request.method, request.path, extra=extra)

    # -- finding the route -----------------------------------------------------------------------------------------

    async def _dispatch(self, request: HttpRequest, connection: Connection) -> None:
        shape = shape_of(request.path, request.id)
        route = self._find(request)
        if route is None:
            response = self._not_found(request, shape)
            log_refusal(request.id, "unknown", response.status)
            await connection.respond(response)
        elif not route.public and not self._may(request):
            log_refusal(request.id, route.path, 401, "authorization")
            await connection.respond(_unauthorized(shape))
        else:
            with self.service.tracer.request_span(route.name, request.headers) as span:
                call = Call(self.service, request, connection, span, route.name, route.path)
                self._calls.add(call)
                try:
                    await self._run(call, route, shape)
                finally:
                    self._calls.discard(call)

    def _find(self, request: HttpRequest) -> Route | None:
        method = "GET" if request.method == "HEAD" else request.method
        route = self._exact.get((method, request.path))
        if route is not None:
            return route
        for pattern, candidate in self._patterns:
            match = pattern.fullmatch(request.path) if candidate.method == method else None
            if match:
                request.variables = match.groups()
                return candidate
        return None

    def _not_found(self, request: HttpRequest, shape: ErrorShape) -> Response:
        allowed = [method for method, path in self._exact if path == request.path]
        allowed += [route.method for pattern, route in self._patterns if pattern.fullmatch(request.path)]
        if allowed:
            headers = {"allow": ",".join(sorted({*allowed, *(["HEAD"] if "GET" in allowed else [])}))}
            response = shape.plain(405, f"{request.method} is not allowed on {request.path}")
            response.headers = headers
            return response
        return shape.plain(404, f"Unknown request URL: {request.method} {request.path}", code="unknown_url")

    def _may(self, request: HttpRequest) -> bool:
        if self._key is None:
            return True
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", "")]  # Anthropic's clients; some of them send both
        if scheme.lower() == "bearer":
            given.append(key)
        return any(hmac.compare_digest(key.encode("latin-1"), self._key) for key in given)

    def _cors_headers(self, request: HttpRequest) -> list[tuple[bytes, bytes]]:
        if not self._origins:
            return [(b"access-control-allow-origin", b"*")]
        origin = request.headers.get("origin", "")
        headers = [(b"vary", b"origin")]
        if origin in self._origins:
            headers.append((b"access-control-allow-origin", origin.encode("latin-1")))
        return headers

    # -- running it ------------------------------------------------------------------------------------------------

    async def _run(self, call: Call, route: Route, shape: ErrorShape) -> None:
        connection, request = call.connection, call.request
        task = asyncio.current_task()
        assert task is not None
        request.watch(task, lambda: connection.complete)
        try:
            await route.endpoint(call)
        except TgiError as error:
            response = shape.failure(error)
            call.fail(error, response.status)
            await self._answer(connection, response)
        except (HttpError, RecursionError) as error:  # or nested so deeply that decoding just managed
            refused = error if isinstance(error, HttpError) else decode_error(error)
            response = shape.refusal(refused)
            call.refuse(response.status, refused.field)
            if connection.started and not connection.complete:  # only what is told back can be too deep this late
                await connection.write(shape.event(ValidationError(refused.text)))
            await self._answer(connection, response)
        except ClientGoneError:
            call.drop()
        except asyncio.CancelledError:
            if not request.gone:
                raise
            task.uncancel()
            call.drop()
        except BaseException as error:
            reraise_unless_failure(error)
            log.exception("a route failed", extra=fields(request_id=request.id, route=route.path))
            call.span.fail("internal")
            error = InternalError()
            if connection.started and not connection.complete:
                await connection.write(shape.event(error))
            await self._answer(connection, shape.failure(error))
        finally:
            request.stop_watching()
            request.free_body()

    async def _answer(self, connection: Connection, response: Response) -> None:
        if not connection.started:
            await connection.respond(response)
        elif not connection.complete:
            await connection.end_events()

    def keep_alive(self, now: float, silence_s: float) -> None:
        """Wake the streams that have sent nothing for that long; they send a comment. Silence tells clients the truth
        about an engine that does not respond."""
        for call in self._calls:
            if not call.connection.complete and now - call.connection.last_write >= silence_s:
                unfinished = [
                    generation for generation in call.streams if not generation.finished and generation.engine_responds
                ]
                if unfinished:  # one is enough: they share the connection
                    unfinished[0].wake()


_PREFLIGHT = {
    "access-control-allow-methods": "GET,POST,DELETE",
    "access-control-allow-headers": "content-type,authorization,x-api-key,anthropic-version,anthropic-beta,"
    "anthropic-dangerous-direct-browser-access",
    "vary": "origin, access-control-request-method, access-control-request-headers",
}


def _unauthorized(shape: ErrorShape) -> Response:
    response = shape.plain(401, "Incorrect or missing API key", code="invalid_api_key")
    response.headers = {"www-authenticate": "Bearer"}
    return response


def _pattern(path: str) -> re.Pattern[str]:
    """What a path with `{name}` (one part) or `{name*}` (the rest) stands for."""
    parts = re.split(r"\{\w+(\*?)\}", path)
    texts = [re.escape(text) for text in parts[::2]]
    places = ["(.*)" if star else "([^/]+)" for star in parts[1::2]]
    return re.compile("".join(text + place for text, place in zip(texts, [*places, ""], strict=True)))
