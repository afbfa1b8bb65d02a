"""Grammars with the real tokenizer of the embedded model: what is accepted, refused, allowed and remembered."""

import gc
import json
import random
import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from text_generation_inference.errors import OverloadedError, ValidationError
from text_generation_inference.runner.grammar import SlotGrammars
from text_generation_inference.sampling import filters
from text_generation_inference.sampling.draw import draw, draw_from_best, noise_keys
from text_generation_inference.sampling.mask import RowMasks, allow_only
from text_generation_inference.text.grammar import (
    GrammarCompiler,
    any_json,
    check_native_schema,
    json_grammar,
    lark_json,
    regex_grammar,
)
from text_generation_inference.text.grammar_trial import Trial
from text_generation_inference.text.json_schema import IGNORED, prepare_schema
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Admission, GenerationRequest, Grammar, SamplingParams
from text_generation_inference.weights.embedded import find_embedded
from text_generation_inference.weights.gguf import GgufFile
from text_generation_inference.weights.gguf_tokenizer import read_tokenizer, read_tokenizer_config

VOCAB, EOS = 49152, 2
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    "nested": {
        "type": "object",
        "properties": {"x": {"properties": {"y": {"properties": {"z": {"type": "null"}}}}, "required": ["y"]}},
        "required": ["x"],
    },
    "enum": {"properties": {"c": {"enum": ["red", "green", 3, None, True]}}, "required": ["c"]},
    "const": {"properties": {"k": {"const": {"v": [1, "two"]}}}, "required": ["k"]},
    "array": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "refs": {
        "$defs": {"node": {"properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    "optional": {"properties": {n: {"type": "boolean"} for n in "abc"}, "required": ["b"]},
    "any of": {
        "properties": {"v": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"enum": ["x"]}]}},
        "required": ["v"],
    },
    "ranges": {"properties": {"n": {"type": "integer", "minimum": -5, "maximum": 120}}, "required": ["n"]},
    "pattern": {"properties": {"p": {"type": "string", "pattern": "[A-Z]{2}-[0-9]{1,4}"}}, "required": ["p"]},
    "lengths": {"properties": {"s": {"type": "string", "minLength": 2, "maxLength": 8}}, "required": ["s"]},
    "format": {"properties": {"d": {"type": "string", "format": "date"}, "u": {"type": "string", "format": "uuid"}}},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"enum": ["é", "日本"]}],
        "items": False,
        "minItems": 2,
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": True},
        ]
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "unicode key": {"properties": {"größe 😀": {"type": "boolean"}}, "required": ["größe 😀"]},
    "multiples": {"properties": {"m": {"type": "integer", "multipleOf": 12}}, "required": ["m"]},
    "nullable": {"properties": {"s": {"type": ["boolean", "null"]}}, "required": ["s"]},
    "anything": {},
}
REGEXES = [
    "yes|no|maybe",
    r"\d{3}-\d{4}",
    "[a-f0-9]{8}",
    r"(\+|-)?[0-9]+(\.[0-9]+)?",
    "(ab|cd){2,5}x*",
    "é+|日本語?",
    "a/b#c",
    '"quoted"\n(line){2}',
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = GgufFile.open(find_embedded())
    folder = tmp_path_factory.mktemp("tokenizer")
    read_tokenizer(file, VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(read_tokenizer_config(file, 8192)))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


def allowed_ids(matcher: LLMatcher) -> np.ndarray:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    return np.unpackbits(mask, bitorder="little").nonzero()[0]


def walk(matcher: LLMatcher, tokenizer: Tokenizer, rng: random.Random) -> str:
    """Tokens at random among the allowed ones, towards an end: each must be accepted."""
    closing = {tokenizer.id_of(token) for token in '"}],0'}
    ids: list[int] = []
    while len(ids) < 400:
        allowed: list[int] = allowed_ids(matcher).tolist()
        assert allowed
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            assert matcher.is_accepting()
            return tokenizer.decode(ids, skip_special_tokens=False)
        near = [token_id for token_id in allowed if token_id in closing]
        token_id = rng.choice(near if near and rng.random() < 0.7 else allowed)
        if token_id != EOS:
            assert matcher.consume_token(token_id), matcher.get_error()
            ids.append(token_id)
    raise AssertionError("no end")


def accepts(compiler: GrammarCompiler, grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    matcher = compiler.compile(grammar).matcher()
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_masks_allow_matches_the_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    compiled = compiler.compile(json_grammar(SCHEMAS[name]))
    for seed in range(12):
        text = walk(compiled.matcher(), tokenizer, random.Random(seed))
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("expression", REGEXES)
def test_whatever_the_masks_allow_matches_the_expression(
    compiler: GrammarCompiler, tokenizer: Tokenizer, expression: str
) -> None:
    compiled = compiler.compile(regex_grammar(expression))
    for seed in range(12):
        text = walk(compiled.matcher(), tokenizer, random.Random(seed))
        assert re.fullmatch(expression, text), text


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(st.characters(exclude_categories=["C"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé ", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(value=json_values)
def test_any_json_accepts_every_value_in_both_styles(
    compiler: GrammarCompiler, tokenizer: Tokenizer, value: Any
) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        text = json.dumps(value, ensure_ascii=False, separators=separators)
        assert accepts(compiler, Grammar("json", "{}"), tokenizer, text)
        assert accepts(compiler, any_json(), tokenizer, text) == isinstance(value, dict)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('{"a":"x","b":1}', True),
        ('{ "a" : "x" , "b" : 1 }', True),
        ('{"a":  "x","b":1}', False),
        ('{"a":\n"x","b":1}', False),
        ('{"a":"x",\t"b":1}', False),
        (' {"a":"x","b":1}', False),
        ('{"a":"x","b":1} ', False),
        ('{"b":1,"a":"x"}', False),  # not the order of the schema
        ('{"a":"x"}', False),
        ('{"a":"x","b":1,"c":2}', False),  # only what is listed
        ('{"a":"x","b":01}', False),
        ('{"a":"\\n é \\" \\\\","b":1}', True),
        ('{"a":"\n","b":1}', False),
        ("[]", False),
    ],
)
def test_style_of_json(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, accepted: bool) -> None:
    assert accepts(compiler, json_grammar(SCHEMAS["flat"]), tokenizer, text) == accepted


@pytest.mark.parametrize(
    ("schema", "text", "accepted"),
    [
        ({"type": "string", "pattern": "b+"}, '"bb"', True),
        ({"type": "string", "pattern": "b+"}, '"abb"', False),  # without anchors it is the whole string
        ({"type": "string", "pattern": "^b+"}, '"bba"', True),
        ({"type": "string", "pattern": "[a-z]", "minLength": 2}, '"ab"', True),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, '{"a":1,"z":2}', True),
        ({"properties": {"a": {}}}, '{"z":2}', False),
        ({"properties": {"a": {}}}, "7", False),  # `properties` means an object
        ({"properties": {"a": {}}, "allOf": [{}, {}]}, "7", False),
        ({"allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {"properties": {"a": {}}}}}, '{"z":1}', False),
        (
            {"allOf": [{"$ref": "#/$defs/b"}, {"properties": {"c": {}}}], "$defs": {"b": {"properties": {"a": {}}}}},
            '{"a":1,"c":2}',
            True,
        ),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "[1,1]", True),  # ignored, as by TGI
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", True),
        ({"x-guidance": {"whitespace_pattern": "x"}, "type": "array"}, "[ ]", True),  # not for callers to choose
        ({"x-guidance": {"whitespace_pattern": "x"}, "type": "array"}, "[x]", False),
        (
            {"properties": {"properties": {"type": "integer"}, "enum": {"const": "properties"}}},
            '{"properties":1,"enum":"properties"}',
            True,
        ),
    ],
)
def test_meaning_of_keywords(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict, text: str, accepted: bool
) -> None:
    assert accepts(compiler, json_grammar(schema), tokenizer, text) == accepted


@pytest.mark.parametrize("value", [True, 3, None, 1.5, [1]])
def test_values_that_are_no_schema(value: object) -> None:
    with pytest.raises(ValidationError, match="^grammar is not supported$"):
        check_native_schema(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{", "grammar is not valid: Input data was truncated"),
        ('{"a": NaN}', "grammar is not valid: JSON is malformed"),
        ("[" * 100_000, "grammar is not valid: "),
        ("3", "grammar is not valid: the schema must be an object or a boolean"),
        ("true", "grammar is not valid: Grammar must have a 'properties' field"),
        ('{"type": "object"}', "grammar is not valid: Grammar must have a 'properties' field"),
        ({"type": "string"}, "grammar is not valid: Grammar must have a 'properties' field"),
        ({"properties": 3}, "grammar is not valid: /properties must be an object"),
        ({"properties": {"a": {"type": "text"}}}, "grammar is not valid: /properties/a/type must be among string, number"),
        ({"properties": {"a": "string"}}, "grammar is not valid: /properties/a must be an object or a boolean"),
        ('{"x": "' + "y" * 200_000 + '"}', "characters, and 200000 are allowed"),
        ({"properties": {"a": {"const": "y" * 20_000}}}, "a text of more than 10000 characters"),
        ({"properties": {f"p{n}": {} for n in range(1001)}}, "an object of more than 1000 members"),
        ({"properties": {"a": {"patternProperties": {f"^{n}$": {} for n in range(51)}}}}, "`patternProperties` of more than 50"),
        ({"properties": {"a": {"enum": list(range(30_000))}}}, "more than 20000 values"),
        ({"properties": {"a": {"multipleOf": 99991}}}, "the least common multiple of all `multipleOf` exceeds 20000"),
        ({"properties": {f"{n}": {"multipleOf": n} for n in (97, 89, 83)}}, "the least common multiple"),
        ({"properties": {"a": {"multipleOf": 10**4000}}}, "the least common multiple"),
        ({"properties": {"a": {"multipleOf": float("nan")}}}, "/properties/a/multipleOf must be a number > 0"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_native_schemas_that_are_refused(value: object, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        check_native_schema(value)
    assert text in str(caught.value)


def test_native_schemas_that_are_taken() -> None:
    schema = {"properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
    assert check_native_schema(schema) == check_native_schema(json.dumps(schema)) == json_grammar(schema)
    assert check_native_schema(schema).value == '{"properties":{"z":{"type":"string"},"a":{"type":"integer"}}}'


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_depth() -> None:
    json_grammar(nested(95))
    for depth in (105, 5000, 100_000):
        with pytest.raises(ValidationError, match="nests deeper than 100 levels"):
            json_grammar(nested(depth))


@pytest.mark.parametrize(
    "schema",
    [
        *SCHEMAS.values(),
        True,
        {"type": "objekt"},
        {"type": []},
        {"type": ["string", "string"]},
        {"type": 3},
        {"properties": []},
        {"required": "a"},
        {"required": [1]},
        {"enum": "a"},
        {"items": [{}]},
        {"items": 3},
        {"prefixItems": {}},
        {"prefixItems": []},
        {"anyOf": []},
        {"allOf": {}},
        {"oneOf": [3]},
        {"minLength": -1},
        {"maxItems": 1.5},
        {"maxItems": 2.0},
        {"minimum": "1"},
        {"multipleOf": 0},
        {"pattern": 3},
        {"$ref": 3},
        {"$defs": {"a": 3}},
        {"additionalProperties": "no"},
        {"patternProperties": {"a": 1}},
        {"const": None, "default": [], "examples": [1], "title": "x"},
        {"title": 3},
        {"format": 1},
    ],
    ids=str,
)
def test_validity_is_that_of_the_meta_schema(schema: Any) -> None:
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        valid = True
    except jsonschema.SchemaError:
        valid = False
    try:
        prepare_schema(schema)
    except ValidationError as error:
        assert not valid and str(error).startswith("grammar is not valid: ")
    else:
        assert valid


def test_preparing_leaves_the_original_alone() -> None:
    schema = {"properties": {"a": {"pattern": "x", "not": {}}}, "uniqueItems": True, "title": "t", "default": {}}
    copy = json.loads(json.dumps(schema))
    prepared = prepare_schema(schema)
    assert schema == copy
    assert prepared == {
        "properties": {"a": {"pattern": "^(?:x)$"}},
        "type": "object",
        "additionalProperties": False,
    }
    assert prepare_schema(dict.fromkeys(IGNORED, True)) == {}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar("regex", "("), "grammar is not valid: "),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", r"[^\s\S]"), "grammar is not valid: there is no token that it allows"),
        (Grammar("regex", "a" * 10_001), "grammar is not valid: it has 10001 characters, and 10000 are allowed"),
        (Grammar("json", "{"), "grammar is not valid: "),
        (Grammar("json", "false"), "grammar is not valid: `false` matches nothing"),
        (Grammar("json", '{"$ref":"#/nowhere"}'), "cannot compile regex from schema: Pointer '/nowhere' does not exist"),
        (Grammar("json", '{"$ref":"https://example.com/a"}'), "cannot compile regex from schema: "),
        (Grammar("json", '{"type":"string","format":"colour"}'), "cannot compile regex from schema: Unknown format: colour"),
        (Grammar("json", '{"type":"string","pattern":"("}'), "cannot compile regex from schema: regex parse error"),
        (Grammar("json", '{"enum":[]}'), "cannot compile regex from schema: Unsatisfiable schema"),
        (Grammar("json", '{"type":"integer","minimum":3,"maximum":2}'), "cannot compile regex from schema: Unsatisfiable"),
        (Grammar("json", '{"$ref":"#"}'), "cannot compile regex from schema: there is no token that it allows"),
        (Grammar("json", json.dumps({"allOf": [{"pattern": f"a{n}"} for n in range(40)]})), "cannot compile regex from schema: it takes more than 2 s or 1024 MiB to compile"),
        (Grammar("lark", "start: nothing"), "grammar is not valid: "),
        (Grammar("ebnf", "x"), "grammar is not supported"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_grammars_that_do_not_compile(compiler: GrammarCompiler, grammar: Grammar, text: str) -> None:
    for _ in range(2):  # the second answer is the remembered one
        with pytest.raises(ValidationError) as caught:
            compiler.compile(grammar)
        assert text in str(caught.value)
        assert len(str(caught.value)) < 500


def test_large_grammars_that_are_fine(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Too large to be compiled without a trial."""
    names = [f"property number {n}" for n in range(200)]
    schema = {"properties": {name: {"type": "boolean", "description": "d" * 99} for name in names}, "required": names}
    text = json.dumps(dict.fromkeys(names, True))
    assert accepts(compiler, json_grammar(schema), tokenizer, text)
    assert accepts(compiler, Grammar("lark", f"start: {lark_json(schema)}"), tokenizer, text)
    assert accepts(compiler, json_grammar({"allOf": [schema, {"required": names[:1]}]}), tokenizer, text)


def test_lark_with_a_schema(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "string", "format": "colour"}}
    term = lark_json({"properties": properties, "required": ["a"]})
    grammar = Grammar("lark", f'start: "<call>" {term} "</call>"')
    assert accepts(compiler, grammar, tokenizer, '<call>{"a": 1}</call>')
    assert not accepts(compiler, grammar, tokenizer, '<call>{"a":  1}</call>')
    assert not accepts(compiler, grammar, tokenizer, '<call>{"a":1,"b":2}</call>')
    assert accepts(compiler, grammar, tokenizer, '<call>{"a":1,"b":"red"}</call>')


def test_compiled_once_for_all_threads_and_forgotten_in_the_end(compiler: GrammarCompiler) -> None:
    with ThreadPoolExecutor(8) as pool:
        same = set(pool.map(compiler.compile, [Grammar("regex", "once")] * 40))
        assert len(same) == 1
        list(pool.map(compiler.compile, [Grammar("regex", f"x{n}") for n in range(200)]))
    assert compiler.compile(Grammar("regex", "x199")) is compiler.compile(Grammar("regex", "x199"))
    assert compiler.compile(Grammar("regex", "once")) in same, "what somebody holds is not compiled again"
    forgotten = weakref.ref(same.pop())
    gc.collect()
    assert forgotten() is None
    assert len(compiler._plain) == 128


def test_neither_hard_grammars_nor_failures_displace_others(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "run", lambda self, source, limits: "survived")  # they are harmless
    honest = compiler.compile(json_grammar({"properties": {"honest": {"type": "integer"}}}))
    known = weakref.ref(honest)
    del honest
    for number in range(150):
        compiler.compile(json_grammar({"allOf": [{"properties": {f"p{number}": {"type": "integer"}}}]}))
        with pytest.raises(ValidationError):
            compiler.compile(Grammar("regex", f"({number}"))
    gc.collect()
    assert known() is not None
    assert len(compiler._hard) == 32 and len(compiler._failed) == 128


def test_a_trial_without_a_result_is_no_fault_of_the_grammar(compiler: GrammarCompiler) -> None:
    """Stopped before it ran, or while it does: the next one who comes has it compiled."""
    hard = json_grammar({"allOf": [{"properties": {"stopped": {"type": "integer"}}}]})
    bomb = json_grammar({"allOf": [{"type": "string", "pattern": f"b{n}"} for n in range(40)]})
    before = Trial()
    before.stop()
    with pytest.raises(OverloadedError):
        compiler.compile(hard, trial=before)
    compiler.compile(hard)
    during = Trial()
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(compiler.compile, bomb, trial=during)
        while during._process is None:
            time.sleep(0.01)
        during.stop()
        with pytest.raises(OverloadedError):
            work.result(10)
    assert during._process.returncode is not None
    assert compiler.find(bomb) is None


def test_a_hard_grammar_is_tried_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine compiles what the api process has tried."""
    monkeypatch.setattr(Trial, "run", lambda self, source, limits: pytest.fail("tried again"))
    compiler.compile(json_grammar({"allOf": [{"properties": {"tried": {"type": "integer"}}}]}), tried=True)


def test_matchers_do_not_disturb_each_other(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    compiled = compiler.compile(Grammar("regex", "abab"))
    one, two = compiled.matcher(), compiled.matcher()
    assert one.consume_tokens(tokenizer.encode("ab"))
    assert tokenizer.decode([int(allowed_ids(two)[0])]) == "abab"[: len(tokenizer.decode([int(allowed_ids(two)[0])]))]
    assert two.consume_tokens(tokenizer.encode("abab"))
    assert two.is_accepting() and not one.is_accepting()


def test_models_without_an_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for vocab_size in (EOS, 1):  # the only EOS lies outside the model
        with pytest.raises(ValidationError, match="this model has no token that ends a text"):
            GrammarCompiler(tokenizer, vocab_size).compile(any_json())
    with pytest.raises(ValidationError, match=r"grammar is not supported: .*there is no tokenizer\.json"):
        GrammarCompiler(lambda: Tokenizer.load(tmp_path), 10).compile(any_json())


# -- masks on the device -------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(vocab=st.integers(1, 200), seed=st.integers(0, 99))
def test_allow_only_is_what_the_bits_say(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keep = rng.random((2, -(-vocab // 32) * 32)) < 0.5
    allowed = torch.from_numpy(np.packbits(keep, axis=1, bitorder="little").view(np.int32))
    scores = torch.randn(2, vocab)
    expected = torch.where(torch.from_numpy(keep[:, :vocab]), scores, -torch.inf)
    assert torch.equal(allow_only(scores.clone(), allowed), expected)
    masks = RowMasks([3, 1], allowed.numpy(), {})
    five = torch.randn(5, vocab)
    five[[3, 1]] = scores
    masked = allow_only(five.clone(), torch.from_numpy(masks.for_all(5, allowed.shape[1])))
    five[[3, 1]] = expected  # the others may have everything
    assert torch.equal(masked, five)


@pytest.mark.parametrize("few", [1, 2, 40])
def test_drawing_from_the_best_of_few(few: int) -> None:
    """A mask that leaves few ids: the short way finds the same ids as the long one, and knows that it does."""
    scores = torch.full((6, 1000), -torch.inf)
    scores[:, torch.randperm(1000)[:few]] = torch.randn(6, few)
    numbers = {"top_k": torch.full((6,), 30), "top_p": torch.full((6,), 0.9), "min_p": torch.zeros(6)}
    keys = noise_keys(torch.arange(6), torch.arange(6))
    ids, enough = draw_from_best(scores, numbers, *keys)
    assert bool(enough.all())
    assert ids.tolist() == draw(filters.keep(scores, numbers, numbers), *keys).tolist()


def admission(slot: int, grammar: Grammar, stop_ids: list[int], output_ids: list[int]) -> Admission:
    request = GenerationRequest(
        id=slot,
        token_ids=[1],
        sampling=SamplingParams(),
        max_new_tokens=9,
        stop_token_ids=stop_ids,
        seed=0,
        grammar=grammar,
    )
    return Admission(slot, request, output_ids, [])


def mask_of(grammars: SlotGrammars, slot: int) -> list[int]:
    masks = grammars.masks([slot])
    assert masks is not None and not masks.errors
    scores = torch.zeros(1, VOCAB)
    allow_only(scores, torch.from_numpy(masks.allowed))
    return (scores[0] == 0).nonzero()[:, 0].tolist()


def test_slots_advance_and_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammars = SlotGrammars(compiler, 4, VOCAB)
    assert grammars.masks([0, 1]) is None
    dog, cat = tokenizer.encode("dog")[0], tokenizer.encode("cat")[0]
    pets = Grammar("regex", "(dog|cat){2}")
    grammars.admit(admission(0, pets, [EOS], []))
    grammars.admit(admission(1, pets, [], []))  # EOS ignored
    grammars.admit(admission(2, pets, [EOS, 500], [dog]))  # back after preemption
    assert {dog, cat} <= set(mask_of(grammars, 0)) == set(mask_of(grammars, 1))
    assert EOS not in mask_of(grammars, 2)
    for _ in range(2):
        grammars.advance([0, 1], [dog, cat])
    grammars.advance([2], [cat])
    assert [mask_of(grammars, slot) for slot in range(3)] == [[EOS], [EOS], [EOS, 500]]
    grammars.advance([0, 1, 2], [EOS, EOS, 500])
    assert [mask_of(grammars, slot) for slot in range(3)] == [[EOS], [EOS], [EOS, 500]]
    grammars.release([0, 1, 2])
    assert grammars.masks([0, 1, 2]) is None


def test_ignoring_eos_goes_on_while_it_can(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammars = SlotGrammars(compiler, 2, VOCAB)
    a = tokenizer.encode("a")[0]
    grammars.admit(admission(0, Grammar("regex", "a{1,2}"), [], [a]))
    grammars.admit(admission(1, Grammar("regex", "a{1,2}"), [EOS], [a]))
    assert mask_of(grammars, 0) == [a]
    assert mask_of(grammars, 1) == [EOS, a]


def test_errors_stay_with_their_slot(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammars = SlotGrammars(compiler, 5, VOCAB)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    grammars.admit(admission(0, Grammar("regex", "a+"), [EOS], []))
    grammars.admit(admission(1, Grammar("regex", "a+"), [EOS], []))
    grammars.admit(admission(2, Grammar("regex", "("), [EOS], []))
    grammars.admit(admission(3, Grammar("regex", "a+"), [EOS], [b]))
    grammars.advance([0, 1], [a, b])  # b is not allowed
    masks = grammars.masks([4, 3, 2, 1, 0])
    assert masks is not None
    assert masks.rows == [4]
    assert set(masks.errors) == {1, 2, 3}
    assert "grammar is not valid" in masks.errors[2]
    assert "doesn't satisfy the grammar" in masks.errors[3] and "doesn't satisfy the grammar" in masks.errors[1]
    grammars.admit(admission(1, Grammar("regex", "b"), [EOS], []))  # the slot's next request starts afresh
    assert mask_of(grammars, 1) == [b]
    without = SlotGrammars(None, 1, VOCAB)
    without.admit(admission(0, any_json(), [EOS], []))
    masks = without.masks([0])
    assert masks is not None and masks.errors == {0: "grammar is not supported"}


def test_a_vocabulary_that_differs_from_the_models(tokenizer: Tokenizer) -> None:
    """A model may lack tokens that the tokenizer has, or have more of them."""
    digit = tokenizer.encode("7")[0]
    for vocab_size in (digit + 1, VOCAB + 77):
        grammars = SlotGrammars(GrammarCompiler(tokenizer, vocab_size), 1, vocab_size)
        grammars.admit(admission(0, Grammar("regex", ".*"), [EOS], []))
        masks = grammars.masks([0])
        assert masks is not None and not masks.errors
        scores = torch.zeros(1, vocab_size)
        allow_only(scores, torch.from_numpy(masks.allowed))
        allowed = (scores[0] == 0).nonzero()[:, 0].tolist()
        assert digit in allowed and max(allowed) < VOCAB
    grammars = SlotGrammars(GrammarCompiler(tokenizer, digit), 1, digit)
    grammars.admit(admission(0, Grammar("regex", "7"), [EOS], []))
    masks = grammars.masks([0])
    assert masks is not None and masks.errors == {0: "grammar error: no token of the model can follow"}
