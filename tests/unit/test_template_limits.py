"""Templates that would run for long or fill the memory fail quickly; ordinary ones on large input do not."""

import json
from typing import Any

import pytest

from text_generation_inference.errors import TemplateError
from text_generation_inference.text import template_budget
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.template_budget import LimitError

GROW = (
    "{% set ns = namespace(x='ab', y='ab') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x }}"
)
BOMBS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "long text " * 500 + "{% endfor %}{% endset %}",
    "{% set x %}{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}{% endset %}",
    "{% macro m() %}" + "long text " * 500 + "{% endmacro %}{% for i in range(99999) %}{% set x = m() %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% macro m(n) %}{% if n and m(n - 1) == m(n - 1) %}{% endif %}{% endmacro %}{% set x = m(40) %}",
    "{% macro m(n) %}{% if n %}{% call m(n - 1) %}x{% endcall %}{% call m(n - 1) %}x{% endcall %}{% endif %}"
    "{% endmacro %}{% call m(40) %}x{% endcall %}",
    "{% set ns = namespace(n=0) %}{% block b %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n % 40 %}{{ self.b() }}{{ self.b() }}{% endif %}{% endblock %}",
    "{% for a in [[[]]] recursive %}{{ loop([[], []]) }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**8 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ ([messages[0].content] * 1000) * 1000 }}",
    "{{ 10 ** 10000 }}",
    "{{ (10 ** 2000) ** 2000 }}",
    GROW.replace("EXPRESSION", "ns.x ~ ns.x"),
    GROW.replace("EXPRESSION", "ns.x + ns.x"),
    GROW.replace("EXPRESSION", "ns.x * 2"),
    GROW.replace("EXPRESSION", "[ns.x, ns.x]"),
    GROW.replace("EXPRESSION", "(ns.x, ns.x)"),
    GROW.replace("EXPRESSION", "{'a': ns.x, 'b': ns.x}"),
    GROW.replace("EXPRESSION", "dict(a=ns.x, b=ns.x)"),
    GROW.replace("EXPRESSION", "namespace(a=ns.x, b=ns.x)"),
    GROW.replace("EXPRESSION", "ns.x | replace('a', ns.x)"),
    GROW.replace("EXPRESSION", "ns.x.replace('b', ns.x)"),
    GROW.replace("EXPRESSION", "[ns.x, ns.x] | join('')"),
    GROW.replace("EXPRESSION", "''.join([ns.x, ns.x])"),
    GROW.replace("EXPRESSION", "'%s%s' % (ns.x, ns.x)"),
    GROW.replace("EXPRESSION", "'%s%s' | format(ns.x, ns.x)"),
    GROW.replace("EXPRESSION", "'{0}{0}'.format(ns.x)"),
    GROW.replace("EXPRESSION", "[ns.x, ns.x] | string"),
    GROW.replace("EXPRESSION", "[ns.x, ns.x] | tojson"),
    GROW.replace("'ab'", "12345").replace("EXPRESSION", "ns.x * ns.x"),
    "{% set x = [1] * 50000 %}{% set y = [x] + [x] %}{% set ns = namespace(y=y) %}"
    "{% for i in range(12) %}{% set ns.y = ns.y + ns.y %}{% endfor %}{{ ns.y }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}{{ 'a'.rjust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ '\t\t'.expandtabs(10**10) }}",
    "{{ '\t\t'.expandtabs(tabsize=10**10) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "{{ ('a' * 10**6) | replace('', 'b' * 10**6) }}",
    "{{ ('a' * 10**6).join(['b'] * 10**5) }}",
    "{{ (['b'] * 10**5) | join('a' * 10**6) }}",
    "{{ range(99999) | join('a' * 10**6) }}",
    "{{ range(99999) | map('center', 10**6) | join }}",
    "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "{{ ('\n' * 10**6) | indent(10**6) }}",
    "{{ ('\n' * 10**6) | indent('x' * 10**6) }}",
    "{{ [[[[1]]]] | tojson(indent=10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ ('%(a)s' * 10**5) % {'a': 'x' * 10**6} }}",
    "{{ ('%(a)s' * 10**5) | format(a='x' * 10**6) }}",
    "{{ ('{0}' * 10**5).format('x' * 10**6) }}",
    "{{ ('{a}' * 10**5).format_map({'a': 'x' * 10**6}) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ ('{:>1000000000}' | safe).format(1) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ 1.5 | round(10**9, 'floor') }}",
    "{{ ('a b ' * 10**6) | wordwrap(1, wrapstring='x' * 10**6) }}",
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ (5).from_bytes(('x' * 10**6).encode(), 'big') // 3 }}",
    "{% set x = ('f' * 10**6) | int(0, 16) %}{{ x * x }}",
    "{% set x = ('f' * 10**6) | int(0, 16) %}{{ x // (x - 1) }}",
    "{% set x = ('f' * 10**6) | int(0, 16) %}{{ x % (x - 1) }}",
    "{% for x in range(99999) | map('string') | select('in', 'ab' * 10**7) %}{% endfor %}",
    "{% filter replace('a', 'b' * 10**6) %}{% filter replace('x', 'a' * 10**6) %}x{% endfilter %}{% endfilter %}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_bombs_fail(source: str) -> None:
    """That this test ends, in little memory, is the proof; how fast it was is not asserted."""
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 1000}])


def rendered(source: str, content: str = "x", **variables: Any) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": content}], **variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0.1 seconds"),
        ("{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}", "makes more than .* characters"),
        ("{{ 'a' * 10**9 }}", "handles more than .* characters"),
        ("{{ 2 ** 20000 }}", "numbers of more than 10000 bits"),
    ],
)
def test_limits_are_named(source: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.1)
    with pytest.raises(TemplateError, match=text) as raised:
        rendered(source)
    assert isinstance(raised.value.__cause__, LimitError)


def test_limits_grow_with_the_input() -> None:
    """A long conversation is no bomb, whatever the limits on what a template adds."""
    content = "x" * (3 * template_budget.MAX_OUTPUT_CHARS)
    assert len(rendered("{{ messages[0].content | trim }}{{ bos_token }}", content)) == len(content)
    with pytest.raises(TemplateError, match="makes more than"):
        rendered("{% for i in range(4) %}{{ messages[0].content }}{% endfor %}", content)


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


def test_a_rendering_starts_with_a_full_budget() -> None:
    template = ChatTemplate("{{ 'a' * 30000000 if add_generation_prompt else 'fine' }}")
    for _ in range(5):
        with pytest.raises(TemplateError, match="makes more than"):
            template.render([{"role": "user", "content": "x"}])
        assert template.render([{"role": "user", "content": "x"}], add_generation_prompt=False) == "fine"


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_input_is_no_crash(depth: int) -> None:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    try:
        assert "deep" in rendered("{{ value | tojson }}", value=value)
    except TemplateError as error:
        assert depth > 100, error
