"""What becomes of messages: parts, roles, templates and their variables."""

import httpx2 as httpx
import pytest
from openai_calls import CHAT, COUNT, HELLO, chat, refused, rendered


def test_content_parts(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Say hello "}, {"type": "text", "text": "in one word.", "extra": 1}]
    assert rendered(http, messages=[{"role": "user", "content": parts}]) == rendered(http, messages=HELLO)
    whole = chat(http, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=4)
    assert whole["choices"][0] == chat(http, temperature=0, max_tokens=4)["choices"][0]
    refused(http, CHAT, messages=[{"role": "user", "content": [{"type": "video", "url": "x"}]}])
    refused(http, CHAT, messages=[{"role": "user", "content": 5}])
    refused(http, CHAT, messages=[{"content": "no role"}])
    refused(http, CHAT, messages="text")
    assert "messages" in refused(http, CHAT, messages=[])["message"]


def test_continuing_the_assistants_words(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": COUNT}]
    prompt = rendered(http, messages=messages)
    assert prompt.endswith(COUNT)
    found = chat(http, messages=messages, temperature=0, max_tokens=4)["choices"][0]["message"]["content"]
    assert found.startswith(" three")
    fresh = rendered(http, messages=messages, add_generation_prompt=True)
    assert fresh.endswith("<|im_start|>assistant\n")
    assert COUNT + "<|im_end|>" in fresh
    whole = rendered(http, messages=messages, continue_final_message=False, add_generation_prompt=False)
    assert whole.endswith("<|im_end|>\n")
    refused(http, CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True)
    refused(http, CHAT, messages=HELLO, continue_final_message=True, add_generation_prompt=True)
    assert not rendered(http, messages=HELLO, add_generation_prompt=False).endswith("assistant\n")


def test_continued_words_are_trimmed_at_the_right(http: httpx.Client) -> None:
    """As TGI: what ends the prompt is the last character that is no space."""
    for content in (COUNT + "  \n\t ", [{"type": "text", "text": COUNT + " "}, {"type": "text", "text": " \n"}]):
        messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": content}]
        assert rendered(http, messages=messages).endswith("<|im_start|>assistant\n" + COUNT)
        found = chat(http, messages=messages, temperature=0, max_tokens=4)["choices"][0]["message"]["content"]
        assert found.startswith(" three")
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": COUNT + " "}]
    # Whoever asks in transformers' way gets what transformers makes.
    assert rendered(http, messages=messages, continue_final_message=True).endswith(COUNT + " ")
    assert rendered(http, messages=messages, add_generation_prompt=True).endswith("assistant\n")


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_messages_without_content(http: httpx.Client, role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}):
        messages = [{"role": "user", "content": "Hi"}, message]
        error = refused(http, CHAT, messages=messages)
        assert (error["type"], error["param"]) == ("invalid_request_error", "messages[1].content")
        assert "`messages[1].content` is missing" in error["message"]
        native = http.post("/chat_tokenize", json={"messages": messages})
        assert (native.status_code, native.json()["error_type"]) == (422, "validation")
        assert native.json()["error"].startswith("Input validation error: `messages[1].content` is missing")
    assert chat(http, messages=[{"role": "user", "content": ""}], max_tokens=1)
    assert chat(http, messages=[{"role": "user", "content": []}], max_tokens=1)


def test_images_are_text(http: httpx.Client) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}, {"type": "text", "text": "What is it?"}]
    assert "![](http://x/y.png)What is it?<|im_end|>" in rendered(http, messages=[{"role": "user", "content": parts}])


def test_chat_template_kwargs(http: httpx.Client) -> None:
    """The embedded model's template reads none; those that have a field of their own are refused."""
    plain = rendered(http, messages=HELLO)
    assert rendered(http, messages=HELLO, chat_template_kwargs={"enable_thinking": False, "x": [1]}) == plain
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        error = refused(http, CHAT, chat_template_kwargs={name: True})
        assert "chat_template_kwargs" in error["message"]
        assert name in error["message"]
    refused(http, CHAT, chat_template_kwargs=[1])


def test_roles(http: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    prompt = rendered(http, messages=messages)
    assert prompt.index("Be brief.") < prompt.index("Hi") < prompt.index("Hello") < prompt.index("Bye")
    assert chat(http, messages=messages, max_tokens=2)["choices"]
