"""Ollama's API: its requests as chats, answers of models that think and call in its words."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from text_generation_inference.api.chat_prompt import ChatPlan
from text_generation_inference.api.chat_run import Chat
from text_generation_inference.api.error_shapes import shape_of
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.http import HttpError
from text_generation_inference.api.metrics import Timings
from text_generation_inference.api.ollama import OllamaLines, as_message, as_response
from text_generation_inference.api.ollama_bodies import OllamaChatRequest, OllamaGenerateRequest
from text_generation_inference.api.ollama_request import chat_of_ollama, chat_of_prompt
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.errors import ContextLengthError, OverloadedError, ValidationError
from text_generation_inference.text.reasoning.formats import TAGS, ReasoningFormat
from text_generation_inference.text.tools import ToolFormat
from text_generation_inference.types import SamplingParams

TURN = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def asked(sees: bool = True, thinks: bool = True, **fields: Any) -> ChatRequest:
    body = msgspec.convert({"model": "m", "messages": [TURN], **fields}, OllamaChatRequest)
    return chat_of_ollama(body, sees, thinks)


def prompted(sees: bool = True, thinks: bool = True, **fields: Any) -> ChatRequest:
    body = msgspec.convert({"model": "m", "prompt": "Hi", **fields}, OllamaGenerateRequest)
    return chat_of_prompt(body, sees, thinks)


def test_options() -> None:
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8}
    options |= {"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 5, "stop": ["a", "b"]}
    chat = asked(options={**options, "num_ctx": 4096, "mirostat": 0})
    names = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
    assert {name: getattr(chat, names.get(name, name)) for name in options} == options
    assert (chat.stream, chat.model, chat.separate_reasoning) == (True, "m", True)
    for unlimited in (-1, -2, 0):
        assert asked(options={"num_predict": unlimited, "seed": -1}).max_tokens is None
    assert asked(options={"seed": -1}).seed is None
    assert asked(stream=False).stream is False
    assert asked(options={"stop": "x"}).stop == "x"


def test_formats() -> None:
    form = asked(format="json").response_format
    assert form is not None and form.type == "json_object"
    form = prompted(format={"type": "object"}).response_format
    assert form is not None and form.json_schema is not None and form.json_schema.schema == {"type": "object"}
    assert asked(format="").response_format is None


def test_thinking() -> None:
    assert asked(think=True).chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert asked(think=False).chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert asked(think=False, thinks=False).include_reasoning is False
    assert asked(think="high").reasoning_effort == "high"
    assert asked().chat_template_kwargs is None


def test_turns() -> None:
    call = {"function": {"name": "look", "arguments": {"a": 1}}}
    other = {"function": {"name": "find", "arguments": {}}, "id": "own"}
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is it?", "images": ["AAAA"]},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, other, call]},
        {"role": "tool", "content": "2", "tool_name": "find"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "3", "tool_name": "look"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    messages = msgspec.to_builtins(asked(messages=turns, tools=[TOOL]).messages)
    assert messages[1]["content"] == [
        {"type": "image_url", "image_url": "data:;base64,AAAA"},
        {"type": "text", "text": "What is it?"},
    ]
    assert messages[2]["reasoning_content"] == "Hm." and messages[2]["content"] is None
    made = [(made["id"], made["function"]["name"]) for made in messages[2]["tool_calls"]]
    assert made == [("call00000", "look"), ("own", "find"), ("call00002", "look")]
    assert [turn["tool_call_id"] for turn in messages[3:-1]] == ["own", "call00000", "call00002", None]
    assert messages[-1]["content"] is None


def test_prompts() -> None:
    messages = msgspec.to_builtins(prompted(system="Be kind.", images=["AAAA"]).messages)
    assert [(message["role"], type(message["content"])) for message in messages] == [("system", str), ("user", list)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: asked(think=True, thinks=False), '`think`: "m" does not support thinking'),
        (lambda: asked(think="low", thinks=False), "`think`"),
        (lambda: asked(format="yaml"), "`format` must be"),
        (lambda: asked(format=[1]), "`format` must be"),
        (lambda: asked(tools=[{"function": {}}]), "`tools`: .*`name`"),
        (lambda: asked(sees=False, messages=[TURN, {**TURN, "images": ["x"]}]), r"`messages\[1\].images`"),
        (lambda: prompted(suffix="x"), "`suffix` is not supported"),
        (lambda: prompted(template="x"), "`template` is not supported"),
        (lambda: prompted(context=[1]), "`context` is not supported"),
        (lambda: prompted(raw=True, system="x"), "`raw`"),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        make()


CALL = '<tool_call>\n{"name": "look", "arguments": {"a": [1]}}\n</tool_call>'


def make_lines(texts: list[str], shape: Any, end: str = "eos_token") -> tuple[OllamaLines, list[Piece]]:
    pieces = [Piece(7, "", -1.0, False, [], "Hm."), *(Piece(7, text, -1.0, False, []) for text in texts)]
    pieces[-1].last = True
    timings = Timings(2.0, 0.1, 0.2, 1.5, len(pieces))
    generation = SimpleNamespace(finish_reason=end, num_tokens=len(pieces), input_length=9, timings=timings)
    plan = ChatPlan("", SamplingParams(), None, ToolFormat("hermes"), {"look": {}}, "mixed", ReasoningFormat(TAGS[0]))
    chat = Chat(asked(), plan, "m", cast(Any, None), [cast(Generation, generation)], "", 0)
    return OllamaLines(chat, shape), pieces


def test_lines_of_a_message() -> None:
    lines, pieces = make_lines(["It ", "is.", *CALL, CALL], as_message)
    told = [msgspec.to_builtins(lines.line(part))["message"] for piece in pieces for part in lines.read(piece)]
    calls = [turn.pop("tool_calls") for turn in told if "tool_calls" in turn]
    assert [turn.get("thinking") or turn["content"] for turn in told] == ["Hm.", "It", " is.", "", ""]
    assert [[(c["function"]["name"], c["function"]["arguments"], c["function"]["index"]) for c in each] for each in calls] == [
        [("look", {"a": [1]}, 0)],
        [("look", {"a": [1]}, 1)],
    ]  # fmt: skip
    last = msgspec.to_builtins(lines.last(told_nothing()))
    assert (last["done"], last["done_reason"], last["eval_count"], last["prompt_eval_count"]) == (
        True,
        "stop",
        len(pieces),
        9,
    )
    assert last["total_duration"] == 2_000_000_000
    assert 0 <= last["prompt_eval_duration"] + last["eval_duration"] <= 1_500_000_000


def told_nothing() -> Any:
    lines, _ = make_lines(["x"], as_message)
    return lines.whole([])


def test_lines_of_a_response() -> None:
    lines, pieces = make_lines(["It is."], as_response)
    told = [msgspec.to_builtins(lines.line(part)) for piece in pieces for part in lines.read(piece)]
    assert [(line["response"], line.get("thinking")) for line in told] == [("", "Hm."), ("It is.", None)]
    assert all(line["done"] is False and "message" not in line and "done_reason" not in line for line in told)


def test_a_call_that_is_cut_off_is_not_told() -> None:
    lines, pieces = make_lines(["Well.", CALL[:-18]], as_message, "length")
    whole = lines.whole([part for piece in pieces for part in lines.read(piece)])
    assert (whole.content, whole.thinking, whole.tool_calls) == ("Well.", "Hm.", [])
    assert lines.last(whole).done_reason == "length"


def test_errors_have_the_shape_of_the_api() -> None:
    shape = shape_of("/api/chat", "1")
    refused = shape.failure(ValidationError("`x` is wrong"))
    assert (refused.status, refused.body) == (400, b'{"error":"`x` is wrong"}')
    assert shape.event(ContextLengthError("too long", 1, 2, 3)) == b'{"error":"too long"}\n'
    busy = shape.failure(OverloadedError("x"))
    assert (busy.status, busy.headers) == (429, {"retry-after": "1"})
    named = shape.failure(ValidationError("`repetition_penalty` must be strictly positive"))
    assert named.body == b'{"error":"`repeat_penalty` must be strictly positive"}'
    assert shape.refusal(HttpError(422, "no")).status == 400
    assert shape.plain(404, "no such route").body == b'{"error":"no such route"}'
    assert shape_of("/api-doc/openapi.json", "1").plain(404, "x").body == b""
