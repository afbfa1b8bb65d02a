"""`/v1/chat/completions`.

`chat_prompt` plans, `chat_run` starts, `chat_answer` and `chat_stream` answer. Tool calls are read from the model's own
format; a grammar forces them only where the caller demands a call.
"""

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_answer import whole_choice
from text_generation_inference.api.chat_run import start_chat
from text_generation_inference.api.chat_stream import stream_chat
from text_generation_inference.api.choices import num_items, rank_choices, take_all, usage_of
from text_generation_inference.api.http import json_response
from text_generation_inference.api.openai_bodies import ChatCompletion, ChatRequest
from text_generation_inference.api.openai_sampling import num_candidates, num_choices
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
        chat = await start_chat(call, body, candidates, permit)
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
