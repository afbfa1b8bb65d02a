"""anthropic: text, streams whose events are of its own types, tools, a typed answer, tokens counted, and errors."""

import json
import sys
from typing import Any

import anthropic
from anthropic import types
from pydantic import BaseModel, Field, TypeAdapter

url, question = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
asked: dict[str, Any] = {"model": "claude-haiku", "messages": [{"role": "user", "content": question}]}
# Newer clients have no `temperature` in their signature; older ones have.
greedy: dict[str, Any] = {"max_tokens": 12, "extra_body": {"temperature": 0}}
EVENTS = TypeAdapter(types.RawMessageStreamEvent)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def check(events: list[Any]) -> list[str]:
    """Each event strictly by the client's own types; their types in order."""
    for event in events:
        EVENTS.validate_python(event.model_dump(), strict=True)
        assert not event.model_extra, event
    return [event.type for event in events]


whole = client.messages.create(**asked, **greedy)
assert isinstance(whole, types.Message) and whole.usage.input_tokens + whole.usage.cache_read_input_tokens > 0
with client.messages.create(**asked, **greedy, stream=True) as raw:
    order = check(list(raw))
with client.messages.stream(**asked, **greedy) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
stopped = client.messages.create(**asked, max_tokens=12, stop_sequences=["o"], extra_body={"temperature": 0})
counted = client.messages.count_tokens(**asked)

tool = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 16}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
weather: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
tools: dict[str, Any] = {"model": "m", "tools": [tool], "max_tokens": 60, "extra_body": {"temperature": 0}}
called = client.messages.create(messages=weather, tool_choice={"type": "any"}, **tools)
named: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
with client.messages.stream(messages=weather, tool_choice=named, **tools) as stream:
    tool_events = check([event for event in stream if event.type in ("content_block_delta", "message_stop")])
    calling = stream.get_final_message()
use = next(block for block in called.content if block.type == "tool_use")
weather += [
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Sunny in Paris"}]},
]
after = client.messages.create(messages=weather, **tools)

schema: Any = {"type": "json_schema", "schema": Person.model_json_schema() | {"additionalProperties": False}}
asked["messages"][0]["content"] = "Anna is 31 years old. Describe her as JSON."
typed = client.messages.create(
    **asked, max_tokens=60, extra_body={"temperature": 0, "output_config": {"format": schema}}
)
try:
    client.messages.create(model="m", max_tokens=0, messages=[{"role": "user", "content": "x"}])
    raise AssertionError("was answered")
except anthropic.BadRequestError as error:
    refused = {"status": error.status_code, "body": error.body, "id": error.request_id}

print(
    json.dumps(
        {
            "texts": [whole.content[0].text, streamed, final.content[0].text],
            "ends": [whole.stop_reason, final.stop_reason],
            "tokens": [whole.usage.output_tokens, final.usage.output_tokens],
            "model": whole.model,
            "order": order,
            "stopped": [stopped.stop_reason, stopped.stop_sequence, [block.text for block in stopped.content]],
            "counted": [
                counted.input_tokens,
                whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
                final.usage.input_tokens + final.usage.cache_read_input_tokens,
            ],
            "calls": [
                [block.name, block.input]
                for message in (called, calling)
                for block in message.content
                if block.type == "tool_use"
            ],
            "tool_ends": [called.stop_reason, calling.stop_reason],
            "tool_events": tool_events[-1],
            "after": after.stop_reason,
            "person": Person.model_validate_json(typed.content[0].text).model_dump(),
            "refused": refused,
        }
    )
)
