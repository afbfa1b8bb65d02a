"""smolagents: text, a stream and an agent that calls a tool, over both of its models for servers."""

import json
import sys

from smolagents import InferenceClientModel, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

url, question = sys.argv[1:]


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"Sunny in {city}"


def models(max_tokens: int) -> list:
    settings = {"temperature": 0, "max_tokens": max_tokens}
    return [
        OpenAIServerModel("tgi", api_base=url + "/v1", api_key="unused", **settings),
        InferenceClientModel(url, token="unused", **settings),
    ]


messages = [ChatMessage(MessageRole.USER, question)]
answers: dict = {"texts": [], "observations": []}
for model in models(12):
    answers["texts"].append(model.generate(messages).content)
    answers["texts"].append("".join(delta.content or "" for delta in model.generate_stream(messages)))
for model in models(40):
    agent = ToolCallingAgent([get_weather], model, max_steps=1, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Call a tool."  # its own is longer than the context of the tests' server
    agent.run("What is the weather in Paris?")
    answers["observations"] += [step.observations for step in agent.memory.steps if hasattr(step, "observations")]
print(json.dumps(answers))
