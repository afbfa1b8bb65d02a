"""Chat answers, whole and streamed, from the tokens of models that think and call: both tell the same."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from text_generation_inference.api import cloud
from text_generation_inference.api.chat_answer import Chat, whole_choice
from text_generation_inference.api.chat_prompt import ChatPlan
from text_generation_inference.api.chat_stream import stream_chat
from text_generation_inference.api.choices import usage_of
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.api.thoughts import plan_thoughts, tells_thoughts
from text_generation_inference.config import ServerConfig
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.reasoning import detect_reasoning_format
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools import detect_tool_format
from text_generation_inference.types import GenerationRequest, Grammar, SamplingParams

SPECIAL = ["</s>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "[THINK]", "[/THINK]"]


def build() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Tokenizer(backend, SpecialTokens({"eos_token": AddedToken("</s>", special=True)}, [], [], []))


TOKENIZER = build()


class FakeGeneration:
    """What an engine would have made of a text, in pieces of several tokens."""

    def __init__(self, text: str, plan: ChatPlan) -> None:
        ids = TOKENIZER.encode(text)
        sampling = SamplingParams(stop=["STOP"])
        self.request = GenerationRequest(
            id=1,
            token_ids=[0],
            sampling=sampling,
            max_new_tokens=99,
            stop_token_ids=[TOKENIZER.encode("</s>")[0]],
            seed=0,
        )
        output = plan.open_text(TOKENIZER, self.request)
        self.finish_reason = ""
        self.num_tokens, self.num_thought_tokens, self.num_cached_tokens = len(ids), 0, 0
        self.input_length = 1
        self.pieces: list[Piece] = []
        for token_id in ids:
            piece, stopped = output.push(token_id)
            thoughts = output.take_thoughts()
            self.num_thought_tokens += bool(thoughts)
            self.pieces.append(Piece(token_id, piece, -1.0, False, [], thoughts))
            if stopped:
                break
        self.pieces[-1].text += output.finish()
        self.pieces[-1].thoughts += output.take_thoughts()
        self.pieces[-1].last = True
        self.text = output
        self.end = "eos_token" if text.endswith("</s>") else "length"
        self._left = list(self.pieces)

    async def take(self) -> list[Piece]:
        pieces, self._left = self._left[:3], self._left[3:]
        if not self._left:
            self.finish_reason = self.end
        return pieces

    take_all = Generation.take_all


def make_chat(text: str, template: str, prompt: str = "", grammar: bool = False, **fields: Any) -> Chat:
    body = msgspec.convert({"messages": [{"role": "user", "content": "Hi"}], **fields}, ChatRequest)
    config, source = ServerConfig(), ChatTemplate(template)
    tools = {tool.function.name: {} for tool in body.tools or []}
    tool_format = detect_tool_format(source, TOKENIZER) if tools else None
    plan = ChatPlan(prompt, SamplingParams(), None, tool_format, tools, "mixed")
    known, demanded = detect_reasoning_format(source, TOKENIZER), Grammar("regex", "x") if grammar else None
    thoughts = plan_thoughts(body, config, known, TOKENIZER, (prompt, ""), demanded, bool(tools))
    plan.reasoning, plan.thinks_first = thoughts.reasoning, thoughts.first
    generation = cast(Generation, FakeGeneration(text, plan))
    separates, includes = tells_thoughts(body, config), body.include_reasoning is not False
    return Chat(body, plan, "m", TOKENIZER, [generation], "id", 0, separates, includes)


SERVICE = SimpleNamespace(fingerprint="f", config=ServerConfig())


def whole(chat: Chat) -> dict[str, Any]:
    generation = cast(FakeGeneration, chat.generations[0])
    generation.finish_reason = generation.end
    return msgspec.to_builtins(whole_choice(0, chat, chat.generations[0], generation.pieces))


def streamed(chat: Chat) -> list[dict[str, Any]]:
    sent: list[bytes] = []

    async def write(data: bytes) -> None:
        sent.append(data)

    async def ignore(*_: object) -> None:
        pass

    connection = SimpleNamespace(start_events=ignore, write=write, end_events=ignore)
    call = SimpleNamespace(
        connection=connection,
        stream_headers=lambda _: {},
        streams=[],
        service=SERVICE,
        succeed=lambda _: None,
        request=SimpleNamespace(path="/v1/chat/completions"),
    )
    asyncio.run(stream_chat(cast(Any, call), chat))
    events = b"".join(sent).decode().split("\n\n")
    return [json.loads(event.removeprefix("data:")) for event in events if event]


def add_up(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the chunks."""
    content, thoughts = "", ""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert delta["role"] == "assistant"
        assert "tool_calls" in delta or isinstance(delta["content"], str), "clients of TGI append it unseen"
        content += delta.get("content", "")
        assert delta.get("reasoning_content") == delta.get("reasoning")
        thoughts += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {"content": content, "thoughts": thoughts, "calls": calls, "end": chunks[-1]["choices"][0]["finish_reason"]}


def as_summed(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    assert message.get("reasoning_content") == message.get("reasoning")
    calls = [{key: call["function"][key] for key in ("name", "arguments")} for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "thoughts": message.get("reasoning_content", ""),
        "calls": calls,
        "end": choice["finish_reason"],
    }


THINK = "{{ tools }}<think></think><tool_call>"
GPT_OSS = "{{ tools }}<|start|><|channel|><|message|> to=functions."
HM = "<think>\nHm, STOP é.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": "b"}}\n</tool_call>'
TOOLS = {"tools": [{"type": "function", "function": {"name": "look"}}]}
LOOK = [{"name": "look", "arguments": '{"a": "b"}'}]


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        (lambda: make_chat("Yes.</s>", "{{ messages }}"), ("Yes.", "", [], "stop")),
        (lambda: make_chat(f"{HM}Yes.</s>", "{{ messages }}"), ("<think>\nHm, ", "", [], "stop")),
        (lambda: make_chat(f"{HM}Yes, é.</s>", THINK), ("Yes, é.", "Hm, STOP é.", [], "stop")),
        (lambda: make_chat(f"{HM}Yes, STOP.</s>", THINK), ("Yes, ", "Hm, STOP é.", [], "stop")),
        (lambda: make_chat("Hm.</think>Yes.</s>", THINK, "<|user|><think>\n"), ("Yes.", "Hm.", [], "stop")),
        (lambda: make_chat("Hm.", THINK, "<think>\n"), ("", "Hm.", [], "length")),
        (lambda: make_chat(f"{HM}{CALL}</s>", THINK, **TOOLS), ("", "Hm, STOP é.", LOOK, "tool_calls")),
        (lambda: make_chat(f"{HM}Ok.\n{CALL}</s>", THINK, **TOOLS), ("Ok.", "Hm, STOP é.", LOOK, "tool_calls")),
        (
            lambda: make_chat("<think>a</think>b</s>", THINK, separate_reasoning=False),
            ("<think>a</think>b", "", [], "stop"),
        ),
        (lambda: make_chat("<think>a</think>b</s>", THINK, include_reasoning=False), ("b", "", [], "stop")),
        (
            lambda: make_chat("<think>a</think>b</s>", THINK, separate_reasoning=False, include_reasoning=False),
            ("b", "", [], "stop"),
        ),
        (lambda: make_chat('Hm.</think>{"a": 1}</s>', THINK, "<think>\n", True), ('{"a": 1}', "Hm.", [], "stop")),
        (lambda: make_chat('"<think>"</s>', THINK, "<think>\n\n</think>\n", True), ('"<think>"', "", [], "stop")),
        (lambda: make_chat("[THINK]a[/THINK]b</s>", "{{ messages }}[/THINK]"), ("b", "a", [], "stop")),
        (
            lambda: make_chat(
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.</s>", GPT_OSS
            ),
            ("Yes.", "Hm.", [], "stop"),
        ),
        (
            lambda: make_chat(
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
                '<|constrain|>json<|message|>{"a": "b"}</s>',
                GPT_OSS,
                **TOOLS,
            ),
            ("", "Hm.", LOOK, "tool_calls"),
        ),
        (
            lambda: make_chat(
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.</s>",
                GPT_OSS,
                separate_reasoning=False,
            ),
            ("Hm.Yes.", "", [], "stop"),
        ),
    ],
)  # fmt: skip
def test_whole_and_streamed_answers(chat: Any, expected: tuple[str, str, list[Any], str]) -> None:
    content, thoughts, calls, end = expected
    summed = as_summed(whole(chat()))
    assert summed == {"content": content, "thoughts": thoughts, "calls": calls, "end": end}
    assert add_up(streamed(chat())) == summed


def test_numbered_calls_go_on_counting() -> None:
    """Ids of Kimi have the number of the call in the conversation, not in its turn."""
    call = "<|tool_call_begin|>functions.look:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|></s>"
    template = "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>"
    said = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [said]}, {"role": "tool", "content": "x", "tool_call_id": said["id"]}]
    for messages, expected in (([], [0, 1]), (turns, [1, 2]), (turns * 2, [2, 3])):
        fields = {"messages": [{"role": "user", "content": "Hi"}, *messages], **TOOLS}
        calls = whole(make_chat(text, template, **fields))["message"]["tool_calls"]
        assert [call["id"] for call in calls] == [f"functions.look:{number}" for number in expected]
        chunks = [chunk["choices"][0]["delta"] for chunk in streamed(make_chat(text, template, **fields))]
        ids = [call["id"] for delta in chunks for call in delta.get("tool_calls", ()) if "id" in call]
        assert ids == [call["id"] for call in calls]


def test_usage_counts_thoughts() -> None:
    chat = make_chat("<think>abc</think>de</s>", THINK, stream_options={"include_usage": True})
    usage = msgspec.to_builtins(usage_of(cast(Any, SERVICE), chat.generations, thinks=True))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert streamed(chat)[-1]["usage"] == usage
    plain = make_chat("abc</s>", "{{ messages }}")
    assert "completion_tokens_details" not in msgspec.to_builtins(usage_of(cast(Any, SERVICE), plain.generations))


def test_log_probabilities_come_with_every_token() -> None:
    chat = make_chat("<think>abc</think>de</s>", THINK, logprobs=True)
    chunks = streamed(chat)
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    told = whole(make_chat("<think>abc</think>de</s>", THINK, logprobs=True))["logprobs"]["content"]
    assert entries == told and len(told) == len(TOKENIZER.encode("<think>abc</think>de</s>"))


@pytest.mark.parametrize("separate", [True, False])
def test_thoughts_that_are_left_out_have_no_log_probabilities(separate: bool) -> None:
    fields = {"logprobs": True, "include_reasoning": False, "separate_reasoning": separate}
    told = whole(make_chat("<think>abc</think>de</s>", THINK, **fields))["logprobs"]["content"]
    assert [entry["token"] for entry in told] == ["d", "e", "</s>"]
    chunks = streamed(make_chat("<think>abc</think>de</s>", THINK, **fields))
    assert told == [
        entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]


@pytest.mark.parametrize(
    ("text", "template", "expected"),
    [
        (f"{HM}Yes, é.</s>", THINK, "Yes, é."),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.</s>",
            GPT_OSS,
            "Yes.",
        ),
        ("Yes.</s>", "{{ messages }}", "Yes."),
    ],
)
def test_predictions_have_no_thoughts(monkeypatch: pytest.MonkeyPatch, text: str, template: str, expected: str) -> None:
    plan = make_chat(text, template).plan
    sent: list[Any] = []

    async def value(value: Any) -> Any:
        return value

    monkeypatch.setattr(cloud, "plan_chat", lambda *_: value(plan))
    service = SimpleNamespace(
        metrics=SimpleNamespace(count_request=lambda: None),
        unknown_fields=SimpleNamespace(note=lambda _: None),
        admit=nullcontext,
        prepare=lambda *_, **__: value(None),
        start=lambda _, make_text, *__: FakeGeneration(text, cast(Any, SimpleNamespace(open_text=make_text))),
    )
    body = {"instances": [{"messages": [{"role": "user", "content": "Hi"}]}]}
    call = SimpleNamespace(
        service=service,
        request=SimpleNamespace(read_json=lambda: value(json.dumps(body).encode()), is_long=False, arrived=0.0),
        connection=SimpleNamespace(respond=lambda response: value(sent.append(response))),
        succeed=lambda _: None,
    )
    asyncio.run(cloud.vertex(cast(Any, call)))
    assert json.loads(sent[0].body) == {"predictions": [expected]}
