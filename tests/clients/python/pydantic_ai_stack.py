"""pydantic-ai: text, a stream, and typed answers in both modes, and one of an agent that has a tool as well."""

import asyncio
import json
import sys
from contextlib import suppress

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits, capture_run_messages
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, question = sys.argv[1:]
model = OpenAIChatModel("tgi", provider=OpenAIProvider(base_url=url + "/v1", api_key="unused"))


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


async def stream() -> str:
    async with Agent(model, model_settings={"temperature": 0, "max_tokens": 12}).run_stream(question) as found:
        return "".join([piece async for piece in found.stream_text(delta=True)])


answers: dict = {"texts": [], "people": {}}
agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 12})
found = agent.run_sync(question)
answers["texts"] = [found.output, asyncio.run(stream())]
answers["tokens"] = found.usage.output_tokens
for mode in (ToolOutput, NativeOutput):
    typed = Agent(model, output_type=mode(Person), model_settings={"temperature": 0, "max_tokens": 60}, retries=0)
    answers["people"][mode.__name__] = typed.run_sync("Anna is 31 years old. Describe her.").output.model_dump()
both = Agent(model, output_type=NativeOutput(Person), model_settings={"temperature": 0, "max_tokens": 60})


@both.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"Sunny in {city}"


with capture_run_messages() as messages, suppress(UsageLimitExceeded):  # a call would want a second request
    both.run_sync("Anna is 31 years old. Describe her.", usage_limits=UsageLimits(request_limit=1))
(part,) = messages[1].parts
answers["both"] = [part.part_kind, part.args if part.part_kind == "tool-call" else part.content]
print(json.dumps(answers))
