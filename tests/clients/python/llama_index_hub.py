"""llama-index through huggingface_hub, which its documentation recommends for TGI."""

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.huggingface_api import HuggingFaceInferenceAPI

url, question = sys.argv[1:]
settings = {"model": url, "task": "conversational", "provider": "hf-inference", "temperature": 0.001}
model = HuggingFaceInferenceAPI(num_output=12, **settings)
longer = HuggingFaceInferenceAPI(num_output=60, **settings)
messages = [ChatMessage(role="user", content=question)]


def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"Sunny in {city}"


async def ask() -> list[str]:
    whole = (await model.achat(messages)).message.content  # first: huggingface_hub closes its client after a stream
    return [whole, "".join([piece.delta async for piece in await model.astream_chat(messages)])]


tool = FunctionTool.from_defaults(get_weather)
called = longer.chat_with_tools([tool], user_msg="What is the weather in Paris?", tool_required=True)
plain = HuggingFaceInferenceAPI(task="text-generation", model=url, temperature=0.001, num_output=4)
answers = {
    "knows": model.context_window,
    "texts": [
        model.chat(messages).message.content,
        "".join(piece.delta for piece in model.stream_chat(messages)),
        model.complete(question).text,
        *asyncio.run(ask()),
    ],
    "calls": [
        [call.function.name, json.loads(call.function.arguments)]
        for call in called.message.additional_kwargs["tool_calls"]
    ],
    "completion": plain.complete("Count: one, two,").text,
    "streamed": "".join(piece.delta for piece in plain.stream_complete("Count: one, two,")),
}
print(json.dumps(answers))
