"""llama-index as TGI's users had it: the package that reads /info and speaks through TGI's own client."""

import asyncio
import json
import sys
from collections.abc import Iterator

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.text_generation_inference import TextGenerationInference

url, question = sys.argv[1:]
model = TextGenerationInference(model_url=url, temperature=0.0, max_tokens=12)
messages = [ChatMessage(role="user", content=question)]


def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"Sunny in {city}"


def read(stream: Iterator) -> str:
    """All of a stream. TGI's old client does not know `[DONE]`, with which TGI 3 ends one: everything has come by then."""
    text = ""
    try:
        for piece in stream:
            text += piece.delta
    except json.JSONDecodeError as error:
        assert error.doc.strip() == "[DONE]", error.doc
    return text


async def ask() -> list[str]:
    text = ""
    try:
        async for piece in await model.astream_chat(messages):
            text += piece.delta
    except json.JSONDecodeError as error:
        assert error.doc.strip() == "[DONE]", error.doc
    return [(await model.achat(messages)).message.content, text]


called = model.chat_with_tools(
    [FunctionTool.from_defaults(get_weather)],
    user_msg="What is the weather in Paris?",
    tool_choice="get_weather",
    max_tokens=60,
)
answers = {
    "knows": [model.metadata.is_function_calling_model, model.metadata.context_window, model.metadata.model_name],
    "texts": [
        model.chat(messages).message.content,
        read(model.stream_chat(messages)),
        model.complete(question).text,
        read(model.stream_complete(question)),
        *asyncio.run(ask()),
    ],
    "calls": called.message.additional_kwargs["tool_calls"],
}
print(json.dumps(answers))
