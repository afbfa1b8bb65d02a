"""llama-index through its class for servers like OpenAI's."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

url, question = sys.argv[1:]
settings = {"model": "tgi", "api_base": url + "/v1", "api_key": "unused", "temperature": 0.0, "context_window": 1024}
model = OpenAILike(is_chat_model=True, is_function_calling_model=True, max_tokens=12, **settings)
longer = OpenAILike(is_chat_model=True, is_function_calling_model=True, max_tokens=60, **settings)
messages = [ChatMessage(role="user", content=question)]


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"Sunny in {city}"


tool = FunctionTool.from_defaults(get_weather)
called = longer.predict_and_call([tool], user_msg="What is the weather in Paris?", tool_required=True)
person = longer.as_structured_llm(Person).complete("Describe a person.").raw
plain = OpenAILike(is_chat_model=False, max_tokens=4, **settings)
answers = {
    "texts": [model.chat(messages).message.content, "".join(piece.delta for piece in model.stream_chat(messages))],
    "calls": [[source.tool_name, source.raw_input["kwargs"], source.content] for source in called.sources],
    "person": person.model_dump(),
    "completion": plain.complete("Count: one, two,").text,
}
print(json.dumps(answers))
