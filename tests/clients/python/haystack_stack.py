"""haystack: its generator for TGI, its generator for OpenAI, and a pipeline with a tool."""

import json
import sys

from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from haystack_integrations.components.generators.huggingface_api import HuggingFaceAPIChatGenerator

url, question = sys.argv[1:]
greedy = {"max_tokens": 12, "temperature": 0}
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 16}}, "required": ["city"]}
weather = Tool("get_weather", "The weather of a city", schema, lambda city: f"Sunny in {city}")
tgi = HuggingFaceAPIChatGenerator("text_generation_inference", {"url": url}, token=None, generation_kwargs=dict(greedy))
openai = OpenAIChatGenerator(Secret.from_token("unused"), "tgi", api_base_url=url + "/v1", generation_kwargs=greedy)
pieces: dict[str, list[str]] = {"tgi": [], "openai": []}
answers: dict = {"texts": [], "calls": []}
for name, generator in (("tgi", tgi), ("openai", openai)):
    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("{{question}}")], required_variables="*"))
    pipeline.add_component("model", generator)
    pipeline.connect("prompt", "model")
    answers["texts"].append(pipeline.run({"question": question})["model"]["replies"][0].text)
    messages = [ChatMessage.from_user(question)]
    generator.run(messages, streaming_callback=lambda chunk, name=name: pieces[name].append(chunk.content))
    answers["texts"].append("".join(pieces[name]))
    asked = [ChatMessage.from_user("What is the weather in Paris?")]
    options = {"tool_choice": "required", "max_tokens": 60}
    call = generator.run(asked, tools=[weather], generation_kwargs=options)["replies"][0].tool_calls[0]
    answers["calls"].append([call.tool_name, call.arguments, weather.invoke(**call.arguments)])
print(json.dumps(answers))
