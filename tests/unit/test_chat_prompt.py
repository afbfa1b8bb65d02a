"""From the body of a chat request to the prompt, with templates of several kinds."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from text_generation_inference.api.chat_prompt import chat_job
from text_generation_inference.api.openai_bodies import ChatRequest
from text_generation_inference.text.chat_template import ChatTemplate, read_prompt

FILES = Path(__file__).parent / "templates"
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
HI = {"role": "user", "content": "Hi"}


def render(name: str, *messages: dict[str, Any], **more: Any) -> str:
    body = msgspec.convert({"messages": list(messages), **more}, ChatRequest)
    template = ChatTemplate((FILES / f"{name}.jinja").read_text(), "<s>", "</s>")
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
