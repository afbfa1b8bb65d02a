"""langchain-openai: text, a stream, bound tools, and typed answers by each of its methods."""

import asyncio
import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

url, question = sys.argv[1:]
settings = {"model": "tgi", "base_url": url + "/v1", "api_key": "unused", "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(max_tokens=12, **settings)
longer = ChatOpenAI(max_tokens=60, **settings)


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"Sunny in {city}"


async def ask() -> str:
    return "".join([piece.text async for piece in chat.astream(question)])


weather = longer.bind_tools([get_weather], tool_choice="required")
asked = HumanMessage("What is the weather in Paris?")
called = weather.invoke([asked])
gathered = None
for chunk in weather.stream([asked]):
    gathered = chunk if gathered is None else gathered + chunk
result = ToolMessage(get_weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"])
answers = {
    "texts": [chat.invoke(question).text, "".join(piece.text for piece in chat.stream(question)), asyncio.run(ask())],
    "tokens": chat.invoke(question).usage_metadata["output_tokens"],
    "calls": [[call["name"], call["args"]] for call in (*called.tool_calls, *gathered.tool_calls)],
    "after": longer.invoke([asked, called, result]).text,
    "completion": OpenAI(max_tokens=4, **settings).invoke("Count: one, two,"),
    "people": {
        method: longer.with_structured_output(Person, method=method)
        .invoke("Anna is 31. Describe her as JSON.")
        .model_dump()
        for method in ("function_calling", "json_schema")
    },
}
print(json.dumps(answers))
