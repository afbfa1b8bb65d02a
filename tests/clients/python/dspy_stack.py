"""dspy: plain, with fields, with JSON fields, and streamed, over the two providers its users choose."""

import asyncio
import json
import os
import sys
from typing import Annotated, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy
from pydantic import Field

url, question = sys.argv[1:]
settings = {"api_key": "unused", "temperature": 0.0, "max_tokens": 12, "cache": False}
openai = dspy.LM("openai/tgi", api_base=url + "/v1", **settings)
hub = dspy.LM("huggingface/tgi", api_base=url, **settings)


class Judge(dspy.Signature):
    """Say whether the sentence is kind."""

    sentence: str = dspy.InputField()
    verdict: Literal["kind", "unkind"] = dspy.OutputField()


class Reply(dspy.Signature):
    """Answer in one word."""

    question: str = dspy.InputField()
    answer: Annotated[str, Field(max_length=16)] = dspy.OutputField()


async def stream() -> tuple[str, str]:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    program = dspy.streamify(dspy.Predict(Reply), stream_listeners=[listener])
    pieces, whole = [], ""
    async for value in program(question="What is two plus two?"):
        if isinstance(value, dspy.streaming.StreamResponse):
            pieces.append(value.chunk)
        elif isinstance(value, dspy.Prediction):
            whole = value.answer
    return "".join(pieces), whole


def text(found: list) -> str:
    return found[0]["text"] if isinstance(found[0], dict) else found[0]


answers: dict = {"texts": [text(lm(messages=[{"role": "user", "content": question}])) for lm in (openai, hub)]}
# A name that dspy knows to honour schemas, so that it asks for one. The server answers to any name.
known = dspy.LM("openai/gpt-4o-mini", api_base=url + "/v1", **{**settings, "max_tokens": 60})
dspy.configure(lm=known, adapter=dspy.JSONAdapter())
answers["verdict"] = dspy.Predict(Judge)(sentence="You look wonderful today.").verdict
answers["answer"] = dspy.Predict("question -> answer: bool")(question="Is Paris a city?").answer
answers["streamed"] = asyncio.run(stream())
print(json.dumps(answers))
