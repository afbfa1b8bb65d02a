"""Budgets of thoughts through the whole engine: exact, alone and in batches, with grammars, preempted, on one slot."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from driving import Output, Tiny, make_request, random_prompts, run, start
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from text_generation_inference.engine.build import Engine
from text_generation_inference.text.reasoning import with_thoughts
from text_generation_inference.text.reasoning.budget import thinking_budget
from text_generation_inference.text.reasoning.formats import TAGS, ReasoningFormat
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import GenerationRequest, Grammar, ThinkingBudget

EOS, OPEN, CLOSE, CHANNEL, MESSAGE, START, END = range(256, 263)
TOKENS = ["</s>", "<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
THINK, GRANITE, HARMONY = ReasoningFormat(TAGS[0]), ReasoningFormat(TAGS[-1]), ReasoningFormat(None)
NEW = 40


@pytest.fixture(scope="module")
def folder(tiny_llama: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every byte is a token; marks are tokens as in the files of Qwen3 and of GPT-OSS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special="think" not in text, normalized=False) for text in TOKENS])
    assert backend.token_to_id("<|end|>") == END
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(tiny_llama.folder, folder, ignore=shutil.ignore_patterns("generation_config.json"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": EOS}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = start(folder, prefix_caching=False)
    yield engine
    engine.close()


def with_budget(request: GenerationRequest, budget: ThinkingBudget | None) -> GenerationRequest:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, thinking=budget))


BIASES = {EOS: -100.0, OPEN: -100.0, CLOSE: -100.0, CHANNEL: -100.0, START: -100.0, END: -100.0, MESSAGE: -100.0}
PARAMS: list[dict] = [{}, {"temperature": 1.7}, {"top_k": 5}, {"repetition_penalty": 1.4, "top_p": 0.9}]


def mixed(tokenizer: Tokenizer, count: int = 24) -> list[tuple[GenerationRequest, int | None]]:
    """Every other request has a budget; none of them would ever end its thoughts by itself."""
    prompts = random_prompts(256, [3 + n % 13 for n in range(count)], seed=7)
    made: list[tuple[GenerationRequest, int | None]] = []
    for n, prompt in enumerate(prompts):
        request = make_request(n, prompt, NEW, seed=n, logit_bias=BIASES, **PARAMS[n // 2 % len(PARAMS)])
        num_tokens = n % 11 if n % 2 else None
        budget = None if num_tokens is None else thinking_budget(THINK, num_tokens, True, False, tokenizer)
        made.append((with_budget(request, budget), num_tokens))
    return made


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_thoughts_end_at_the_budget_and_neighbours_notice_nothing(engine: Engine, tokenizer: Tokenizer) -> None:
    asked = mixed(tokenizer)
    outputs = run(engine, [request for request, _ in asked])
    free = run(engine, [with_budget(request, None) for request, _ in asked])
    for output, unlimited, (_, num_tokens) in zip(outputs, free, asked, strict=True):
        assert (output.error, len(output.token_ids), CLOSE in unlimited.token_ids) == (None, NEW, False)
        if num_tokens is None:
            assert (output.token_ids, output.logprobs) == (unlimited.token_ids, unlimited.logprobs)
        else:
            assert output.token_ids.index(CLOSE) == num_tokens
            assert output.token_ids.count(CLOSE) == 1
            assert output.token_ids[:num_tokens] == unlimited.token_ids[:num_tokens]


@pytest.mark.parametrize("overlap", [True, False])
def test_alone_and_on_slots_that_change_hands(
    engine: Engine, folder: Path, tokenizer: Tokenizer, overlap: bool
) -> None:
    asked = [request for request, _ in mixed(tokenizer)]
    expected = ids(run(engine, asked))
    assert [run(engine, [request])[0].token_ids for request in asked[:6]] == expected[:6]
    narrow = start(folder, max_batch_size=2, prefix_caching=False, overlap=overlap)
    assert ids(run(narrow, asked, arrivals=[n // 3 for n in range(len(asked))])) == expected
    narrow.close()


def test_preemption_changes_nothing(engine: Engine, folder: Path, tokenizer: Tokenizer) -> None:
    asked = [request for request, _ in mixed(tokenizer)]
    small = start(folder, max_batch_total_tokens=160, max_total_tokens=64)
    assert ids(run(small, asked)) == ids(run(engine, asked))
    assert small.loop.scheduler.stats.num_preemptions > 0
    small.close()


def forced(text: str, tokenizer: Tokenizer) -> GenerationRequest:
    """A request whose answer begins so."""
    grammar = Grammar("lark", "start: " + " ".join(f"<[{i}]>" for i in tokenizer.encode(text, False)) + " /(?s:.*)/\n")
    request = make_request(1, [5, 6], NEW, logit_bias=BIASES)
    return msgspec.structs.replace(request, grammar=grammar)


def test_thoughts_that_the_model_opens_itself(engine: Engine, tokenizer: Tokenizer) -> None:
    budget = thinking_budget(THINK, 5, False, False, tokenizer)
    grammar = Grammar("lark", "start: /\\n/ <[257]> TEXT <[258]> TEXT\nTEXT: /(?s:.*)/\n")
    request = msgspec.structs.replace(make_request(1, [5, 6], NEW, logit_bias=BIASES), grammar=grammar)
    output = run(engine, [with_budget(request, budget)])[0]
    assert output.token_ids[1] == OPEN and output.token_ids.index(CLOSE) == 2 + 5
    # An answer that does not begin with thoughts has none further on.
    other = with_budget(forced("Yes<think>", tokenizer), budget)
    assert CLOSE not in run(engine, [other])[0].token_ids


def test_thoughts_that_end_in_time_are_let_alone(engine: Engine, tokenizer: Tokenizer) -> None:
    request = forced("abc</think>", tokenizer)
    free = run(engine, [request])[0]
    for num_tokens in (4, 5, 30):
        limited = with_budget(request, thinking_budget(THINK, num_tokens, True, False, tokenizer))
        assert run(engine, [limited])[0].token_ids == free.token_ids


def test_marks_of_many_tokens(engine: Engine, tokenizer: Tokenizer) -> None:
    budget = thinking_budget(GRANITE, 4, False, False, tokenizer)
    output = run(engine, [with_budget(forced("Here's my thought process:", tokenizer), budget)])[0]
    assert output.error is None
    request = make_request(2, [5, 6], NEW, logit_bias=BIASES)
    output = run(engine, [with_budget(request, msgspec.structs.replace(budget, opened=True))])[0]
    text = tokenizer.encode("Here is my response:", False)
    assert output.token_ids[4 : 4 + len(text)] == text
    assert output.token_ids[4 + len(text) : 4 + 2 * len(text)] != text


@pytest.mark.parametrize("calls", [True, False])
def test_channels(engine: Engine, tokenizer: Tokenizer, calls: bool) -> None:
    budget = thinking_budget(HARMONY, 6, False, calls, tokenizer)
    head = tokenizer.encode("<|channel|>analysis<|message|>", False)
    lark = (
        "start: "
        + " ".join(f"<[{i}]>" for i in head)
        + " (TEXT | <[259]> | <[260]> | <[261]> | <[262]>)*\nTEXT: /(?s:.+)/\n"
    )
    request = msgspec.structs.replace(make_request(1, [5, 6], 60, logit_bias=BIASES), grammar=Grammar("lark", lark))
    output = run(engine, [with_budget(request, budget)])[0]
    rest = output.token_ids[len(head) + 6 :]
    assert rest[: len(budget.closing)] == budget.closing
    assert END not in output.token_ids[: len(head) + 6]
    assert rest[0] == END and rest[-1] not in (END, CHANNEL)


def test_a_grammar_decides_the_answer_behind_thoughts(engine: Engine, tokenizer: Tokenizer) -> None:
    grammar = with_thoughts(THINK, Grammar("regex", "[a-z]{3}"), True, tokenizer)
    request = make_request(1, [5, 6], NEW, stop_token_ids=[EOS], logit_bias={CLOSE: -100.0})
    budget = thinking_budget(THINK, 7, True, False, tokenizer)
    output = run(engine, [with_budget(msgspec.structs.replace(request, grammar=grammar), budget)])[0]
    assert output.reason == "eos_token" and output.token_ids.index(CLOSE) == 7
    answer = tokenizer.decode(output.token_ids[8:]).strip()
    assert len(answer) == 3 and answer.isalpha() and answer.islower()


def test_models_without_a_tokenizer(tiny_llama: Tiny, tokenizer: Tokenizer) -> None:
    engine = start(tiny_llama.folder)
    request = make_request(1, [5, 6], NEW)
    failed = run(
        engine, [with_budget(request, thinking_budget(THINK, 2, True, False, tokenizer)), make_request(2, [7], 4)]
    )
    assert failed[0].reason == "error" and "there is no tokenizer.json" in (failed[0].error or "")
    assert len(failed[1].token_ids) == 4
    engine.close()
