"""openai-agents: text, a stream, a tool that is called, and a typed answer of an agent with a tool."""

import asyncio
import json
import sys

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

url, question = sys.argv[1:]
set_tracing_disabled(True)
cities: list[str] = []


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city"""
    cities.append(city)
    return f"Sunny in {city}"


async def run() -> dict:
    async with AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        model = OpenAIChatCompletionsModel("tgi", client)
        greedy = ModelSettings(temperature=0, max_tokens=12)
        plain = Agent("plain", model=model, model_settings=greedy)
        streamed = Runner.run_streamed(plain, question)
        pieces = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        more = ModelSettings(temperature=0, max_tokens=60)
        caller = Agent(
            "caller",
            model=model,
            tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(temperature=0, max_tokens=60, tool_choice="required"),
        )
        typed = Agent("typed", model=model, tools=[get_weather], output_type=Person, model_settings=more)
        try:
            person = (
                await Runner.run(typed, "Anna is 31 years old. Describe her.", max_turns=1)
            ).final_output.model_dump()
        except MaxTurnsExceeded:  # it called the tool
            person = None
        return {
            "texts": [(await Runner.run(plain, question)).final_output, "".join(pieces)],
            "called": (await Runner.run(caller, "What is the weather in Paris?")).final_output,
            "cities": cities,
            "person": person,
        }


print(json.dumps(asyncio.run(run())))
