"""Parts of `text-generation-benchmark` that need no engine: flags, figures, tables, keys, and what the screen shows."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from text_generation_inference.bench.row_progress import describe_seconds
from text_generation_inference.bench.scale import short
from text_generation_inference.bench.static import display as displays
from text_generation_inference.bench.static import state as states
from text_generation_inference.bench.static.charts import NamedPoint, count_bins, histogram, scatter, ticks
from text_generation_inference.bench.static.command import main
from text_generation_inference.bench.static.display import Moment, ProgressLines
from text_generation_inference.bench.static.prompt import make_prompt
from text_generation_inference.bench.static.results import BatchResult, percentile, summarise
from text_generation_inference.bench.static.state import State
from text_generation_inference.bench.static.tables import all_tables
from text_generation_inference.bench.static.task import Sampling, StaticTask, read_task
from text_generation_inference.bench.static.terminal import split_keys
from text_generation_inference.bench.static.view import Look, draw
from text_generation_inference.errors import StartError
from text_generation_inference.text.model_folder import SpecialTokens
from text_generation_inference.text.tokenizer import Tokenizer

PROG = "text-generation-benchmark"


def task_of(*arguments: str, **environment: str) -> StaticTask:
    return read_task(["-t", "embedded", *arguments], environment, PROG)


# -- figures and tables --------------------------------------------------------------------------------------------


def test_percentiles_are_at_the_floor_of_the_index() -> None:
    ten = [float(value) for value in range(10)]
    assert [percentile(ten, p) for p in (50, 90, 99)] == [5, 9, 9]
    assert [percentile([1.0, 2.0, 3.0], p) for p in (50, 90, 99)] == [2, 3, 3]
    assert percentile([1.0, 2.0], 50) == 2  # floor(0.5 x 2) = 1, counted from 0
    assert [percentile(list(map(float, range(1000))), p) for p in (50, 90, 99)] == [500, 900, 990]
    assert math.isnan(percentile([], 50)) and math.isnan(percentile([1.0], 100))


def test_summary_of_runs_in_any_order() -> None:
    summary = summarise([3.0, 1.0, 2.0, 10.0])
    assert (summary.average, summary.lowest, summary.highest) == (4.0, 1.0, 10.0)
    assert (summary.p50, summary.p90, summary.p99) == (3.0, 10.0, 10.0)
    assert math.isnan(summarise([]).average)


def test_formulas() -> None:
    batch = BatchResult(batch_size=4)
    batch.add_run((100, 11), prefill_seconds=0.5, decode_seconds=2.0)
    assert batch.prefill_ms == [500] and batch.prefill_tokens_per_s == [4 * 100 / 0.5]
    assert batch.decode_total_ms == [2000] and batch.decode_token_ms == [2000 / 10]
    assert batch.decode_tokens_per_s == [4 * 10 / 2]


def test_a_single_token_has_no_decode_steps() -> None:
    batch = BatchResult(batch_size=2)
    batch.add_run((10, 1), prefill_seconds=0.5, decode_seconds=0.0)
    assert batch.prefill_ms == [500] and batch.decode_total_ms == batch.decode_tokens_per_s == []
    assert "| Decode (token) | 2          | NaN ms" in all_tables(task_of("-d", "1"), [batch])


GOLDEN = """\
| Parameter          | Value         |
|--------------------|---------------|
| Model              | folder\\|model |
| Sequence Length    | 100           |
| Decode Length      | 11            |
| Top N Tokens       | Some(3)       |
| N Runs             | 2             |
| Warmups            | 1             |
| Temperature        | Some(0.7)     |
| Top K              | None          |
| Top P              | None          |
| Typical P          | None          |
| Repetition Penalty | None          |
| Frequency Penalty  | None          |
| Watermark          | false         |
| Do Sample          | true          |

| Step           | Batch Size | Average    | Lowest     | Highest    | p50        | p90        | p99        |
|----------------|------------|------------|------------|------------|------------|------------|------------|
| Prefill        | 1          | 15.00 ms   | 10.00 ms   | 20.00 ms   | 20.00 ms   | 20.00 ms   | 20.00 ms   |
|                | 16         | 800.00 ms  | 800.00 ms  | 800.00 ms  | 800.00 ms  | 800.00 ms  | 800.00 ms  |
| Decode (token) | 1          | 5.50 ms    | 5.00 ms    | 6.00 ms    | 6.00 ms    | 6.00 ms    | 6.00 ms    |
|                | 16         | 123.46 ms  | 123.46 ms  | 123.46 ms  | 123.46 ms  | 123.46 ms  | 123.46 ms  |
| Decode (total) | 1          | 55.00 ms   | 50.00 ms   | 60.00 ms   | 60.00 ms   | 60.00 ms   | 60.00 ms   |
|                | 16         | 1234.57 ms | 1234.57 ms | 1234.57 ms | 1234.57 ms | 1234.57 ms | 1234.57 ms |

| Step    | Batch Size | Average             | Lowest              | Highest              |
|---------|------------|---------------------|---------------------|----------------------|
| Prefill | 1          | 7500.00 tokens/secs | 5000.00 tokens/secs | 10000.00 tokens/secs |
|         | 16         | 2000.00 tokens/secs | 2000.00 tokens/secs | 2000.00 tokens/secs  |
| Decode  | 1          | 183.33 tokens/secs  | 166.67 tokens/secs  | 200.00 tokens/secs   |
|         | 16         | 129.60 tokens/secs  | 129.60 tokens/secs  | 129.60 tokens/secs   |"""


def test_tables() -> None:
    arguments = ["-t", "folder|model", "-s", "100", "-d", "11", "-r", "2", "--temperature", "0.7", "--do-sample"]
    task = read_task([*arguments, "--top-n-tokens", "3"], {}, PROG)
    one, sixteen = BatchResult(batch_size=1), BatchResult(batch_size=16)
    one.add_run((100, 11), 0.010, 0.050)
    one.add_run((100, 11), 0.020, 0.060)
    sixteen.add_run((100, 11), 0.8, 1.2345678)
    assert all_tables(task, [one, sixteen]) == GOLDEN


# -- flags and environment -----------------------------------------------------------------------------------------


def test_defaults() -> None:
    task = task_of()
    assert task.batch_sizes == [1, 2, 4, 8, 16, 32]
    assert (task.sequence_length, task.decode_length, task.runs, task.warmups) == (10, 8, 10, 1)
    assert task.sampling == Sampling() and task.settings == {"prefix_caching": False} and task.notes == []
    params = task.sampling.params()
    assert not params.samples and params.seed == 0 and params.ignore_eos


def test_flags() -> None:
    flags = "-b 4 -b 2,1 -b 4 -s 100 -d 20 -r 3 -w 0 --device cpu --quantize fp8 --num-threads 2 --cuda-graphs 1,2"
    task = task_of(*flags.split())
    assert task.batch_sizes == [4, 2, 1]
    assert (task.sequence_length, task.decode_length, task.runs, task.warmups) == (100, 20, 3, 0)
    expected = {"device": "cpu", "quantize": "fp8", "num_threads": 2, "cuda_graphs": [1, 2], "prefix_caching": False}
    assert task.settings == expected
    sampling = "--temperature .5 --top-k 4 --top-p 0.9 --typical-p 0.8 --repetition-penalty 1.1 --frequency-penalty -1"
    params = task_of(*sampling.split(), "--watermark", "--do-sample", "--top-n-tokens", "5").sampling.params()
    assert (params.temperature, params.top_k, params.top_p, params.typical_p) == (0.5, 4, 0.9, 0.8)
    assert (params.repetition_penalty, params.frequency_penalty) == (1.1, -1) and params.top_n_tokens == 5
    assert params.watermark and params.do_sample


def test_environment() -> None:
    names = {
        "TOKENIZER_NAME": "some/model",
        "SEQUENCE_LENGTH": "5",
        "DECODE_LENGTH": "6",
        "RUNS": "7",
        "WARMUPS": "3",
        "TEMPERATURE": "0.5",
        "TOP_K": "9",
        "TOP_P": "",  # as if not set
        "WATERMARK": "true",
        "DO_SAMPLE": "false",
        "TOP_N_TOKENS": "2",
        "REVISION": "refs/pr/1",
        "TGI_DEVICE": "cpu",
        "MAX_TOTAL_TOKENS": "7",  # of a server: the batches decide here
        "PREFIX_CACHING": "1",
    }
    task = read_task(["-r", "8", "--device", "cuda"], names, PROG)
    assert (task.model, task.runs, task.warmups) == ("some/model", 8, 3)
    assert (task.sequence_length, task.decode_length) == (5, 6)
    assert task.sampling == Sampling(temperature=0.5, top_k=9, watermark=True, top_n_tokens=2)
    assert task.settings == {"revision": "refs/pr/1", "device": "cuda", "prefix_caching": False}


def test_a_socket_is_not_needed() -> None:
    for task in (task_of("-m", "/tmp/socket"), task_of(MASTER_SHARD_UDS_PATH="/tmp/socket")):
        assert len(task.notes) == 1 and "--master-shard-uds-path has no effect" in task.notes[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--tokenizer-name is missing"),
        (["-t", "x", "-b", "0"], "--batch-size '0'"),
        (["-t", "x", "-b", "1,,2"], "--batch-size ''"),
        (["-t", "x", "-b", "99999"], "--batch-size '99999'"),
        (["-t", "x", "-s", "0"], "--sequence-length '0'"),
        (["-t", "x", "-s", "ten"], "--sequence-length 'ten'"),
        (["-t", "x", "-s", "٣"], "--sequence-length"),
        (["-t", "x", "-d", "0"], "--decode-length '0'"),
        (["-t", "x", "-r", "-1"], "--runs '-1'"),
        (["-t", "x", "-w", "1.5"], "--warmups '1.5'"),
        (["-t", "x", "--temperature", "warm"], "--temperature 'warm'"),
        (["-t", "x", "--temperature", "nan"], "--temperature 'nan'"),
        (["-t", "x", "--temperature", "0"], "`temperature` must be strictly positive"),
        (["-t", "x", "--top-p", "2"], "`top_p`"),
        (["-t", "x", "--frequency-penalty", "3"], "`frequency_penalty`"),
        (["-t", "x", "--dtype", "int3"], "`dtype`"),
        (["-t", "x", "--num-threads", "all"], "--num-threads 'all'"),
        (["-t", "x", "--nonsense"], "--nonsense"),
        (["-t", "x", "stray"], "stray"),
    ],
)
def test_mistakes_are_told_at_once(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and text in told


@pytest.mark.parametrize(
    ("name", "value"), [("RUNS", "many"), ("WATERMARK", "maybe"), ("TOP_P", "x"), ("DTYPE", "int3")]
)
def test_mistakes_in_the_environment(name: str, value: str) -> None:
    with pytest.raises(StartError, match=f"{name}={value!r}|`{name.lower()}`"):
        task_of(**{name: value})


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--tokenizer-name", "--batch-size", "--top-n-tokens", "--master-shard-uds-path", "--json", "--device"):
        assert flag in text
    unwrapped = " ".join(text.split())
    assert "env: DECODE_LENGTH" in unwrapped and "default: 1 2 4 8 16 32" in unwrapped


def test_flags_and_screen_need_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import text_generation_inference.bench.static.command, text_generation_inference.bench.static.screen"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


# -- the prompt ----------------------------------------------------------------------------------------------------


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, and one before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={text: number for number, text in enumerate([*alphabet, "<s>"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(backend, SpecialTokens({}, [], [], []))


@pytest.mark.parametrize("length", [1, 2, 10, 511, 5000])
def test_prompts_have_the_exact_length(length: int) -> None:
    ids = make_prompt(byte_tokenizer(), length, 257, "tiny")
    assert len(ids) == length
    assert length == 1 or (ids[0] == 256 and 256 not in ids[1:])


def test_a_tokenizer_that_makes_too_few_tokens() -> None:
    backend = Backend(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>"))  # a whole text is one unknown word
    with pytest.raises(StartError, match="cannot make a prompt of 2 tokens: of filler text it makes 1,"):
        make_prompt(Tokenizer(backend, SpecialTokens({}, [], [], [])), 2, 10, "tiny")
    nothing = Backend(models.BPE(vocab={}, merges=[]))
    with pytest.raises(StartError, match="makes 0,"):
        make_prompt(Tokenizer(nothing, SpecialTokens({}, [], [], [])), 2, 10, "tiny")


def test_a_tokenizer_that_fails() -> None:
    backend = Backend(models.WordLevel(vocab={}, unk_token="<unk>"))
    with pytest.raises(StartError, match="the tokenizer of tiny cannot read plain text: .*UNK"):
        make_prompt(Tokenizer(backend, SpecialTokens({}, [], [], [])), 2, 10, "tiny")


def test_a_tokenizer_of_another_model() -> None:
    with pytest.raises(StartError, match="outside the model's vocabulary of 100"):
        make_prompt(byte_tokenizer(), 10, 100, "tiny")


# -- progress ------------------------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved by hand."""
    moment = [1000.0]
    for module in (states, displays):
        monkeypatch.setattr(module.time, "monotonic", lambda: moment[0])
    return moment


def run(state: State, now: list[float], rounds: int, seconds: float) -> None:
    for _ in range(rounds):
        now[0] += seconds
        if not state.warming_up:
            state.batches[state.current].add_run((10, 8), seconds / 4, seconds / 2)
        state.end_round()


def test_time_left(now: list[float]) -> None:
    state = State(task_of("-b", "1,2,4", "-r", "3"))
    assert state.total_seconds_left() is None
    run(state, now, 1, 30.0)
    assert state.batch_seconds_left() == pytest.approx(3 * 30)
    run(state, now, 1, 1.0)  # the first round was slow: it is forgotten
    assert state.batch_seconds_left() == pytest.approx(2)
    now[0] += 0.25
    assert state.batch_seconds_left() == pytest.approx(1.75)
    now[0] -= 0.25
    run(state, now, 2, 1.0)
    state.start_batch(1)
    assert state.total_seconds_left() == pytest.approx(4 * 1.5 + 4 * 2.5)
    run(state, now, 4, 2.0)
    state.start_batch(2)
    assert state.total_seconds_left() == pytest.approx(4 * 4)  # on the line through 1 and 2 seconds
    assert state.total_share == pytest.approx(2 / 3) and state.num_finished == 2
    run(state, now, 2, 4.0)
    assert state.batch_share == 0.5 and state.total_share == pytest.approx(2.5 / 3)
    state.finish()
    assert state.total_share == 1 and state.total_seconds_left() == 0 and state.num_finished == 3


def test_lines_of_progress(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    state = State(task_of("-b", "1,2", "-r", "2", "-d", "8"))
    lines = ProgressLines(state)
    assert not lines.wants_turn(Moment.BETWEEN_ROUNDS)
    run(state, now, 2, 6.0)
    assert lines.wants_turn(Moment.BETWEEN_ROUNDS) and not lines.wants_turn(Moment.IN_A_STEP)
    lines.take_turn()
    assert not lines.wants_turn(Moment.BETWEEN_ROUNDS)
    run(state, now, 1, 6.0)
    state.start_batch(1)
    assert lines.wants_turn(Moment.BETWEEN_ROUNDS)
    lines.take_turn()
    run(state, now, 3, 7.0)
    state.finish()
    lines.finish()
    assert capsys.readouterr().err.split("\n") == [
        "batch size 1: round 2 of 3 (67%) [0 of 2 batch sizes, 0:33 left]",
        "batch size 1: prefill 1500.00 ms, decode 428.57 ms per token [1 of 2 batch sizes, 0:27 left]",
        "batch size 2: prefill 1750.00 ms, decode 500.00 ms per token [2 of 2 batch sizes]",
        "",
    ]


def test_clock() -> None:
    assert [describe_seconds(seconds) for seconds in (-1, 0.4, 65, 3599.6, 7384)] == [
        "0:00",
        "0:00",
        "1:05",
        "1:00:00",
        "2:03:04",
    ]


# -- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "keys", "rest"),
    [
        (b"\x1b[C\x1b[D\t", ["right", "left", "right"], b""),
        (b"\x1bOC\x1bOD\x1b[Z", ["right", "left", "left"], b""),
        (b"+=-qQ\x03", ["+", "+", "-", "q", "q", "ctrl-c"], b""),
        (b"xyz\xc3\xa9\x1b[1;5C\x1b[3~", [], b""),  # keys that mean nothing
        (b"q\x1b", ["q"], b"\x1b"),  # the rest may come later
        (b"\x1b[", [], b"\x1b["),
        (b"\x1b[1;", [], b"\x1b[1;"),
        (b"\x1bq", ["q"], b""),  # the escape key, then q
        (b"", [], b""),
    ],
)
def test_keys(typed: bytes, keys: list[str], rest: bytes) -> None:
    assert split_keys(typed) == (keys, rest)


def test_looking_around() -> None:
    look = Look()
    assert look.press("left", 3) and look.tab == 2 and not look.follows
    assert look.press("right", 3) and look.tab == 0
    assert look.press("+", 3) and look.zoom and not look.press("+", 3)
    assert look.press("-", 3) and not look.zoom


# -- charts --------------------------------------------------------------------------------------------------------


def test_bins() -> None:
    assert count_bins([1.0, 1.4, 2.0, 2.6, 3.0], 4) == ([2, 0, 1, 2], 1.0, 3.0)
    assert count_bins([5.0] * 7, 3) == ([0, 7, 0], 5.0, 5.0)


def test_histogram() -> None:
    lines = [line.plain for line in histogram([10.0] * 8 + [11.0, 12.5] + [14.0] * 4, 40, 10, "cyan")]
    assert all(len(line) == 40 for line in lines)
    assert lines[0].split() == ["8"]  # above the tallest bar
    assert lines[-2].count("█") > lines[1].count("█") > 0
    assert lines[-1].startswith("10 ms") and lines[-1].endswith("14 ms")
    assert "no runs yet" in "".join(line.plain for line in histogram([], 40, 5, "cyan"))
    same = [line.plain for line in histogram([7.0] * 3, 41, 6, "cyan")]
    assert same[-2].strip(" ") == "███████" and same[-1].strip() == "7 ms"


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 100, 6, [0, 20, 40, 60, 80, 100]),
        (0, 2600, 2, [0, 3000]),
        (12.6, 29.8, 5, [10, 15, 20, 25, 30]),
        (0, 0.0031, 4, [0, 0.002, 0.004]),
    ],
)
def test_ticks(low: float, high: float, most: int, expected: list[float]) -> None:
    assert ticks(low, high, most) == pytest.approx(expected)


def test_ticks_of_a_single_value() -> None:
    found = ticks(50, 50, 5)
    assert found[0] < 50 < found[-1]
    assert ticks(0, 0, 2)[0] < ticks(0, 0, 2)[-1]


def test_short_numbers() -> None:
    values = [0, 0.0314, 4.25, 98.12, 512.3, 999.9, 1234, 35_000, 99_960, 123_456, 1.25e6, 4e9, 1e15]
    expected = "0 0.0314 4.25 98.1 512 1k 1.23k 35k 100k 123k 1.25M 4G 1e+15"
    assert [short(value, 3) for value in values] == expected.split()


def test_scatter() -> None:
    points = [NamedPoint(10, 100, "1", False), NamedPoint(20, 150, "2", True), NamedPoint(40, 190, "4", False)]
    whole = [line.plain for line in scatter(points, 60, 16, "cyan", False, "ms")]
    assert len(whole) == 16 and all(len(line) == 60 for line in whole)
    assert whole[0].startswith("200 ┤") and whole[13].startswith("  0 ┤")
    assert whole[-1].split() == ["0", "10", "20", "30", "40", "ms"]
    text = "\n".join(whole)
    assert text.count("●") == 2 and text.count("◆") == 1
    assert whole[0].rindex("●") > whole[3].index("◆") > whole[6].index("●")  # more is higher up and to the right
    zoomed = [line.plain for line in scatter(points, 60, 16, "cyan", True, "ms")]
    assert zoomed[13].startswith("    │") and zoomed[-1].split() == ["10", "20", "30", "40", "ms"]
    assert any(0x2800 < ord(character) < 0x2900 for character in text)  # the points are joined
    assert "no batch size is done yet" in "".join(line.plain for line in scatter([], 60, 16, "cyan", True, "ms"))


def test_names_of_points_do_not_run_together() -> None:
    points = [NamedPoint(10 + number, 100 + number, str(10 + number), False) for number in range(12)]
    for line in scatter(points, 70, 12, "cyan", False, "ms")[:-1]:
        for word in line.plain.split("┤")[-1].replace("●", " ").split():
            digits = "".join(character for character in word if character.isdigit())
            assert len(digits) in (0, 2), word


# -- the screen ----------------------------------------------------------------------------------------------------


def lines_of(state: State, look: Look, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height)
    drawn = console.render_lines(draw(state, look, width, height), console.options.update_dimensions(width, height))
    return ["".join(segment.text for segment in line) for line in drawn]


def shown(state: State, look: Look, width: int = 80, height: int = 24) -> str:
    return "\n".join(lines_of(state, look, width, height))


@pytest.fixture
def measured(now: list[float]) -> State:
    state = State(task_of("-r", "4"), about="cpu, float32")
    for index in range(3):
        state.start_batch(index)
        run(state, now, 5, 0.5 + index)
    state.start_batch(3)
    run(state, now, 3, 4.0)
    return state


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (120, 30), (300, 100)])
def test_everything_is_on_the_screen(measured: State, width: int, height: int) -> None:
    text = shown(measured, Look(), width, height)
    words = ["Model: embedded | Sequence Length: 10 | Decode Length: 8", "Total Progress", "Batch Progress"]
    words += ["1 ✓", "2 ✓", "4 ✓", "8 ●", "32", "3 / 6", "2 / 4", " left", "quit", "zoom"]
    words += ["Prefill", "Decode Total", "Decode Token", "tokens/secs", "Average", "Lowest", "Highest"]
    words += ["p50", "p90", "p99", "Prefill latency", "Decode Token latency"]
    words += ["Prefill throughput over latency", "Decode throughput over latency", "█", "●", "┤", "└"]
    for word in words:
        assert word in text, word
    assert "1000.00 ms" in text and "285.71 ms" in text  # of the batch size at work


def test_any_size_is_filled_exactly(measured: State) -> None:
    empty = State(task_of("-b", ",".join(str(size) for size in range(1, 60))))
    finished = State(task_of("-b", "3", "-r", "1"))
    finished.finish()
    for width in (1, 2, 5, 11, 23, 40, 49, 50, 59, 60, 79, 80, 81, 133, 250):
        for height in (1, 2, 3, 5, 8, 11, 12, 15, 16, 19, 22, 23, 24, 25, 33, 61):
            for state in (measured, empty, finished):
                lines = lines_of(state, Look(), width, height)
                assert len(lines) == height and {cell_len(line) for line in lines} == {width}


def test_tabs(measured: State) -> None:
    assert "1000.00 ms" in shown(measured, Look())
    assert "125.00 ms" in shown(measured, Look(tab=0, follows=False))
    waiting = shown(measured, Look(tab=5, follows=False))
    assert waiting.count("no runs yet") == 2 and "125.00 ms" not in waiting


def test_many_tabs_show_those_around_the_chosen_one() -> None:
    state = State(task_of("-b", ",".join(str(size) for size in range(100, 160))))
    line = shown(state, Look(tab=30, follows=False)).split("\n")[1]
    assert " 130 " in line and " 129 " in line and " 131 " in line and "‹" in line and "›" in line
    assert " 100 " not in line and " 159 " not in line


def test_zoom(measured: State) -> None:
    axis = shown(measured, Look()).split("\n")[-2]
    zoomed = shown(measured, Look(zoom=True)).split("\n")[-2]
    assert axis.split()[0] == "0" and zoomed.split()[0] != "0"


def test_phases(now: list[float]) -> None:
    state = State(task_of("-w", "2", "-r", "1", "-b", "1"))
    assert "warm-up 1 / 2" in shown(state, Look()) and "left" not in shown(state, Look())
    run(state, now, 3, 1.0)
    state.batches[0].prefill_steps = 5
    assert "prefill in 5 steps" in shown(state, Look())
    state.finish()
    text = shown(state, Look())
    assert "finished: q prints the tables" in text and "1 / 1" in text and "100%" in text


def test_wide_characters_in_a_name(tmp_path: Path) -> None:
    state = State(read_task(["-t", "模型" * 60], {}, PROG))
    assert {cell_len(line) for line in lines_of(state, Look())} == {80}
