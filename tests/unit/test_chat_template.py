"""`ChatTemplate` against `apply_chat_template` of transformers, byte for byte."""

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from text_generation_inference.errors import ModelFormatError, TemplateError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.template_rendering import Conversation, Renderer, Templates

BOS, EOS = "<s>", "</s>"

TEMPLATES = {
    "chatml": """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant' }}
{% endif %}
""",
    "chatml_default_system": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "llama2": """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\\n' ~ messages[0]['content'] ~ '\\n<</SYS>>\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- set content = (system if loop.index0 == 0 else '') ~ message['content'].strip() %}
    {%- if message['role'] == 'user' %}
        {{- bos_token ~ '[INST] ' ~ content ~ ' [/INST]' }}
    {%- else %}
        {{- ' ' ~ content ~ ' ' ~ eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "mistral": """
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, found ' + message['role'] + '!') }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "zephyr": """{% for message in messages %}
  {% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
  {% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
  {% else %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
  {% endif %}
  {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
  {% endif %}
{% endfor %}""",
    "phi": """{% for message in messages %}{% if message['role'] in ['system', 'user'] and message['content'] %}\
{{ '<|' ~ message['role'] ~ '|>\\n' ~ message['content'] ~ '<|end|>\\n' }}{% elif message['role'] == 'assistant' %}\
{{ '<|assistant|>\\n' ~ message['content'] ~ '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "qwen_tools": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last_query < 0 and message.role == 'user' and message.content is string %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last_query %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "loop_controls": """{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 4 %}{% break %}{% endif %}
{{ loop.index }}:{{ message.content }}|{{ loop.cycle('odd', 'even') }}|{{ loop.changed(message.role) }}
{% else %}
nothing
{% endfor %}""",
    "macros": """{% macro turn(role, text='') -%}
<{{ role }}>{{ text }}{{ caller() if caller }}</{{ role }}>
{% endmacro %}
{% for message in messages %}
{{ turn(message.role, text=message.content|default('', true)) }}
{% endfor %}
{% call turn('end') %}{{ messages|length }} turns{% endcall %}
{% set captured %}
  kept {{ messages[-1].role }}
{% endset %}
{{- captured|trim }}""",
    "to_json": """{{ messages | tojson }}
{{ tools | tojson(indent=2) }}
{{ {'b': 1, 'a': '<&>\\'é"'} | tojson }}
{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}
{{ tools is none }} {{ documents is none }} {{ pad_token is defined }} {{ bos_token }}""",
    "generation": """{% set text = 'outer' %}
{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}
  {% set text = 'inner' %}
{{ message.content }}{{ text }}{{ eos_token }}
{% endgeneration %}
{% else %}
{{ message.content }}{{ text }}
{% endif %}
{% endfor %}{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}""",
    "content_parts": """{% for message in messages %}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content is iterable and message.content is not mapping %}
{%- for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}
{%- else %}none{% endif %};
{% endfor %}""",
    "filters": """{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}
{%- for role, group in messages | groupby('role') %} {{ role }}={{ group | list | length }}{% endfor %}
{{ dict(a=1, b=[2, 3]) }} {{ 'x'.join(['a', 'b']) }} {{ '%05.1f' | format(3.14159) }} {{ messages[0].missing }}
{{- messages[0].missing is undefined }}{{ (messages | last).role | upper }}{{ 7 // 2 }}{{ 'ab' * 2 }}
{% set parts = 'a,b,,c'.split(',') %}{{ parts | reject('equalto', '') | join('-') }}{{ range(3) | list }}
{{ messages[0].get('name', 'nobody') }}{{ messages[0].items() | list | length }} "quoted" <tag> &amp;""",
    "thinking": """{% for message in messages %}{{ message.thinking | default('-') }}/\
{{ message.reasoning_content | default('-') }}/{{ message.reasoning | default('-') }}
{% endfor %}""",
    "whitespace": "\n  {% if true %}\n   a\n  {% endif %}\n\n  {#- comment -#}\n b\n{# line #}\nc\n\n",
    "extra_variables": "{{ documents | default('none', true) }} {{ mood }} {{ depth.level }} {{ bos_token }}",
}

FILES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
CORPUS = {**TEMPLATES, **FILES}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a "place" <now> & later, 天気',
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi\n"}],
    "turns": [
        {"role": "user", "content": "  one  "},
        {"role": "assistant", "content": "two\n\nlines"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "four"},
    ],
    "unicode": [
        {"role": "user", "content": "naïve 当 😀 \u2028 <|im_end|> {{ 7 * 7 }} {% raw %}"},
        {"role": "assistant", "content": "<b>&amp;\"'\\n</b>"},
        {"role": "user", "content": "\u202eRTL e\u0301"},
    ],
    "empty": [{"role": "user", "content": ""}],
    "no_messages_but_system": [{"role": "system", "content": "x"}],
    "tools": [
        {"role": "user", "content": "Weather in Köln?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "\nI should look.\n",
            "tool_calls": [
                {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Köln", "n": 1.5}}},
                {"type": "function", "function": {"name": "get_weather", "arguments": '{"place":"Köln"}'}},
            ],
        },
        {"role": "tool", "content": '{"temp": 3}'},
        {"role": "tool", "content": "rain"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "look: "}, {"type": "image"}], "name": "Ann"},
        {"role": "assistant", "content": None, "thinking": "hmm", "reasoning_content": "first"},
    ],
}
CONVERSATIONS["one_call"] = [
    {"role": "system", "content": "You have /no_think tools."},
    {"role": "user", "content": "Search"},
    {
        "role": "assistant",
        "content": "<think>\nlook\n</think>\n\nI look.",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "search", "arguments": {"q": 'a "b" {c}', "n": 2}},
            }
        ],
    },
    {"role": "tool", "content": '{"hits": ["天", 1]}', "tool_call_id": "abcdefghi", "name": "search"},
    {"role": "assistant", "content": "Two hits.  "},
    {"role": "user", "content": "Thanks"},
]
CONVERSATIONS["answered"] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "  Hi  "},
    {"role": "assistant", "content": "Hello, <|im_end|> my\n"},
]
CONVERSATIONS["two_systems"] = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "system", "content": "c"},
    {"role": "developer", "content": "d"},
]
CONVERSATIONS["part_lists"] = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What "}, {"type": "image"}, {"type": "text", "text": "is it?"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "A  "}, {"type": "text", "text": "cat. "}]},
]
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find\nthings in many places, with a long text that is cut somewhere",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string", "description": "what\nto find"},
                "n": {"type": "integer", "enum": [1, 2, 3]},
                "where": {"type": "array", "items": {"type": ["string", "null"]}},
                "options": {"type": "object", "properties": {"exact": {"type": "boolean"}}},
                "any": {"oneOf": [{"type": "string"}, {"type": "number"}]},
            },
            "required": ["q"],
        },
        "return": {"type": "array", "items": {"type": "object"}},
    },
}
DOCUMENTS = [{"title": "One", "text": "first <text>"}, {"title": "Zwei", "text": "ü", "doc_id": 7}]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "mood": "é", "depth": {"level": 2}, "bos_token": "<other>"},
    {
        "documents": DOCUMENTS,
        "controls": {"citations": True},
        "builtin_tools": ["search", "code_interpreter"],
        "tools_in_user_message": False,
        "citation_mode": "accurate",
        "reasoning_effort": "high",
        "thinking": True,
        "date_string": "26 Jul 2024",
    },
]


@cache
def reference(template: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={BOS: 0, EOS: 1, "a": 2}, merges=[]))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token="<pad>", chat_template=template
    )


@pytest.mark.parametrize("name", CORPUS)
def test_same_as_transformers(name: str) -> None:
    ours = ChatTemplate(CORPUS[name], BOS, EOS, {"pad_token": "<pad>"})
    theirs = reference(CORPUS[name])
    rendered = 0
    for messages in CONVERSATIONS.values():
        for tools in (None, [], [WEATHER, SEARCH]):
            for options in ({"add_generation_prompt": True}, {}, {"continue_final_message": True}):
                for variables in VARIABLES:
                    before = json.dumps(messages)
                    try:
                        expected = theirs.apply_chat_template(
                            messages, tools, tokenize=False, **{"add_generation_prompt": False, **options}, **variables
                        )
                    except Exception:
                        expected = None
                    try:
                        text = ours.render(messages, tools, **{"add_generation_prompt": False, **options}, **variables)
                        rendered += 1
                    except TemplateError:
                        text = None
                    assert text == expected
                    assert json.dumps(messages) == before, "the caller's messages are changed"
    assert rendered >= 18


def test_corpus_is_large() -> None:
    assert len(CORPUS) >= 40


def test_named_templates_like_transformers() -> None:
    named = {
        name: FILES["command_r" + suffix]
        for name, suffix in [("default", ""), ("tool_use", "_tool_use"), ("rag", "_rag")]
    }
    ours, theirs = ChatTemplate(named, BOS, EOS), reference(FILES["command_r"])
    messages = CONVERSATIONS["turns"]
    theirs.chat_template = named
    try:
        for tools in (None, [], [SEARCH]):
            expected = theirs.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
            assert ours.render(messages, tools) == expected
        expected = theirs.apply_chat_template(
            messages, chat_template="rag", documents=DOCUMENTS, tokenize=False, add_generation_prompt=True
        )
        assert ours.render(messages, template_name="rag", documents=DOCUMENTS) == expected
    finally:
        theirs.chat_template = FILES["command_r"]
    with pytest.raises(TemplateError, match=r"^template not found$"):
        ours.render(messages, template_name="no such")


@pytest.mark.parametrize(
    ("name", "uses"),
    [("llama31_tools", True), ("mistral_v3_tools", True), ("qwen3_thinking", True), ("deepseek_r1", False)],
)
def test_uses_tools(name: str, uses: bool) -> None:
    assert ChatTemplate(CORPUS[name]).uses_tools == uses


def test_uses_tools_looks_at_variables_only() -> None:
    assert not ChatTemplate("{{ 'tools' }} tools {{ messages[0].tools }} {# tools #}").uses_tools
    assert not ChatTemplate("{% set tools = 1 %}{{ tools }}").uses_tools
    assert ChatTemplate("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}").uses_tools
    assert ChatTemplate({"default": "x", "tool_use": "{{ tools }}"}).uses_tools
    assert not ChatTemplate({"default": "x", "other": "{{ tools }}"}).uses_tools
    assert not ChatTemplate(None).uses_tools


# As many models that see have it: parts of users and assistants, nothing for texts; the system is read as a text.
PARTS_ALONE = """{% for m in messages %}{% if m['role'] == 'system' %}<{{ m['content'] | trim }}>{% else %}{{ m['role'] }}:
{%- if m['role'] == 'assistant' %}{{ m['content'][0]['text'] }}{% else %}
{%- for part in m['content'] | selectattr('type', 'equalto', 'image') %} IMAGE{% endfor %}
{%- for part in m['content'] | selectattr('type', 'equalto', 'text') %} {{ part['text'] }}{% endfor %}{% endif %}
{%- endif %}/{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "role", "forms"),
    [
        *((CORPUS["gemma3"], role, (True, True)) for role in ("user", "system", "assistant", "tool")),
        (CORPUS["mistral_args"], "user", (True, True)),
        *((CORPUS[name], "user", (True, False)) for name in ("chatml", "to_json", "yi")),
        *((PARTS_ALONE, role, (False, True)) for role in ("user", "assistant", "tool")),
        *((PARTS_ALONE, role, (True, False)) for role in ("system", "developer")),
        ("{{ raise_exception('no') }}", "assistant", (False, False)),
    ],
)
def test_forms_that_contents_may_have(template: str, role: str, forms: tuple[bool, bool]) -> None:
    assert ChatTemplate(template, BOS, EOS).content_forms(role) == forms


def test_continued_message_keeps_its_spaces_when_the_template_does() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello \n"}]
    assert ChatTemplate(FILES["yi"]).render(messages, continue_final_message=True).endswith("assistant\nHello \n")
    assert ChatTemplate(TEMPLATES["llama3"]).render(messages, continue_final_message=True).endswith("\n\nHello")


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[-1].content }}", None),
        ("{{ messages[-1].content }}", []),
        ("{{ messages[-1].content }}", [{"type": "image"}]),
        ("{{ messages[-1].role }}", "a"),
        ("{{ messages[-1].content[:1] }}", "ab"),
        ("{{ messages | length }} content", "ab"),
    ],
)
def test_what_cannot_be_continued(source: str, content: Any) -> None:
    messages = [{"role": "assistant", "content": content}]
    with pytest.raises(TemplateError, match="continue"):
        ChatTemplate(source).render(messages, continue_final_message=True)


def test_no_messages() -> None:
    with pytest.raises(TemplateError, match="at least one message"):
        ChatTemplate("x").render([])


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{{ raise_exception('no way') }}", 1),
        ("a\nb\n{% if messages %}\n  {{- raise_exception('no way') }}{% endif %}", 4),
        ("{% macro m() %}\n\n{{ raise_exception('no way') }}{% endmacro %}\n\n{{ m() }}", 3),
    ],
)
def test_refusals_name_the_line(source: str, line: int) -> None:
    with pytest.raises(TemplateError) as raised:
        ChatTemplate(source).render(CONVERSATIONS["one"])
    assert str(raised.value) == f"syntax error: no way (in <string>:{line})"


def test_templates_do_what_they_are_for() -> None:
    """A few results in full, so that the comparison above is not between two wrong texts."""
    messages = CONVERSATIONS["one"]
    assert ChatTemplate(TEMPLATES["chatml"], BOS, EOS).render(messages) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(TEMPLATES["llama2"], BOS, EOS).render(CONVERSATIONS["system"]) == (
        "<s>[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\nHi [/INST]"
    )
    rendered = ChatTemplate(TEMPLATES["qwen_tools"], BOS, EOS).render(CONVERSATIONS["tools"], [WEATHER])
    assert 'Weather of a \\"place\\" <now> & later, 天気' in rendered
    assert "<think>\nI should look.\n</think>" in rendered


def test_missing_tokens_render_as_nothing() -> None:
    template = ChatTemplate("[{{ bos_token }}{{ eos_token }}{{ bos_token is defined }}]")
    assert template.render(CONVERSATIONS["one"]) == "[False]"


def test_date_is_local_time() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(CONVERSATIONS["one"])
    assert abs((datetime.now() - datetime.fromisoformat(rendered)).days) <= 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__globals__['json'].dumps }}",
        "{{ namespace.__init__.__globals__.keys() }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ dict.mro() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_sandbox(source: str) -> None:
    conversation = Conversation("default", CONVERSATIONS["one"])
    with pytest.raises(TemplateError) as raised:
        Renderer(Templates({"default": source}, {})).render(conversation, 100)
    assert isinstance(raised.value.__cause__, SecurityError)


def test_objects_are_out_of_reach() -> None:
    class Payload:
        def run(self) -> str:
            return "reached"

    template = ChatTemplate("{{ messages[0].content }} {{ messages[0].content.run() if messages[0].content.run }}")
    assert template.render([{"role": "user", "content": Payload()}]) == "<Payload> "


def test_reserved_names_cannot_be_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}{{ add_generation_prompt }}")
    assert template.render(CONVERSATIONS["one"], messages=[1, 2, 3]) == "1True"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{{ messages[0].missing.deeper }}", "has no attribute 'missing'"),
        ("{{ nothing | tojson }}", "not JSON serializable"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_failures_carry_their_text(source: str, text: str) -> None:
    with pytest.raises(TemplateError, match=text):
        ChatTemplate(source).render(CONVERSATIONS["one"])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% generation %}", "{{ x | no_such_filter }}", "{% end %}"])
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source)


def test_messages_must_be_objects() -> None:
    with pytest.raises(TemplateError, match="message must be an object"):
        ChatTemplate("x").render(["text"])  # pyright: ignore[reportArgumentType]


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("files", "without", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config", "config"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "plain", "tools"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "plain", "plain"),
        ({"tokenizer_config.json": {"chat_template": NAMED[1:]}}, None, "tools"),
        ({"tokenizer_config.json": {"chat_template": {"default": "plain", "tool_use": "tools"}}}, "plain", "tools"),
        (
            {"chat_template.json": {"chat_template": "json"}, "tokenizer_config.json": {"chat_template": "c"}},
            "json",
            "json",
        ),
        ({"chat_template.jinja": b"jinja", "chat_template.json": {"chat_template": "json"}}, "jinja", "jinja"),
        ({"chat_template.jinja": b"jinja", "tokenizer_config.json": {"chat_template": NAMED}}, "jinja", "jinja"),
        ({"chat_template.jinja": b"jinja", "additional_chat_templates/tool_use.jinja": b"more"}, "jinja", "more"),
        ({"processor_config.json": {"chat_template": "processor"}}, "processor", "processor"),
        ({"tokenizer_config.json": {}}, None, None),
        ({"tokenizer_config.json": {"chat_template": None}}, None, None),
        ({}, None, None),
    ],
)
def test_sources(tmp_path: Path, files: dict[str, Any], without: str | None, with_tools: str | None) -> None:
    template = ChatTemplate.load(write(tmp_path, files))
    assert template.source == without
    assert template.found == (with_tools is not None)
    for tools, expected in ((None, without), ([WEATHER], with_tools)):
        if expected is None:
            with pytest.raises(TemplateError, match=r"^template not found$"):
                template.render(CONVERSATIONS["one"], tools)
        else:
            assert template.render(CONVERSATIONS["one"], tools) == expected


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<img>"}},
        {
            "tokenizer_config.json": {
                "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
                "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False},
                "extra_special_tokens": {"image_token": "<img>"},
            }
        },
        {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "image_token": "<img>"}},
    ],
)
def test_folder_gives_the_special_tokens(tmp_path: Path, files: dict[str, Any]) -> None:
    source = b"{{ bos_token }}{{ eos_token }}{{ image_token }}{{ pad_token }}"
    template = ChatTemplate.load(write(tmp_path, {**files, "chat_template.jinja": source}))
    assert template.render(CONVERSATIONS["one"]) == "<s></s><img>"


CONFIG = {"chat_template": "given {{ bos_token }}{{ eos_token }}", "bos_token": "<given>"}


@pytest.mark.parametrize(
    ("given", "files", "expected"),
    [
        (CONFIG, {}, "given <given>"),
        (CONFIG, {"tokenizer_config.json": {"chat_template": "config", "eos_token": "</s>"}}, "given <given>"),
        (CONFIG, {"chat_template.jinja": b"jinja"}, "given <given>"),
        (CONFIG, {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>"}}, "given <given></s>"),
        ({"bos_token": "<given>"}, {"chat_template.jinja": b"jinja {{ bos_token }}"}, "jinja <given>"),
        ({"chat_template": NAMED}, {}, "plain"),
    ],
)
def test_tokenizer_config_path(tmp_path: Path, given: Any, files: dict[str, Any], expected: str) -> None:
    path = write(tmp_path / "elsewhere", {"any name.json": given}) / "any name.json"
    template = ChatTemplate.load(write(tmp_path / "model", {"config.json": {}, **files}), path)
    assert template.render(CONVERSATIONS["one"]) == expected


@pytest.mark.parametrize("content", [None, b"{", b"[]", {"chat_template": 3}])
def test_bad_tokenizer_config_path(tmp_path: Path, content: Any) -> None:
    files = {} if content is None else {"given.json": content}
    with pytest.raises(ModelFormatError, match=r"given\.json"):
        ChatTemplate.load(tmp_path, write(tmp_path, files) / "given.json")


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": b"\xff"},
        {"chat_template.json": b"{"},
        {"tokenizer_config.json": {"chat_template": 3}},
        {"tokenizer_config.json": {"chat_template": []}},
        {"tokenizer_config.json": {"chat_template": [{"name": "default"}]}},
        {"tokenizer_config.json": {"chat_template": [{"name": [], "template": "x"}]}},
        {"tokenizer_config.json": {"chat_template": [{"name": "x\ud800", "template": "x"}]}},
        {"tokenizer_config.json": {"chat_template": "x\ud800"}},
    ],
)
def test_corrupt_sources_are_named(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError, match=next(iter(files)).replace(".", r"\.")):
        ChatTemplate.load(write(tmp_path, files))


def test_same_folder_as_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    reference(TEMPLATES["llama3"]).save_pretrained(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for line_end in ("\n", "\r\n"):
        source = TEMPLATES["zephyr"].replace("\n", line_end)
        (tmp_path / "chat_template.jinja").write_bytes(source.encode())
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        ours = ChatTemplate.load(tmp_path)
        for messages in (CONVERSATIONS["turns"], CONVERSATIONS["unicode"]):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert ours.render(messages) == expected


@pytest.mark.parametrize(
    ("files", "broken"),
    [
        ({"chat_template.jinja": "{{ messages }}\n{% for %}"}, "chat_template.jinja"),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}\\n{% for %}"}'}, "tokenizer_config.json"),
        (
            {"chat_template.jinja": "{{ messages }}", "additional_chat_templates/rag.jinja": "x\n{% for %}"},
            "additional_chat_templates/rag.jinja",
        ),
    ],
)
def test_a_broken_template_names_its_file_and_line(tmp_path, files, broken):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelFormatError) as raised:
        ChatTemplate.load(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / broken}: the chat template is broken: Expected")
    assert str(raised.value).endswith("(line 2)")
