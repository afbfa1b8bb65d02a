"""Messages as templates read them."""

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from text_generation_inference.errors import ValidationError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.messages import TOOL_PROMPT, append_tool_prompt, normalise_messages

FILES = Path(__file__).parent / "templates"
HI = {"role": "user", "content": "x"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}]


def template(name: str) -> ChatTemplate:
    return ChatTemplate((FILES / f"{name}.jinja").read_text(), "<s>", "</s>")


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments, **more}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ({"a": 1}, {"a": 1}),
        ("{}", {}),
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        ('"text"', '"text"'),
        ("", ""),
        ("[" * 100_000, "[" * 100_000),
        (None, {}),
    ],
)
def test_arguments_become_objects(given: Any, expected: Any) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call(given)]}]
    before = copy.deepcopy(messages)
    assert normalise_messages(messages) == [{"role": "assistant", "content": "", "tool_calls": [call(expected)]}]
    assert messages == before


def test_parameters_are_arguments() -> None:
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "parameters": {"a": 1}}}],
    }
    (normal,) = normalise_messages([message])
    assert normal["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_other_fields_are_kept() -> None:
    message = {"role": "tool", "content": "3", "tool_call_id": "abc", "name": "f"}
    assert normalise_messages([message]) == [message]
    assert normalise_messages([{"role": "user", "content": "x", "tool_calls": []}]) == [
        {"role": "user", "content": "x"}
    ]
    assert normalise_messages([{"role": "assistant", "content": None}]) == [{"role": "assistant", "content": ""}]


PARTS = [
    {"type": "text", "text": "Look: "},
    {"type": "image_url", "image_url": {"url": "http://x/y.png", "detail": "low"}},
    {"type": "text", "text": "\nwell?"},
]


def test_parts_become_text() -> None:
    expected = [{"role": "user", "content": "Look: ![](http://x/y.png)\nwell?"}]
    assert normalise_messages([{"role": "user", "content": PARTS}]) == expected
    assert normalise_messages([{"role": "user", "content": PARTS}], template("yi")) == expected
    assert normalise_messages([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


FIRST_PART = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"


@pytest.mark.parametrize("reader", [template("gemma3"), ChatTemplate(FIRST_PART)], ids=["gemma3", "first part"])
def test_no_part_is_lost_where_the_template_reads_parts(reader: ChatTemplate) -> None:
    """Gemma's shows no part of the type `image_url`, others look at the first part alone."""
    assert all(reader.content_forms("user"))
    messages = [{"role": "user", "content": PARTS}]
    normal = normalise_messages(messages, reader)
    assert normal == [{"role": "user", "content": "Look: ![](http://x/y.png)\nwell?"}]
    assert "Look: ![](http://x/y.png)\nwell?" in reader.render(normal)
    assert normalise_messages([{"role": "user", "content": []}], reader) == [{"role": "user", "content": ""}]


# Parts alone of users and assistants, as models that see often have it; the system is read as a text alone.
PARTS_ALONE = """{% for m in messages %}{% if m['role'] == 'system' %}<{{ m['content'] | trim }}>{% else %}{{ m['role'] }}:
{%- if m['role'] == 'assistant' %}{{ m['content'][0]['text'] }}{% else %}
{%- for part in m['content'] %}{{ '@' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}
{%- endif %}/{% endfor %}"""


@pytest.mark.parametrize("as_parts", [False, True])
def test_no_text_is_lost_where_the_template_reads_nothing_but_parts(as_parts: bool) -> None:
    """Llava's, Idefics' and SmolVLM's show nothing of a text, or fail."""
    reader = ChatTemplate(PARTS_ALONE)

    def content(text: str) -> Any:
        return [{"type": "text", "text": text}] if as_parts else text

    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("tool", "c"), ("assistant", "")]
    messages: list[dict[str, Any]] = [{"role": role, "content": content(text)} for role, text in turns]
    messages += [{"role": "user", "content": PARTS}, {"role": "assistant", "content": None, "tool_calls": [call({})]}]
    shown = reader.render(normalise_messages(messages, reader, lambda _: None))
    said = '{"name": "f", "parameters": {}}'
    assert shown == f"<S>/user:a/assistant:b/tool:c/assistant:/user:Look: @\nwell?/assistant:{said}/"
    (normal,) = normalise_messages([{"role": "user", "content": "x"}], reader)
    (message,) = append_tool_prompt([normal], TOOLS, "Use it.", True)
    assert reader.render([message]) == "user:x\n---\nUse it./"


def test_pictures_are_shown_as_the_caller_says() -> None:
    """A text in their place, or parts that a template reads; in order, through all messages."""
    again = {"type": "image_url", "image_url": "data:image/png;base64,AA=="}  # a bare text, as some clients send it
    messages = [
        {"role": "user", "content": [*PARTS, again]},
        {"role": "assistant", "content": "One."},
        {"role": "tool", "content": [again, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    before = copy.deepcopy(messages)
    shown: list[str] = []

    def stand_in(url: str) -> str:
        shown.append(url)
        return f"<{len(shown)}>"

    for reader in (None, template("yi")):
        shown.clear()
        assert [message["content"] for message in normalise_messages(messages, reader, stand_in)] == [
            "Look: <1>\nwell?<2>",
            "One.",
            "<3>ab",
        ]
        assert shown == ["http://x/y.png", "data:image/png;base64,AA==", "data:image/png;base64,AA=="]
    parts = [message["content"] for message in normalise_messages(messages, template("gemma3"), lambda _: None)]
    image = {"type": "image"}
    assert parts == [
        [{"type": "text", "text": "Look: "}, image, {"type": "text", "text": "\nwell?"}, image],
        "One.",
        [image, {"type": "text", "text": "ab"}],
    ]
    assert messages == before


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "image": None},
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
    ],
)
def test_a_picture_that_is_not_there_is_refused(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    with pytest.raises(ValidationError, match="an image that is not there"):
        normalise_messages(messages, template("gemma3"), lambda _: None)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("x", "a message must be an object. Given: str"),
        ({"role": "user", "content": 5}, "`content` must be a text or a list of parts. Given: int"),
        ({"role": "user", "content": {"type": "text"}}, "`content` must be a text or a list of parts. Given: dict"),
        ({"role": "user", "content": ["x"]}, "a part of `content` must be an object. Given: str"),
        (
            {"role": "user", "content": [{"type": "imag", "image": b""}]},
            "holds a part of type 'imag'; known: text, image",
        ),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "holds a part of type ['text']"),
        ({"role": "user", "content": [{}]}, "an image that is not there"),
        ({"role": "user", "content": [{"type": "image", "image": b"x"}]}, "a picture, and this model takes none"),
    ],
)
def test_what_would_be_lost_is_refused_in_words(message: Any, said: str) -> None:
    """Callers of `LLM` may hand over anything."""
    with pytest.raises(ValidationError, match=re.escape(said)):
        normalise_messages([message])


def test_pictures_in_the_words_of_transformers() -> None:
    found: list[Any] = []
    parts = [{"type": "image", "base64": "AA=="}, {"image": b"x"}, {"image_url": "u"}, {"text": None}, {"text": "t"}]
    (normal,) = normalise_messages([{"role": "user", "content": parts}], None, found.append)
    assert found == ["data:;base64,AA==", b"x", "u"]
    assert normal["content"] == [*[{"type": "image"}] * 3, {"type": "text", "text": "t"}]


def test_templates_that_write_pictures() -> None:
    gemma, marker = template("gemma3"), "<start_of_image>"
    assert gemma.writes_pictures(marker) and not gemma.writes_pictures("<image>")
    assert not template("yi").writes_pictures(marker) and not ChatTemplate(FIRST_PART).writes_pictures(marker)
    (normal,) = normalise_messages([{"role": "user", "content": PARTS}], gemma, lambda _: None)
    assert "Look:<start_of_image>well?" in gemma.render([normal])


def test_parts_with_calls_become_text() -> None:
    messages = [{"role": "assistant", "content": PARTS, "tool_calls": [call({})]}]
    (normal,) = normalise_messages(messages, template("gemma3"))
    assert normal["content"] == 'Look: ![](http://x/y.png)\nwell?\n{"name": "f", "parameters": {}}'


def test_a_role_added_up_from_chunks() -> None:
    """OpenAI's Python client makes one text of the role in every chunk."""
    for role in ("assistant", "assistantassistant", "assistant" * 50):
        assert normalise_messages([{"role": role, "content": "x"}]) == [{"role": "assistant", "content": "x"}]
    for role in ("assistants", "user", "useruser", ""):
        assert normalise_messages([{"role": role, "content": "x"}]) == [{"role": role, "content": "x"}]


def test_calls_become_text_where_the_template_shows_none() -> None:
    messages = [{"role": "assistant", "content": "So:", "tool_calls": [call('{"a": "é"}'), call({})]}]
    (normal,) = normalise_messages(messages, template("yi"))
    assert normal["content"] == 'So:\n{"name": "f", "parameters": {"a": "é"}}\n{"name": "f", "parameters": {}}'
    (normal,) = normalise_messages(messages, template("qwen3_thinking"))
    assert normal["content"] == "So:"


NULL_ONLY = """{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}
{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"""


def test_empty_content_is_what_the_template_asks_for() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call({})]}]
    for name in ("qwen3_thinking", "hermes_tool_use", "mistral_v3_tools", "deepseek_r1"):
        assert normalise_messages(messages, template(name))[1]["content"] == ""
        assert '"f"' in template(name).render(normalise_messages(messages, template(name))) or name == "deepseek_r1"
    null_only = ChatTemplate(NULL_ONLY)
    assert null_only.needs_null_content
    assert normalise_messages(messages, null_only)[1]["content"] is None
    assert '"name": "f"' in null_only.render(normalise_messages(messages, null_only))
    for content in ("", []):  # as some clients say that there is none
        given = [messages[0], {**messages[1], "content": content}]
        assert normalise_messages(given, null_only) == normalise_messages(messages, null_only)


# As DeepSeek's own templates do: V3 and R1 where the content is none, V3.1 in any case.
JOINED = """{% for m in messages %}{% if m.tool_calls is defined and CONDITION %}{% for c in m.tool_calls %}
{{ '<call>' + c.function.name + '<sep>' + c.function.arguments + '</call>' }}{% endfor %}
{% else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("condition", ["m.content is none", "true"])
def test_arguments_are_text_where_the_template_joins_it(condition: str) -> None:
    joins = ChatTemplate(JOINED.replace("CONDITION", condition))
    assert joins.needs_argument_text and joins.needs_null_content == (condition != "true")
    calls = [call('{"b":  "é"}'), call({"a": ["é"]}), call(None)]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    before = copy.deepcopy(messages)
    shown = joins.render(normalise_messages(messages, joins))
    assert shown.replace("\n", "") == (
        'x<call>f<sep>{"b":  "é"}</call><call>f<sep>{"a": ["é"]}</call><call>f<sep>{}</call>'
    )
    assert messages == before
    assert not any(template(name).needs_argument_text for name in ("qwen3_thinking", "deepseek_r1", "gpt_oss", "yi"))


SINGLE = """{% for m in messages %}{% if m.tool_calls %}
{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls alone') }}{% endif %}
{{ '(' + m.content + '|' + m.tool_calls[0].function.name + ')' }}{% else %}
{{ '(' + m.role + '|' + m.content + ')' }}{% endif %}{% endfor %}"""


def test_each_call_has_a_message_where_one_may_hold_no_more() -> None:
    """As in the templates of Llama 3, whose models write several all the same, and of GPT-OSS."""

    def shown(ids: list[str], results: list[str]) -> str:
        calls = [{**call({}, name=f"f{number}"), "id": name} for number, name in enumerate(ids)]
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "So:", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": name, "content": f"r{n}"} for n, name in enumerate(results)),
            {"role": "user", "content": "y"},
        ]
        before = copy.deepcopy(messages)
        text = single.render(normalise_messages(messages, single)).replace("\n", "")
        assert messages == before
        return text.removeprefix("(user|x)").removesuffix("(user|y)")

    single = ChatTemplate(SINGLE)
    assert shown(["a", "b"], ["a", "b"]) == "(So:|f0)(tool|r0)(|f1)(tool|r1)"
    assert shown(["a", "b"], ["b", "a"]) == "(So:|f0)(tool|r1)(|f1)(tool|r0)"
    assert shown(["a", "b", "c"], ["b"]) == "(So:|f0)(|f1)(tool|r0)(|f2)"
    assert shown(["a", "a"], ["a", "c"]) == "(So:|f0)(tool|r0)(|f1)(tool|r1)"
    assert shown(["a", "a"], ["a", "a"]) == "(So:|f0)(tool|r0)(|f1)(tool|r1)"  # ids that do not tell calls apart
    assert shown(["a"], ["a"]) == "(So:|f0)(tool|r0)"
    for name in ("llama31_tools", "gpt_oss"):
        assert template(name).needs_single_calls, name
    for name in ("qwen3_thinking", "mistral_v3_tools", "deepseek_r1", "yi", "command_r_tool_use"):
        assert not template(name).needs_single_calls, name


def test_calls_without_ids_have_a_result_each() -> None:
    """As in `transformers`."""
    calls = [{key: value for key, value in call({}, name=name).items() if key != "id"} for name in ("f", "g")]
    messages: list[Any] = [HI, {"role": "assistant", "tool_calls": calls}]
    messages += [{"role": "tool", "content": text} for text in "ab"]
    shown = ChatTemplate(SINGLE).render(normalise_messages(messages, ChatTemplate(SINGLE)))
    assert shown.replace("\n", "") == "(user|x)(|f)(tool|a)(|g)(tool|b)"
    with pytest.raises(ValidationError, match="a message must be an object"):
        normalise_messages([*messages, "x"], ChatTemplate(SINGLE))


@pytest.mark.parametrize(
    ("condition", "text"), [("m.content is none", ""), ("true", "m.content"), ("true", "m.content[0].text")]
)
def test_each_of_several_calls_has_the_content_that_the_template_asks_for(condition: str, text: str) -> None:
    said = text or "m.content"
    source = "{% for m in messages %}{% if m.tool_calls and CONDITION %}{{ m.tool_calls[0].function.name + TEXT }}/"
    source += "{% elif not m.tool_calls %}{{ '' + SAID }}/{% endif %}{% endfor %}"
    source = source.replace("CONDITION", condition).replace("TEXT", text or "''").replace("SAID", said)
    template, calls = ChatTemplate(source), [call({}, name=name) for name in ("f", "g")]
    assert template.needs_single_calls
    messages = [HI, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert template.render(normalise_messages(messages, template)) == "x/f/g/"


def test_pictures_of_results_come_in_the_order_of_the_prompt() -> None:
    """A template that writes the same marker for each does not tell which is which."""
    calls, found = [{**call({}), "id": name} for name in "ab"], list[Any]()
    results = [{"role": "tool", "tool_call_id": name, "content": [{"image_url": name}]} for name in "ba"]
    messages = [HI, {"role": "assistant", "tool_calls": calls}, *results]
    normalise_messages(messages, ChatTemplate(SINGLE), found.append)
    assert found == ["a", "b"]


def test_contents_are_checked_with_the_places_they_come_from() -> None:
    calls, found = [{**call({}), "id": name} for name in "ab"], list[Any]()
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "bac"]
    messages = [HI, {"role": "assistant", "content": "So:", "tool_calls": calls}, *results, HI]
    normalise_messages(messages, ChatTemplate(SINGLE), check=lambda *given: found.append(given))
    assert found == [(0, "x"), (1, "So:"), (3, "a"), (1, ""), (2, "b"), (4, "c"), (5, "x")]


def test_many_calls_and_results_take_no_longer_each() -> None:
    """A server puts them apart beside others' requests."""
    calls = [{**call({}), "id": str(number)} for number in range(20_000)]
    results = [{"role": "tool", "tool_call_id": str(number), "content": "r"} for number in range(20_000)]
    messages = [HI, {"role": "assistant", "tool_calls": calls}, *results]
    pairs = [HI, *({"role": "assistant", "tool_calls": calls[:2]} for _ in range(20_000))]
    start = time.process_time()
    assert len(normalise_messages(messages, ChatTemplate(SINGLE))) == 40_001
    assert len(normalise_messages(pairs, ChatTemplate(SINGLE))) == 40_001
    assert time.process_time() - start < 10  # several times that, if each looks at all others


def test_tool_prompt_as_tgi() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}]
    shown = json.dumps(TOOLS, ensure_ascii=False, separators=(",", ":"))
    before = copy.deepcopy(messages)
    expected = f"Hi\n---\n{shown}\n{TOOL_PROMPT}"
    assert append_tool_prompt(messages, TOOLS, None, False) == [messages[0], {"role": "user", "content": expected}]
    assert append_tool_prompt(messages, TOOLS, "", False)[1]["content"] == expected
    assert append_tool_prompt(messages, TOOLS, "Use it.", False)[1]["content"] == f"Hi\n---\n{shown}\nUse it."
    assert append_tool_prompt(messages, TOOLS, None, True) == messages
    assert append_tool_prompt(messages, TOOLS, "Use it.", True)[1]["content"] == "Hi\n---\nUse it."
    assert messages == before
    assert TOOL_PROMPT.startswith("\nGiven the functions") and TOOL_PROMPT.endswith("Do not use variables.\n")


@pytest.mark.parametrize("content", [None, []])
def test_tool_prompt_needs_content(content: Any) -> None:
    messages = [{"role": "user", "content": content}]
    assert append_tool_prompt(messages, TOOLS, None, False) == messages
    assert append_tool_prompt([], TOOLS, None, False) == []


def test_tool_prompt_joins_parts() -> None:
    (message,) = append_tool_prompt([{"role": "user", "content": PARTS}], TOOLS, "Use it.", True)
    assert message["content"] == [*PARTS, {"type": "text", "text": "\n---\nUse it."}]
