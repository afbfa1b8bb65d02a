"""Two and four ranks give the tokens of one, whatever a request asks for, wherever slots are, whatever is captured."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from driving import Output, Tiny, make_request, make_tiny, random_prompts, run
from queue_on_cpu import QueueOnCpu
from thread_runners import start_threads
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import GenerationRequest, Grammar

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 321  # no number of ranks divides it
ASKED: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2},
    {"typical_p": 0.6, "watermark": True},
    {"min_p": 0.05, "frequency_penalty": 1.1, "presence_penalty": 0.7},
    {"logit_bias": {7: 4.0, 200: 3.5, 320: -100.0}, "top_n_tokens": 2},
    {"top_n_sigma": 1.2, "presence_penalty": 0.5, "top_n_tokens": 3},
    {"repetition_penalty": 1.8, "logit_bias": {300: 2.0}},
    {"decoder_input_details": True},
    {"decoder_input_details": True, "prompt_top_n_tokens": 3, "do_sample": True},
    {"min_tokens": 5, "stop_token_ids": [11, 12, 310]},
    {"do_sample": True, "watermark": True, "logit_bias": {1: 1.0}},
]


def requests(asked: list[dict[str, Any]], new: int = 6) -> list[GenerationRequest]:
    prompts = random_prompts(VOCAB, [3 + 2 * n % 17 for n in range(len(asked))], seed=4)
    return [make_request(n, prompt, new, seed=n, **asked[n]) for n, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Llama", {"num_hidden_layers": 1, "vocab_size": VOCAB}, tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def one_rank(tiny: Tiny) -> list[Output]:
    with start_threads(tiny.folder, 1) as engine:
        return run(engine, requests(ASKED))


def on_device(cache_dir: Path, ops: Ops | None = None) -> CpuDevice:
    device = QueueOnCpu(cache_dir, ops)
    device.limits = msgspec.structs.replace(device.limits, max_captured_tokens=16)
    return device


WAYS: dict[str, dict[str, Any]] = {
    "host": {},
    "device": {"make_device": on_device, "cuda_graphs": [1, 4]},
    "buckets": {"bucketing": True, "max_batch_prefill_tokens": 64},
    "buckets on a device": {"make_device": on_device, "bucketing": True, "max_batch_prefill_tokens": 64},
}


def assert_same(found: list[Output], expected: list[Output]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.error is None and ours.token_ids == theirs.token_ids and ours.reason == theirs.reason
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert [list(top) for top in ours.top_tokens] == [list(top) for top in theirs.top_tokens]
        assert ours.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=1e-4)


@pytest.mark.parametrize(("way", "world"), [(way, 2) for way in WAYS] + [("host", 4), ("device", 4)])
def test_everything_that_can_be_asked_for(tiny: Tiny, one_rank: list[Output], way: str, world: int) -> None:
    with start_threads(tiny.folder, world, **WAYS[way]) as engine:
        found = run(engine, requests(ASKED))
        if WAYS[way].get("make_device") is not None:
            assert all(runner.device.num_replays for runner in engine.runners.runners)
    assert_same(found, one_rank)
    for ours, theirs in zip(found, one_rank, strict=True):
        assert {k: list(v) for k, v in ours.prompt_tops.items()} == {k: list(v) for k, v in theirs.prompt_tops.items()}


# -- grammars ------------------------------------------------------------------------------------------------------

EOS = 1
GRAMMARS = [
    Grammar("json", json.dumps({"properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}}})),
    Grammar("regex", "[a-z]{3,9}"),
    Grammar("regex", "(yes|no){1,9}"),
    Grammar("regex", "7|é+"),
]  # fmt: skip
BESIDE: list[dict[str, Any]] = [
    {},
    {"temperature": 1.7},
    {"top_p": 0.9, "repetition_penalty": 1.4},
    {"top_n_tokens": 2},
]


def write_tokenizer(folder: Path) -> None:
    """Bytes: fewer tokens than the model has, so that all of the last rank's may be forbidden."""
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


@pytest.mark.parametrize(("way", "world"), [("host", 2), ("device", 2), ("host", 4)])
def test_grammars(tiny: Tiny, way: str, world: int) -> None:
    asked = requests([{"stop_token_ids": [EOS], **BESIDE[n % 4]} for n in range(8)], new=14)
    asked = [msgspec.structs.replace(r, grammar=GRAMMARS[n // 2]) if n % 2 else r for n, r in enumerate(asked)]
    write_tokenizer(tiny.folder)
    compiler = partial(GrammarCompiler, partial(Tokenizer.load, tiny.folder), VOCAB)
    found: list[list[Output]] = []
    for number, settings in ((1, {}), (world, WAYS[way])):
        with start_threads(tiny.folder, number, make_grammars=compiler, **settings) as engine:
            found.append(run(engine, asked))
    assert_same(found[1], found[0])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    third = "".join(letters[token - 2] for token in found[1][3].token_ids if token != EOS)
    assert re.fullmatch("[a-z]{3,9}", third)
