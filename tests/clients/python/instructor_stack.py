"""instructor: a typed answer in the modes whose form the server holds, and one that grows."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url, _ = sys.argv[1:]


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


client = OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
asked = {
    "model": "tgi",
    "messages": [{"role": "user", "content": "Anna is 31 years old. Describe her as a person."}],
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 1,
}
answers: dict = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    patched = instructor.from_openai(client, mode=mode)
    person = patched.chat.completions.create(response_model=Person, **asked)
    grown = list(patched.chat.completions.create_partial(response_model=Person, **asked))
    answers[mode.value] = [person.model_dump(), grown[-1].model_dump(), len(grown)]
print(json.dumps(answers))
