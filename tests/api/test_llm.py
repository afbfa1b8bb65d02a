"""Offline use as a user would: `LLM` and `tgi generate` on the embedded model."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from text_generation_inference import LLM, SamplingParams
from text_generation_inference.errors import (
    EngineError,
    ModelFormatError,
    ModelNotFoundError,
    ResourceError,
    StartError,
    ValidationError,
)
from text_generation_inference.types import Grammar, TokenOut, TopTokens


@pytest.fixture(scope="module")
def llm(model_cache: Path) -> Iterator[LLM]:
    with LLM(cache_dir=str(model_cache), max_batch_total_tokens=4096, max_total_tokens=1024, progress=False) as llm:
        yield llm


def idle(llm: LLM) -> bool:
    scheduler = llm.engine.loop.scheduler
    scheduler.check()
    return scheduler.num_waiting == scheduler.num_running == 0 and scheduler.pool.num_free == scheduler.pool.num_usable


def test_stream_equals_generate_and_never_splits_a_character(llm: LLM) -> None:
    for prompt in ("The capital of France is", "🙂🙃🎉 Emoji: 😀😃😄", "日本の首都は"):
        params = SamplingParams(max_new_tokens=30)
        whole = llm.generate(prompt, params)[0]
        tokens = list(llm.stream(prompt, params))
        assert "".join(token.text for token in tokens) == whole.text
        assert [token.id for token in tokens] == whole.token_ids
        assert tokens[-1].completion is not None
        assert tokens[-1].completion.text == whole.text
        assert all("\ufffd" not in token.text for token in tokens[:-1])


def test_stop_strings_across_token_borders(llm: LLM) -> None:
    free = llm.generate("Count: 1, 2, 3, 4,", SamplingParams(max_new_tokens=40))[0].text
    stop = free[11:17]
    cut = free[: free.index(stop)]
    for include, expected in ((False, cut), (True, cut + stop)):
        params = SamplingParams(max_new_tokens=40, stop=["never", stop], include_stop=include)
        answer = llm.generate("Count: 1, 2, 3, 4,", params)[0]
        assert (answer.text, answer.finish_reason) == (expected, "stop_sequence")
        assert "".join(t.text for t in llm.stream("Count: 1, 2, 3, 4,", params)) == expected
    assert idle(llm)


def join(outs: list[TokenOut]) -> TokenOut:
    """The tokens of several steps as if one step had yielded them."""
    rows = [(n, row) for n, out in enumerate(outs) for row in range(len(out.request_ids))]
    rows.sort(key=lambda place: outs[place[0]].request_ids[place[1]])  # those of one request stay in order
    new_row = {place: row for row, place in enumerate(rows)}
    return TokenOut(
        [outs[n].request_ids[row] for n, row in rows],
        [outs[n].token_ids[row] for n, row in rows],
        [outs[n].logprobs[row] for n, row in rows],
        [TopTokens(new_row[n, t.row], t.token_ids, t.logprobs) for n, out in enumerate(outs) for t in out.top_tokens],
        [prompt for out in outs for prompt in out.prompt_logprobs],
        [finish for out in outs for finish in out.finished],
        [admitted for out in outs for admitted in out.admitted],
    )


@pytest.mark.parametrize("steps", [2, 5, 40])
def test_several_tokens_of_a_request_at_a_time_change_nothing(
    llm: LLM, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = llm.generate("Count: 1, 2, 3, 4,", SamplingParams(max_new_tokens=40))[0].text
    all_params = [
        SamplingParams(max_new_tokens=17, top_n_tokens=2),
        SamplingParams(
            max_new_tokens=20, stop=[free[11:17]]
        ),  # the engine's end may come with it, after the stop string
        SamplingParams(max_new_tokens=33, ignore_eos=True, decoder_input_details=True),
    ]
    one_by_one = [llm.generate("Count: 1, 2, 3, 4,", params)[0] for params in all_params]
    loop = llm.engine.loop
    take = loop.take

    def take_several() -> TokenOut:
        outs = [take()]
        while len(outs) < steps and loop.has_work:
            if loop.launch():
                loop.wait()
                outs.append(take())
        return join(outs)

    monkeypatch.setattr(loop, "take", take_several)
    assert [llm.generate("Count: 1, 2, 3, 4,", params)[0] for params in all_params] == one_by_one
    assert one_by_one[1].finish_reason == "stop_sequence"
    assert idle(llm)


def test_chat_ends_with_eos_which_is_not_shown(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Say hello in one word."}], SamplingParams(max_new_tokens=200))
    parts = [{"type": "text", "text": "Say hello "}, {"type": "text", "text": "in one word."}]
    again = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_new_tokens=1))
    assert again.prompt_token_ids == answer.prompt_token_ids
    assert answer.finish_reason == "eos_token"
    assert answer.token_ids[-1] == 2
    assert "<|im_end|>" not in answer.text
    shown = llm.generate(
        llm.render_chat([{"role": "user", "content": "Say hello in one word."}]),
        SamplingParams(max_new_tokens=200, skip_special_tokens=False),
    )[0]
    assert shown.text == answer.text + "<|im_end|>"


def test_many_prompts_come_back_in_order(llm: LLM) -> None:
    prompts = [f"Number {n} is" for n in range(30)]
    params = SamplingParams(max_new_tokens=5)
    together = [answer.token_ids for answer in llm.generate(prompts, params)]
    assert together == [llm.generate(prompt, params)[0].token_ids for prompt in prompts]


def test_interleaved_streams(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    one, two = llm.stream("The sun is", params), llm.stream("The moon is", params)
    texts = ["", ""]
    for a, b in zip(one, two, strict=True):
        texts[0] += a.text
        texts[1] += b.text
    assert texts == [llm.generate(p, params)[0].text for p in ("The sun is", "The moon is")]


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_new_tokens=500))
    for _ in range(3):
        next(stream)
    stream.close()
    llm.generate("x", SamplingParams(max_new_tokens=2))
    assert idle(llm)


def test_best_of_keeps_the_likeliest(llm: LLM) -> None:
    answer = llm.generate("My favourite", SamplingParams(max_new_tokens=8, temperature=1.2, best_of=4))[0]
    mean = [sum(c.logprobs) / len(c.logprobs) for c in (answer, *answer.others)]
    assert len(answer.others) == 3
    assert mean[0] == max(mean)
    assert len({c.seed for c in (answer, *answer.others)}) == 4


def test_details(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=3, top_n_tokens=2, decoder_input_details=True)
    answer = llm.generate("The capital of France is", params)[0]
    assert [len(tops) for tops in answer.top_tokens] == [2, 2, 2]
    assert answer.top_tokens[0][0].id == answer.token_ids[0]
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert all(isinstance(p, float) and p <= 0 for p in answer.prompt_logprobs[1:])
    assert answer.seed is None


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ("", {}, "`inputs` cannot be empty"),
        ([], {}, "`inputs` cannot be empty"),
        ([[1, 49152]], {}, "`inputs` holds token id 49152, which is outside the vocabulary of 49152"),
        ([[-1]], {}, "`inputs` holds token id -1"),
        ([[1] * 1024], {}, "`inputs` must have less than 1023 tokens. Given: 1024"),
        (
            "x",
            {"max_new_tokens": 2000},
            "`inputs` tokens + `max_new_tokens` must be <= 1024. Given: 1 `inputs` tokens and 2000",
        ),
        ("x", {"temperature": 0.0}, "`temperature` must be strictly positive"),
        ("x", {"temperature": float("nan")}, "`temperature` must be a finite number"),
        ("x", {"top_p": float("inf")}, "`top_p` must be a finite number"),
        ("x", {"top_p": 1.5}, "`top_p` must be > 0.0 and <= 1.0"),
        ("x", {"top_k": -1}, "`top_k` must be >= 0"),
        ("x", {"typical_p": 0.0}, "`typical_p` must be"),
        ("x", {"min_p": 2.0}, "`min_p` must be"),
        ("x", {"top_n_sigma": -1.0}, "`top_n_sigma` must be >= 0.0 and <= 100.0"),
        ("x", {"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
        ("x", {"frequency_penalty": 3.0}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ("x", {"presence_penalty": -3.0}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        ("x", {"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ("x", {"logit_bias": {99999: 1.0}}, "`logit_bias` holds token id 99999"),
        ("x", {"logit_bias": {1: float("inf")}}, "`logit_bias` for token 1 must be >= -1e+30"),
        ("x", {"stop": [""]}, "`stop` must not contain an empty string"),
        ("x", {"seed": -1}, "`seed` must be >= 0"),
        ("x", {"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ("x", {"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ],
)
def test_bad_requests_name_the_field(llm: LLM, prompt, params: dict, text: str) -> None:
    if prompt == []:
        assert llm.generate([]) == []
        prompt = [[]]
    with pytest.raises(ValidationError) as caught:
        llm.generate(prompt, SamplingParams(**params))
    assert text in str(caught.value)
    assert idle(llm)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e300},
        {"temperature": 10**400},
        {"temperature": "1"},
        {"temperature": None},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-50},
        {"top_k": 10**400},
        {"top_k": 2.7},
        {"top_n_tokens": 2.5},
        {"max_new_tokens": 2.5},
        {"stop": "END"},
        {"stop": None},
        {"stop": [1]},
        {"logit_bias": None},
        {"logit_bias": {5: 1e300}},
        {"logit_bias": {1: 10**400}},
        {"stop_token_ids": [1.5]},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_wrong_types_and_ranges_fail_the_caller_alone(llm: LLM, params: dict) -> None:
    with pytest.raises(ValidationError):
        llm.generate("x", SamplingParams(**params))
    assert len(llm.generate("x", SamplingParams(max_new_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_stop_string_in_the_first_token_keeps_the_prompt_logprobs(llm: LLM) -> None:
    free = llm.generate("The capital of France is", SamplingParams(max_new_tokens=3))[0]
    params = SamplingParams(max_new_tokens=30, stop=[free.text[1:3]], decoder_input_details=True)
    answer = llm.generate("The capital of France is", params)[0]
    assert (answer.finish_reason, len(answer.token_ids)) == ("stop_sequence", 1)
    assert answer.prompt_logprobs is not None
    assert all(isinstance(logprob, float) for logprob in answer.prompt_logprobs[1:])


def test_length_comes_before_a_stop_string(llm: LLM) -> None:
    free = llm.generate("The capital of France is", SamplingParams(max_new_tokens=3))[0]
    one = llm.generate("The capital of France is", SamplingParams(max_new_tokens=1, stop=[free.text[1:3]]))[0]
    assert one.finish_reason == "length"


def test_grammars_in_every_call(llm: LLM) -> None:
    schema = {
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
    }
    grammar = Grammar("json", json.dumps(schema))
    params = SamplingParams(max_new_tokens=60)
    prompt = "The capital of Italy as JSON: "
    whole = llm.generate([prompt, "The capital of France as JSON: "], params, grammar=grammar)
    for answer in whole:
        assert list(json.loads(answer.text)) == ["city", "big"]
        assert answer.finish_reason == "eos_token"
    streamed = list(llm.stream(prompt, params, grammar=grammar))
    assert "".join(token.text for token in streamed) == whole[0].text
    chatted = llm.chat(
        [{"role": "user", "content": "Name a city."}], params, grammar=Grammar("regex", "[A-Z][a-z]{2,9}")
    )
    assert re.fullmatch("[A-Z][a-z]{2,9}", chatted.text)
    drawn = SamplingParams(max_new_tokens=60, temperature=1.5, best_of=3)
    for answer in (best := llm.generate(prompt, drawn, grammar=grammar)[0], *best.others):
        assert set(json.loads(answer.text)) == {"city", "big"}
    assert idle(llm)


def test_bad_grammars_raise(llm: LLM) -> None:
    for grammar, text in (
        (Grammar("regex", "("), "grammar is not valid: "),
        (Grammar("json", '{"type": "text"}'), "grammar is not valid: /type must be among"),
        (Grammar("json", '{"$ref": "#/x"}'), "cannot compile regex from schema: "),
        (Grammar("prose", "x"), "grammar is not supported"),
    ):
        with pytest.raises(ValidationError) as caught:
            llm.generate("x", grammar=grammar)
        assert text in str(caught.value)
    assert idle(llm)


def test_arrays_of_ids(llm: LLM) -> None:
    import numpy as np
    import torch

    params = SamplingParams(max_new_tokens=3)
    expected = llm.generate([504, 3575, 282], params)[0].token_ids
    for ids in (
        np.array([504, 3575, 282]),
        torch.tensor([504, 3575, 282]),
        [np.array([504, 3575, 282])],
        (504, 3575, 282),
    ):
        assert llm.generate(ids, params)[0].token_ids == expected


def test_threads_take_turns(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=15, ignore_eos=True)
    prompts = [f"Thread {n} says" for n in range(4)]
    expected = [llm.generate(prompt, params)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            answers = list(pool.map(lambda prompt: llm.generate(prompt, params)[0].token_ids, prompts))
            assert answers == expected
    assert idle(llm)


def test_interrupting_leaves_a_usable_object(llm: LLM) -> None:
    """Ctrl-C in a notebook: the call ends, the next one works."""
    expected = llm.generate("The sun", SamplingParams(max_new_tokens=5))[0].token_ids
    for delay in (0.05, 0.11, 0.23, 0.37):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Once upon a time"] * 3, SamplingParams(max_new_tokens=900, ignore_eos=True))
        timer.join()
        assert llm.generate("The sun", SamplingParams(max_new_tokens=5))[0].token_ids == expected
    assert idle(llm)


def test_a_failing_device_is_a_typed_error_for_everyone(model_cache: Path) -> None:
    broken = LLM(cache_dir=str(model_cache), max_batch_total_tokens=512, max_total_tokens=256, progress=False)
    stream = broken.stream("One", SamplingParams(max_new_tokens=100, ignore_eos=True))
    next(stream)
    broken.engine.rank.runner.model.logits = None  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="a step failed on the device"):
        broken.generate("Two", SamplingParams(max_new_tokens=5))
    with pytest.raises(EngineError):
        list(stream)
    with pytest.raises(EngineError):
        broken.generate("Three")
    broken.close()


def test_after_close(model_cache: Path) -> None:
    closed = LLM(cache_dir=str(model_cache), max_batch_total_tokens=512, max_total_tokens=256, progress=False)
    closed.close()
    with pytest.raises(EngineError, match="this LLM is closed"):
        closed.generate("x")


def test_a_token_the_model_lacks(llm: LLM, tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model: typing one of them is a caller's error."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llm.engine.folder / name).read_bytes())
    config = json.loads((llm.engine.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 1000}))
    with LLM(
        str(tmp_path), load_format="dummy", max_batch_total_tokens=512, max_total_tokens=64, progress=False
    ) as small:
        with pytest.raises(ValidationError, match="outside the vocabulary of 1000"):
            small.generate("The capital of France is Paris")
        assert small.generate([5, 6], SamplingParams(max_new_tokens=2, ignore_eos=True))[0].token_ids


def test_unknown_models_and_settings(model_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM(str(tmp_path / "absent"), progress=False)
    with pytest.raises(ModelFormatError, match="neither a config.json nor a .gguf file"):
        LLM(str(tmp_path), progress=False)
    with pytest.raises(TypeError, match="LLM has no setting max_token"):
        LLM(max_token=3)
    with pytest.raises(StartError, match="`device` must be one of"):
        LLM(device="abacus", progress=False)
    with pytest.raises(ResourceError, match="Not enough memory"):
        LLM(max_batch_total_tokens=10**12, cache_dir=str(model_cache), progress=False)


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"]}')
    with pytest.raises(ModelFormatError, match="'NewForCausalLM' is not supported: transformers .* has no such"):
        LLM(str(tmp_path), progress=False)


def test_dummy_weights_need_no_checkpoint(llm: LLM, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llm.engine.folder / name).read_bytes())
    answers = []
    for seed in (0, 0, 1):
        with LLM(
            str(tmp_path),
            load_format="dummy",
            seed=seed,
            max_batch_total_tokens=512,
            max_total_tokens=64,
            progress=False,
        ) as other:
            answers.append(other.generate("Hi", SamplingParams(max_new_tokens=5, ignore_eos=True))[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


# -- the command line ----------------------------------------------------------------------------------------------


def tgi(cache: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "text_generation_inference.cli", *arguments]
    environment = {**os.environ, "TGI_CACHE_DIR": str(cache)}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=120)


def test_generate_streams_one_prompt(llm: LLM, model_cache: Path) -> None:
    done = tgi(model_cache, "generate", "The capital of France is", "-n", "5")
    assert done.returncode == 0
    assert done.stdout == llm.generate("The capital of France is", SamplingParams(max_new_tokens=5))[0].text + "\n"
    assert "reused" in done.stderr
    assert "tokens/s" in done.stderr


def test_generate_reads_lines_and_writes_json(llm: LLM, model_cache: Path) -> None:
    done = tgi(model_cache, "generate", "--json", "-q", "-n", "4", "--top-n-tokens", "2", stdin="One\n\nTwo\n")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    expected = llm.generate(["One", "Two"], SamplingParams(max_new_tokens=4))
    assert [line["prompt"] for line in lines] == ["One", "Two"]
    assert [line["token_ids"] for line in lines] == [answer.token_ids for answer in expected]
    assert all(len(line["top_tokens"]) == 4 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["generate", "--temperature", "0", "x"], 1, "error: `temperature` must be strictly positive"),
        (["generate", "--model", "/no/such/model", "x"], 1, "error: "),
        (["generate"], 1, "error: no prompt"),
        (["generate", "--system", "x", "y"], 2, "--system needs --chat"),
        (["generate", "--nonsense"], 2, "unrecognized arguments: --nonsense"),
        ([], 2, "COMMAND"),
    ],
)
def test_mistakes_get_one_clear_line(model_cache: Path, arguments: list[str], code: int, text: str) -> None:
    done = tgi(model_cache, *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupting_ends_cleanly(llm: LLM, model_cache: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "text_generation_inference.cli",
        "generate",
        "Once upon a time",
        "-n",
        "900",
        "--ignore-eos",
    ]
    environment = {**os.environ, "TGI_CACHE_DIR": str(model_cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"interrupted" in errors
    assert b"Traceback" not in errors
    assert time.monotonic() - start < 10


def test_ranks_answer_as_one(llm: LLM, model_cache: Path) -> None:
    """From a thread that ends before they do, too: they belong to the `LLM`."""
    limits = {"max_batch_total_tokens": 4096, "max_total_tokens": 1024, "progress": False}
    with ThreadPoolExecutor(1) as pool:
        several = pool.submit(lambda: LLM(cache_dir=str(model_cache), num_shard=2, **limits)).result()
    grammar = Grammar("regex", "[a-z]{3,9}(, [a-z]{3,9}){2}")
    with several:
        for prompt, params, shape in (
            ("The capital of France is", SamplingParams(max_new_tokens=8), None),
            ("Once upon", SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.9, seed=7), None),
            ("Colours:", SamplingParams(max_new_tokens=12), grammar),
        ):
            expected, found = (each.generate(prompt, params, grammar=shape)[0] for each in (llm, several))
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert idle(several)
