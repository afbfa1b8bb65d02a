"""ollama: what is served, text and streams on both routes, a format, thoughts that are not there, errors."""

import asyncio
import json
import sys

import ollama

url, question = sys.argv[1:]
client = ollama.Client(host=url)
short = {"temperature": 0, "num_predict": 12}
turns = [{"role": "user", "content": question}]
person = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip


async def ask() -> str:
    stream = await ollama.AsyncClient(host=url).chat("tgi", turns, options=short, stream=True)
    return "".join([part.message.content or "" async for part in stream])


def get_weather(city: str) -> str:
    """The weather of a city

    Args:
      city: its name
    """
    return f"Sunny in {city}"


whole = client.chat("tgi", turns, options=short)
streamed = list(client.chat("tgi", turns, options=short, stream=True))
generated = client.generate("tgi", question, options=short)
texts = [
    whole.message.content,
    "".join(part.message.content or "" for part in streamed),
    generated.response,
    "".join(part.response or "" for part in client.generate("tgi", question, options=short, stream=True)),
    asyncio.run(ask()),
]
either = client.chat(
    "tgi", turns, tools=[get_weather], format=person, options={"temperature": 0, "num_predict": 60}
).message
refused = []
for fields in ({"think": True}, {"options": {"top_p": 7}}, {"options": {"num_predict": 99_999}}):
    try:
        client.chat("tgi", turns, **fields)
    except ollama.ResponseError as error:
        refused.append([error.status_code, error.error])
try:
    client.embed("tgi", question)
except ollama.ResponseError as error:
    refused.append([error.status_code, error.error])
shown = client.show("tgi")
print(
    json.dumps(
        {
            "texts": texts,
            "ends": [[part.done, part.done_reason] for part in (whole, streamed[0], streamed[-1], generated)],
            "counts": [[part.prompt_eval_count, part.eval_count] for part in (whole, streamed[-1], generated)],
            "took": all(part.total_duration > part.eval_duration >= 0 for part in (whole, streamed[-1], generated)),
            "raw": client.generate("tgi", "Count: one, two,", raw=True, options=short).response,
            "stopped": client.generate("tgi", "Count: one, two,", raw=True, options={**short, "stop": [","]}).response,
            "loaded": client.generate("tgi").done_reason,
            "person": json.loads(client.chat("tgi", turns, format=person, options={"seed": 1, "num_predict": 60}).message.content),
            "either": [call.function.arguments for call in either.tool_calls or []] or [json.loads(either.content)],
            "called": bool(either.tool_calls),
            "refused": refused,
            "served": [[model.model for model in listed.models] for listed in (client.list(), client.ps())],
            "shown": [shown.capabilities, shown.modelinfo],
        }
    )
)  # fmt: skip
