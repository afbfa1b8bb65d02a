"""The embedded model equals `transformers` in float32, token for token, on real prompts, alone and in mixed batches."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from text_generation_inference import LLM, SamplingParams

TEXTS = [
    "A",
    "Hello",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n# compute the mean of an array\n",
    "1, 2, 3, 5, 8, 13,",
    "3.14159 is the value of",
    "Once upon a time, in a village far away,",
    "Die Hauptstadt von Deutschland ist",
    "La capitale de l'Italie est",
    "El perro corre por el",
    "Столица России —",
    "日本の首都は",
    "中国的首都是",
    "대한민국의 수도는",
    "عاصمة مصر هي",
    "भारत की राजधानी",
    "🙂🙃 Emoji are fun 🎉🎉",
    "👨‍👩‍👧‍👦 is a family",
    "  leading and   inner   spaces ",
    "\n\n\n",
    "\tTabs\tand\nnewlines\r\n",
    "<html><body><h1>Title</h1>",
    'SELECT name FROM users WHERE id = 1; -- "quoted"',
    "x = {'a': [1, 2, {'b': None}]}",
    "Q: What is the boiling point of water?\nA:",
    "naïve café — “smart quotes” … €",
    "ALL CAPS SHOUTING!!!",
]
CHATS = [
    "What is gravity?",
    "Write a haiku about the sea.",
    "Translate 'good morning' to French.",
    "List three prime numbers.",
    "Why is the sky blue? 🌤",
    "¿Qué hora es?",
    "Explain recursion to a child.",
    "你好",
]
LONG = [200, 513, 1100, 1500]
NEW = 20
NEW_ALONE = 8  # prompts end anywhere in a block: several go on to the next one within these


class Reference:
    """What `transformers` says; passes are kept, since an answer is the same each time."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model = model
        self._passes: list[tuple[list[int], int, list[int], list[float]]] = []

    def check_greedy(self, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
        """One pass over prompt and output: each output token must be the best after what precedes it."""
        best, best_logprobs = self._look(prompt, tokens)
        assert best == tokens
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(best_logprobs, logprobs, strict=True))

    def _look(self, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
        """The best token at each place of an output, and its log-probability."""
        ids, begin = prompt + tokens, len(prompt)
        for seen, start, best, logprobs in self._passes:
            if start == begin and seen[: len(ids)] == ids:
                return best[: len(tokens)], logprobs[: len(tokens)]
        with torch.no_grad():
            scores = self._model(torch.tensor([ids]), logits_to_keep=len(tokens) + 1).logits[0, :-1].log_softmax(-1)
        found = scores.max(-1)
        self._passes.append((ids, begin, found.indices.tolist(), found.values.tolist()))
        return found.indices.tolist(), found.values.tolist()


@pytest.fixture(scope="module")
def llm(model_cache: Path) -> Iterator[LLM]:
    with LLM("embedded", cache_dir=str(model_cache), max_batch_total_tokens=20_000, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Reference:
    folder = llm.engine.folder
    return Reference(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    encode = llm.tokenizer.encode
    raw = [encode(text) for text in TEXTS]
    chats = [encode(llm.render_chat([{"role": "user", "content": text}]), False) for text in CHATS]
    words = " ".join(
        random.Random(0).choices(
            ["the", "river", "runs", "past", "old", "stone", "houses", "while", "children", "sing"], k=1600
        )
    )
    long = [encode(words)[:length] for length in LONG]
    return raw + chats + long


def test_there_are_enough_prompts(prompts: list[list[int]]) -> None:
    assert len(prompts) >= 40
    assert {1, 1500} <= {len(prompt) for prompt in prompts}


def test_mixed_batch_equals_transformers(llm: LLM, reference: Reference, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        assert len(answer.token_ids) == NEW
        reference.check_greedy(prompt, answer.token_ids, answer.logprobs)


def test_alone_equals_transformers(llm: LLM, reference: Reference, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=NEW_ALONE, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        answer = llm.generate(prompt, params, cache_salt=f"alone-{number}")[0]
        assert (answer.num_cached_tokens, len(answer.token_ids)) == (0, NEW_ALONE)
        reference.check_greedy(prompt, answer.token_ids, answer.logprobs)


def test_without_native_kernels_equals_transformers(
    model_cache: Path, reference: Reference, prompts: list[list[int]]
) -> None:
    some = prompts[::5]
    with LLM(cache_dir=str(model_cache), custom_kernels=False, max_batch_total_tokens=8192, progress=False) as llm:
        assert any("reused" in note for note in llm.notes)
        for prompt, answer in zip(
            some, llm.generate(some, SamplingParams(max_new_tokens=8, ignore_eos=True)), strict=True
        ):
            reference.check_greedy(prompt, answer.token_ids, answer.logprobs)


def test_a_cached_prompt_gives_the_same_answer(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=NEW)
    first, second = (llm.generate(prompts[-1], params, cache_salt="again")[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 1488)
    assert second.token_ids == first.token_ids


def test_tokenizer_and_template_equal_transformers(llm: LLM) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(llm.engine.folder)
    for text in TEXTS + CHATS:
        assert llm.tokenizer.encode(text) == theirs.encode(text)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert llm.render_chat(messages) == expected
    assert llm.tokenizer.eos_ids == {2}
