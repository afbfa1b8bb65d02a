"""Answers of models that think and call, in the words of the Messages and the Responses API: whole and streamed alike."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from text_generation_inference.api.chat_events import AnswerReader, AnswerWriter
from text_generation_inference.api.chat_prompt import ChatPlan
from text_generation_inference.api.chat_run import Chat
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.messages_answer import MessagesWriter, messages_answer
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.api.responses_answer import RunningResponse, whole_response
from text_generation_inference.api.responses_bodies import ResponsesRequest
from text_generation_inference.api.responses_stream import ResponsesWriter
from text_generation_inference.errors import RequestError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.reasoning import ReasoningFormat
from text_generation_inference.text.tools import detect_tool_format
from text_generation_inference.types import SamplingParams

THOUGHTS, TEXT = ["Hm", ", é."], ["It ", "is ", "so."]
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": "b"}}\n</tool_call>'
ANSWERS: dict[str, tuple[list[str], list[str], str]] = {  # thoughts, text, why it ended
    "text": ([], TEXT, "eos_token"),
    "cut": ([], TEXT, "length"),
    "nothing": ([], [""], "eos_token"),
    "stopped": ([], TEXT, "stop_sequence"),
    "thoughts": (THOUGHTS, TEXT, "eos_token"),
    "thoughts alone": (THOUGHTS, [""], "length"),
    "call": ([], list(CALL), "eos_token"),
    "all": (THOUGHTS, [*TEXT, *CALL, CALL], "eos_token"),
    "cut call": ([], [*TEXT, *CALL[:-20]], "length"),
}


class _NoTokenizer:
    """Knows no marker as a token: they are plain text."""

    def id_of(self, token: str) -> int | None:
        return None

    skipped_ids: frozenset[int] = frozenset()


def make_chat(name: str) -> tuple[Chat, list[Piece]]:
    thoughts, texts, end = ANSWERS[name]
    pieces = [Piece(7, "", -1.0, False, [], text) for text in thoughts] + [
        Piece(7, text, -1.0, False, []) for text in texts
    ]
    pieces[-1].last = True
    generation = SimpleNamespace(
        finish_reason=end,
        num_tokens=len(pieces),
        num_thought_tokens=len(thoughts),
        num_cached_tokens=4,
        input_length=10,
        text=SimpleNamespace(stop_string="END" if end == "stop_sequence" else ""),
    )
    calls = "call" in name or name == "all"
    form = detect_tool_format(ChatTemplate("{{ tools }}<tool_call>"), cast(Any, _NoTokenizer())) if calls else None
    plan = ChatPlan("", SamplingParams(), None, form, {"look": {}}, "mixed")
    plan.reasoning = ReasoningFormat(None) if thoughts else None
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}], "max_tokens": len(pieces)}, ChatRequest)
    return Chat(body, plan, "m", cast(Any, None), [cast(Generation, generation)], "the_id", 5), pieces


def run(chat: Chat, pieces: Sequence[Piece], writer: AnswerWriter) -> list[dict[str, Any]]:
    """All events, each of which has its type as its name."""
    reader = AnswerReader(chat, chat.generations[0])
    frames = [writer.begin()]
    for piece in pieces:
        if reader.is_plain:
            frames.append(writer.text(piece.text) if piece.text else b"")
        else:
            frames.append(writer.tell(reader.read(piece), piece))
    return read(b"".join([*frames, writer.finish(reader.num_calls)]))


def read(data: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, body = frame.split("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# -- Messages ------------------------------------------------------------------------------------------------------


def add_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that Anthropic's client makes of events, which must come in their order."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message, blocks, is_open = events[0]["message"], list[dict[str, Any]](), False
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                is_open = True
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                delta, block = event["delta"], blocks[-1]
                key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
                if delta["type"] == "input_json_delta":
                    block["json"] += delta["partial_json"]
                else:
                    block[key[delta["type"]]] += delta[key[delta["type"]]]
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    for block in blocks:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given) if given.endswith("}") else {}
    return {**message, "content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"]}


@pytest.mark.parametrize("name", ANSWERS)
def test_messages_are_told_alike_whole_and_streamed(name: str) -> None:
    chat, pieces = make_chat(name)
    whole = json.loads(msgspec.json.encode(messages_answer(chat, pieces, hides_cached=False)))
    streamed = add_up(run(chat, pieces, MessagesWriter(chat, hides_cached=False)))
    for message in (whole, streamed):
        for block in message["content"]:
            block.pop("id", None)  # of calls: another one each time
    assert streamed == whole
    assert whole["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": len(pieces),
    }
    hidden = msgspec.to_builtins(messages_answer(chat, pieces, hides_cached=True))["usage"]
    assert (hidden["input_tokens"], hidden["cache_read_input_tokens"]) == (10, 0)


@pytest.mark.parametrize(
    ("name", "kinds", "reason"),
    [
        ("text", ["text"], "end_turn"),
        ("cut", ["text"], "max_tokens"),
        ("nothing", [], "end_turn"),
        ("stopped", ["text"], "stop_sequence"),
        ("thoughts", ["thinking", "text"], "end_turn"),
        ("thoughts alone", ["thinking"], "max_tokens"),
        ("call", ["tool_use"], "tool_use"),
        ("all", ["thinking", "text", "tool_use", "tool_use"], "tool_use"),
        ("cut call", ["text", "tool_use"], "max_tokens"),
    ],
)
def test_blocks_and_reasons(name: str, kinds: list[str], reason: str) -> None:
    chat, pieces = make_chat(name)
    answer = msgspec.to_builtins(messages_answer(chat, pieces, hides_cached=False))
    assert [block["type"] for block in answer["content"]] == kinds
    assert answer["stop_reason"] == reason
    assert answer["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    for block in answer["content"]:
        if block["type"] == "tool_use":
            assert (block["name"], block["input"]) == ("look", {} if name == "cut call" else {"a": "b"})
        if block["type"] == "thinking":
            assert block["thinking"] == "Hm, é." and block["signature"]


def test_the_end_of_the_context_is_told_from_the_limit_of_the_request() -> None:
    chat, pieces = make_chat("cut")
    chat.body.max_tokens = 1000
    assert messages_answer(chat, pieces, False).stop_reason == "model_context_window_exceeded"


# -- Responses -----------------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "instructions": "Be brief."},
]


def make_response(chat: Chat, kept: list[Any], **fields: Any) -> RunningResponse:
    body = msgspec.convert({"input": "x", "max_output_tokens": 9, **fields}, ResponsesRequest)
    return RunningResponse(chat, body, False, True, kept.append)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return {**response, "output": items, "completed_at": None}


@pytest.mark.parametrize("fields", SETTINGS, ids=["plain", "summaries"])
@pytest.mark.parametrize("name", ANSWERS)
def test_responses_are_told_alike_whole_and_streamed(name: str, fields: dict[str, Any]) -> None:
    chat, pieces = make_chat(name)
    kept: list[Any] = []
    running = make_response(chat, kept, **fields)
    whole = json.loads(msgspec.json.encode(whole_response(running, pieces)))
    events = run(chat, pieces, ResponsesWriter(running, "/v1/responses"))
    final = events[-1]["response"]
    assert without_ids(final) == without_ids(whole)
    assert json.loads(msgspec.json.encode(kept)) == [final]
    Response.model_validate_json(json.dumps(whole), strict=True)
    assert final["status"] == ("incomplete" if ANSWERS[name][2] == "length" else "completed")
    assert events[-1]["type"] == f"response.{final['status']}"
    for number, event in enumerate(events):
        KINDS[event["type"]].model_validate_json(json.dumps(event), strict=True)
        assert event["sequence_number"] == number
    check_order(events, final["output"])


def check_order(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Items follow each other; what was told in pieces is what is told in the end."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    opened: dict[str, Any] | None = None
    done: list[dict[str, Any]] = []
    text = ""
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert opened is None and event["output_index"] == len(done)
            opened, text = event["item"], ""
            assert opened["status"] == "in_progress"
            continue
        assert opened is not None and event["output_index"] == len(done)
        assert event.get("item_id", opened["id"]) == opened["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith(("_text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == text
        elif kind == "response.output_item.done":
            assert (event["item"]["id"], event["item"]["type"]) == (opened["id"], opened["type"])
            done.append(event["item"])
            opened = None
    assert opened is None and done == output


def test_thoughts_are_told_as_summaries_where_those_are_asked_for() -> None:
    chat, pieces = make_chat("all")
    plain, summed = (msgspec.to_builtins(whole_response(make_response(chat, [], **f), pieces)) for f in SETTINGS)
    assert [item["type"] for item in plain["output"]] == ["reasoning", "message", "function_call", "function_call"]
    first = plain["output"][0]
    assert (first["summary"], first["content"][0]["text"], "encrypted_content" in first) == ([], "Hm, é.", False)
    first = summed["output"][0]
    assert (first["summary"][0]["text"], "content" in first, first["encrypted_content"] != "") == (
        "Hm, é.",
        False,
        True,
    )
    assert plain["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_a_failure_ends_the_stream_with_the_response() -> None:
    chat, pieces = make_chat("text")
    kept: list[Any] = []
    writer = ResponsesWriter(make_response(chat, kept), "/v1/responses")
    frames = [writer.begin(), writer.text(pieces[0].text), writer.fail(RequestError("it broke"))]
    events = read(b"".join(frames))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    error, failed = events[-2:]
    assert (error["type"], error["code"], "it broke" in error["message"]) == ("error", "generation", True)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert kept == []
    for event in events:
        KINDS[event["type"]].model_validate_json(json.dumps(event), strict=True)
