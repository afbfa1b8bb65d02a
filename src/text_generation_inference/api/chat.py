"""`/v1/chat/completions`.

`chat_prompt` plans, `chat_answer` and `chat_stream` answer. Tool calls are read from the model's own format; a
grammar forces them only where the caller demands a call.
"""

import secrets
import time

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_answer import Chat, whole_choice
from text_generation_inference.api.chat_prompt import plan_chat
from text_generation_inference.api.chat_stream import stream_chat
from text_generation_inference.api.choices import body_model, num_items, rank_choices, start_choices, take_all, usage_of
from text_generation_inference.api.generation import Generation
from text_generation_inference.api.http import json_response
from text_generation_inference.api.openai_bodies import ChatCompletion, ChatRequest
from text_generation_inference.api.openai_sampling import num_candidates, num_choices, prompt_limit
from text_generation_inference.api.service import Permit
from text_generation_inference.api.thoughts import tells_thoughts
from text_generation_inference.api.unknown_fields import BodyForm

_FORM = BodyForm(ChatRequest)


async def chat_completions(call: Call) -> None:
    await answer_chat(call, await call.read_body(_FORM))


async def answer_chat(call: Call, body: ChatRequest) -> None:
    service = call.service
    service.metrics.count_request()
    count = num_choices(body, service.config)
    candidates = num_candidates(body, count)
    with service.admit(candidates) as permit:
        chat = await _start(call, body, candidates, permit)
        if body.stream:
            await stream_chat(call, chat)
            return
        outcomes = await take_all(chat.generations)
        ranked = rank_choices(chat.generations, count)
        choices = await service.build(
            lambda: [
                whole_choice(index, chat, chat.generations[chosen], outcomes[chosen])
                for index, chosen in enumerate(ranked)
            ],
            num_items(chat.generations),
        )
        for generation in chat.generations:
            call.succeed(generation)
    first = chat.generations[0]
    assert first.timings is not None
    usage = usage_of(service, chat.generations, thinks=chat.plan.reasoning is not None)
    answer = ChatCompletion(chat.id, chat.created, chat.model, service.fingerprint, choices, usage)
    headers = call.timing_headers(len(chat.plan.prompt), first.input_length, first.timings)
    await call.connection.respond(json_response(answer, headers=headers))


async def _start(call: Call, body: ChatRequest, count: int, permit: Permit) -> Chat:
    """Everything up to the engine. What is wrong with the request is raised here, before any answer begins."""
    service = call.service
    plan = await plan_chat(service, body, call.request.is_long)
    request = await service.prepare(
        plan.given,
        plan.params,
        add_special_tokens=bool(body.add_special_tokens),  # templates have those that are needed
        truncate=prompt_limit(body, service.facts.max_input_tokens),
        grammar=plan.grammar,
        cache_salt=body.cache_salt,
        permit=permit,
        field="messages",
    )
    if plan.pictures is not None and plan.pictures.sources:
        plan.pictures = None  # what they came from may have megabytes
        call.request.free_body()
    generations: list[Generation] = []
    start_choices(call, request, permit, count, generations, plan.open_text)
    model = body_model(service, body.model)
    number = "chatcmpl-" + secrets.token_hex(12)
    separates, includes = tells_thoughts(body, service.config), body.include_reasoning is not False
    created = int(time.time())
    return Chat(body, plan, model, service.tokenizer, generations, number, created, separates, includes)
