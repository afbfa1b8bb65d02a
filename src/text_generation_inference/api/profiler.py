"""Routes for an administrator: start and stop a profile of the engine's steps.

They have a key of their own; without one set there is nobody who may call them.
"""

import hmac
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from text_generation_inference.api.call import Call
from text_generation_inference.api.errors import UnavailableError, decode_body
from text_generation_inference.api.http import Response, json_response
from text_generation_inference.errors import TgiError, ValidationError
from text_generation_inference.types import Profiled

OFF = "profiles are off: set ADMIN_API_KEY or --admin-api-key, and send that key as a bearer token"


class StartProfile(msgspec.Struct):
    """Body of `/start_profile`; all of it may be left out."""

    num_steps: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None  # it ends by itself after so many
    record_shapes: bool | None = None
    replica: Annotated[int, msgspec.Meta(ge=0)] = 0


class StopProfile(msgspec.Struct):
    """Body of `/stop_profile`; all of it may be left out."""

    replica: Annotated[int, msgspec.Meta(ge=0)] = 0


class ProfileStarted(msgspec.Struct):
    folder: str  # that the trace will be in
    replica: int | UnsetType = UNSET  # of several


class ProfileStopped(msgspec.Struct):
    path: str  # of the trace
    replica: int | UnsetType = UNSET


class ProfileOffError(TgiError):
    status = 404
    error_type = "profiler"


class ProfileStateError(TgiError):
    """A profile is being taken already, or none is."""

    status = 409
    error_type = "profiler"


_decode_start = msgspec.json.Decoder(StartProfile).decode
_decode_stop = msgspec.json.Decoder(StopProfile).decode


async def start(call: Call) -> None:
    if not await _may(call):
        return
    body = decode_body(_decode_start, await call.request.read_body() or b"{}")
    done = await _ask(call, body.replica, True, body.num_steps, body.record_shapes)
    await call.connection.respond(json_response(ProfileStarted(done.path, _told(call, body.replica))))


async def stop(call: Call) -> None:
    if not await _may(call):
        return
    content = await call.request.read_body()
    is_read = content and call.service.engines.are_several  # with one engine there is nothing to say
    body = decode_body(_decode_stop, content if is_read else b"{}")
    done = await _ask(call, body.replica, False)
    await call.connection.respond(json_response(ProfileStopped(done.path, _told(call, body.replica))))


async def _may(call: Call) -> bool:
    expected = call.service.config.admin_api_key
    if not expected:
        raise ProfileOffError(OFF)
    scheme, _, key = call.request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(key.encode("latin-1"), expected.encode()):
        return True
    call.refuse(401, "authorization")
    await call.connection.respond(Response(401, headers={"www-authenticate": "Bearer"}))
    return False


def _told(call: Call, replica: int) -> int | UnsetType:
    return replica if call.service.engines.are_several else UNSET


async def _ask(
    call: Call, replica: int, start: bool, num_steps: int | None = None, record_shapes: bool | None = None
) -> Profiled:
    links = call.service.engines.links
    if replica >= len(links):
        raise ValidationError(f"`replica` must be less than {len(links)}. Given: {replica}")
    link = links[replica]
    if link.client is None:
        raise UnavailableError(link.unavailable)
    done = await link.client.profile(start, num_steps, record_shapes)
    if done.error is not None:
        raise ProfileStateError(done.error)
    return done
