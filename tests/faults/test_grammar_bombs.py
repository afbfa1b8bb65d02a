"""Grammars that would take minutes or all memory to compile: each is refused in time, or does no harm.

Compiling is tried in programs of its own first, each of which may use its 2 s: too long for tests/unit.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from text_generation_inference.errors import ValidationError
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Grammar
from text_generation_inference.weights.embedded import find_embedded
from text_generation_inference.weights.gguf import GgufFile
from text_generation_inference.weights.gguf_tokenizer import read_tokenizer, read_tokenizer_config

VOCAB = 49152
MANY_PATTERNS = json.dumps({"allOf": [{"pattern": f"a{n}"} for n in range(40)]})

# Run where they cannot harm: each must compile or be refused, and give its first masks, within these limits.
BOMBS = r"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from text_generation_inference.errors import OverloadedError, ValidationError
from text_generation_inference.text.grammar import GrammarCompiler, json_grammar, regex_grammar
from text_generation_inference.text.tokenizer import Tokenizer
import random
import numpy as np

def chain(count, make):
    return {"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": make({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}, f"d{count}": {"type": "string"}}}

def patterns(count):
    return [{"type": "string", "pattern": f"a{n}"} for n in range(count)]

multiples = [{"type": "integer", "multipleOf": p} for p in (997, 991, 983, 977)]
regexes = [
    "(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", "(.*a){50}", "(.*a){1000}", "(a|b)*a(a|b){30}", ".*a.{200}",
    "[a-z]{1,1000000}", "(abc|def){100000}", "(a+)+b", r"(\p{L}{1,500}){1,500}", "(" * 5000 + "a" + ")" * 5000,
    "(a?){5000}a{5000}", "(a?b?c?d?){3000}x", "|".join(f"w{n}" for n in range(1400)), "ab" * 5000, "((((a*)*)*)*)*",
]
schemas = [
    {"enum": [f"value {n}" for n in range(9000)]},
    {"enum": ["x" * 900 + str(n) for n in range(200)]},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}},
    {"properties": {f"p{n}": {"properties": {f"q{m}": {"type": "string"} for m in range(9)}} for n in range(700)}},
    chain(40, lambda ref: {"anyOf": [ref, ref]}), chain(40, lambda ref: {"allOf": [ref, ref]}),
    chain(200, lambda ref: {"properties": {"a": ref, "b": ref}}), chain(200, lambda ref: {"items": ref, "type": "array"}),
    {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "string", "minLength": 100000}, {"type": "array", "minItems": 1000000, "items": {"type": "integer"}},
    {"type": "string", "pattern": "(.*a){50}", "minLength": 5000, "maxLength": 10000},
    {"type": "string", "pattern": "^(ab|c)*$", "minLength": 20000, "maxLength": 20001},
    {"type": "integer", "multipleOf": 999983}, {"type": "integer", "multipleOf": 2**31}, {"anyOf": multiples}, {"allOf": multiples},
    {"type": "integer", "multipleOf": 19997}, {"anyOf": [{"multipleOf": 139, "type": "number"}, {"multipleOf": 141, "type": "number"}]},
    {"components": {"a": {"multipleOf": 999983, "type": "integer"}}, "$ref": "#/components/a"},
    {"allOf": [{"anyOf": [{"properties": {f"p{k}_{n}": {"const": n}}} for n in range(10)]} for k in range(6)]},
    {"patternProperties": {f"^{chr(97 + n % 26)}{n}x[a-z]{{1,100}}(foo|bar)*$": {"type": "string"} for n in range(50)}},
    {"allOf": patterns(30)}, {"allOf": patterns(3000)}, {"$ref": "#/x/0", "x": [{"pattern": f"a{n}", "$ref": f"#/x/{n + 1}"} for n in range(40)] + [{}]},
    {"allOf": [{"enum": [f"x{n}" for n in range(9000)]}, {"type": "string", "pattern": "^x.*9$"}]},
    {"enum": [{"a": n, "b": [n]} for n in range(3000)]}, {"type": "object", "required": [f"r{n}" for n in range(9000)]},
    {"allOf": [{"type": "string", "pattern": f"^(a{{{p}}})*$"} for p in (7, 11, 13, 17, 19)]},
    {"properties": {f"n{n}": {"type": "number", "minimum": -1234567.89 + n, "maximum": 98765432.1 + n} for n in range(300)}},
]
compiler = GrammarCompiler(Tokenizer.load(sys.argv[1]), 49152)
refused = 0
for make, values in ((regex_grammar, regexes), (json_grammar, schemas)):
    for value in values:
        try:
            matcher = compiler.compile(make(value)).matcher()
        except ValidationError:
            refused += 1
            continue
        rng = random.Random(0)
        for _ in range(20):
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            if matcher.is_error() or matcher.is_stopped():
                break
            matcher.consume_token(int(rng.choice(mask.nonzero()[0])))
print("refused", refused, "of", len(regexes) + len(schemas))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the embedded model's tokenizer."""
    file = GgufFile.open(find_embedded())
    folder = tmp_path_factory.mktemp("tokenizer")
    read_tokenizer(file, VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(read_tokenizer_config(file, 8192)))
    return folder


def test_bombs_are_refused_or_harmless(folder: Path) -> None:
    program = [sys.executable, "-c", BOMBS, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"refused \d+ of 47\n", done.stdout), done.stdout


@pytest.mark.parametrize("start", ["start: <[3000]> a\na: ", "start: "])
def test_a_schema_within_a_grammar_is_tried_too(folder: Path, start: str) -> None:
    compiler = GrammarCompiler(Tokenizer.load(folder), VOCAB)
    for _ in range(2):  # the second answer is the remembered one
        with pytest.raises(ValidationError) as caught:
            compiler.compile(Grammar("lark", f"{start}%json {MANY_PATTERNS}"))
        assert "grammar is not valid: it takes more than 2 s or 1024 MiB to compile" in str(caught.value)
        assert len(str(caught.value)) < 500
