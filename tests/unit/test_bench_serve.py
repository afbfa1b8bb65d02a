"""Parts of `tgi bench serve` that need no server: flags, lengths, arrivals, prompts, events, figures and tables."""

import itertools
import json
import random
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from scipy import stats
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from text_generation_inference.bench.serve import arrivals
from text_generation_inference.bench.serve.apis import ApiCall, StreamedAnswer, describe_body
from text_generation_inference.bench.serve.client_pool import Record
from text_generation_inference.bench.serve.command import main, parse_limits, parse_seconds, read_task
from text_generation_inference.bench.serve.measure import histogram_of, spread_of, summarise
from text_generation_inference.bench.serve.messages import Finished, Outcome
from text_generation_inference.bench.serve.modes import Modes, steps_of
from text_generation_inference.bench.serve.profiles import PROFILES, Lengths, exactly, parse_lengths
from text_generation_inference.bench.serve.prompts import Counter, FilePrompts, Prompt, PromptMaker, read_prompts
from text_generation_inference.bench.serve.results import Phase, ServeReport
from text_generation_inference.bench.serve.tables import limit_line, tables
from text_generation_inference.bench.serve.vocabulary import load_tokenizer
from text_generation_inference.errors import StartError
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.tokenizer import Tokenizer

# -- flags ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nonsense"], "--nonsense"),
        (["--api", "grpc"], "grpc"),
        (["--profile", "poetry"], "poetry"),
        (["--mode", "rate"], "--rates"),
        (["--rates", "1"], "not sweep"),
        (["--mode", "rate", "--rates", "0"], "above 0"),
        (["--mode", "rate", "--rates", "nan"], "above 0"),
        (["--mode", "rate", "--rates", "1,fast"], "'1,fast'"),
        (["--mode", "rate", "--rates", "20000", "--duration", "2m"], "more than 1,000,000 requests"),
        (["--max-vus", "0"], "--max-vus"),
        (["--num-rates", "0"], "--num-rates"),
        (["--num-requests", "0"], "--num-requests"),
        (["--duration", "0"], "--duration"),
        (["--duration", "soon"], "'soon' is no time"),
        (["--timeout", "0s"], "--timeout"),
        (["--warmup", "-1"], "--warmup"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--prompt-tokens", "many"], "num_tokens=200"),
        (["--prompt-tokens", "min_tokens=3"], "must name num_tokens"),
        (["--output-tokens", "num_tokens=5,min_tokens=9,max_tokens=6"], "min_tokens <= max_tokens"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--max-new-tokens", "5", "--output-tokens", "5"], "leave one out"),
        (["--ignore-eos", "--api", "generate"], "--api completions"),
        (["--shared-prefix", "-1"], "--shared-prefix"),
        (["--shared-prefix", "4", "--prompts", "x.json"], "--prompts"),
        (["--client-processes", "0"], "--client-processes"),
        (["--limit", "speed=3"], "ttft="),
        (["--limit", "ttft"], "ttft="),
        (["--limit", "ttft=fast"], "no time"),
        (["--extra-meta", "gpu"], "key=value"),
        (["--api-key", "two words"], "--api-key"),
    ],
)
def test_mistakes_are_told_at_once(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and text in told


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "from-outside")
    task = read_task([])
    assert (task.profile, task.prompt, task.output) == ("quick", exactly(64), exactly(32))
    assert (task.modes.mode, task.modes.users, task.modes.num_rates) == ("sweep", 16, 4)
    assert (task.modes.seconds, task.modes.warmup_seconds, task.timeout_s) == (10, 5, 600)
    assert task.api_key == "from-outside"
    planned = task.modes.warmup_seconds + (1 + task.modes.num_rates) * task.modes.seconds
    assert planned <= 60  # answers that have to end come on top
    task = read_task(["--profile", "fixed-length"])
    assert (task.profile, task.prompt) == ("fixed-length", exactly(200))
    assert (task.modes.mode, task.modes.users, task.modes.num_rates) == ("sweep", 128, 10)
    assert (task.modes.seconds, task.modes.warmup_seconds, task.timeout_s) == (120, 30, 600)
    task = read_task(
        [
            "--mode",
            "rate",
            "--rates",
            "1",
            "--rates",
            "2,4.5",
            "--duration",
            "1m30s",
            "--warmup",
            "0",
            "--max-new-tokens",
            "7",
            "--api-key",
            "k",
            "--prompt-options",
            "num_tokens=50,max_tokens=60,min_tokens=40,variance=10",
            "--limit",
            "ttft=200,e2e=2s",
        ]
    )
    assert task.modes.rates == [1, 2, 4.5] and task.modes.seconds == 90 and task.modes.warmup_seconds == 0
    assert task.prompt == Lengths(50, 40, 60, 10) and task.output == exactly(7) and task.api_key == "k"
    assert task.limits_ms == {"ttft": 200, "e2e": 2000}
    assert read_task(["--num-requests", "5"]).modes.seconds is None
    assert read_task(["--num-requests", "5", "--duration", "9"]).modes.seconds == 9


def test_times() -> None:
    given = ["90", "90s", "1.5m", "1m30s", "90000ms"]
    assert [parse_seconds(text, "--x") for text in given] == [90] * 5
    assert parse_limits("itl=20ms, tpot=0.5") == {"itl": 20, "tpot": 0.5}
    for text in ("", "s", "-1s", "1s2", "1 s", "٣s", "1" * 40):
        with pytest.raises(StartError):
            parse_seconds(text, "--x")


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--url", "--profile", "--rates", "--limit", "--details", "--ignore-eos"))


@pytest.mark.parametrize("module", ["command", "run", "worker"])
def test_torch_is_never_imported(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import text_generation_inference.bench.serve.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# -- lengths and arrivals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PROFILES))
def test_lengths_are_drawn_as_inference_benchmarker_draws_them(name: str) -> None:
    rng = random.Random(3)
    for lengths in (PROFILES[name].prompt, PROFILES[name].output):
        drawn = [lengths.draw(rng) for _ in range(20_000)]
        assert lengths.lowest <= min(drawn) and max(drawn) <= lengths.highest
        if not lengths.spread:
            assert set(drawn) == {lengths.mean}
            continue
        normal = stats.norm(lengths.mean, lengths.spread)
        for bound, share in (
            (lengths.lowest, normal.cdf(lengths.lowest)),
            (lengths.highest, normal.sf(lengths.highest)),
        ):
            assert drawn.count(bound) / len(drawn) == pytest.approx(share, abs=0.015)  # moved to the bound
        inside = [value for value in drawn if lengths.lowest < value < lengths.highest]
        grid = stats.truncnorm(
            (lengths.lowest - lengths.mean) / lengths.spread,
            (lengths.highest - lengths.mean) / lengths.spread,
            lengths.mean,
            lengths.spread,
        )
        assert sum(inside) / len(inside) == pytest.approx(grid.mean(), rel=0.02)


def test_the_published_lengths() -> None:
    fixed, code, classes = (PROFILES[name] for name in ("fixed-length", "code-generation", "classification"))
    assert fixed.prompt == exactly(200) and fixed.output == Lengths(800, 50, 800, 100)
    assert code.prompt == Lengths(4096, 3000, 6000, 1000) and code.output == Lengths(50, 30, 80, 10)
    assert classes.prompt == Lengths(10000, 8000, 12000, 5000) and classes.output == Lengths(50, 30, 80, 10)
    assert parse_lengths("12", "--x") == exactly(12)
    assert parse_lengths("num_tokens=100,variance=10", "--x") == Lengths(100, 1, 140, 10)


def test_constant_arrivals() -> None:
    times = arrivals.constant(4.0, 3.0)
    assert times == [number / 4 for number in range(12)]
    assert len(arrivals.constant(0.01, 3.0)) == 1
    assert arrivals.constant(10.0, 999.0, num_requests=3) == [0, 0.1, 0.2]


def test_poisson_arrivals_are_statistically_right() -> None:
    rate, seconds = 50.0, 400.0
    times = arrivals.poisson(rate, seconds, random.Random(11))
    assert len(times) == pytest.approx(rate * seconds, abs=5 * (rate * seconds) ** 0.5)
    assert max(times) < seconds and times == sorted(times)
    pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert stats.kstest(pauses, "expon", args=(0, 1 / rate)).pvalue > 0.01
    counts = [sum(1 for time in times if second <= time < second + 1) for second in range(int(seconds))]
    assert stats.variation(counts) ** 2 * rate == pytest.approx(1, abs=0.2)  # variance equals mean
    other = arrivals.poisson(rate, seconds, random.Random(12))
    assert other != times
    assert len(arrivals.poisson(5.0, 0.0, random.Random(1), num_requests=40)) == 40


# -- prompts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return load_tokenizer("embedded")


def plain(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, SpecialTokens({}, [], [], []))


def letters_only() -> Tokenizer:
    """Single bytes, and words that text never becomes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: number for number, token in enumerate([*letters, "Ġword", "word"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return plain(backend)


def with_beginning() -> Tokenizer:
    """Words, and one token before every text."""
    words = [f"{a}{b}{c}" for a in "bcdfg" for b in "aeiou" for c in "lmnrs"]
    backend = Backend(
        models.WordLevel({word: number for number, word in enumerate(["<s>", "?", *words])}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return plain(backend)


@pytest.mark.parametrize("kind", ["embedded", "letters", "beginning"])
@pytest.mark.parametrize("length", [2, 3, 17, 200])
def test_prompts_have_exactly_the_asked_tokens(kind: str, length: int, embedded: Tokenizer) -> None:
    tokenizer = {"embedded": embedded, "letters": letters_only(), "beginning": with_beginning()}[kind]
    maker = PromptMaker(Counter(tokenizer, True), exactly(length), exactly(9), seed=5)
    for _ in range(20):
        prompt = maker.make()
        assert isinstance(prompt.content, str)
        assert len(tokenizer.encode(prompt.content)) == length == prompt.num_tokens
        assert prompt.max_new_tokens == 9


def test_prompts_differ_from_the_first_token_on(embedded: Tokenizer) -> None:
    maker = PromptMaker(Counter(embedded, True), exactly(24), exactly(1), seed=5)
    firsts = [embedded.encode(str(maker.make().content))[0] for _ in range(300)]
    assert len(set(firsts)) == 300
    again = PromptMaker(Counter(embedded, True), exactly(24), exactly(1), seed=5)
    other = PromptMaker(Counter(embedded, True), exactly(24), exactly(1), seed=6)
    assert embedded.encode(str(again.make().content))[0] == firsts[0]
    assert [embedded.encode(str(other.make().content))[0] for _ in range(9)] != firsts[:9]


def test_a_shared_prefix_is_shared_and_counted(embedded: Tokenizer) -> None:
    maker = PromptMaker(Counter(embedded, True), exactly(64), exactly(1), seed=5, shared_prefix=48)
    prompts = [embedded.encode(str(maker.make().content)) for _ in range(50)]
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:48]) for prompt in prompts}) == 1
    assert len({prompt[48] for prompt in prompts}) == 50
    with pytest.raises(StartError, match="--shared-prefix"):
        PromptMaker(Counter(embedded, True), exactly(64), exactly(1), seed=5, shared_prefix=64)


def test_a_tokenizer_that_cannot_make_the_length() -> None:
    """Every text has an even number of tokens: each letter is two."""
    backend = Backend(models.BPE({"a": 0, "b": 1, "<0x61>": 2, "?": 3}, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    counter = Counter(plain(backend), True)
    assert counter.count("ab") == 4
    maker = PromptMaker(counter, exactly(7), exactly(1), seed=1, name="odd")
    with pytest.raises(StartError, match="tokenizer odd cannot make a prompt of 7 tokens"):
        maker.make()


def test_prompts_from_a_file(tmp_path: Path, embedded: Tokenizer) -> None:
    file = tmp_path / "prompts.json"
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    entries = ["A plain text.", {"prompt": "With a length.", "max_new_tokens": 3, "id": 1}, {"conversations": turns}]
    file.write_text(json.dumps(entries))
    found = read_prompts(str(file), Counter(embedded, True), None, exactly(9), seed=1)
    assert [prompt.max_new_tokens for prompt in found] == [9, 3, 9, 9]
    assert [prompt.content for prompt in found] == ["A plain text.", "With a length.", turns[:2], turns]
    assert found[0].num_tokens == len(embedded.encode("A plain text."))
    assert read_prompts(str(file), None, None, exactly(9), seed=1)[0].num_tokens is None
    source = FilePrompts(found, seed=2)
    drawn = [source.make() for _ in range(8)]
    assert drawn[:4] == drawn[4:] and all(drawn.count(prompt) == 2 for prompt in found)


def test_texts_of_a_file_are_cut_to_length(tmp_path: Path, embedded: Tokenizer) -> None:
    file = tmp_path / "prompts.json"
    long = "It was the best of times, it was the worst of times, naïve café 日本語 and 3,141 more. " * 3
    file.write_text(json.dumps([long, "too short", long[::-1]]))
    for length in (5, 11, 23, 40):
        found = read_prompts(str(file), Counter(embedded, True), exactly(length), exactly(1), seed=1)
        assert found and all(len(embedded.encode(str(prompt.content))) == length for prompt in found)
    with pytest.raises(StartError, match="no prompt of at least 4000 tokens"):
        read_prompts(str(file), Counter(embedded, True), exactly(4000), exactly(1), seed=1)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[", "not valid JSON"),
        ("{}", "must hold a list"),
        ("[]", "holds no prompt"),
        ("[5]", "entry 0"),
        ('["a", {"prompt": ""}]', "entry 1"),
        ('[{"prompt": "a", "max_new_tokens": 0}]', "max_new_tokens"),
        ('[{"conversations": [{"role": "user"}]}]', "a turn without"),
        ('[{"conversations": [{"role": "robot", "content": "x"}]}]', "a turn without"),
    ],
)
def test_bad_files_of_prompts(content: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(content)
    with pytest.raises(StartError, match=text) as told:
        read_prompts(str(file), None, None, exactly(1), seed=1)
    assert str(file) in str(told.value)


def test_a_missing_file_of_prompts() -> None:
    with pytest.raises(StartError, match="cannot be read"):
        read_prompts("/nowhere/prompts.json", None, None, exactly(1), seed=1)


def test_tokenizers_come_from_folders_and_files(tmp_path: Path, embedded: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").write_text(embedded.to_json())
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(name)).encode("a few words") == embedded.encode("a few words")
    for name in ("/nowhere/model", str(tmp_path / "no.gguf")):
        with pytest.raises(StartError, match="--tokenizer"):
            load_tokenizer(name)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartError, match="not a valid tokenizer"):
        load_tokenizer(str(tmp_path))


# -- events --------------------------------------------------------------------------------------------------------


def read(api: str, *events: object) -> StreamedAnswer:
    answer = StreamedAnswer()
    read_event = ApiCall(api=api, model=None).read_event()
    for number, event in enumerate(events):
        read_event(event if isinstance(event, bytes) else b" " + json.dumps(event).encode(), answer, float(number))
    return answer


def test_native_events() -> None:
    token = {"index": 1, "token": {"id": 1, "text": 'a "token":{ in it', "logprob": None}, "generated_text": None}
    last = {**token, "generated_text": "", "details": {"generated_tokens": 2, "input_length": 5, "seed": None}}
    answer = read("generate", token, last)
    assert list(answer.times) == [0, 1] and answer.is_finished and answer.error is None
    assert (answer.num_generated, answer.num_prompt) == (2, 5)
    answer = read("generate", token, {"error": "Request failed", "error_type": "generation"})
    assert list(answer.times) == [0] and not answer.is_finished
    assert answer.error == "error in the stream: Request failed"
    assert "unreadable event: <html>" in str(read("generate", b"<html>").error)


def test_chat_events() -> None:
    def chunk(delta: dict[str, object], finish: str | None = None) -> dict[str, object]:
        return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None}

    answer = read(
        "chat",
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hel"}),
        chunk({"reasoning_content": "hm"}),
        chunk({}, "length"),
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}},
        b" [DONE]",
    )
    assert list(answer.times) == [1, 2] and answer.is_finished and answer.error is None
    assert (answer.num_generated, answer.num_prompt) == (4, 9)
    assert read("chat", chunk({"content": "a"}), b"[DONE]").is_finished
    answer = read("chat", chunk({"content": "a"}), {"error": {"message": "out of\nmemory", "code": 500}})
    assert answer.error == "error in the stream: out of memory"
    assert read("chat", {"object": "error", "message": "no"}).error == "error in the stream: no"


def test_completion_events() -> None:
    events = [{"choices": [{"text": "a", "finish_reason": None}]}, {"choices": [{"text": "", "finish_reason": "stop"}]}]
    answer = read("completions", *events)
    assert list(answer.times) == [0] and answer.is_finished and answer.num_generated is None


def test_bodies() -> None:
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]
    native = json.loads(ApiCall(api="generate", model="m").body(turns, 5))
    assert native == {"inputs": "One?\nYes.", "parameters": {"max_new_tokens": 5, "do_sample": False, "details": True}}
    chat = json.loads(ApiCall(api="chat", model="m", ignore_eos=True).body(turns, 5))
    assert chat["messages"] == turns and chat["ignore_eos"] is True and chat["max_tokens"] == 5 and chat["model"] == "m"
    completion = json.loads(ApiCall(api="completions", model=None).body("One?", 5))
    assert completion["prompt"] == "One?" and completion["stream"] is True and "ignore_eos" not in completion
    assert "model" not in completion


def test_what_a_refusal_says() -> None:
    assert describe_body(b'{"error":"Model is overloaded","error_type":"overloaded"}') == "Model is overloaded"
    assert describe_body(b'{"error":{"message":"no such model"}}') == "no such model"
    assert describe_body(b"<html>\n  Bad   Gateway") == "<html> Bad Gateway"
    assert describe_body(b"") == ""
    assert len(describe_body(b"x" * 5000)) == 200


# -- figures -------------------------------------------------------------------------------------------------------


def outcome(number: int, sent: float, times: list[float], end: float | None, **others: object) -> Outcome:
    values = {"num_generated": None, "num_prompt": None, "error": None, **others}
    return Outcome(number, sent, sent, end, array("d", times).tobytes(), **values)


def finished(ended: float, **others: object) -> Finished:
    values = {"started": 100.0, "cpu_seconds": 0.1, "lags": array("d", [0.001] * 99 + [0.004]).tobytes()}
    return Finished(ended=ended, **{**values, "starved_seconds": 0.0, **others})


def test_known_figures() -> None:
    """Two answers of 3 and 5 tokens, one of them bundling two tokens in an event, one failure."""
    record = Record(
        [
            outcome(1, 100.5, [100.6, 100.7, 100.7, 101.0, 101.1], 101.2, num_generated=5),
            outcome(0, 100.0, [100.05, 100.06], 100.1, num_generated=3),
            outcome(2, 101.0, [101.1], 101.5, error="error in the stream: x"),
        ],
        [finished(102.0)],
    )
    prompts = {number: Prompt("", 10 + number, 5) for number in range(3)}
    limits = {"ttft": 60.0, "itl": 400.0}
    phase = summarise(record, prompts, "constant@1.00req/s", "constant", rate=1.0, limits_ms=limits, with_details=True)
    assert phase.seconds == pytest.approx(1.5)  # first sent to last end
    assert (phase.num_sent, phase.num_successful, phase.num_failed, phase.num_unfinished) == (3, 2, 1, 0)
    assert phase.errors == {"error in the stream: x": 1} and phase.error_rate == pytest.approx(1 / 3)
    assert phase.qps == pytest.approx(2 / 1.5, abs=1e-4)
    assert phase.output_tokens_per_s == pytest.approx(8 / 1.5, abs=1e-3)
    assert (phase.prompt_tokens, phase.decoded_tokens) == (10.5, 4)
    assert phase.ttft is not None and phase.ttft.average == pytest.approx(75) and phase.ttft.p50 == pytest.approx(75)
    assert phase.itl is not None
    assert phase.itl.average == pytest.approx((10 + 100 + 0 + 300 + 100) / 5)
    assert (phase.itl.lowest, phase.itl.highest) == (0, pytest.approx(300))
    assert phase.tpot is not None and phase.tpot.average == pytest.approx((10 / 2 + 500 / 4) / 2)
    assert phase.e2e is not None and phase.e2e.average == pytest.approx((100 + 700) / 2)
    assert phase.goodput is not None and phase.goodput.num_requests == 1
    assert phase.goodput.share == pytest.approx(1 / 3) and phase.goodput.per_s == pytest.approx(1 / 1.5, abs=1e-4)
    assert phase.lag is not None and phase.lag.p50 == pytest.approx(1)
    assert phase.client_cpu == pytest.approx(0.05) and not phase.client_limited
    assert phase.requests is not None and [one.prompt_tokens for one in phase.requests] == [10, 11, 12]
    first = phase.requests[0]
    assert (first.planned, first.sent, first.first, first.last, first.end) == (0, 0, 0.05, 0.06, 0.1)
    assert first.gaps_ms == [10] and phase.requests[2].error is not None


def test_answers_that_were_cut_off_count_as_far_as_they_got() -> None:
    """Ten users at 10 tokens/s with answers of 20 tokens, ended after 5 s: two rounds and a half."""
    record = Record(finished=[finished(105.0)])
    for user in range(10):
        for turn in range(3):
            begin = 100.0 + 2 * turn
            times = [begin + 0.1 * (place + 1) for place in range(20)]
            times = [time for time in times if time <= 105.0 + 1e-9]
            end = times[-1] if len(times) == 20 else None
            record.outcomes.append(outcome(3 * user + turn, begin, times, end))
    phase = summarise(record, {number: Prompt("", 5, 20) for number in range(30)}, "throughput", "throughput", users=10)
    assert (phase.num_successful, phase.num_unfinished, phase.error_rate) == (20, 10, 0)
    assert phase.output_tokens_per_s == pytest.approx(100) and phase.qps == pytest.approx(5)


def test_nothing_measured() -> None:
    phase = summarise(Record(), {}, "warmup", "throughput", users=1, limits_ms={"ttft": 1.0})
    assert phase.qps == phase.output_tokens_per_s == phase.error_rate == 0
    assert phase.ttft is phase.itl is phase.tpot is phase.e2e is phase.lag is None
    failed = summarise(Record([outcome(0, 1.0, [], 1.0, error="x")]), {0: Prompt("", 1, 1)}, "a", "throughput", users=1)
    assert failed.error_rate == 1 and failed.ttft is None
    assert "| a" in tables([phase, failed])


@pytest.mark.parametrize(
    "others", [{"cpu_seconds": 1.8}, {"lags": array("d", [0.05] * 9).tobytes()}, {"starved_seconds": 0.5}]
)
def test_the_client_says_when_it_was_the_limit(others: dict[str, object]) -> None:
    record = Record([outcome(0, 100.0, [100.1], 100.2)], [finished(102.0), finished(102.0, **others)])
    phase = summarise(record, {0: Prompt("", 1, 1)}, "throughput", "throughput", users=1)
    assert phase.client_limited
    assert limit_line([]) is None
    assert "may have been the limit" in str(limit_line([phase]))


def test_errors_of_many_kinds_are_counted_together() -> None:
    outcomes = [outcome(number, 1.0, [], 2.0, error=f"error {number}") for number in range(30)]
    outcomes += [outcome(30 + number, 1.0, [], 2.0, error="often") for number in range(5)]
    phase = summarise(Record(outcomes), {number: Prompt("", 1, 1) for number in range(35)}, "a", "throughput", users=1)
    assert next(iter(phase.errors)) == "often" and phase.errors["often"] == 5
    assert sum(phase.errors.values()) == 35 and len(phase.errors) == 21


def test_spreads_and_histograms() -> None:
    spread = spread_of([1.0, 2.0, 3.0, 4.0])
    assert spread is not None and (spread.p50, spread.lowest, spread.highest) == (2.5, 1, 4)
    assert spread.p90 == pytest.approx(3.7)
    assert spread_of([]) is histogram_of([]) is None
    for values in ([5.0], [0.0, 0.0], [10.0, 11.0, 12.0], [0.0, 0.1, 9.0, 800.0], [1e-9, 1e3]):
        found = histogram_of(values)
        assert found is not None
        assert sum(found.counts) == len(values) and len(found.edges) == len(found.counts) + 1
        assert found.edges == sorted(set(found.edges))
        assert found.edges[0] <= min(values) + 1e-6 and found.edges[-1] >= max(values) - 1e-6


# -- modes and tables ----------------------------------------------------------------------------------------------


def modes(**given: object) -> Modes:
    values = {"mode": "sweep", "arrivals": "constant", "users": 8, "seconds": 60.0, "warmup_seconds": 5.0}
    return Modes(**{**values, "rates": [], "num_rates": 10, "num_requests": None, **given})  # pyright: ignore


def phase_of(qps: float) -> Phase:
    empty = summarise(Record(), {}, "throughput", "throughput", users=8)
    empty.qps = qps
    return empty


def test_a_sweep_goes_from_a_tenth_to_beyond_the_maximum() -> None:
    """With the published maximum of 4.30 req/s the rates are those of the published table."""
    steps = list(steps_of(modes(), lambda: phase_of(4.30)))
    assert [step.name for step in steps][:4] == ["warmup", "throughput", "constant@0.52req/s", "constant@1.03req/s"]
    assert steps[-1].name == "constant@5.16req/s" and len(steps) == 12 == modes().num_phases()
    assert (steps[0].users, steps[0].seconds, steps[1].users, steps[1].seconds) == (1, 5, 8, 60)
    with pytest.raises(StartError, match="no rates to sweep"):
        list(steps_of(modes(), lambda: phase_of(0)))


def test_other_modes() -> None:
    steps = list(steps_of(modes(mode="rate", rates=[2.0, 0.25], arrivals="poisson", warmup_seconds=0.0), lambda: None))
    assert [(step.name, step.mode, step.rate) for step in steps] == [
        ("poisson@2.00req/s", "poisson", 2.0),
        ("poisson@0.25req/s", "poisson", 0.25),
    ]
    (warmup, step) = steps_of(modes(mode="throughput", num_requests=7), lambda: None)
    assert (warmup.num_requests, step.num_requests, step.users) == (None, 7, 8)


def test_the_columns_of_the_table() -> None:
    record = Record([outcome(0, 100.0, [100.1, 100.2], 100.25)], [finished(101.0)])
    phase = summarise(record, {0: Prompt("", 200, 2)}, "warmup", "throughput", users=1, limits_ms={"e2e": 1e4})
    shown = tables([phase])
    lines = shown.split("\n")
    heads = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert heads == [
        "Benchmark",
        "QPS",
        "E2E Latency (avg)",
        "TTFT (avg)",
        "ITL (avg)",
        "Throughput",
        "Error Rate",
        "Successful Requests",
        "Prompt tokens per req (avg)",
        "Decoded tokens per req (avg)",
    ]
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == [
        "warmup",
        "4.00 req/s",
        "0.25 sec",
        "100.00 ms",
        "100.00 ms",
        "8.00 tokens/sec",
        "0.00%",
        "1/1",
        "200.00",
        "2.00",
    ]
    assert "TPOT p50" in shown and "Goodput (E2E 10000 ms)" in shown and "Client lag" in shown
    assert ServeReport.__struct_fields__  # the report page reads these
