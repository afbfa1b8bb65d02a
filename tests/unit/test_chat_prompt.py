"""From the body of a chat request to the prompt, with templates of several kinds."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from text_generation_inference.api.chat_prompt import chat_job
from text_generation_inference.api.errors import openai_error
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.errors import TemplateError, ValidationError
from text_generation_inference.text.chat_template import ChatTemplate, read_prompt
from text_generation_inference.text.picture_prompt import PicturePrompt, PictureWords

FILES = Path(__file__).parent / "templates"
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
HI = {"role": "user", "content": "Hi"}


def render(name: str, *messages: dict[str, Any], **more: Any) -> str:
    return render_by((FILES / f"{name}.jinja").read_text(), *messages, **more)


def render_by(source: str | dict[str, str], *messages: dict[str, Any], **more: Any) -> str:
    body = msgspec.convert({"messages": list(messages), **more}, ChatRequest)
    template = ChatTemplate(source, "<s>", "</s>")
    job = chat_job(body, template, [])
    prompt = read_prompt(template.process.exchange(job.frame))
    return prompt.rstrip() if job.trims_end else prompt


@pytest.mark.parametrize("name", ["yi", "gemma3", "qwen3_thinking", "vicuna", "llama31_tools"])
def test_continued_words_end_the_prompt(name: str) -> None:
    """Right-trimmed as TGI does, whether the template keeps the spaces at the end of a message or not."""
    for spaces in ("", " ", " \n\t", "\u3000"):
        assert render(name, HI, {"role": "assistant", "content": "Well, one," + spaces}).endswith("Well, one,")
    trimmed = render(name, HI, {"role": "assistant", "content": ""})
    assert trimmed == trimmed.rstrip()


@pytest.mark.parametrize("name", ["hermes_tool_use", "qwen3_thinking", "mistral_v3_tools"])
def test_calls_at_the_end_are_complete(name: str) -> None:
    """They are in the prompt, and what follows is a new turn."""
    prompt = render(name, HI, {"role": "assistant", "tool_calls": [{**CALL, "id": "abcdefghi"}]})
    assert '"look"' in prompt
    again = render(name, HI, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "abcdefghi"}]})
    assert again == prompt


def test_calls_at_the_end_that_are_text_are_continued() -> None:
    prompt = render("yi", HI, {"role": "assistant", "tool_calls": [CALL]})
    assert prompt.endswith('{"name": "look", "parameters": {}}')


@pytest.mark.parametrize("name", ["gemma3", "yi", "qwen3_thinking", "llama31_tools"])
def test_an_image_is_text_in_every_template(name: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    for parts in ([{"type": "text", "text": "See "}, image], [{"type": "text", "text": "See ![](https://x/y.png)"}]):
        assert "See ![](https://x/y.png)" in render(name, {"role": "user", "content": parts})
    assert "![](https://x/y.png)" in render(name, {"role": "user", "content": [image]})


def test_effort_turns_thinking_on_and_off() -> None:
    """Templates of the families have two names for it; what the caller gives by name comes first."""
    source = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
    assert render_by(source, HI) == "  "
    assert render_by(source, HI, reasoning_effort="none") == "False False none"
    assert render_by(source, HI, reasoning_effort="low") == "True True low"
    given = {"enable_thinking": True, "chat_template_kwargs": {"thinking": "yes"}}
    assert render_by(source, HI, reasoning_effort="none", **given) == "True yes none"


def test_thoughts_are_sent_back_under_any_name() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        message = {"role": "assistant", "content": "Yes.", name: "Hm."}
        source = "{{ messages[1].reasoning_content }} {{ messages[1].thinking }} {{ messages[1].tool_plan }}"
        assert render_by(source, HI, message, HI) == "Hm. Hm. Hm."
    odd = {"role": "assistant", "content": "Yes.", "reasoning": {"effort": 1}, "thinking": None}
    assert render_by("{{ messages[1].reasoning_content }}|", HI, odd, HI) == "|"


# Gemma's and the older Mistral's way: no words for a system, and turns that must alternate.
STRICT = """{{ bos_token }}{% if messages[0].role == 'system' %}
    {{- raise_exception('System role not supported') }}
{% endif %}{% for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + message.role + '\\n' + message.content + '<end_of_turn>\\n' }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "Be kind."}, HI], "System role not supported (in <string>:2)"),
        ([{"role": "developer", "content": "Be kind."}, HI], "System role not supported (in <string>:2)"),
        ([HI, HI], "Conversation roles must alternate user/assistant/user/assistant/... (in <string>:5)"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_words(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(TemplateError) as raised:
        render_by(STRICT, *messages)
    answer = openai_error(raised.value, "/v1/chat/completions")
    assert answer.status == 400
    assert msgspec.json.decode(answer.body)["error"]["message"] == f"Template error: syntax error: {words}"


def test_a_developer_is_the_system_where_templates_know_none() -> None:
    said = {"role": "developer", "content": "Be kind."}
    assert "<|im_start|>system\nBe kind.<|im_end|>" in render("yi", said, HI)
    assert "system" not in render_by("{% for m in messages %}{{ m.role }};{% endfor %}{# developer #}", said, HI)


def test_documents_have_a_template_of_their_own() -> None:
    sources = {"default": "plain", "rag": "{{ documents | length }} documents", "tool_use": "tools"}
    assert render_by(sources, HI) == "plain"
    assert render_by(sources, HI, documents=[{"text": "a"}]) == "1 documents"
    assert render_by({"default": "plain {{ documents | length }}"}, HI, documents=[{"text": "a"}]) == "plain 1"


# -- models that see -------------------------------------------------------------------------------------------------

DATA = "data:image/png;base64," + "A" * 1_000_000
PICTURE = {"type": "image_url", "image_url": {"url": DATA}}
LOOK = {"role": "user", "content": [{"type": "text", "text": "Look:"}, PICTURE, {"type": "text", "text": "well?"}]}


def words(marker: str) -> PictureWords:
    reserved = (marker, "<soft>")
    return PictureWords("<soft>", 7, marker, reserved, frozenset({7}), False, lambda text, bos: text)


def see(name: str, as_parts: bool, *messages: dict[str, Any]) -> PicturePrompt | None:
    template = ChatTemplate((FILES / f"{name}.jinja").read_text(), "<s>", "</s>")
    body = msgspec.convert({"messages": list(messages)}, ChatRequest)
    job = chat_job(body, template, [], words("<start_of_image>"), as_parts)
    assert len(job.frame) < 100_000  # data never goes through a template
    assert job.shown is not None
    return job.shown.split(read_prompt(template.process.exchange(job.frame)))


@pytest.mark.parametrize(("name", "as_parts"), [("gemma3", True), ("gemma3", False), ("yi", False), ("vicuna", False)])
def test_pictures_keep_their_place_in_every_template(name: str, as_parts: bool) -> None:
    found = see(name, as_parts, LOOK, {"role": "assistant", "content": "One."}, LOOK)
    assert found is not None and found.sources == [DATA, DATA]
    first, between, last = found.texts
    assert first.endswith("Look:") and between.startswith("well?") and between.endswith("Look:")
    assert last.startswith("well?") and "One." in between


def test_a_template_that_loses_a_picture_is_given_texts_instead() -> None:
    """One that shows the parts of tools as they are has no marker for them."""
    source = "{% for m in messages %}{{ m.content if m.role == 'tool' else m.content[0].type }}{% endfor %}"
    template = ChatTemplate(source)
    body = msgspec.convert({"messages": [{"role": "tool", "content": [PICTURE]}]}, ChatRequest)
    job = chat_job(body, template, [], words("<start_of_image>"), True)
    assert job.shown is not None and job.shown.split(read_prompt(template.process.exchange(job.frame))) is None
    job = chat_job(body, template, [], words("<start_of_image>"), False)
    assert job.shown is not None
    assert job.shown.split(read_prompt(template.process.exchange(job.frame))) == PicturePrompt(["", ""], [DATA])


def test_markers_typed_by_users_are_refused_by_field() -> None:
    with pytest.raises(ValidationError, match=r"`messages\[1\].content` holds '<soft>'"):
        see("yi", False, HI, {"role": "user", "content": "a <soft> b"})
    with pytest.raises(ValidationError, match=r"`messages\[0\].content` holds '<start_of_image>'"):
        see("gemma3", True, {"role": "user", "content": [PICTURE, {"type": "text", "text": "<start_of_image>"}]})
    calls = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2"}]}
    with pytest.raises(ValidationError, match=r"`messages\[2\].content` holds '<soft>'"):  # which are put apart
        see("llama31_tools", False, HI, calls, {"role": "user", "content": "<soft>"})
