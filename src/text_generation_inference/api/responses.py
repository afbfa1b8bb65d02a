"""OpenAI's Responses API: `/v1/responses`, over the chat path; stored responses by their id, and tokens counted."""

from collections.abc import Callable
from typing import Any

import msgspec

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_events import stream_answer, stream_events
from text_generation_inference.api.chat_prompt import render_chat
from text_generation_inference.api.chat_run import start_chat
from text_generation_inference.api.choices import num_items
from text_generation_inference.api.http import Response, json_response
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.api.responses_answer import RunningResponse, whole_response
from text_generation_inference.api.responses_bodies import (
    DeletedResponse,
    InputTokenCount,
    ResponsesAnswer,
    ResponsesRequest,
)
from text_generation_inference.api.responses_request import chat_of_response, items_of
from text_generation_inference.api.responses_store import MAX_ENTRY_BYTES
from text_generation_inference.api.responses_stream import ResponsesWriter
from text_generation_inference.api.service import LONG_TEXT
from text_generation_inference.api.tokens import count_tokens
from text_generation_inference.api.unknown_fields import BodyForm

_FORM = BodyForm(ResponsesRequest)
Keep = Callable[[ResponsesAnswer], None]


async def create(call: Call) -> None:
    service = call.service
    body = await call.read_body(_FORM)
    service.metrics.count_request()
    with service.admit() as permit:
        chat_body, keep = await _as_chat(call, body)
        chat = await start_chat(call, chat_body, 1, permit, prefix="resp_", field="input")
        running = RunningResponse(chat, body, service.config.hide_cached_tokens, keep is not None, keep or _forget)
        generation = running.generation
        if body.stream:
            writer = ResponsesWriter(running, call.request.path)
            await stream_events(call, chat, lambda: stream_answer(call, chat, generation, writer), writer.fail)
            return
        pieces = await generation.take_all()
        answer = await service.build(lambda: whole_response(running, pieces), num_items(chat.generations))
        running.keep(answer)
        call.succeed(generation)
    assert generation.timings is not None
    headers = call.timing_headers(len(chat.plan.prompt), generation.input_length, generation.timings)
    await call.connection.respond(json_response(answer, headers=headers))


async def count(call: Call) -> None:
    """The tokens of a prompt. Nothing of it waits behind generations."""
    body = await call.read_body(_FORM)
    with call.service.admit() as permit:
        chat_body, _ = await _as_chat(call, body)
        prompt = await render_chat(call.service, chat_body, call.request.is_long)
        found = await count_tokens(call.service, prompt.pictures or prompt.text, "input", permit)
    await call.connection.respond(json_response(InputTokenCount(found)))


async def retrieve(call: Call) -> None:
    answer = call.service.responses.answer(call.request.variables[0])
    await call.connection.respond(Response(200, answer, "application/json"))


async def delete(call: Call) -> None:
    number = call.request.variables[0]
    call.service.responses.delete(number)
    await call.connection.respond(json_response(DeletedResponse(number, True)))


async def _as_chat(call: Call, body: ResponsesRequest) -> tuple[ChatRequest, Keep | None]:
    """The body of the chat route, and what stores the answer, if that is wanted and it is not too large."""
    service, left_out = call.service, list[str]()
    takes_later, words = service.template.takes_later_system, service.words
    stored = b"[]"
    if body.previous_response_id is not None:
        stored = service.responses.items(body.previous_response_id)
    items = items_of(body, service.responses.item, MAX_ENTRY_BYTES)
    wants = body.store is not False and service.responses.is_on

    def work() -> tuple[ChatRequest, bytes | None]:
        before = msgspec.json.decode(stored, type=list[dict[str, Any]])
        chat = chat_of_response(body, before, items, takes_later, words, left_out.append)
        history = msgspec.json.encode([*before, *items]) if wants else None
        return chat, history if history is not None and len(history) < MAX_ENTRY_BYTES else None

    chat, history = await service.run_beside(work, call.request.is_long or len(stored) > LONG_TEXT)
    service.unknown_fields.note(left_out)
    body.input = ""  # pictures in it may have megabytes
    return chat, None if history is None else _keeper(call, history)


def _keeper(call: Call, history: bytes) -> Keep:
    def keep(answer: ResponsesAnswer) -> None:
        output = {item.id: msgspec.json.encode(item) for item in answer.output}
        items = b"[" + b",".join([history[1:-1], *output.values()]) + b"]"
        answer.store = call.service.responses.put(answer.id, msgspec.json.encode(answer), items, output)

    return keep


def _forget(answer: ResponsesAnswer) -> None:
    """Nobody wants it stored."""
