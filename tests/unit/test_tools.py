"""Tool calls: told from templates and tokens, read from text in pieces, forced by grammars that the same parser reads."""

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from text_generation_inference.errors import ValidationError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.grammar import json_grammar, regex_grammar
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.output import RequestText
from text_generation_inference.text.reasoning import detect_reasoning_format
from text_generation_inference.text.stopping import StopStrings
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools import (
    CallArguments,
    CallStart,
    Content,
    Shape,
    ToolFormat,
    ToolParser,
    detect_tool_format,
    forced_grammar,
)
from text_generation_inference.weights.embedded import find_embedded
from text_generation_inference.weights.gguf import GgufFile
from text_generation_inference.weights.gguf_tokenizer import read_tokenizer, read_tokenizer_config

TEMPLATES = Path(__file__).parent / "templates"
NAMES = ["get_weather", "search", "f"]

HERMES = ToolFormat("hermes")
LLAMA = ToolFormat("llama3", (), frozenset({"<|python_tag|>"}))
MISTRAL = ToolFormat("mistral", (), frozenset({"[TOOL_CALLS]"}))
ARGS = ToolFormat("mistral_args", (), frozenset({"[TOOL_CALLS]", "[ARGS]"}))
DEEPSEEK = ToolFormat("deepseek")
JSON = ToolFormat("json")
FORMATS = {"hermes": HERMES, "llama3": LLAMA, "mistral": MISTRAL, "args": ARGS, "deepseek": DEEPSEEK, "json": JSON}
FORMATS |= {name: ToolFormat(name) for name in ("qwen_xml", "glm", "kimi", "harmony", "cohere", "tagged_list")}
FORMATS |= {name: ToolFormat(name) for name in ("pythonic", "minimax", "dsml", "seed")}
# Of templates that show no tools: the tool prompt asks for JSON.
READ = FORMATS | {"asked": ToolFormat("deepseek_args", bare=True), "asked_list": ToolFormat("mistral", bare=True)}
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "array"},
            "near": {"type": ["string", "null"]},
            "unit": {"enum": ["C", "F"]},
            "code": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
    },
    "search": {"type": "object", "properties": {"q": {}, "exact": {"type": "boolean"}}},
    "f": None,
}

KOELN = '{"place": "Köln", "days": [1, {"x": "}\\"]"}]}'
DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

Result = tuple[str, list[tuple[str, str]]]  # content, and each call with its arguments


def collect(
    tool_format: ToolFormat,
    pieces: Sequence[str],
    names: Sequence[str] | dict[str, Any] = SCHEMAS,
    shape: Shape = "mixed",
    cut: bool = False,
) -> Result:
    parser = ToolParser(tool_format, names, shape)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(cut)
    content = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case Content(text=text):
                assert text
                content += text
            case CallStart(index=index, name=name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index=index, text=text):
                assert index == len(calls) - 1 and text
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


WEATHER = ("get_weather", KOELN)
HARMONY_HEAD = "<|channel|>commentary to=functions.f<|message|>"
CASES: list[tuple[str, str, Result]] = [
    # -- Hermes and Qwen
    ("hermes", "Just text.\n", ("Just text.\n", [])),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {KOELN}}}\n</tool_call>', ("", [WEATHER])),
    ("hermes", f'<tool_call>{{"name":"get_weather","arguments":{KOELN}}}</tool_call>', ("", [WEATHER])),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {KOELN}}}\n</tool_call>\n',
        ("Let me see.", [WEATHER]),
    ),
    (
        "hermes",
        f'\n\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>\n<tool_call>\n{{"name": "get_weather", "arguments": {KOELN}}}\n</tool_call>',
        ("", [("f", "{}"), WEATHER]),
    ),
    ("hermes", f'<tool_call>{{"arguments": {KOELN}, "name": "get_weather"}}</tool_call>', ("", [WEATHER])),
    (
        "hermes",
        '<tool_call>{"id": [1, {"name": "x"}], "name": "f", "arguments": {}, "type": "function"}</tool_call>',
        ("", [("f", "{}")]),
    ),
    ("hermes", '<tool_call>{"name": "no_such", "arguments": {"a": 1}}</tool_call>', ("", [("no_such", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>', ("", [("f", '{"a": "b"}')])),
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "search", "parameters": {"q": 1}}]</tool_call>',
        ("", [("f", "{}"), ("search", '{"q": 1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>Done.', ("Done.", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} and so on', ("and so on", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f\\u00fc\\"", "arguments": {}}</tool_call>', ("", [('fü"', "{}")])),
    ("hermes", "a < b and <tool_cal and <tool_call", ("a < b and <tool_cal and <tool_call", [])),
    *[
        (
            "hermes",
            f'Ok. <tool_call>{{"name": "f", "arguments": {written}\n</tool_call>Done.',
            ("Ok.Done.", [("f", told)]),
        )
        for written, told in [
            ("{}", "{}"),
            ("{}}}", "{}"),
            ('{"a": {}} \n', '{"a": {}}'),
            ("{}, }", "{}"),
            ('{"a": 1]}}', '{"a": 1'),
        ]
    ],
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, 1]', ("1]", [("f", "{}")])),
    ("hermes", "<tool_call>", ("<tool_call>", [])),
    ("hermes", "<tool_call>nothing</tool_call>", ("<tool_call>nothing</tool_call>", [])),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>", ("<tool_call>{'name': 'f'}</tool_call>", [])),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    (
        "hermes",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ),
    ("hermes", '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\', ("", [("f", '{"a": "b\\')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>', ("", [("f", '{"a": True}')])),
    ("hermes", '{"name": "f", "arguments": {}}', ('{"name": "f", "arguments": {}}', [])),
    # -- Llama 3
    ("llama3", "Hello, you.", ("Hello, you.", [])),
    ("llama3", f'{{"name": "get_weather", "parameters": {KOELN}}}', ("", [WEATHER])),
    ("llama3", f'<|python_tag|>{{"name": "get_weather", "parameters": {KOELN}}}', ("", [WEATHER])),
    ("llama3", '<|python_tag|>{"name": "no_such", "parameters": {}}', ("", [("no_such", "{}")])),
    ("llama3", '{"name": "no_such", "parameters": {}}', ('{"name": "no_such", "parameters": {}}', [])),
    (
        "llama3",
        '{"name": "f", "parameters": {}}; {"name": "search", "parameters": {"q": ";{"}}',
        ("", [("f", "{}"), ("search", '{"q": ";{"}')]),
    ),
    ("llama3", '{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {}}\n', ("", [("f", "{}"), ("f", "{}")])),
    ("llama3", '{"name": "f", "parameters": {}}; ', ("", [("f", "{}")])),
    ("llama3", '{"type": "function", "name": "f", "parameters": {}}', ("", [("f", "{}")])),
    ("llama3", '{"type": "function", "function": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    ("llama3", "<|python_tag|>print(1)", ("print(1)", [])),
    ("llama3", 'I call:\n{"name": "f", "parameters": {}}', ("I call:", [("f", "{}")])),
    ("llama3", 'I say {"name": "f", "parameters": {}}', ('I say {"name": "f", "parameters": {}}', [])),
    (
        "llama3",
        '{"answer": 42,\n{"name": "f", "parameters": {}}',
        ('{"answer": 42,\n{"name": "f", "parameters": {}}', []),
    ),
    ("llama3", "text <|eot_i and <|", ("text <|eot_i and <|", [])),
    ("llama3", "text ", ("text ", [])),
    # -- Mistral
    ("mistral", "Bonjour ", ("Bonjour ", [])),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {KOELN}}}]', ("", [WEATHER])),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {{}}, "id": "abcdefghi"}}, {{"name": "get_weather", "arguments": {KOELN}}}]',
        ("", [("f", "{}"), WEATHER]),
    ),
    ("mistral", 'Well.[TOOL_CALLS] [{"name": "f", "arguments": {}}]', ("Well.", [("f", "{}")])),
    ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}', ("", [("f", "{}")])),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, ', ("", [("f", "{}")])),
    ("mistral", "[TOOL_CALLS] none", (" none", [])),
    ("mistral", "[TOOL", ("[TOOL", [])),
    ("args", f"[TOOL_CALLS]get_weather[ARGS]{KOELN}", ("", [WEATHER])),
    (
        "args",
        f"Ok.\n[TOOL_CALLS]f[ARGS]{{}}[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS] {KOELN}",
        ("Ok.", [("f", "{}"), WEATHER]),
    ),
    ("args", '[TOOL_CALLS]f{"a": 1}', ("", [("f", '{"a": 1}')])),
    ("args", "[TOOL_CALLS]f[ARGS]nothing", ("f[ARGS]nothing", [])),
    ("args", "[TOOL_CALLS]get_weat", ("get_weat", [])),
    # -- DeepSeek
    ("deepseek", f"{DS[0]}{DS[1]}function{DS[2]}get_weather\n```json\n{KOELN}\n```{DS[3]}{DS[4]}", ("", [WEATHER])),
    (
        "deepseek",
        f"Hm.\n{DS[0]}{DS[1]}function{DS[2]}f\n```json\n{{}}\n```{DS[3]}\n{DS[1]}get_weather{DS[2]}{KOELN}{DS[3]}{DS[4]}",
        ("Hm.", [("f", "{}"), WEATHER]),
    ),
    ("deepseek", f"{DS[1]}f", (f"{DS[1]}f", [])),
    # -- without a form
    ("json", f'{{"name": "get_weather", "parameters": {KOELN}}}', ("", [WEATHER])),
    ("json", f'```json\n{{"name": "get_weather", "arguments": {KOELN}}}\n```\n', ("", [WEATHER])),
    (
        "json",
        f'Sure:\n```\n[{{"name": "f", "arguments": {{}}}},\n {{"name": "get_weather", "arguments": {KOELN}}}]\n```',
        ("Sure:", [("f", "{}"), WEATHER]),
    ),
    ("json", '{"function": {"_name": "search", "q": "ü", "n": 1.5}}', ("", [("search", '{"q": "ü", "n": 1.5}')])),
    ("json", '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', ("", [("f", '{"a": 1}')])),
    (
        "json",
        '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}',
        ('{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}', []),
    ),
    (
        "json",
        '{"function": {"_name": "no_tool", "content": "Hi"}}',
        ('{"function": {"_name": "no_tool", "content": "Hi"}}', []),
    ),
    ("json", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    ("json", '{"people": [\n{"name": "f", "arguments": {}}]}', ('{"people": [\n{"name": "f", "arguments": {}}]}', [])),
    ("json", '```python\nprint("f")\n```\n', ('```python\nprint("f")\n```\n', [])),
    ("json", "[1] See there.\n[a](b)\n", ("[1] See there.\n[a](b)\n", [])),
    ("json", "``", ("``", [])),
    ("json", "  \n ", ("  \n ", [])),
    ("json", "", ("", [])),
    ("json", '{"name": "f"}', ('{"name": "f"}', [])),
    ("json", '{"name": "f", "arguments": {"a": ', ("", [("f", '{"a": ')])),
    ("json", '{"name": "f", "arguments": {"a": ]}} rest', ("]}} rest", [("f", '{"a": ')])),
    # -- Qwen3-Coder
    (
        "qwen_xml",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=place>\nKöln\n</parameter>\n<parameter=days>\n"
        '[1, {"x": "</a>"}]\n</parameter>\n</function>\n</tool_call>',
        ("I look.", [("get_weather", '{"place": "Köln", "days": [1, {"x": "</a>"}]}')]),
    ),
    (
        "qwen_xml",
        "<tool_call>\n<function=get_weather>\n<parameter=place>\n12\n</parameter>\n<parameter=near>\nnull\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n<parameter=code>\n7\n</parameter>\n</function>\n</tool_call>",
        ("", [("get_weather", '{"place": "12", "near": null, "unit": "C", "code": 7}')]),
    ),
    (
        "qwen_xml",
        "<tool_call><function=search><parameter=q>two\n\nlines\n</parameter><parameter=exact>True</parameter></function></tool_call>",
        ("", [("search", '{"q": "two\\n\\nlines", "exact": true}')]),
    ),
    ("qwen_xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>", ("", [("f", "{}")])),
    ("qwen_xml", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", ("", [("f", '{"a": 1}')])),
    (
        "qwen_xml",
        "<tool_call><function=f></function></tool_call>\n<tool_call><function=search><parameter=q>1</parameter></function></tool_call>",
        ("", [("f", "{}"), ("search", '{"q": 1}')]),
    ),
    ("qwen_xml", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', ("", [("f", "{}")])),
    ("qwen_xml", "<tool_call>nothing</tool_call>", ("<tool_call>nothing</tool_call>", [])),
    ("qwen_xml", "a <function and <function=<x> b", ("a <function and <function=<x> b", [])),
    ("qwen_xml", "<tool_call><function=f><parameter=a>1</parameter> so", ("so", [("f", '{"a": 1}')])),
    # -- GLM
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>place</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>[1]</arg_value>\n</tool_call>",
        ("", [("get_weather", '{"place": "Köln", "days": [1]}')]),
    ),
    ("glm", "Hm. <tool_call>f</tool_call>", ("Hm.", [("f", "{}")])),
    ("glm", "<tool_call>f <x></tool_call>", ("<tool_call>f <x></tool_call>", [])),
    ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', ("", [("f", "{}")])),
    # -- Kimi
    (
        "kimi",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{KOELN}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        ("Ok.", [WEATHER, ("f", "{}")]),
    ),
    # -- GPT-OSS, as `reasoning.harmony` hands it on
    ("harmony", f"Ok.\n<|channel|>commentary to=functions.get_weather<|message|>{KOELN}", ("Ok.", [WEATHER])),
    *[
        ("harmony", f"Ok.\n{HARMONY_HEAD}{body}", ("Ok." + content, calls))
        for body, content, calls in [
            ("", "", [("f", "{}")]),
            ("null", "", [("f", "{}")]),
            (" \n", "", [("f", "{}")]),
            (f"\n{HARMONY_HEAD}{KOELN}", "", [("f", "{}"), ("f", KOELN)]),
            ("a=1", "\na=1", []),
            ("nul", "\nnul", []),
            ("[1]", "\n[1]", []),
            ("<|channel|>", "\n<|channel|>", []),
        ]
    ],
    ("harmony", "Say <|channel|>commentary to= or so.", ("Say <|channel|>commentary to= or so.", [])),
    # -- Cohere
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        + KOELN
        + "}\n]<|END_ACTION|>",
        ("", [WEATHER]),
    ),
    (
        "cohere",
        'Plan: I look.\nAction: ```json\n[\n {"tool_name": "f", "parameters": {}}\n]\n```',
        ("Plan: I look.", [("f", "{}")]),
    ),
    ("cohere", "Action: none is needed.", ("Action: none is needed.", [])),
    # -- Granite, Phi-4-mini
    ("tagged_list", '<|tool_call|>[{"name": "f", "arguments": {}}]', ("", [("f", "{}")])),
    (
        "tagged_list",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {KOELN}}}, {{"name": "f", "arguments": {{}}}}]<|/tool_call|>',
        ("", [WEATHER, ("f", "{}")]),
    ),
    (
        "tagged_list",
        f'Yes.\n<tool_call>[{{"name": "get_weather", "arguments": {KOELN}}}, {{"name": "f"}}]</tool_call>',
        ("Yes.", [WEATHER, ("f", "{}")]),
    ),  # Granite 3.1
    ("tagged_list", '<tool_call>[{"name": "f", "arguments": {}}]', ("", [("f", "{}")])),
    ("tagged_list", "Write <|tool_call|> and a list.", ("Write <|tool_call|> and a list.", [])),
    # -- Seed-OSS, MiniMax, DeepSeek V3.2
    (
        "seed",
        "<seed:tool_call>\n<function=search>\n<parameter=q>[1]</parameter>\n</function>\n</seed:tool_call>",
        ("", [("search", '{"q": [1]}')]),
    ),
    (
        "minimax",
        'So:\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="place">3 <b>\n"x"</parameter>\n'
        '<parameter name="days">[1]</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>\nDone.',
        ("So:\nDone.", [("get_weather", '{"place": "3 <b>\\n\\"x\\"", "days": [1]}'), ("f", "{}")]),
    ),
    ("minimax", "<invoke name='f'></invoke>", ("", [("f", "{}")])),
    ("minimax", '<invoke name="">', ('<invoke name="">', [])),
    ("minimax", "<minimax:tool_call>none</minimax:tool_call>", ("<minimax:tool_call>none</minimax:tool_call>", [])),
    (
        "dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="q" string="true">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ("", [("search", '{"q": "3", "exact": true}')]),
    ),
    # -- Python's calls
    *(
        (family, text, expected)
        for family in ("pythonic", "llama3")
        for text, expected in (
            ("[f()]", ("", [("f", "{}")])),
            (
                "Sure.\n[get_weather(place='Köln', days=[1, 2.5, None, {'a': (True,)}]), f( x = -1_000 , )]\nSo.",
                (
                    "Sure.\nSo.",
                    [
                        ("get_weather", '{"place": "Köln", "days": [1, 2.5, null, {"a": [true]}]}'),
                        ("f", '{"x": -1000}'),
                    ],
                ),
            ),
            (
                r"""[f(a="it's \"x\" \n\u00e9\q", b='', c='''a'b''c''')]""",
                ("", [("f", '{"a": "it\'s \\"x\\" \\né\\\\q", "b": "", "c": "a\'b\'\'c"}')]),
            ),
            ("```python\nf(a=0x1F)\nsearch(q=1e3)\n```\n", ("", [("f", '{"a": 31}'), ("search", '{"q": 1000.0}')])),
            ("```tool_code\nprint(f)\n```", ("```tool_code\nprint(f)\n```", [])),
            ("[f](http://x) [f(a=1)]", ("[f](http://x) [f(a=1)]", [])),
            ("[unknown(a=1)]\n[1, 2]\n[f(a=b)]", ("[unknown(a=1)]\n[1, 2]\n[f(a=b)]", [])),
            ("[f(a=1, b=c), f()]", (", b=c), f()]", [("f", '{"a": 1}')])),
            ("[f(a=1) and so on]", ("and so on]", [("f", '{"a": 1}')])),
            ("<|python_start|>[any(a=1)]<|python_end|>Yes", ("Yes", [("any", '{"a": 1}')])),
        )
    ),
    ("pythonic", "<|tool_call_start|>[any(a='x')]<|tool_call_end|>", ("", [("any", '{"a": "x"}')])),
    ("pythonic", "<function_calls>\nf(a=1)\nf()\n</function_calls>", ("", [("f", '{"a": 1}'), ("f", "{}")])),
    # -- Llama 4, DeepSeek V3.1
    ("llama3", f'<|python_start|>{{"name": "get_weather", "parameters": {KOELN}}}<|python_end|>', ("", [WEATHER])),
    ("deepseek", f"{DS[0]}{DS[1]}get_weather{DS[2]}{KOELN}{DS[3]}{DS[4]}", ("", [WEATHER])),
]


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_cases(family: str, text: str, expected: Result) -> None:
    """Whole, character by character, and cut at every place."""
    tool_format = FORMATS[family]
    assert collect(tool_format, [text]) == expected
    assert collect(tool_format, list(text)) == expected
    for place in range(len(text) + 1):
        assert collect(tool_format, [text[:place], text[place:]]) == expected


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|eot_id|>", "<|eot|>", "</s>", *DS,
    "function", "{", "}", "[", "]", '"', ":", ",", ";", "\n", " ", "\\", "```json\n", "```", '"name": "f"', '"arguments": {', "f", "é",
    '{"name": "f", "arguments": {"a": "}"}}', '{"function": {"_name": "f"}}', "\n" * 70, "null", "1.5", "text",
    "<function=f>", "<function=", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|channel|>commentary to=functions.",
    "<|message|>", "<|START_ACTION|>", "<|END_ACTION|>", "Action:", "<|tool_call|>", "<|/tool_call|>", '"tool_name": "f"', "<|python_end|>",
    "[f(", "f(", ")", "=", "a='", 'b="', "'", "\'\'\'", "True", "(1, ", "<|python_start|>", "<function_calls>", "<seed:tool_call>",
    "<minimax:tool_call>", '<invoke name="f">', '<parameter name="a">', "</invoke>", "<｜DSML｜invoke ", 'name="f">', "</｜DSML｜invoke>",
]  # fmt: skip


@pytest.mark.parametrize("family", READ)
@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=25),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    shape=st.sampled_from(["mixed", "either", "calls"]),
    cut_off=st.booleans(),
)
def test_cuts_make_no_difference(family: str, parts: list[str], cuts: list[int], shape: Shape, cut_off: bool) -> None:
    text = "".join(parts)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = collect(READ[family], [text], NAMES, shape, cut_off)
    assert collect(READ[family], pieces, NAMES, shape, cut_off) == whole
    assert collect(READ[family], list(text), NAMES, shape, cut_off) == whole


@pytest.mark.parametrize("family", READ)
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
def test_plain_text_is_untouched(family: str, text: str, cut: int) -> None:
    if not any(mark in text for mark in "{[<`"):
        assert collect(READ[family], [text[:cut], text[cut:]]) == (text, [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


SECTIONS = {
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "dsml": ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    "seed": ("<seed:tool_call>", "</seed:tool_call>"),
}


def write_call(family: str, name: str, arguments: str) -> str:
    match family:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'
        case "llama3" | "json" | "pythonic" | "asked" | "asked_list":
            return f'{{"name": "{name}", "parameters": {arguments}}}\n'
        case "mistral":
            return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]'
        case "args":
            return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
        case "kimi":
            return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        case "harmony":
            return f"<|channel|>commentary to=functions.{name}<|message|>{arguments}"
        case "cohere":
            return f'<|START_ACTION|>[{{"tool_name": "{name}", "parameters": {arguments}}}]<|END_ACTION|>'
        case "tagged_list":
            return f'<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]'
        case "minimax" | "dsml" | "seed":
            start, end = SECTIONS[family]
            return f'{start}\n{{"name": "{name}", "arguments": {arguments}}}\n{end}\n'
        case "qwen_xml" | "glm":  # whose values are no JSON: these forms read Hermes' as well
            return write_call("hermes", name, arguments)
        case _:
            return f"{DS[1]}function{DS[2]}{name}\n```json\n{arguments}\n```{DS[3]}\n"


@pytest.mark.parametrize("family", READ)
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), json_values, max_size=3)), max_size=4),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
    size=st.integers(1, 40),
)
def test_any_arguments_come_out_as_written(
    family: str, calls: list[tuple[str, dict[str, Any]]], indent: int | None, ascii_only: bool, size: int
) -> None:
    tool_format = READ[family]
    written = [(name, json.dumps(value, indent=indent, ensure_ascii=ascii_only)) for name, value in calls]
    text = "".join(write_call(family, name, arguments) for name, arguments in written)
    content, found = collect(tool_format, [text[i : i + size] for i in range(0, len(text), size)])
    assert (content, found) == ("", written)
    assert [json.loads(arguments) for _, arguments in found] == [value for _, value in calls]


@settings(max_examples=200, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(NAMES), st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), json_values)
        ),
        min_size=1,
        max_size=3,
    ),
    fenced=st.booleans(),
    size=st.integers(1, 40),
)
def test_what_python_writes_is_read(calls: list[tuple[str, dict[str, Any]]], fenced: bool, size: int) -> None:
    each = [f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls]
    text = "```python\n" + "\n".join(each) + "\n```" if fenced else f"[{', '.join(each)}]"
    content, found = collect(FORMATS["pythonic"], [text[i : i + size] for i in range(0, len(text), size)])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_arguments_are_streamed() -> None:
    parser = ToolParser(HERMES, NAMES)
    assert parser.push('<tool_call>{"name": "f", "arg') == []
    assert parser.push('uments": {"a"') == [CallStart(0, "f"), CallArguments(0, '{"a"')]
    assert parser.push(": 1") == [CallArguments(0, ": 1")]
    assert parser.push("}}</tool_call> more") == [CallArguments(0, "}"), Content(" more")]
    assert parser.finish() == []


def test_content_is_streamed() -> None:
    parser = ToolParser(LLAMA, NAMES)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" you <") == [Content(" you")]
    assert parser.push("b>") == [Content(" <b>")]
    assert parser.push('\n{"answer"') == [Content('\n{"answer"')]
    assert parser.push(": 1") == [Content(": 1")]


# -- calls that a limit cuts off -----------------------------------------------------------------------------------

CUT: list[tuple[str, str, Result]] = [
    ("hermes", '<tool_call>\n{"name": "f"', ("", [("f", "")])),
    ("hermes", 'So: <tool_call>\n{"name": "f", "argu', ("So:", [("f", "")])),
    ("hermes", '<tool_call>{"name": "sea', ("", [("search", "")])),  # which can only be one
    ("hermes", '<tool_call>{"na', ("", [])),  # which may be any: nothing is told
    ("hermes", '<tool_call>{"name": "f", "arguments": nul', ("", [("f", "")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\', ("", [("f", '{"a": "b\\')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_c', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call> So it', (" So it", [("f", "{}")])),
    ("hermes", "<tool_call>nothing of the ki", ("<tool_call>nothing of the ki", [])),
    ("hermes", "a < b and <tool_", ("a < b and <tool_", [])),  # no call yet
    ("llama3", '{"name": "search", "para', ("", [("search", "")])),
    ("llama3", '<|python_tag|>{"name": "sea', ("", [("search", "")])),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "sea', ("", [("f", "{}"), ("search", "")])),
    ("llama3", '{"name": "sea', ('{"name": "sea', [])),  # may be an answer in JSON
    ("llama3", '{"answer": 4', ('{"answer": 4', [])),
    ("mistral", '[TOOL_CALLS][{"name": "search", "ar', ("", [("search", "")])),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "get_',
        ("", [("f", "{}"), ("get_weather", "")]),
    ),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, ', ("", [("f", "{}")])),
    ("mistral", "[TOOL_CALLS]sea", ("", [("search", "")])),
    ("args", "[TOOL_CALLS]sea", ("", [("search", "")])),
    ("args", "[TOOL_CALLS]f[AR", ("", [("f", "")])),
    ("args", "[TOOL_CALLS]f[CALL_ID]12", ("", [("f", "")])),
    ("args", '[TOOL_CALLS]f[ARGS]{"a', ("", [("f", '{"a')])),
    ("args", "[TOOL_CALLS]", ("", [])),
    ("deepseek", f"{DS[0]}{DS[1]}func", ("", [])),
    ("deepseek", f"{DS[0]}{DS[1]}function{DS[2]}sea", ("", [("search", "")])),
    ("deepseek", f"{DS[1]}function{DS[2]}f\n```js", ("", [("f", "")])),
    ("deepseek", f'{DS[1]}function{DS[2]}f\n```json\n{{"a": 1}}\n``', ("", [("f", '{"a": 1}')])),
    ("deepseek", f"{DS[1]}sea", ("", [("search", "")])),
    ("deepseek", f"{DS[1]}search{DS[2]}", ("", [("search", "")])),
    ("json", '{"name": "search"', ("", [("search", "")])),
    ("json", '```json\n[{"name": "search", "par', ("", [("search", "")])),
    ("json", '{"name": "Bob", "age"', ('{"name": "Bob", "age"', [])),
]


@pytest.mark.parametrize(("family", "text", "expected"), CUT)
def test_calls_that_are_cut_off(family: str, text: str, expected: Result) -> None:
    tool_format = FORMATS[family]
    for pieces in ([text], list(text), [text, ""]):
        assert collect(tool_format, pieces, cut=True) == expected


@pytest.mark.parametrize("shape", ["calls", "either"])
@pytest.mark.parametrize("family", FORMATS)
def test_calls_cut_off_anywhere(family: str, shape: Shape) -> None:
    """Where nothing but calls may come, or a marker says so, no part of a call is ever content."""
    tool_format = FORMATS[family]
    written = [("get_weather", KOELN), ("search", '{"q": 1}')]
    text = write_forced("mistral_args" if family == "args" else family, written)
    names = ["get_weather", "search"]
    for size in range(1, len(text)):
        content, calls = collect(tool_format, [text[:size]], names, shape, cut=True)
        assert collect(tool_format, list(text[:size]), names, shape, cut=True) == (content, calls)
        if shape == "calls" or not tool_format.form.bare:
            assert content == ""
        for call, (name, arguments) in zip(calls, written, strict=False):
            assert call[0] == name and arguments.startswith(call[1])
        begun = [name for name, arguments in written if f"{arguments[:8]}" in text[:size]]
        assert [name for name, _ in calls[: len(begun)]] == begun


def test_one_tool_is_known_from_the_start() -> None:
    for family, tool_format in FORMATS.items():
        text = write_forced("mistral_args" if family == "args" else family, [("search", "{}")])
        assert collect(tool_format, [text[:4]], ["search"], "calls", cut=True) == ("", [("search", "")])


def test_an_answer_that_mentions_calls() -> None:
    """Behind the beginning of an answer in a format, there is no call."""
    inner = '<tool_call>{"name": "f", "arguments": {}}</tool_call>[TOOL_CALLS]f[ARGS]{}' + DS[1]
    answer = json.dumps({"note": inner, "name": "f"}, ensure_ascii=False)
    for tool_format in FORMATS.values():
        for pieces in ([answer], list(answer)):
            assert collect(tool_format, pieces, shape="either") == (answer, [])
    people = '{"name": "f", "age": 3}\n{"name": "f", "arguments": {}}'
    assert collect(JSON, list(people), shape="either") == (people, [])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (r'{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}', ("f", '{"a": "\ufffd"}')),
        (r'{"name": "f\ud800", "arguments": {}}', ("f\ufffd", "{}")),
        (r'{"function": {"name": "f\udc00", "arguments": {"a": "\ud800"}}}', ("f\ufffd", '{"a": "\ufffd"}')),
        (r'{"function": {"_name": "f\udc00", "\ud800": 1}}', ("f\ufffd", '{"\ufffd": 1}')),
        (r'{"name": "f\ud83d\ude00"}', ("f\U0001f600", "{}")),
    ],
)
def test_half_a_pair_of_surrogates_is_replaced(call: str, expected: tuple[str, str]) -> None:
    assert collect(HERMES, [f"<tool_call>{call}</tool_call>"]) == ("", [expected])


@pytest.mark.parametrize("family", ["hermes", "args", "mistral", "deepseek", "kimi", "llama3", "json"])
def test_line_breaks_within_strings_become_json(family: str) -> None:
    """Code and letters are full of them, and models do not always write them as JSON has them."""
    code = 'def f():\n\treturn ""\r\n\x00é'
    written = json.dumps({"code": code, "of": [code]}, ensure_ascii=False, indent=1)
    as_they_are = written.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r").replace("\\u0000", "\x00")
    assert as_they_are != written
    for size in (1, 2, 7, 1000):
        text = write_call(family, "f", as_they_are)
        content, calls = collect(FORMATS[family], [text[i : i + size] for i in range(0, len(text), size)])
        assert (content, calls) == ("", [("f", written)])
    text = f'<tool_call>{{"arguments": {as_they_are}, "name": "f"}}</tool_call>'
    assert collect(HERMES, [text]) == ("", [("f", written)])


def test_odd_types_in_schemas_are_passed_over() -> None:
    schema = {"properties": {"a": {"type": [{}, "string", None]}, "b": {"type": [{}]}}}
    call = "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>"
    assert collect(FORMATS["qwen_xml"], [call], {"f": schema}) == ("", [("f", '{"a": "1", "b": 2}')])


def test_thousand_calls() -> None:
    for family in FORMATS:
        text = "".join(write_call(family, "f", json.dumps({"n": n})) for n in range(1000))
        _, calls = collect(FORMATS[family], [text[i : i + 7] for i in range(0, len(text), 7)])
        assert calls == [("f", json.dumps({"n": n})) for n in range(1000)]


@pytest.mark.parametrize("family", FORMATS)
def test_cost_is_linear(family: str) -> None:
    """A quadratic parser would need minutes for this; no time is asserted."""
    arguments = json.dumps({"text": 'a "quoted" \\ {part} ' * 1_500, "list": [[["x"] * 10] * 10] * 5})
    texts = [
        write_call(family, "f", arguments),
        '{"parameters": ' + arguments + ', "name": "f"}',
        '<tool_call>{"id": ' + arguments + ', "name": "f"}',
        "<" * 20_000,
        "[" * 8_000,
        "{" * 8_000,
        "\n{" * 8_000,
        " " * 20_000,
        "\n" * 20_000,
        "[TOOL_CALLS]" * 4_000,
        "[TOOL_CALLS]" + "a" * 20_000,
        "<tool_call>" * 4_000,
        "<｜tool▁call▁begin｜>" * 2_000,
        "```json\n" * 4_000,
        '{"name": "' + "f" * 20_000,
        "<tool_call><function=f><parameter=a>" + "<" * 20_000,
        "<tool_call>f<arg_key>a</arg_key><arg_value>" + "<" * 20_000,
        "<|channel|>commentary to=functions." * 2_000,
        "[f(" * 8_000,
        "[f(a=" + "[" * 20_000,
        "[f(a='" + "\\" * 20_001,
        "[f(a='''" + "'x" * 10_000,
        "[f(a=1, " * 4_000,
        "<function_calls>f(" + "a=1, " * 4_000,
        '<invoke name="f"><parameter name="a">' + "<" * 20_000,
    ]
    for text in texts:
        whole = collect(FORMATS[family], [text])
        assert collect(FORMATS[family], [text[i : i + 3] for i in range(0, len(text), 3)]) == whole


# -- detection and grammars ----------------------------------------------------------------------------------------


def build_tokenizer(special: Sequence[str] = (), ordinary: Sequence[str] = ()) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [
        '{"name": "get_weather", "arguments": {"place": "Paris", "days": 3}}',
        "the function is called with its name",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ordinary])
    return Tokenizer(backend, SpecialTokens({"eos_token": AddedToken("</s>", special=True)}, [], [], []))


PLAIN = build_tokenizer()
MARKED = build_tokenizer(
    special=["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|eom_id|>", *DS], ordinary=["<tool_call>", "</tool_call>"]
)

ORDINARY = build_tokenizer((), ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", *DS])
TOKENIZERS = pytest.mark.parametrize("tokenizer", [PLAIN, MARKED, ORDINARY], ids=["plain", "marked", "ordinary"])


@pytest.mark.parametrize(
    ("template", "tokenizer", "family"),
    [
        ("qwen3_thinking", PLAIN, "hermes"),
        ("hermes_tool_use", PLAIN, "hermes"),
        ("llama31_tools", MARKED, "llama3"),
        ("mistral_v3_tools", MARKED, "mistral"),
        ("mistral_args", MARKED, "mistral_args"),
        ("deepseek_r1", PLAIN, "deepseek"),
        ("yi", PLAIN, "json"),
        ("yi", MARKED, "json"),
        ("granite", PLAIN, "tagged_list"),
        ("phi4_mini", build_tokenizer(["<|tool|>", "<|tool_call|>", "<|/tool_call|>"]), "tagged_list"),
        ("phi4", PLAIN, "json"),
        ("gpt_oss", PLAIN, "harmony"),
        ("command_r_tool_use", PLAIN, "cohere"),
    ],
)
def test_detection(template: str, tokenizer: Tokenizer, family: str) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    assert detect_tool_format(ChatTemplate(source), tokenizer).family == family


def test_detection_by_tokens() -> None:
    words = ChatTemplate('Answer {"name": ..., "parameters": ...} {{ tools }}')
    assert detect_tool_format(words, build_tokenizer(["<|python_tag|>"])).family == "llama3"
    assert detect_tool_format(words, PLAIN).family == "json"
    assert detect_tool_format(ChatTemplate("{{ tools }}"), build_tokenizer(["[TOOL_CALLS]"])).family == "mistral"
    assert detect_tool_format(ChatTemplate("{{ tools }}"), build_tokenizer((), ["<tool_call>"])).family == "hermes"
    assert detect_tool_format(ChatTemplate(None), MARKED).family == "json"
    python = ChatTemplate("{{ tools }} as [func_name1(params_name1=params_value1), func_name2(params)]")
    assert detect_tool_format(python, PLAIN).family == "pythonic"


def test_answers_to_the_tool_prompt_are_calls() -> None:
    """In a grammar's place nothing but the family's own form is one."""
    shown = f'{{"name": "get_weather", "parameters": {KOELN}}}'
    own = "".join((DS[0], DS[1], "get_weather", DS[2], KOELN, DS[3], DS[4]))
    template = ChatTemplate(DS[1])
    assert not template.uses_tools
    asked = detect_tool_format(template, PLAIN)
    for text in (shown, f"```json\n{shown}\n```", own):
        assert collect(asked, [text]) == collect(asked, list(text)) == ("", [WEATHER])
    assert collect(asked, [shown], shape="either") == (shown, [])
    taught = detect_tool_format(ChatTemplate(DS[1] + "{{ tools }}"), PLAIN)
    assert collect(taught, [shown]) == (shown, []) and collect(taught, [own]) == ("", [WEATHER])
    listed = detect_tool_format(ChatTemplate("[TOOL_CALLS]"), PLAIN)
    for text in (f"[{shown}]", f"[TOOL_CALLS][{shown}]"):
        assert collect(listed, [text]) == collect(listed, list(text)) == ("", [WEATHER])


def shown_text(tokenizer: Tokenizer, tool_format: ToolFormat, ids: Sequence[int]) -> str:
    """What the parser is given of these tokens."""
    text = RequestText(tokenizer, [], StopStrings([], False), shown_ids=tool_format.shown_ids)
    return "".join(text.push(token_id)[0] for token_id in ids) + text.finish()


def test_special_markers_have_text_and_other_special_tokens_none() -> None:
    template = ChatTemplate("{{ tools }} [TOOL_CALLS]")
    kept = detect_tool_format(template, MARKED)
    assert kept.form.short_ids
    assert dict(kept.marker_ids) == {text: MARKED.id_of(text) for text in ("[TOOL_CALLS]", "[ARGS]")}
    assert kept.shown_ids == {MARKED.id_of(text) for text in ("[TOOL_CALLS]", "[ARGS]")}
    ordinary = detect_tool_format(template, ORDINARY)
    assert not ordinary.shown_ids and ordinary.marker_ids
    hermes = detect_tool_format(ChatTemplate("<tool_call>"), MARKED)
    assert not hermes.shown_ids and not hermes.form.short_ids
    ids = MARKED.encode('é[TOOL_CALLS] [{"name": "f", "arguments": {}}]<|eom_id|></s>')
    assert shown_text(MARKED, kept, ids) == 'é[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    assert collect(kept, [shown_text(MARKED, kept, ids)]) == ("é", [("f", "{}")])
    half = MARKED.encode("é")[:1]  # a character that a marker cuts off is told as far as it came
    assert shown_text(MARKED, kept, [*half, *ids[-3:]]).startswith("\ufffd")


PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place"],
    "additionalProperties": False,
}
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "search", "parameters": UNIT}},
    {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "f-g_2", "parameters": None}},
]
SOURCES = {
    "qwen_xml": "<tool_call><function=",
    "glm": "<tool_call><arg_key>",
    "kimi": "<|tool_call_begin|>",
    "cohere": "<|START_ACTION|>",
    "tagged_list": "<|tool_call|>",
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS][ARGS]",
    "deepseek": DS[1] + "```json",
    "deepseek_args": DS[1],
    "minimax": "<minimax:tool_call>",
    "dsml": "<｜DSML｜",
    "seed": "<seed:tool_call>",
    "pythonic": "<|tool_call_start|>",
    "json": "",
}


@cache
def vocabulary_of(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer._backend.to_str(), eos_token=sorted(tokenizer.eos_ids))


def accepts(tokenizer: Tokenizer, grammar: Any, text: str, ends: bool = True) -> bool:
    """Whether the grammar lets a model write these tokens, and then end."""
    source = LLMatcher.grammar_from_lark(grammar.value)
    assert not LLMatcher.validate_grammar(source)
    matcher = LLMatcher(vocabulary_of(tokenizer), source)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if matcher.validate_tokens(ids) != len(ids):
        return False
    matcher.consume_tokens(ids)
    return matcher.is_accepting() or not ends


def write_forced(family: str, calls: Sequence[tuple[str, str]]) -> str:
    match family:
        case "kimi":
            each = (
                f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{a}<|tool_call_end|>" for n, a in calls
            )
            return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"
        case "harmony":
            # What the grammar demands is turned into this before the parser sees it.
            return "\n".join(f"<|channel|>commentary to=functions.{n}<|message|>{a}" for n, a in calls)
        case "cohere":
            each = ", ".join(f'{{"tool_name": "{n}", "parameters": {a}}}' for n, a in calls)
            return f"<|START_ACTION|>[{each}]<|END_ACTION|>"
        case "tagged_list":
            return "<|tool_call|>[" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"
        case "minimax" | "dsml" | "seed":
            start, end = SECTIONS[family]
            return "\n".join(f'{start}\n{{"name": "{n}", "arguments": {a}}}\n{end}' for n, a in calls)
        case "hermes" | "qwen_xml" | "glm":
            return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)
        case "llama3":
            return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)
        case "mistral":
            return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"
        case "mistral_args":
            return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)
        case "deepseek":
            each = [f"{DS[1]}function{DS[2]}{n}\n```json\n{a}\n```{DS[3]}" for n, a in calls]
            return DS[0] + "\n".join(each) + DS[4]
        case "deepseek_args":
            return DS[0] + "".join(f"{DS[1]}{n}{DS[2]}{a}{DS[3]}" for n, a in calls) + DS[4]
        case _:
            each = ", ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)
            return each if len(calls) == 1 else f"[{each}]"


ONE, TWO, ANY = (
    ("get_weather", '{"place": "Köln {\\"}"}'),
    ("search", '{"unit": "C"}'),
    ("f", '{"x": [1, {"y": null}]}'),
)


@TOKENIZERS
@pytest.mark.parametrize("family", SOURCES)
def test_forced_calls_are_read_by_the_parser(family: str, tokenizer: Tokenizer) -> None:
    tool_format = detect_tool_format(ChatTemplate(SOURCES[family]), tokenizer)
    assert tool_format.family == family
    any_tool = forced_grammar(tool_format, TOOLS, None, parallel=True)
    for calls in ([ONE], [TWO], [ANY], [("f", "{}")], [("f-g_2", "{}")], [ONE, TWO, ANY, ONE]):
        text = write_forced(family, calls)
        assert accepts(tokenizer, any_tool, text)
        shown = shown_text(tokenizer, tool_format, tokenizer.encode(text))
        assert collect(tool_format, list(shown), ["get_weather", "search", "f", "f-g_2"]) == ("", list(calls))


def test_forced_calls_of_harmony() -> None:
    """One message to a function, which the splitter turns into what the parser reads."""
    template = ChatTemplate("<|channel|>commentary to=functions. <|message|>")
    markers = ["<|channel|>", "<|constrain|>", "<|message|>"]
    for tokenizer in (PLAIN, build_tokenizer(markers), build_tokenizer((), markers)):
        tool_format = detect_tool_format(template, tokenizer)
        grammar = forced_grammar(tool_format, TOOLS, None, parallel=True)
        name, arguments = ONE
        text = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
        assert accepts(tokenizer, grammar, text)
        assert not accepts(tokenizer, grammar, text + text)
        assert not accepts(tokenizer, grammar, f"<|channel|>final<|message|>{arguments}")
        reasoning = detect_reasoning_format(template, tokenizer)
        assert reasoning is not None and reasoning.shown_ids == tool_format.shown_ids
        splitter = reasoning.split(opened=False, calls=True)
        shown = shown_text(tokenizer, tool_format, tokenizer.encode(text))
        assert collect(tool_format, [*splitter.push(shown)[1], *splitter.finish()[1]]) == ("", [ONE])


@TOKENIZERS
@pytest.mark.parametrize("family", SOURCES)
def test_forced_grammars_refuse_everything_else(family: str, tokenizer: Tokenizer) -> None:
    tool_format = detect_tool_format(ChatTemplate(SOURCES[family]), tokenizer)
    named = forced_grammar(tool_format, TOOLS, "get_weather", parallel=False)
    assert accepts(tokenizer, named, write_forced(family, [ONE]))
    assert accepts(tokenizer, named, write_forced(family, [("get_weather", '{"place":"a","days": 3}')]))
    for calls in (
        [TWO],
        [("no_such", "{}")],
        [("get_weather", "{}")],
        [("get_weather", '{"place": 3}')],
        [("get_weather", '{"place": "a", "other": 1}')],
        [("get_weather", "null")],
        [ONE, ONE],
    ):
        assert not accepts(tokenizer, named, write_forced(family, calls)), calls
    for text in ("", "Hello", "{}", write_forced(family, [ONE])[:-1], write_forced(family, [ONE]) + " and more"):
        assert not accepts(tokenizer, named, text), text


PERSON = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/Name"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "$defs": {"Name": {"type": "string"}},
}
NODE = {
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/Value"}, "next": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"Value": {"enum": [1, 2]}},
}


@TOKENIZERS
@pytest.mark.parametrize("family", SOURCES)
def test_a_call_or_an_answer_in_a_format(family: str, tokenizer: Tokenizer) -> None:
    tool_format = detect_tool_format(ChatTemplate(SOURCES[family]), tokenizer)
    names = ["get_weather", "search", "f", "f-g_2"]
    between = "\n" if family in ("json", "pythonic") else None  # a list would begin unlike one call

    def written(calls: Sequence[tuple[str, str]]) -> str:
        if between is not None:
            return between.join(write_forced(family, [call]) for call in calls)
        return write_forced(family, calls)

    def read(text: str) -> Result:
        shown = shown_text(tokenizer, tool_format, tokenizer.encode(text))
        return collect(tool_format, list(shown), names, "either")

    either = forced_grammar(tool_format, TOOLS, None, True, json_grammar(PERSON))
    for calls in ([ONE], [TWO], [ANY], [("f", "{}")], [ONE, TWO]):
        assert accepts(tokenizer, either, written(calls))
        assert read(written(calls)) == ("", list(calls))
    for answer in ('{"name": "Bob", "age": 3}', '{"name":"get_weather","age":3}', '{"name": "getting", "age": 3}'):
        assert accepts(tokenizer, either, answer)
        assert read(answer) == (answer, [])
    for text in (
        "",
        "Hello",
        '{"name": "Bob"}',
        '{"name": "Bob", "age": 3}' + written([ONE]),
        written([("no_such", "{}")]),
        written([("get_weather", '{"place": 3}')]),
        written([ONE])[:-1],
        written([ONE]) + '{"name": "Bob", "age": 3}',
    ):
        assert not accepts(tokenizer, either, text), text
    assert not accepts(
        tokenizer, forced_grammar(tool_format, TOOLS, None, False, json_grammar(PERSON)), written([ONE, TWO])
    )
    if family == "llama3":
        assert accepts(tokenizer, either, "<|python_tag|>" + written([ONE]))
    expression = forced_grammar(tool_format, TOOLS, None, True, regex_grammar(r"(yes|no)/\d+"))
    assert accepts(tokenizer, expression, "yes/12")
    assert accepts(tokenizer, expression, written([ONE]))
    assert not accepts(tokenizer, expression, "yes")


def walk(tokenizer: Tokenizer, grammar: Any, rng: random.Random) -> list[int]:
    """Tokens as a model without an opinion would write them under the masks of the grammar."""
    matcher = LLMatcher(vocabulary_of(tokenizer), LLMatcher.grammar_from_lark(grammar.value))
    ids: list[int] = []
    while len(ids) < 5000:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        chosen = int(rng.choice(np.flatnonzero(bits).tolist()))
        if chosen in tokenizer.eos_ids:
            return ids
        ids.append(chosen)
        matcher.consume_token(chosen)
    raise AssertionError("the text has no end")


@TOKENIZERS
@pytest.mark.parametrize("family", SOURCES)
def test_whatever_the_masks_allow_is_a_call_or_an_answer(family: str, tokenizer: Tokenizer) -> None:
    tool_format = detect_tool_format(ChatTemplate(SOURCES[family]), tokenizer)
    word = {"enum": ["a<", 'b}"', "get_weather"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {"q": word}, "required": ["q"]}}}
        for name in ("get_weather", "get")
    ]
    person = {"properties": {"name": word, "age": {"enum": [1, 20]}}, "required": ["name", "age"]}
    either = forced_grammar(tool_format, tools, None, True, json_grammar(person))
    kinds: set[str] = set()
    for seed in range(40):
        ids = walk(tokenizer, either, random.Random(seed))
        shown = shown_text(tokenizer, tool_format, ids)
        content, calls = collect(tool_format, list(shown), ["get_weather", "get"], "either")
        kinds.add("calls" if calls else "answer")
        if calls:
            assert content == ""
            assert all(name in ("get_weather", "get") and list(json.loads(text)) == ["q"] for name, text in calls)
        else:
            assert list(json.loads(content)) == ["name", "age"]
    assert kinds == {"calls", "answer"}


@pytest.mark.parametrize("family", SOURCES)
def test_schemas_that_refer_to_themselves(family: str) -> None:
    tool_format = detect_tool_format(ChatTemplate(SOURCES[family]), MARKED)
    tools = [{"type": "function", "function": {"name": "f", "parameters": NODE}}]
    for instead in (None, json_grammar(PERSON)):
        grammar = forced_grammar(tool_format, tools, None, False, instead)
        assert accepts(MARKED, grammar, write_forced(family, [("f", '{"value": 1, "next": {"value": 2}}')]))
        assert not accepts(MARKED, grammar, write_forced(family, [("f", '{"value": 1, "next": {"value": 3}}')]))


def test_forced_grammar_with_the_embedded_tokenizer(embedded: Tokenizer) -> None:
    tool_format = detect_tool_format(ChatTemplate("{{ messages }}"), embedded)
    grammar = forced_grammar(tool_format, TOOLS, None, parallel=False)
    assert accepts(embedded, grammar, write_forced("json", [ONE]))
    assert not accepts(embedded, grammar, write_forced("json", [ONE, TWO]))
    assert not accepts(embedded, grammar, "Hello", ends=False)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("embedded")
    file = GgufFile.open(find_embedded())
    read_tokenizer(file, len(file.texts("tokenizer.ggml.tokens"))).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(read_tokenizer_config(file, 2048)))
    return Tokenizer.load(folder)


@pytest.mark.parametrize("name", ['q"uote', "back\\slash", "ünï", "with space", "<[3]>", "%json", "new\nline"])
def test_odd_names_are_forced_as_they_are(name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    grammar = forced_grammar(HERMES, tools, name, parallel=False)
    text = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{}}}}\n</tool_call>'
    assert accepts(PLAIN, grammar, text)
    assert collect(HERMES, [text]) == ("", [(name, "{}")])


@pytest.mark.parametrize(
    ("tools", "name", "text"),
    [
        ([], None, "no function"),
        (TOOLS, "no_such", "no_such"),
        (
            [{"function": {"name": "g", "parameters": {"type": "string"}}}],
            None,
            "'g' must be a JSON schema of an object",
        ),
        ([{"function": {"name": "g", "parameters": [1]}}], None, "'g' must be a JSON schema of an object"),
    ],
)
def test_what_cannot_be_forced(tools: list[dict[str, Any]], name: str | None, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        forced_grammar(HERMES, tools, name, parallel=False)
