"""`/v1/chat/completions`.

Level 8. `chat_prompt` plans, `chat_answer` and `chat_stream` answer. Tool calls are read from the model's own format; a
grammar forces them only where the caller demands a call.
"""

import secrets
import time

import msgspec

from tgi.api.call import Call
from tgi.api.chat_answer import Chat, whole_choice
from tgi.api.chat_prompt import plan_chat
from tgi.api.chat_stream import stream_chat
from tgi.api.choices import body_model, start_choices, take_all, usage_of
from tgi.api.errors import decode_body
from tgi.api.generation import Generation
from tgi.api.http import json_response
from tgi.api.openai_bodies import ChatCompletion, ChatCompletionComplete, ChatRequest
from tgi.api.openai_sampling import num_choices
from tgi.api.service import Permit

_decode = msgspec.json.Decoder(ChatRequest).decode


async def chat_completions(call: Call) -> None:
    await answer_chat(call, decode_body(_decode, await call.request.read_json()))


async def answer_chat(call: Call, body: ChatRequest) -> None:
    service = call.service
    service.metrics.count_request()
    count = num_choices(body, service.config)
    with service.admit(count) as permit:
        chat = await _start(call, body, count, permit)
        if body.stream:
            await stream_chat(call, chat)
            return
        choices: list[ChatCompletionComplete] = []
        outcomes = await take_all(chat.generations)
        for index, (generation, pieces) in enumerate(zip(chat.generations, outcomes, strict=True)):
            choices.append(whole_choice(index, chat, generation, pieces))
            call.succeed(generation)
    first = chat.generations[0]
    assert first.timings is not None
    usage = usage_of(chat.generations)
    answer = ChatCompletion(chat.id, chat.created, chat.model, service.fingerprint, choices, usage)
    headers = call.timing_headers(len(chat.plan.prompt), first.input_length, first.timings)
    await call.connection.respond(json_response(answer, headers=headers))


async def _start(call: Call, body: ChatRequest, count: int, permit: Permit) -> Chat:
    """Everything up to the engine. What is wrong with the request is raised here, before any answer begins."""
    service = call.service
    plan = await service.run_beside(
        lambda: plan_chat(body, service.config, service.template, service.tool_format), call.request.is_long
    )
    request = await service.prepare(
        plan.prompt, plan.params, add_special_tokens=False, truncate=body.truncate, grammar=plan.grammar
    )
    generations: list[Generation] = []
    keeps_special = plan.tool_format is not None and plan.tool_format.keeps_special_tokens
    start_choices(call, request, permit, count, generations, keeps_special)
    model = body_model(service, body.model)
    number = "chatcmpl-" + secrets.token_hex(12)
    return Chat(body, plan, model, service.tokenizer, generations, number, int(time.time()))
