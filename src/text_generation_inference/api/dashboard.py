"""The events of the page at `/dashboard`. What is in them is `live`'s."""

import asyncio

from text_generation_inference.api.bodies import ErrorResponse
from text_generation_inference.api.call import Call
from text_generation_inference.api.http import Response, frame, json_response
from text_generation_inference.api.live import PERIOD_S, LiveStart
from text_generation_inference.api.metrics import DURATION_BOUNDS
from text_generation_inference.errors import OverloadedError
from text_generation_inference.version import __version__


async def events(call: Call) -> None:
    """A stream that ends when the client leaves, or the server stops."""
    service, request = call.service, call.request
    await request.read_body()  # of none: from here on it is known when the client leaves
    if request.method == "HEAD":
        await call.connection.respond(Response(200, content_type="text/event-stream"))
        return
    try:
        listener = service.live.join()
    except OverloadedError as error:  # no generation was refused: it does not count as one
        refusal = ErrorResponse(str(error), "overloaded")
        await call.connection.respond(json_response(refusal, 429, {"retry-after": "10"}))
        return
    try:
        await call.connection.start_events({"x-accel-buffering": "no"})
        await call.connection.write(frame(_start(call)))
        while (event := await listener.next()) is not None:
            await call.connection.write(event)
        await call.connection.end_events()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not request.gone or task is None:
            raise
        task.uncancel()  # closing a page is no failure
    finally:
        service.live.leave(listener)


def _start(call: Call) -> LiveStart:
    config, facts = call.service.config, call.service.facts
    return LiveStart(
        call.service.model_name,
        __version__,
        config.num_shard or 1,
        facts.max_input_tokens,
        facts.max_total_tokens,
        config.max_concurrent_requests,
        DURATION_BOUNDS,
        PERIOD_S,
    )
