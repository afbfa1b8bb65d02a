"""Expressions over names of matrices: what they match is what `re` matches, and hostile ones come to an end."""

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.quant.choose import detect
from text_generation_inference.quant.compressed_tensors import CompressedTensors
from text_generation_inference.quant.expressions import MAX_DEPTH, MAX_LENGTH, Expression, PatternError, Work
from text_generation_inference.quant.gptq import GptqQuantization

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.mlp.experts.117.down_proj",
    "model.layers.3.mlp.gate",
    "model.visual.blocks.2.attn.qkv",
    "lm_head",
]
# As checkpoints have them.
REAL = [
    r".*self_attn.*",
    r"model\.layers\.[0-9]+\..*",
    r".*\.(?:1|10|3)\..*(down|up)_proj$",
    r"^(?!.*experts).*$",
    r"^(?!.*self_attn\.(?:q_proj|k_proj)$).*$",
    r".*mlp.gate$",
    r"visual.*",
    r"model.layers.0.*",
    r".*layers\.(\d{1,2})\.mlp.experts\.\d+\.(?P<which>gate|down)_proj",
    r"(?<!x)model.*(?<=_)proj",
    r".*\bgate\b",
    r"",
]


@pytest.mark.parametrize("expression", REAL)
def test_real_ones(expression: str) -> None:
    ours = Expression(expression, Work())
    assert [ours.matches(name) for name in NAMES] == [re.match(expression, name) is not None for name in NAMES]


ATOMS = [
    "a",
    "b",
    ".",
    r"\.",
    "1",
    r"\d",
    r"\W",
    r"\w",
    "[ab]",
    "[^a.]",
    "[a-c1]",
    r"[\d.-]",
    "[]a]",
    "_",
    "{",
    "{,",
    "{}",
]
ANCHORS = ["^", "$", r"\b", r"\B", r"\Z", r"\A", "(?#no)"]
TIMES = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "{,}", "*?", "+?", "??"]


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.sampled_from(["({})", "(?:{})", "(?P<n>{})", "(?={})", "(?!{})", "(?<={})", "(?<!{})"])
    return (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map("|".join)
        | st.tuples(group, inner).map(lambda pair: pair[0].replace("{}", pair[1]))
        | st.tuples(st.sampled_from(ATOMS[:13]), st.sampled_from(TIMES)).map("".join)
        | st.tuples(inner, st.sampled_from(TIMES)).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
    )


EXPRESSIONS = st.recursive(st.sampled_from(ATOMS) | st.sampled_from(ANCHORS), larger, max_leaves=12)


@given(EXPRESSIONS, st.lists(st.text("ab1._c\n", min_size=1, max_size=8), min_size=1, max_size=8))
def test_the_same_as_the_library(expression: str, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            known = re.compile(expression)
        except re.error:
            with pytest.raises(PatternError):
                Expression(expression, Work())
            return
        try:
            ours = Expression(expression, Work())
        except PatternError as error:  # nothing else that the library takes is refused
            assert "not read" in str(error) and ("(?#" in expression or re.search(r"[*+?}]\+", expression))
            return
    for name in names:
        assert ours.matches(name) is (known.match(name) is not None)


@given(st.text(max_size=40) | st.text("()[]{}\\|*+?^$.,-:=!<>P#a1b", max_size=40))
def test_any_text_is_taken_as_the_library_takes_it_or_refused(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = Expression(text, Work())
        except PatternError:
            return
        assert ours.matches("a1b.proj") is (re.match(text, "a1b.proj") is not None)


HOSTILE = [
    "(a*)*b",
    "(a|a)*b",
    "(a|aa)+$",
    "((a{0,5000}){0,5000}){0,5000}b",
    ".*" * 2000 + "b",
    "(?:" * (MAX_DEPTH - 1) + "a" + "*)" * (MAX_DEPTH - 1) + "b",
    "(?=.*" * (MAX_DEPTH - 1) + "b" + ")" * (MAX_DEPTH - 1),
    "(?:(?!.*b)(?=.*a).)*" * 400,
    "[" + "ab" * 4000 + "]*b",
]


@pytest.mark.parametrize("expression", HOSTILE, ids=lambda text: text[:20])
def test_hostile_ones_end(expression: str) -> None:
    """The suite's time limit is what fails here; no other bound is on a clock."""
    try:
        assert not Expression(expression, Work()).matches("a" * 120) or not expression.endswith("b")
    except PatternError as error:
        assert "too much work" in str(error)


def test_names_together_have_a_bound() -> None:
    work = Work()
    expression = Expression(".*a", work)
    before = work.left
    assert expression.matches("model.layers.0")
    assert 0 < before - work.left < 10
    work.left = 1
    with pytest.raises(PatternError, match=r"matching it with 'model\.layers\.0' takes too much work"):
        expression.matches("model.layers.0")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("a" * (MAX_LENGTH + 1), "it has 10001 characters, 10000 are allowed"),
        ("(" * (MAX_DEPTH + 1) + ")" * (MAX_DEPTH + 1), "more than 50 groups in each other"),
        (r"(a)\1", r"\1 is not read in it"),
        ("(?i)a", "(?i) is not read in it"),
        ("(?>a)", "(?>a is not read in it"),
        ("a*+", "*+ is not read in it"),
        ("a{9999999}", "{9999999} is too much"),
        ("(a", "it is no pattern"),
        ("a)", "it is no pattern"),
        ("[a", "it is no pattern"),
        ("*", "it is no pattern"),
        ("a{2,1}", "it is no pattern"),
    ],
)
def test_what_is_refused(expression: str, text: str) -> None:
    with pytest.raises(PatternError) as caught:
        Expression(expression, Work())
    assert text in str(caught.value)


def test_config_json_is_named() -> None:
    """Where a field is read, and where it is matched."""
    slow = "(?=.*" * 40 + "b" + ")" * 40
    groups = {"g": {"targets": [f"re:{slow}"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
    found = detect(
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}, "config.json"
    )
    assert isinstance(found, CompressedTensors)
    with pytest.raises(ModelFormatError, match=r"config_groups\.g: `targets` has 're:.*takes too much work"):
        found.scheme_of("model.layers.0.mlp.down_proj" * 3)
    rules = {"quant_method": "gptq", "bits": 4, "dynamic": {f"+:{slow}": {}}}
    found = detect({"quantization_config": rules}, "config.json")
    assert isinstance(found, GptqQuantization)
    with pytest.raises(ModelFormatError, match=r"`dynamic` has '\+:.*takes too much work"):
        found.rule("model.layers.0.mlp.down_proj" * 3)
    fp8 = {"quant_method": "fp8", "ignored_layers": ["re:" + "a" * 20_000]}
    with pytest.raises(ModelFormatError, match=r"`ignored_layers` has 're:a+\.\.\.: it has 20000"):
        detect({"quantization_config": fp8}, "config.json")
