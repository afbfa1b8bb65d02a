"""openai's Responses: text, streams whose events are of its own types, tools, typed answers, stored answers, errors."""

import json
import sys
from typing import Any, get_args

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field

url, question = sys.argv[1:]
client = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
greedy: dict[str, Any] = {"model": "tgi", "temperature": 0, "max_output_tokens": 12}
KINDS = get_args(get_args(ResponseStreamEvent)[0])


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def check(events: list[Any]) -> list[str]:
    """Each event strictly by the client's own types, numbered without gaps; their types in order."""
    for event in events:
        assert type(event) in KINDS, event.type
        type(event).model_validate_json(event.model_dump_json(), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return [event.type for event in events]


whole = client.responses.create(input=question, **greedy)
assert isinstance(whole, Response)
order = check(list(client.responses.create(input=question, stream=True, **greedy)))
with client.responses.stream(input=question, **(greedy | {"max_output_tokens": 200})) as stream:
    pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    final = stream.get_final_response()

tool: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 16}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
more: dict[str, Any] = greedy | {"max_output_tokens": 60, "tools": [tool]}
weather: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
called = client.responses.create(input=weather, tool_choice="required", **more)
named: Any = {"type": "function", "name": "get_weather"}
tool_events = list(client.responses.create(input=weather, tool_choice=named, stream=True, **more))
tool_order = check(tool_events)
calls = [item for item in called.output if item.type == "function_call"]
result: Any = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "Sunny in Paris"}
by_hand = client.responses.create(input=[*weather, *called.output, result], **more)
by_id = client.responses.create(input=[result], previous_response_id=called.id, **more)

asked: Any = [{"role": "user", "content": "Anna is 31 years old. Describe her as JSON."}]
parsed = client.responses.parse(input=asked, text_format=Person, **(greedy | {"max_output_tokens": 60}))

same = client.responses.retrieve(whole.id)
client.responses.delete(whole.id)
refused = []
unstored = client.responses.create(input=question, store=False, **greedy)
for call in (
    lambda: client.responses.retrieve(whole.id),
    lambda: client.responses.create(input="x", previous_response_id=unstored.id, **greedy),
    lambda: client.responses.create(input="x", **(greedy | {"max_output_tokens": 0})),
):
    try:
        call()
        raise AssertionError("was answered")
    except openai.APIStatusError as error:
        refused.append([error.status_code, error.param, error.code])

print(
    json.dumps(
        {
            "texts": [whole.output_text, unstored.output_text],
            "ends": [whole.status, whole.incomplete_details and whole.incomplete_details.reason, final.status],
            "joined": ["".join(pieces), final.output_text],
            "tokens": [whole.usage.output_tokens, whole.usage.total_tokens - whole.usage.input_tokens],
            "order": order,
            "tool_order": tool_order,
            "calls": [[item.name, json.loads(item.arguments)] for item in calls],
            "streamed_call": json.loads(tool_events[-1].response.output[0].arguments),
            "after": [by_hand.output_text, by_id.output_text],
            "after_tokens": [by_hand.usage.input_tokens, by_id.usage.input_tokens],
            "person": parsed.output_parsed.model_dump(),
            "same": same.model_dump() == whole.model_dump(),
            "stores": [whole.store, unstored.store],
            "refused": refused,
        }
    )
)
