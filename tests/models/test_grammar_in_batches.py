"""Grammars through the whole engine: output that conforms, free neighbours that notice nothing, preemption, failures."""

import gc
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from driving import Output, Tiny, collect, make_request, random_prompts, run, start
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from text_generation_inference import LLM, SamplingParams
from text_generation_inference.engine.build import Engine
from text_generation_inference.text.grammar import is_worn
from text_generation_inference.types import GenerationRequest, Grammar, StepPlan, StepResult

WORD = {"type": "string", "maxLength": 20}
SCHEMAS: list[dict[str, Any]] = [
    {"properties": {"name": WORD, "age": {"type": "integer", "maximum": 150}}, "required": ["name", "age"]},
    {"properties": {"a": {"properties": {"b": {"properties": {"c": {"type": "boolean"}}, "required": ["c"]}}, "required": ["b"]}}, "required": ["a"]},
    {"properties": {"colour": {"enum": ["red", "green", "blue"]}}, "required": ["colour"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 5},
    {
        "$defs": {"pet": {"properties": {"kind": {"enum": ["cat", "dog"]}, "name": WORD}, "required": ["kind", "name"]}},
        "properties": {"pets": {"type": "array", "items": {"$ref": "#/$defs/pet"}, "minItems": 1, "maxItems": 2}},
        "required": ["pets"],
    },
    {"properties": {"city": WORD, "state": WORD, "zip": {"type": "string", "pattern": "[0-9]{5}"}}, "required": ["city"]},
    {"properties": {"price": {"type": "number", "maximum": 1000, "multipleOf": 0.25}}, "required": ["price"]},
    {"properties": {"ok": {"type": "boolean"}, "why": {"type": ["string", "null"], "maxLength": 30}}, "required": ["ok", "why"]},
    {"properties": {"greeting": {"enum": ["こんにちは", "привет", "¡hola!"]}, "größe": {"enum": [1, 2]}}, "required": ["greeting", "größe"]},
    {"properties": {"version": {"const": "v1"}, "kind": {"const": {"a": [1, None]}}}, "required": ["version", "kind"]},
    {"properties": {"value": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]}}, "required": ["value"]},
    {"properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]},
    {"oneOf": [{"properties": {"left": {"type": "boolean"}}, "required": ["left"]}, {"properties": {"right": {"const": 1}}, "required": ["right"]}]},
]  # fmt: skip
REGEXES = [r"[A-Z][a-z]{2,10}", r"\d{3}-\d{4}", "(yes|no)( please)?", r"[0-9]{1,3}(\.[0-9]{1,3}){3}", "é{1,3}|日本"]
NEW = 24


# -- the embedded model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(model_cache: Path) -> Iterator[LLM]:
    with LLM(cache_dir=str(model_cache), max_batch_total_tokens=16_384, max_total_tokens=512, progress=False) as llm:
        yield llm


def schema_requests(llm: LLM, **params: Any) -> list[GenerationRequest]:
    """One request for each schema, and one for each expression."""
    grammars = [Grammar("json", json.dumps(schema)) for schema in SCHEMAS]
    grammars += [Grammar("regex", expression) for expression in REGEXES]
    prompt = llm.tokenizer.encode(llm.render_chat([{"role": "user", "content": "Answer with some made-up data."}]))
    made = [make_request(n, prompt, 200, stop_token_ids=[2], **params) for n in range(len(grammars))]
    return [msgspec.structs.replace(r, grammar=grammar) for r, grammar in zip(made, grammars, strict=True)]


def check_conforms(llm: LLM, outputs: list[Output]) -> None:
    texts = [llm.tokenizer.decode(output.token_ids) for output in outputs]
    for output, text in zip(outputs, texts, strict=True):
        assert (output.reason, output.error) == ("eos_token", None), text
    for schema, text in zip(SCHEMAS, texts, strict=False):
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
        assert "  " not in re.sub(r'"[^"]*"', "x", text)
    for expression, text in zip(REGEXES, texts[len(SCHEMAS) :], strict=True):
        assert re.fullmatch(expression, text), text


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 50, "top_p": 0.95}, {"typical_p": 0.5, "min_p": 0.01}, {"repetition_penalty": 1.5}],
    ids=str,
)  # fmt: skip
def test_output_conforms(llm: LLM, params: dict) -> None:
    check_conforms(llm, run(llm.engine, schema_requests(llm, **params)))


def test_logprobs_are_of_what_is_allowed(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("Is it so?")
    request = make_request(1, prompt, 9, stop_token_ids=[2], top_n_tokens=9)
    output = run(llm.engine, [msgspec.structs.replace(request, grammar=Grammar("regex", "yes|no"))])[0]
    first = output.top_tokens[0]
    assert {llm.tokenizer.decode([token_id]) for token_id in first} <= {"y", "ye", "yes", "n", "no"}
    assert sum(2.718281828**logprob for logprob in first.values()) == pytest.approx(1, abs=1e-3)
    assert output.top_tokens[-1] == {2: 0.0}
    assert output.logprobs[-1] == 0.0


# -- a tiny model whose tokens are nearly random, with a tokenizer -------------------------------------------------

EOS = 1


@pytest.fixture(scope="module")
def tiny_folder(tiny_llama: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    corpus = [
        '{"name": "the quick brown fox", "age": 42, "tags": ["over", "lazy", "dogs"], "ok": true, "no": false}'
    ] * 2
    backend.train_from_iterator(corpus, trainer)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(tiny_llama.folder, folder, ignore=shutil.ignore_patterns("generation_config.json"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": EOS}))
    return folder


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[Engine]:
    engine = start(tiny_folder, prefix_caching=False)
    yield engine
    engine.close()


GRAMMARS = [
    Grammar("json", json.dumps({"properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}})),
    Grammar("json", "{}"),
    Grammar("regex", "[a-z]{3,9}"),
    Grammar("regex", "(yes|no){1,40}"),
    Grammar("json", json.dumps({"type": "array", "items": {"enum": ["a", "bb", 3]}})),
]  # fmt: skip
PARAMS: list[dict] = [
    {},
    {"temperature": 1.7},
    {"top_k": 5},
    {"logit_bias": {40: 5.0}},
    {"repetition_penalty": 1.4, "top_p": 0.9},
]


def mixed(count: int = 40, **params: Any) -> list[GenerationRequest]:
    """Every other request has a grammar."""
    prompts = random_prompts(320, [3 + n % 13 for n in range(count)], seed=7)
    made = [
        make_request(n, prompt, NEW, seed=n, **{"stop_token_ids": [EOS], **PARAMS[n // 2 % len(PARAMS)], **params})
        for n, prompt in enumerate(prompts)
    ]
    return [
        msgspec.structs.replace(r, grammar=GRAMMARS[n // 2 % len(GRAMMARS)]) if n % 2 else r for n, r in enumerate(made)
    ]


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_alone_and_in_a_batch(engine: Engine) -> None:
    together = run(engine, mixed())
    assert [output.error for output in together] == [None] * len(together)
    assert ids(together) == [run(engine, [request])[0].token_ids for request in mixed()]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3}, {"top_k": 20}], ids=str)
def test_free_neighbours_notice_nothing(engine: Engine, params: dict) -> None:
    """The same batch with and without the grammars of its other half: equal tokens, and equal bits of log-probability."""
    asked = [msgspec.structs.replace(r, stop_token_ids=[]) for r in mixed(24)]
    asked = [msgspec.structs.replace(r, sampling=SamplingParams(ignore_eos=True, **params)) for r in asked]
    constrained = run(engine, asked)
    free = run(engine, [msgspec.structs.replace(r, grammar=None) for r in asked])
    for one, other in zip(constrained[::2], free[::2], strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert ids(constrained[1::2]) != ids(free[1::2])


def test_preemption_changes_nothing(engine: Engine, tiny_folder: Path) -> None:
    small = start(tiny_folder, max_batch_total_tokens=160, max_total_tokens=64)
    expected = run(engine, mixed())
    outputs = run(small, mixed())
    assert [(o.token_ids, o.reason, o.error) for o in outputs] == [(o.token_ids, o.reason, o.error) for o in expected]
    assert small.loop.scheduler.stats.num_preemptions > 0
    small.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_few_slots_that_change_hands(engine: Engine, tiny_folder: Path, overlap: bool) -> None:
    expected = ids(run(engine, mixed()))
    narrow = start(tiny_folder, max_batch_size=2, prefix_caching=False, overlap=overlap)
    assert ids(run(narrow, mixed(), arrivals=[n // 3 for n in range(40)])) == expected
    narrow.close()


def fill_lexer(engine: Engine, grammar: Grammar) -> None:
    """Match one text after another until the lexer, which all matchers of a grammar share, has no room left."""
    compiled, rng = engine.grammars.compile(grammar), random.Random(0)
    ends = [engine.grammars.prepare().tokenize_str(letter)[0] for letter in "ab"]
    while not is_worn(matcher := compiled.matcher()):
        for _ in range(100):
            matcher.compute_bitmask()
            matcher.consume_token(rng.choice(ends))
        if is_worn(matcher):
            break


@pytest.mark.parametrize("num_steps", [0, 9])
def test_a_lexer_that_others_have_filled(engine: Engine, num_steps: int) -> None:
    """Before the request comes, or in the middle of it."""
    grammar = Grammar("regex", "[ab]*a[ab]{18}")
    request = make_request(1, [5, 6], NEW, stop_token_ids=[EOS], temperature=1.5, seed=3)
    request = msgspec.structs.replace(request, grammar=grammar)
    expected = run(engine, [request])[0]
    assert len(expected.token_ids) > 9 and expected.error is None
    outputs = {1: Output()}
    engine.loop.add(request)
    for _ in range(num_steps):
        collect(engine.loop.step(), outputs)
    fill_lexer(engine, grammar)
    while engine.loop.has_work:
        collect(engine.loop.step(), outputs)
    assert (outputs[1].token_ids, outputs[1].error) == (expected.token_ids, None)
    assert len(engine.grammars._plain) == 1


def test_steps_leave_no_cycles_behind(engine: Engine) -> None:
    """A cycle would keep a step's plan, with its prompts, and its result until some collection finds it."""
    gc.collect()
    gc.disable()
    try:
        run(engine, mixed(12))
        kept = Counter(type(thing) for thing in gc.get_objects())
        assert kept[StepPlan] + kept[StepResult] + kept[GenerationRequest] <= 3
    finally:
        gc.enable()


def test_a_long_prompt_in_chunks(engine: Engine, tiny_folder: Path) -> None:
    prompt = random_prompts(320, [90], seed=2)[0]
    request = msgspec.structs.replace(make_request(1, prompt, NEW, stop_token_ids=[EOS]), grammar=GRAMMARS[2])
    chunked = start(tiny_folder, max_batch_prefill_tokens=16)
    assert ids(run(chunked, [request])) == ids(run(engine, [request]))
    chunked.close()


def test_ignoring_eos_runs_to_the_limit(engine: Engine) -> None:
    request = make_request(1, [5, 6], NEW, ignore_eos=True)
    output = run(engine, [msgspec.structs.replace(request, grammar=Grammar("regex", "[a-z]{3}"))])[0]
    assert output.reason == "length"
    assert len(output.token_ids) == NEW
    first = output.token_ids.index(EOS)
    assert set(output.token_ids[first:]) == {EOS}


def test_failures_end_one_request_alone(engine: Engine, tiny_llama: Tiny, tmp_path: Path) -> None:
    """A vocabulary without digits: grammars that need one fail at the start or later, and only their own requests."""
    backend = Backend(models.BPE(vocab={"<s>": 0, "</s>": 1, "a": 2, "b": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama.folder, folder, ignore=shutil.ignore_patterns("generation_config.json"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    poor = start(folder)
    good = [make_request(n, [5, 6, n], NEW, stop_token_ids=[EOS]) for n in range(4)]
    good[3] = msgspec.structs.replace(good[3], grammar=Grammar("regex", "(a|b){5}"))
    grammars = [
        Grammar("regex", "7"),
        Grammar("regex", "(a|b){2}[0-9]"),
        Grammar("regex", "("),
        Grammar("json", '{"enum":[]}'),
    ]
    bad = [
        msgspec.structs.replace(make_request(10 + n, [9, n], NEW, stop_token_ids=[EOS]), grammar=g)
        for n, g in enumerate(grammars)
    ]
    for _ in range(2):
        outputs = run(poor, [request for pair in zip(bad, good, strict=True) for request in pair])
        assert [output.reason for output in outputs[::2]] == ["error"] * 4
        assert [len(output.token_ids) for output in outputs[::2]] == [0, 2, 0, 0]
        for output, text in zip(
            outputs[::2],
            ("there is no token", "there is no token", "grammar is not valid", "cannot compile"),
            strict=True,
        ):
            assert text in (output.error or "")
        assert ids(outputs[1:7:2]) == ids(run(engine, good[:3]))
        assert {2, 3} >= set(outputs[7].token_ids[:-1]) and outputs[7].reason == "eos_token"
    poor.close()


def test_models_without_a_tokenizer(tiny_llama: Tiny) -> None:
    engine = start(tiny_llama.folder)
    request = msgspec.structs.replace(make_request(1, [5, 6], NEW), grammar=GRAMMARS[1])
    output = run(engine, [request])[0]
    assert output.reason == "error" and "there is no tokenizer.json" in (output.error or "")
    assert len(run(engine, [make_request(1, [5, 6], NEW)])[0].token_ids) == NEW
    engine.close()
