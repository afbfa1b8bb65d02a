"""Client libraries as their users have them, unmodified: what each was answered is what a plain request is answered."""

import json
import re
from pathlib import Path
from typing import Any

import install
import pytest
from scripts import SCRIPTS, NotInstalled, command_of, skip_or_fail

COUNT = " three, four,"  # greedy, after "Count: one, two,"
WEATHER = ["get_weather", {"city": "Paris"}]
ANNA = {"name": "Anna", "age": 31}


def is_person(value: dict) -> bool:
    return set(value) == {"name", "age"} and 0 < len(value["name"]) <= 12 and 0 <= value["age"] <= 120


def is_answer(value: dict, called: bool) -> bool:
    """Of a model that was given a tool and a format: a call, or an answer in the format."""
    return set(value) == {"city"} if called else is_person(value)


def without_repeats(values: list[str]) -> list[str]:
    return [value for value, before in zip(values, ["", *values], strict=False) if value != before]


def test_every_script_has_a_test() -> None:
    assert {f"test_{name}" for name in SCRIPTS} <= set(globals())


def test_what_is_not_installed_is_skipped_and_fails_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "ENVIRONMENTS", tmp_path)
    with pytest.raises(NotInstalled) as caught:
        command_of(SCRIPTS["dspy_stack"])
    with pytest.raises(pytest.skip.Exception, match="install.py"):
        skip_or_fail(caught.value, {})
    with pytest.raises(NotInstalled):
        skip_or_fail(caught.value, {"CI": "true"})
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert command_of(SCRIPTS["vercel_ai"]) == []


# -- Python --------------------------------------------------------------------------------------------------------


def check_anthropic(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 3
    assert (said["ends"], said["tokens"], said["model"]) == (["max_tokens"] * 2, [12, 12], "claude-haiku")
    deltas = ["content_block_delta"] * (len(said["order"]) - 5)
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert said["order"] == ["message_start", "content_block_start", *deltas, *ends] and len(deltas) > 3
    assert said["stopped"] == ["stop_sequence", "o", [greedy[: greedy.index("o")]]]
    assert len(set(said["counted"])) == 1
    assert said["calls"] == [WEATHER] * 2 and said["tool_ends"] == ["tool_use"] * 2
    assert said["tool_events"] == "message_stop" and said["after"] in ("end_turn", "max_tokens", "tool_use")
    assert is_person(said["person"])
    refused = said["refused"]
    assert (refused["status"], refused["body"]["error"]["type"]) == (400, "invalid_request_error")
    assert "`max_tokens`" in refused["body"]["error"]["message"]
    assert refused["id"] == refused["body"]["request_id"]


def test_anthropic_stack(said: Any, greedy: str) -> None:
    check_anthropic(said, greedy)


def test_anthropic_older_stack(said: Any, greedy: str) -> None:
    check_anthropic(said, greedy)


def test_dspy_stack(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 2
    assert said["verdict"] in ("kind", "unkind")
    assert said["answer"] in (True, False)
    pieces, whole = said["streamed"]
    assert json.loads(pieces) == whole != ""  # the pieces are those of the JSON


def test_haystack_stack(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 4
    assert said["calls"] == [[*WEATHER, "Sunny in Paris"]] * 2


def test_instructor_stack(said: Any) -> None:
    assert set(said) == {"tool_call", "json_schema_mode"}
    for whole, grown, steps in said.values():
        assert whole == grown == ANNA
        assert steps > 3


def test_langchain_openai_stack(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 3
    assert said["tokens"] == 12
    assert said["calls"] == [WEATHER] * 2
    assert "Sunny" in said["after"]
    assert said["completion"] == COUNT
    assert said["people"] == {"function_calling": ANNA, "json_schema": ANNA}


def test_llama_index_hub(said: Any, greedy: str) -> None:
    assert said["knows"] == 1023  # max_input_tokens of /info
    assert said["texts"] == [greedy] * 5
    assert said["calls"] == [WEATHER]
    assert said["completion"] == "Count: one, two," + COUNT  # it asks at `/`, which repeats the prompt
    assert said["streamed"] == COUNT


def test_llama_index_openai(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 2
    assert said["calls"] == [[*WEATHER, "Sunny in Paris"]]
    assert is_person(said["person"])
    assert said["completion"] == COUNT


def test_llama_index_tgi(said: Any, greedy: str) -> None:
    """Tools are used if /info tells a version of 2.0.1 or later."""
    assert said["knows"] == [True, 1024, "embedded"]
    assert said["texts"] == [greedy] * 6
    (call,) = said["calls"]
    assert call["function"]["name"] == "get_weather"
    assert "Paris" in call["function"]["arguments"]


def test_ollama_stack(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 5
    assert said["ends"] == [[True, "length"], [False, None], [True, "length"], [True, "length"]]
    assert said["counts"] == [[said["counts"][0][0], 12]] * 3 and said["took"]
    assert (said["raw"], said["stopped"], said["loaded"]) == (
        " three, four, five, six, seven, eight,",
        " three",
        "load",
    )
    assert is_person(said["person"])
    assert all(is_answer(value, said["called"]) for value in said["either"])
    thinks, top_p, length, embed = said["refused"]
    assert thinks == [400, '`think`: "tgi" does not support thinking']
    assert top_p == [400, "`top_p` must be > 0.0 and <= 1.0"]
    assert length[0] == 400 and "`num_predict`" in length[1]
    assert embed[0] == 404
    assert said["served"] == [["embedded"]] * 2
    assert said["shown"][0] == ["completion"] and said["shown"][1]["llama.context_length"] == 1024


def test_openai_agents_stack(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 2
    assert said["called"] == "Sunny in Paris"
    assert said["cities"][0] == "Paris"
    assert is_person(said["person"]) if said["person"] else len(said["cities"]) == 2


def test_openai_agents_responses_stack(said: Any, greedy: str) -> None:
    whole, streamed = said["texts"]
    assert whole == streamed and whole.startswith(greedy)
    assert said["longer"]  # the second request has the first one before it
    assert said["called"] == "Sunny in Paris"
    assert is_person(said["person"])


def test_openai_responses_stack(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 2
    assert said["ends"] == ["incomplete", "max_output_tokens", "completed"]
    assert said["joined"][0] == said["joined"][1] and said["joined"][0].startswith(greedy)
    assert said["tokens"] == [12, 12]
    begin = ["response.created", "response.in_progress", "response.output_item.added"]
    text = [*begin, "response.content_part.added", "response.output_text.delta", "response.output_text.done"]
    assert without_repeats(said["order"]) == [
        *text, "response.content_part.done", "response.output_item.done", "response.incomplete"
    ]  # fmt: skip
    arguments = "response.function_call_arguments."
    assert without_repeats(said["tool_order"]) == [
        *begin, arguments + "delta", arguments + "done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    assert said["calls"] == [WEATHER] and said["streamed_call"] == WEATHER[1]
    assert len(set(said["after"])) == len(set(said["after_tokens"])) == 1  # by its id, and with all of it sent again
    assert is_person(said["person"])
    assert said["same"] and said["stores"] == [True, False]
    assert said["refused"] == [
        [404, None, None],
        [400, "previous_response_id", "previous_response_not_found"],
        [400, "max_output_tokens", None],
    ]


def test_outlines_stack(said: Any, greedy: str) -> None:
    assert said["completions"] == [COUNT] * 3
    assert is_person(json.loads(said["person"])) and is_person(json.loads(said["chat_person"]))
    assert said["choice"] in ("yes", "no")
    assert re.fullmatch(r"\d{3}-\d{4}", said["pattern"])
    assert "".join(said["pieces"]).removesuffix("<|im_end|>") == said["pattern"]
    assert said["chat"] == greedy


def test_pydantic_ai_stack(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 2
    assert said["tokens"] == 12
    assert said["people"] == {"ToolOutput": ANNA, "NativeOutput": ANNA}
    kind, content = said["both"]
    assert is_answer(json.loads(content), called=kind == "tool-call")


def test_smolagents_stack(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 4
    assert [found for found in said["observations"] if found] == ["Sunny in Paris"] * 2


# -- JavaScript ----------------------------------------------------------------------------------------------------


def test_huggingface_inference(said: Any, greedy: str) -> None:
    assert said["completions"] == [COUNT] * 2
    assert said["texts"] == [greedy] * 2
    assert said["call"]["name"] == "get_weather"
    assert "Paris" in said["call"]["arguments"]
    assert 0 <= said["age"] <= 99


def test_openai_node(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 3
    assert said["cities"][0] == "Paris"
    call = said["calls"][0]["function"]["parsed_arguments"] if said["calls"] else None
    assert is_answer(call or said["person"], called=call is not None)
    assert said["completion"] == COUNT
    assert said["error"] == {"name": "BadRequestError", "status": 400, "param": "top_p"}


def test_vercel_ai(said: Any, greedy: str) -> None:
    assert said["texts"] == [greedy] * 2
    assert said["tokens"] == [12, 12]
    assert said["results"] == ["Sunny in Paris"] * 2
    assert said["cities"][:2] == ["Paris"] * 2
    assert said["person"] == ANNA
    assert is_answer(said["both"].get("input", said["both"]), called="toolName" in said["both"])
    assert is_person(said["answered"])


def test_vercel_ai_providers(said: Any, greedy: str) -> None:
    assert set(said) == {"openai", "anthropic"}
    for told in said.values():
        assert told["texts"] == [greedy] * 2
        assert (told["ends"], told["tokens"]) == (["length"] * 2, [12, 12])
        assert (told["steps"], told["results"]) == (2, ["Sunny in Paris"] * 2)
        assert told["answered"] and is_person(told["person"])
