"""Bodies of the Messages and the Responses API as bodies of the chat route, and responses that are stored."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from text_generation_inference.api import responses_store
from text_generation_inference.api.chat_prompt import chat_job, choose_tools
from text_generation_inference.api.errors import NotStoredError, UnsupportedError
from text_generation_inference.api.messages_bodies import MessagesRequest
from text_generation_inference.api.messages_request import chat_of_messages
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.api.responses_bodies import ResponsesRequest
from text_generation_inference.api.responses_request import chat_of_response, hidden_thoughts, items_of
from text_generation_inference.api.responses_store import ResponseStore
from text_generation_inference.api.tenants import current_key
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.chat_template import ChatTemplate, read_prompt
from text_generation_inference.text.picture_prompt import PictureWords

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"
TOOL = {"name": "Read", "description": "Reads a file", "input_schema": {"type": "object", "properties": {}}}
MARK = "<image>"  # the token that stands for a picture
WORDS = PictureWords(MARK, 7, MARK, (MARK,), frozenset({7}), False, lambda text, _: text)


def messages(later: bool = True, sees: bool = True, left_out: list[str] | None = None, **fields: Any) -> ChatRequest:
    body = msgspec.convert({"model": "m", "max_tokens": 9, **fields}, MessagesRequest)
    return chat_of_messages(body, later, WORDS if sees else None, (left_out if left_out is not None else []).append)


def respond(
    given: Any, later: bool = True, sees: bool = True, before: Any = (), left_out: list[str] | None = None, **more: Any
) -> ChatRequest:
    body = msgspec.convert({"input": given, **more}, ResponsesRequest)
    note = (left_out if left_out is not None else []).append
    return chat_of_response(body, before, items_of(body, lambda _: b"{}", 99), later, WORDS if sees else None, note)


def turns(chat: ChatRequest) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in chat.messages]


# -- Messages ------------------------------------------------------------------------------------------------------


def conversation(number: int, num_turns: int) -> dict[str, Any]:
    """As Claude Code sends it: a block that changes with every request, and words of the system behind results."""
    use: dict[str, Any] = {"type": "tool_use", "id": "toolu_{}", "name": "Read", "input": {"file_path": "a.py"}}
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Go on", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_{}", "content": "print(1)"}]},
        {"role": "system", "content": "<system-reminder>The list is empty.</system-reminder>"},
        {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
    ]
    sent: list[dict[str, Any]] = []
    for place in range(num_turns):
        for message in copy.deepcopy(turn):
            for block in message["content"] if isinstance(message["content"], list) else ():
                for key in ("id", "tool_use_id"):
                    if key in block:
                        block[key] = block[key].format(place)
            sent.append(message)
    sent.append({"role": "user", "content": "And now?"})
    system = [
        {"type": "text", "text": BILLING.format(f"{number:05x}")},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    return {
        "messages": sent,
        "system": system,
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "someone"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []},
    }


def rendered(chat: ChatRequest, template: ChatTemplate) -> str:
    job = chat_job(chat, template, choose_tools(chat))
    return read_prompt(template.process.exchange(job.frame))


LATER = {"hermes_tool_use": True, "llama31_tools": True, "phi4": True, "gemma3": False}


@pytest.mark.parametrize("name", LATER)
def test_the_next_request_begins_with_the_prompt_of_the_last_one(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], "<s>", "</s>")
    assert template.takes_later_system is LATER[name]
    prompts: list[str] = []
    for number in range(1, 4):
        body = conversation(number, number)
        if name in ("gemma3", "phi4"):  # they know no tools
            body["tools"] = []
            body["messages"] = [m for m in body["messages"] if "tool" not in str(m["content"])]
        prompts.append(rendered(messages(template.takes_later_system, **body), template))
    for prompt in prompts:
        assert "cch=" not in prompt
        assert prompt.count("You are an agent.\nBe brief.") == 1
    for before, after in pairwise(prompts):
        assert before.count("system-reminder") < after.count("system-reminder")
        shared = before[: before.index("And now?")]
        assert len(shared) > 100 and after.startswith(shared)


def test_turns_of_messages() -> None:
    left_out: list[str] = []
    chat = messages(later=False, left_out=left_out, **conversation(1, 1))
    assert turns(chat) == [
        ("system", "You are an agent.\nBe brief."),
        ("user", "Go on"),
        ("assistant", "I look."),
        ("tool", "print(1)\n\n<system-reminder>The list is empty.</system-reminder>"),
        ("assistant", "Done."),
        ("user", "And now?"),
    ]
    (call,) = chat.messages[2].tool_calls or []
    assert (call.id, call.function.name, call.function.arguments) == ("toolu_0", "Read", {"file_path": "a.py"})
    assert (chat.messages[3].tool_call_id, chat.messages[3].name) == ("toolu_0", "Read")
    assert [tool.function.name for tool in chat.tools or []] == ["Read"]
    assert left_out == ["tools.web_search_20250305"]
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True}


def test_blocks_of_messages() -> None:
    png = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    left_out: list[str] = []
    chat = messages(
        left_out=left_out,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "one"}]},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                    {"type": "text", "text": "see "},
                    {"type": "image", "source": png},
                    {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
                    {"type": "document", "title": "T", "source": {"type": "text", "data": "words"}},
                    {"type": "container_upload", "file_id": 3},
                ],
            },
            {"role": "user", "content": "more"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "zzz"},
                    {"type": "text", "text": "The answer is"},
                ],
            },
        ],
    )
    first, second, user, assistant = chat.messages
    assert [(m.role, m.content, m.tool_call_id) for m in (first, second)] == [("tool", "one", "a"), ("tool", "", "b")]
    parts = msgspec.to_builtins(user.content)
    assert [part.get("image_url") for part in parts if part["type"] == "image_url"] == [
        "data:image/png;base64,AAAA",
        "https://x/y.png",
    ]
    assert "".join(part.get("text", "") for part in parts) == "see T\nwords\n\nmore"
    assert (assistant.content, assistant.reasoning_content) == ("The answer is", "hm")
    assert left_out == ["content.container_upload", "content.redacted_thinking"]


def test_settings_of_messages() -> None:
    hello = [{"role": "user", "content": "x"}]
    schema = {"type": "object"}
    chat = messages(
        messages=hello,
        system="Be kind.",
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "Read", "disable_parallel_tool_use": True},
        stop_sequences=["a"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        thinking={"type": "disabled"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    assert turns(chat)[0] == ("system", "Be kind.")
    assert [tool.function.name for tool in choose_tools(chat)] == ["Read"]
    assert (chat.parallel_tool_calls, chat.stop, chat.temperature, chat.top_p, chat.top_k) == (
        *(False, ["a"]),
        *(0.5, 0.9, 3),
    )
    assert (chat.include_reasoning, chat.reasoning_effort, chat.max_tokens) == (False, "low", 9)
    assert chat.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert chat.response_format is not None and chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema == schema
    for kind, expected in (("any", "required"), ("auto", "auto"), ("none", "none")):
        assert messages(messages=hello, tool_choice={"type": kind}).tool_choice == expected


# -- Responses -----------------------------------------------------------------------------------------------------


def test_turns_of_responses() -> None:
    left_out: list[str] = []
    chat = respond(
        [
            {"role": "developer", "content": "Use tools."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a":1}'},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"role": "system", "content": "Hurry."},
        ],
        later=False,
        left_out=left_out,
        instructions="Be brief.",
        tools=[{"type": "function", "name": "look", "parameters": {"type": "object"}}, {"type": "web_search"}],
        reasoning={"effort": "none"},
        max_output_tokens=7,
    )
    assert turns(chat) == [
        ("system", "Be brief.\n\nUse tools."),
        ("user", "Hi"),
        ("assistant", "I look."),
        ("tool", "one"),
        ("tool", "two\n\nHurry."),
    ]
    said = chat.messages[2]
    assert said.reasoning_content == "hm"
    assert [call.id for call in said.tool_calls or []] == ["c1", "c2"]
    assert [message.name for message in chat.messages[3:]] == ["look", "look"]
    assert (chat.reasoning_effort, chat.max_tokens, len(chat.tools or [])) == ("none", 7, 1)
    assert left_out == ["input.web_search_call", "tools.web_search"]


def test_thoughts_come_back_in_each_form() -> None:
    for thoughts in (
        {"summary": [{"type": "summary_text", "text": "hm"}]},
        {"summary": [], "encrypted_content": hidden_thoughts("hm")},
        {"content": [{"type": "reasoning_text", "text": "hm"}], "summary": [{"type": "summary_text", "text": "no"}]},
    ):
        items = [{"role": "user", "content": "x"}, {"type": "reasoning", **thoughts}, {"role": "user", "content": "y"}]
        assert respond(items).messages[1].reasoning_content == "hm"
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA\xff!"}
    assert turns(respond([{"role": "user", "content": "x"}, foreign])) == [("user", "x")]


def test_choices_of_responses() -> None:
    tools = [{"type": "function", "name": name} for name in ("a", "b")]
    for choice, names in (
        ({"type": "function", "name": "b"}, ["b"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "a"}]}, ["a"]),
        ("auto", ["a", "b"]),
        ("none", []),
    ):
        chat = respond("x", tools=tools, tool_choice=choice)
        assert [tool.function.name for tool in choose_tools(chat)] == names
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    found = respond("x", text={"format": schema}).response_format
    assert found is not None and found.json_schema is not None and found.json_schema.schema == {"type": "object"}
    assert respond("x", text={"format": {"type": "text"}}).response_format is None


# -- what is refused -----------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "x"}]
PICTURE = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}


def block(**members: Any) -> Callable[[], ChatRequest]:
    return lambda: messages(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, members]}])


def item(*given: Any) -> Callable[[], ChatRequest]:
    return lambda: respond([*USER, *given])


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda: messages(messages=[]), "messages"),
        (block(text="x"), "messages[0].content[1].type"),
        (block(type=3), "messages[0].content[1].type"),
        (block(type="text"), "messages[0].content[1].text"),
        (block(type="text", text=3), "messages[0].content[1].text"),
        (block(type="image", source={"type": "base64"}), "messages[0].content[1].source.data"),
        (block(type="image", source={"type": "file", "file_id": "f"}), "messages[0].content[1].source.type"),
        (block(type="image_url", image_url={"url": "https://x/y.png"}), "messages[0].content[1]"),
        (
            block(
                type="tool_result", tool_use_id="a", content=[{"type": "input_image", "image_url": "https://x/y.png"}]
            ),
            "messages[0].content[1].content[0]",
        ),
        (block(type="tool_use", id="a", name="b", input="{}"), "messages[0].content[1].input"),
        (block(type="tool_result", content="x"), "messages[0].content[1].tool_use_id"),
        (
            block(type="tool_result", tool_use_id="a", content=[{"type": "text"}]),
            "messages[0].content[1].content[0].text",
        ),
        (
            block(type="document", source={"type": "base64", "media_type": "application/pdf", "data": "A"}),
            "messages[0].content[1].source",
        ),
        (lambda: messages(sees=False, messages=[{"role": "user", "content": [PICTURE]}]), "messages[0].content[0]"),
        (lambda: messages(messages=USER, system=[{"type": "text"}]), "system[0].text"),
        (lambda: messages(messages=USER, tools=[{"name": "a"}]), "tools[0].input_schema"),
        (lambda: messages(messages=USER, system=MARK), "system"),
        (lambda: messages(messages=USER, system=[{"type": "text", "text": MARK}]), "system[0]"),
        (lambda: messages(messages=[*USER, {"role": "user", "content": MARK}], system="x"), "messages[1].content"),
        (block(type="text", text=MARK), "messages[0].content[1]"),
        (block(type="tool_result", tool_use_id="a", content=MARK), "messages[0].content[1].content"),
        (block(type="document", source={"type": "text", "data": MARK}), "messages[0].content[1]"),
        (lambda: respond([]), "input"),
        (lambda: respond("x", background=True), "background"),
        (lambda: respond("x", conversation="conv_1"), "conversation"),
        (lambda: respond("x", instructions=MARK), "instructions"),
        (lambda: respond(MARK, instructions="x"), "input"),
        (lambda: respond("x", before=[{"role": "user", "content": MARK}]), "previous_response_id.content"),
        (item({"role": "user", "content": [{"type": "input_text", "text": MARK}]}), "input[1].content[0]"),
        (item({"type": "function_call_output", "call_id": "x", "output": MARK}), "input[1].output"),
        (item({"role": "nobody", "content": "x"}), "input[1].role"),
        (item({"role": "user"}), "input[1].content"),
        (item({"role": "user", "content": [{"text": "x"}]}), "input[1].content[0].type"),
        (item({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}), "input[1].content[0]"),
        (item({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}), "input[1].content[0]"),
        *(
            (item({"role": "user", "content": [{"type": kind, "image_url": "https://x/y.png"}]}), "input[1].content[0]")
            for kind in ("image", "image_url")
        ),
        (item({"type": "function_call", "name": "x"}), "input[1].call_id"),
        (item({"type": "function_call_output", "call_id": "x"}), "input[1].output"),
        (item({"type": "item_reference"}), "input[1].id"),
        (lambda: respond("x", tools=[{"type": "function"}]), "tools[0].name"),
        (lambda: respond("x", tools=[{"name": "x"}]), "tools[0].type"),
        (lambda: respond("x", tool_choice="always"), "tool_choice"),
        (lambda: respond("x", tool_choice={"type": "web_search"}), "tool_choice"),
        (
            lambda: respond("x", tool_choice={"type": "allowed_tools", "tools": [{"type": "function", "name": "b"}]}),
            "tool_choice",
        ),
        (lambda: respond("x", text={"format": {"type": "grammar"}}), "text.format.type"),
        (lambda: respond("x", text={"format": {"type": "json_schema"}}), "text.format.schema"),
    ],
)
def test_refusals_name_the_place(ask: Callable[[], ChatRequest], name: str) -> None:
    with pytest.raises((ValidationError, UnsupportedError)) as caught:
        ask()
    assert f"`{name}`" in str(caught.value)


# -- what is stored ------------------------------------------------------------------------------------------------


def put(store: ResponseStore, name: str, size: int = 10) -> None:
    store.put(name, b"a" * size, b"[]", {f"item of {name}": b"{}"})


def missing(store: ResponseStore, name: str) -> bool:
    with pytest.raises(NotStoredError) as by_item:
        store.item(f"item of {name}")
    with pytest.raises(NotStoredError) as caught:
        store.items(name)
    assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")
    assert by_item.value.param == "input"
    return True


def test_the_store_is_bounded_by_number_and_drops_what_was_not_used() -> None:
    store = ResponseStore(2)
    put(store, "a")
    put(store, "b")
    assert store.answer("a") == b"a" * 10
    put(store, "c")
    assert len(store) == 2 and missing(store, "b")
    assert store.items("a") == b"[]" and store.item("item of c") == b"{}"
    store.delete("a")
    assert missing(store, "a")
    with pytest.raises(NotStoredError) as caught:
        store.delete("a")
    assert caught.value.status == 404
    assert missing(ResponseStore(0), "a")


def test_the_store_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(1000, max_bytes=10_000)
    for number in range(20):
        put(store, f"r{number}", 2000)
    assert len(store) == 3 and missing(store, "r16") and store.answer("r17")
    monkeypatch.setattr(responses_store, "MAX_ENTRY_BYTES", 4000)
    put(store, "large", 5000)
    assert len(store) == 3 and missing(store, "large")


def test_the_store_forgets_with_time_and_keeps_keys_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(responses_store.time, "monotonic", lambda: now)
    store = ResponseStore(9)
    put(store, "a")
    put(store, "b")
    now = responses_store.LIFETIME_S - 1
    assert store.answer("b")
    now += 2
    assert missing(store, "a") and len(store) == 1
    token = current_key.set("another")
    assert missing(store, "b")
    current_key.reset(token)
    assert store.answer("b")


def test_references_are_bounded() -> None:
    body = msgspec.convert({"input": [{"type": "item_reference", "id": "a"}] * 3}, ResponsesRequest)
    assert items_of(body, lambda _: b'{"a":1}', 21) == [{"a": 1}] * 3
    with pytest.raises(ValidationError, match="`input` refers"):
        items_of(body, lambda _: b'{"a":1}', 20)
