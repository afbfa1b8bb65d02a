"""Templates that would run for long or fill the memory fail and harm nobody; ordinary ones on large input do not fail."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from text_generation_inference.api.metrics import Metrics
from text_generation_inference.api.rendering import ChatRenderer
from text_generation_inference.errors import ModelFormatError, OverloadedError, TemplateError
from text_generation_inference.text import template_process
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.template_process import TemplateProcess
from text_generation_inference.text.template_rendering import MAX_OUTPUT_CHARS

USER = [{"role": "user", "content": "x" * 1000}]
TIME, MEMORY, TEXT = "more than 0.2 seconds", "more than 256 MiB", "makes more than"
GROW = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
BOMBS = [
    (NESTED.replace("BODY", ""), TIME),
    (NESTED.replace("BODY", "x" * 100), TEXT),
    ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}", TIME),
    ("{% set x %}{% for i in range(99999) %}{{ messages[0].content * 99 }}{% endfor %}{% endset %}", MEMORY),
    ("{{ 'a' * messages | length * 10**10 }}", MEMORY),
    ("{{ [messages] * 10**9 }}", MEMORY),
    ("{{ 10 ** (messages | length * 10**9) }}", TIME),  # one instruction of the interpreter, which nothing interrupts
    (GROW.replace("EXPRESSION", "ns.x ~ ns.x"), MEMORY),
    (GROW.replace("EXPRESSION", "[ns.x, ns.x]") + "{{ ns.x }}", TIME),
    (GROW.replace("EXPRESSION", "[ns.x, ns.x] | join"), MEMORY),
    ("{{ '%1000000000d' % messages | length }}", MEMORY),
    ("{{ ('f' * 10**6 * messages | length) | int(0, 16) | string }}", "integer string conversion"),
]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """With little time."""
    found = TemplateProcess(max_cpu_seconds=0.2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def small_process() -> Iterator[TemplateProcess]:
    """With little memory, and the time to fill it."""
    found = TemplateProcess(max_bytes=256 << 20)
    yield found
    found.close()


@pytest.mark.parametrize(("source", "text"), BOMBS)
def test_bombs_fail_alone(process: TemplateProcess, small_process: TemplateProcess, source: str, text: str) -> None:
    """The next rendering finds everything as it was, by the same template too."""
    limited = process if text == TIME else small_process
    bomb = ChatTemplate("{% if not harmless %}" + source + "{% endif %}fine", process=limited)
    with pytest.raises(TemplateError, match=text):
        bomb.render(USER)
    assert bomb.render(USER, harmless=True) == "fine"


def test_a_bomb_of_the_compiler_is_a_broken_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja computes constants when it compiles."""
    (tmp_path / "chat_template.jinja").write_text("{{ 10 ** (10 ** 9) }}")
    limited = TemplateProcess(max_cpu_seconds=0.2)
    monkeypatch.setattr("text_generation_inference.text.chat_template.shared_process", lambda: limited)
    with pytest.raises(ModelFormatError, match="broken: the template takes more than"):
        ChatTemplate.load(tmp_path)
    limited.close()


def test_a_process_that_is_killed_is_started_again(process: TemplateProcess) -> None:
    template = ChatTemplate("{{ messages | length }}", process=process)
    assert template.render(USER) == "1"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert template.render(USER) == "1"


def test_a_process_that_ends_in_the_same_moment_blocks_nobody(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone, and nobody has been told yet: that rendering fails, and its turn ends."""

    async def run() -> str:
        template = ChatTemplate("{{ messages | length }}", process=process)
        renderer = ChatRenderer(template, 5.0, Metrics(100, 200))
        job = template.job(USER)
        await renderer.render(job, False)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with monkeypatch.context() as patched:
            patched.setattr(subprocess.Popen, "poll", lambda _: None)
            with pytest.raises(TemplateError, match="with status -9"):
                await renderer.render(job, False)
        found = await renderer.render(job, False)
        renderer.close()
        return found

    assert asyncio.run(run()) == "1"


def test_who_interrupts_a_rendering_does_not_find_its_prompt_in_the_next(process: TemplateProcess) -> None:
    template = ChatTemplate("{{ messages[0].content }}", process=process)
    pid = process.pid
    assert pid is not None and template.render([{"role": "user", "content": "before"}]) == "before"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    kept = signal.signal(signal.SIGALRM, interrupt)
    try:
        os.kill(pid, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "interrupted"}])
    finally:
        signal.signal(signal.SIGALRM, kept)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert template.render([{"role": "user", "content": "after"}]) == "after"


def test_no_processor_time_is_overload(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things: the template is not to blame."""
    template = ChatTemplate("fine", process=process)
    monkeypatch.setattr(template_process, "_MAX_SECONDS", 0.2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(OverloadedError):
        template.render(USER)
    monkeypatch.undo()
    assert template.render(USER) == "fine"


def test_renderings_of_a_server() -> None:
    """Many at once, of which some fail and some are left by their callers: everybody else gets their own prompt."""

    async def run() -> list[Any]:
        source = "{% if messages[0].content == 'bomb' %}" + BOMBS[0][0] + "{% endif %}{{ messages[0].content }}"
        template = ChatTemplate(source, process=TemplateProcess(max_cpu_seconds=0.2))
        renderer = ChatRenderer(template, 30.0, Metrics(100, 200))
        contents = ["bomb" if number == 20 else f"<{number}>" * 1000 for number in range(40)]
        jobs = [template.job([{"role": "user", "content": content}]) for content in contents]
        tasks = [asyncio.ensure_future(renderer.render(job, n % 2 == 1)) for n, job in enumerate(jobs)]
        await asyncio.sleep(0)
        for number in range(0, 40, 7):
            tasks[number].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        renderer.close()
        return found

    for number, found in enumerate(asyncio.run(run())):
        if number % 7 == 0:
            assert isinstance(found, asyncio.CancelledError)
        elif number == 20:
            assert isinstance(found, TemplateError)
        else:
            assert found == f"<{number}>" * 1000


def rendered(source: str, content: str = "x", **variables: Any) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": content}], **variables)


def test_limits_grow_with_the_input() -> None:
    """A long conversation is no bomb, whatever the limits on what a template adds."""
    content = "x" * (3 * MAX_OUTPUT_CHARS)
    assert len(rendered("{{ messages[0].content | trim }}{{ bos_token }}", content)) == len(content)
    with pytest.raises(TemplateError, match="makes more than"):
        rendered("{% for i in range(4) %}{{ messages[0].content }}{% endfor %}", content)


def test_what_a_template_says_is_short() -> None:
    """Also when it refuses: the api process reads all of it, and sends it to a client."""
    with pytest.raises(TemplateError) as refused:
        rendered("{{ raise_exception('no ' * (messages | length * 10**6)) }}")
    assert str(refused.value).startswith("syntax error: no no") and len(str(refused.value)) == 10_000


def test_large_conversations_fit() -> None:
    source = (
        "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}{% if ns.last < 0 and m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}"
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ (m.content | trim) + '</' + m['role'] + '>' }}{% endfor %}"
    )
    messages = [{"role": role, "content": f"message {i} " * 20} for i in range(1000) for role in ("user", "assistant")]
    properties = {f"p{i}": {"type": "string", "description": "d" * 40} for i in range(50)}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": properties}} for i in range(100)]
    text = ChatTemplate(source).render(messages, tools)
    assert text.endswith(messages[-1]["content"].strip() + "</assistant>")
    assert json.dumps(tools[-1], indent=4) in text


def test_numbers_and_texts_of_any_size() -> None:
    assert (
        rendered("{{ value | tojson }}", value=[2**200, -1, 0.5, "\u2028é天\0"])
        == f'[{2**200}, -1, 0.5, "\u2028é天\\u0000"]'
    )
    with pytest.raises(TemplateError, match="no data"):
        rendered("{{ value }}", value="\ud800")
    with pytest.raises(TemplateError, match="surrogate"):
        rendered("{{ '\\ud800' }}")


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_input_is_no_crash(depth: int) -> None:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    try:
        assert "deep" in rendered("{{ value | tojson }}", value=value)
    except TemplateError as error:
        assert depth > 100, error
