"""outlines: its model for TGI, with a schema, a choice and a pattern; and its model for OpenAI."""

import asyncio
import json
import sys
from typing import Literal

import openai
import outlines
from huggingface_hub import AsyncInferenceClient, InferenceClient
from pydantic import BaseModel, Field

url, question = sys.argv[1:]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


async def ask() -> str:
    return await outlines.from_tgi(AsyncInferenceClient(url))(
        "Count: one, two,", max_new_tokens=4, return_full_text=False
    )


tgi = outlines.from_tgi(InferenceClient(url))
settings = {"max_new_tokens": 60, "return_full_text": False}
served = outlines.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="unused"), "tgi")
pattern = outlines.regex(r"\d{3}-\d{4}")
answers = {
    "completions": [
        tgi("Count: one, two,", max_new_tokens=4, return_full_text=False),
        "".join(tgi.stream("Count: one, two,", max_new_tokens=4)),
        asyncio.run(ask()),
    ],
    "person": tgi("A person: ", Person, **settings),
    "choice": tgi("Is Paris in France? ", Literal["yes", "no"], **settings),
    "pattern": tgi("A telephone number: ", pattern, **settings),
    "pieces": list(tgi.stream("A telephone number: ", pattern, max_new_tokens=60)),
    "chat": served(question, temperature=0, max_tokens=12),
    "chat_person": served("Describe a person.", Person, temperature=0, max_tokens=60),
}
print(json.dumps(answers))
