"""Reading request bodies and turning them into requests, where no server is needed."""

from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from text_generation_inference.api.bodies import GenerateRequest
from text_generation_inference.api.openai_bodies import ChatRequest, CompletionRequest
from text_generation_inference.api.openai_sampling import prompt_limit
from text_generation_inference.api.unknown_fields import BodyForm, UnknownFields
from text_generation_inference.errors import ContextLengthError, ValidationError
from text_generation_inference.text.prepare import prepare_request
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import ModelFacts, SamplingParams

FACTS = ModelFacts(
    model_id="m",
    dtype="float32",
    vocab_size=100,
    max_input_tokens=10,
    max_total_tokens=12,
    num_blocks=4,
    block_size=16,
    device="cpu",
)


@dataclass
class Words:
    """A tokenizer that makes a token of each word, behind one that begins every text, if it has such a one."""

    begins: list[int]
    eos_ids: frozenset[int] = field(default_factory=lambda: frozenset({2}))

    def encode(self, text: str, add_special_tokens: bool = True, truncate: int | None = None) -> list[int]:
        return (self.begins if add_special_tokens else []) + [5] * len(text.split())


def prepare(prompt: str, begins: list[int], **params: Any):
    tokenizer = cast(Tokenizer, Words(begins))
    return prepare_request(1, prompt, SamplingParams(**params), tokenizer, FACTS)


def test_an_empty_text_has_a_token_where_the_tokenizer_begins_with_one():
    assert prepare("", [1]).token_ids == [1]
    with pytest.raises(ValidationError, match="`inputs` cannot be empty"):
        prepare("", [])


def test_what_does_not_fit_tells_its_numbers():
    with pytest.raises(ContextLengthError) as found:
        prepare("a b c d e", [], max_new_tokens=8)
    assert (found.value.limit, found.value.num_input, found.value.num_new) == (12, 5, 8)
    for count in (11, 13):  # beyond the input, beyond everything
        with pytest.raises(ContextLengthError) as found:
            prepare("a " * count, [], max_new_tokens=1)
        assert (found.value.num_input, found.value.num_new) == (count, None)


def test_cutting_the_prompt():
    def limit(**body: int) -> int | None:
        return prompt_limit(CompletionRequest(prompt="a", **body), 10)

    assert limit() is None
    assert limit(truncate=3) == limit(truncate_prompt_tokens=3) == 3
    assert limit(truncate_prompt_tokens=-1) == 10
    for bad in (0, 11):
        with pytest.raises(ValidationError, match="`truncate_prompt_tokens`"):
            limit(truncate_prompt_tokens=bad)


def test_unknown_names():
    chat, generate = BodyForm(ChatRequest), BodyForm(GenerateRequest)
    assert chat.unknown_names(b'{"messages":[{"other":1}],"user":"a","seed":1}') == []
    assert chat.unknown_names(b'{"messages":[],"b":{"c":1},"parameters":{"d":1}}') == ["b", "parameters"]
    body = b'{"inputs":"a", "parameters" : {"seed":1,"x":2}, "z":{}}'
    assert sorted(generate.unknown_names(body)) == ["parameters.x", "z"]
    assert generate.unknown_names(b'{"inputs":"a"}') == []
    crowd = msgspec.json.encode({"inputs": "a", **{f"name{number}": 1 for number in range(30_000)}})
    assert generate.unknown_names(crowd) == []  # too many to be looked at on the event loop
    assert generate.unknown_names(b'{"inputs":"' + b"word " * 100_000 + b'","z":1}') == ["z"]


def test_names_are_logged_once_and_bounded(caplog: pytest.LogCaptureFixture):
    counted: list[int] = []
    fields = UnknownFields(counted.append)
    with caplog.at_level("INFO", logger="text_generation_inference.api"):
        fields.note([])
        fields.note(["a", "b"])
        fields.note(["a", "x" * 1000])
        fields.note([f"name{number}" for number in range(5000)])
    assert sum(counted) == 5004
    assert len(caplog.records) == 257  # so many names, and that there will be no more
    assert max(len(record.getMessage()) for record in caplog.records) < 200
    assert sum("'a'" in record.getMessage() for record in caplog.records) == 1


def test_min_tokens_are_within_the_limit():
    SamplingParams(min_tokens=5, max_new_tokens=5).check()
    SamplingParams(min_tokens=5).check()
    for bad in (SamplingParams(min_tokens=-1), SamplingParams(min_tokens=6, max_new_tokens=5)):
        with pytest.raises(ValidationError, match="`min_tokens`"):
            bad.check()


def test_thinking_is_a_variable_of_the_template():
    def variables(**body: Any) -> object:
        return msgspec.convert({"messages": [], **body}, ChatRequest).chat_template_kwargs

    assert variables(enable_thinking=False) == {"enable_thinking": False}
    assert variables(enable_thinking=False, chat_template_kwargs={"a": 1}) == {"enable_thinking": False, "a": 1}
    assert variables(enable_thinking=False, chat_template_kwargs={"enable_thinking": True}) == {"enable_thinking": True}
    assert variables() is None
