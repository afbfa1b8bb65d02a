"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`, over the chat path."""

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_events import stream_answer, stream_events
from text_generation_inference.api.chat_prompt import render_chat
from text_generation_inference.api.chat_run import start_chat
from text_generation_inference.api.choices import num_items
from text_generation_inference.api.error_shapes import shape_of
from text_generation_inference.api.http import json_response
from text_generation_inference.api.messages_answer import MessagesWriter, messages_answer
from text_generation_inference.api.messages_bodies import CountTokensRequest, MessagesRequest, TokenCount
from text_generation_inference.api.messages_request import chat_of_messages
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.api.tokens import count_tokens
from text_generation_inference.api.unknown_fields import BodyForm

_MESSAGES, _COUNT = BodyForm(MessagesRequest), BodyForm(CountTokensRequest)


async def messages(call: Call) -> None:
    service = call.service
    body = await call.read_body(_MESSAGES)
    service.metrics.count_request()
    with service.admit() as permit:
        chat = await start_chat(call, await _as_chat(call, body), 1, permit, prefix="msg_")
        generation, hides_cached = chat.generations[0], service.config.hide_cached_tokens
        if body.stream:
            writer = MessagesWriter(chat, hides_cached)
            shape = shape_of(call.request.path, call.request.id)
            await stream_events(call, chat, lambda: stream_answer(call, chat, generation, writer), shape.event)
            return
        pieces = await generation.take_all()
        answer = await service.build(lambda: messages_answer(chat, pieces, hides_cached), num_items(chat.generations))
        call.succeed(generation)
    assert generation.timings is not None
    headers = call.timing_headers(len(chat.plan.prompt), generation.input_length, generation.timings)
    await call.connection.respond(json_response(answer, headers=headers))


async def count(call: Call) -> None:
    """The tokens of a prompt. Nothing of it waits behind generations."""
    body = await call.read_body(_COUNT)
    with call.service.admit() as permit:
        prompt = await render_chat(call.service, await _as_chat(call, body), call.request.is_long)
        found = await count_tokens(call.service, prompt.pictures or prompt.text, "messages", permit)
    await call.connection.respond(json_response(TokenCount(found)))


async def _as_chat(call: Call, body: CountTokensRequest) -> ChatRequest:
    service, left_out = call.service, list[str]()
    takes_later, words = service.template.takes_later_system, service.words
    chat = await service.run_beside(
        lambda: chat_of_messages(body, takes_later, words, left_out.append), call.request.is_long
    )
    service.unknown_fields.note(left_out)
    return chat
