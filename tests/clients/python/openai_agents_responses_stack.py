"""openai-agents with its default model, the Responses API: text, a stream, a tool, an answer continued by its id."""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

url, question = sys.argv[1:]
set_tracing_disabled(True)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"Sunny in {city}"


async def run() -> dict:
    async with AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        model = OpenAIResponsesModel("tgi", client)
        greedy = ModelSettings(temperature=0, max_tokens=200)  # a stream that is cut off is an error to it
        plain = Agent("plain", model=model, model_settings=greedy)
        streamed = Runner.run_streamed(plain, question)
        pieces = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        first = await Runner.run(plain, question)
        second = await Runner.run(plain, question, previous_response_id=first.last_response_id)
        caller = Agent(
            "caller",
            model=model,
            tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(temperature=0, max_tokens=60, tool_choice="required"),
        )
        called = await Runner.run(caller, "What is the weather in Paris?")
        settings = ModelSettings(temperature=0, max_tokens=60)
        typed = Agent("typed", model=model, output_type=Person, model_settings=settings)
        return {
            "texts": [first.final_output, "".join(pieces)],
            "longer": second.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.input_tokens + 12,
            "called": called.final_output,
            "person": (await Runner.run(typed, "Anna is 31 years old. Describe her.")).final_output.model_dump(),
        }


print(json.dumps(asyncio.run(run())))
