"""`text-generation-benchmark` as a user has it: in a terminal of its own, and without one."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from bench_samples import TINY_CONFIG
from text_generation_inference.bench.floor import FloorModel, find_rates
from text_generation_inference.bench.static import batch_run
from text_generation_inference.bench.static.batch_run import make_requests, run_batch
from text_generation_inference.bench.static.command import main
from text_generation_inference.bench.static.display import Display, Moment
from text_generation_inference.bench.static.run import _terminating
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.errors import EngineError
from text_generation_inference.types import SamplingParams

MAIN = "import sys; from text_generation_inference.bench.static.command import main; sys.exit(main())"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config without weights, and a tokenizer with a token for each byte."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def bench(tiny: Path, one_thread: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process: (exit status, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["-t", str(tiny), "--load-format", "dummy", "--device", "cpu", *arguments])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


# -- without a terminal --------------------------------------------------------------------------------------------


def test_the_embedded_model(model_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["-t", "embedded", "--device", "cpu", "-b", "1", "-b", "3", "-s", "16", "-d", "5", "-r", "2"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *arguments, "--json", str(file)],
        env={**os.environ, "TGI_CACHE_DIR": str(model_cache)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "batch size 1: prefill" in done.stderr and "[2 of 2 batch sizes]" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    parameters, latency, throughput = done.stdout.strip().split("\n\n")
    assert "| Model              | embedded |" in parameters
    assert [line.split("|")[1].strip() for line in latency.split("\n")[2:]] == [
        *("Prefill", "", "Decode (token)", "", "Decode (total)", "")
    ]
    assert [line.split("|")[2].strip() for line in throughput.split("\n")[2:]] == ["1", "3"] * 2
    found = json.loads(file.read_text())
    assert found["complete"] and found["benchmark"] == "static" and found["model"] == "embedded"
    assert (found["sequence_length"], found["decode_length"], found["runs"], found["warmups"]) == (16, 5, 2, 1)
    assert found["configuration"]["batch_sizes"] == [1, 3] and found["hardware"]["device"] == "cpu"
    for batch, size in zip(found["batches"], (1, 3), strict=True):
        assert batch["batch_size"] == size and batch["prefill_steps"] == 1
        for run in range(2):
            prefill, decode = batch["prefill_ms"][run] / 1e3, batch["decode_total_ms"][run] / 1e3
            assert prefill > 0 and decode > 0
            assert batch["prefill_tokens_per_s"][run] == pytest.approx(size * 16 / prefill, rel=1e-3)
            assert batch["decode_token_ms"][run] == pytest.approx(1e3 * decode / 4, rel=1e-3)
            assert batch["decode_tokens_per_s"][run] == pytest.approx(size * 4 / decode, rel=1e-3)


def test_quiet_and_sampled(bench: Callable[..., tuple[int, str, str]]) -> None:
    sampling = [
        "--temperature",
        "0.7",
        "--top-k",
        "5",
        "--watermark",
        "--top-n-tokens",
        "3",
        "--repetition-penalty",
        "2",
    ]
    status, out, told = bench("-b", "2", "-r", "2", "-w", "0", "--quiet", *sampling)
    assert status == 0 and told == ""
    assert "| Temperature        | Some(0.7)" in out and "| Watermark          | true" in out
    assert "| Top N Tokens       | Some(3)" in out and "| Do Sample          | false" in out


def test_a_prefill_in_several_steps_is_told(bench: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    limits = ["-b", "4", "-s", "100", "-r", "1", "--max-batch-prefill-tokens", "160"]
    status, _, told = bench(*limits, "--json", str(tmp_path / "report.json"))
    assert status == 0
    assert "note: the prefill of batch size 4 took 3 steps of at most 160 tokens" in told
    assert json.loads((tmp_path / "report.json").read_text())["batches"][0]["prefill_steps"] == 3


def test_a_socket_is_answered_with_a_word(bench: Callable[..., tuple[int, str, str]]) -> None:
    status, out, told = bench("-b", "1", "-r", "1", "-d", "1", "-m", "/tmp/text-generation-server-0")
    assert status == 0 and told.startswith(
        "note: --master-shard-uds-path has no effect: the engine runs in this process"
    )
    assert "| Decode (total) | 1          | NaN ms" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-s", "500", "-d", "13"], "make 513 tokens"),
        (["-b", "8", "--max-batch-total-tokens", "64"], "at most --batch-size 2 fits"),
        (["--json", "/nowhere/report.json"], "cannot write to /nowhere"),
        (["--device", "tpu"], "tpu"),
        (["-t", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_errors_are_one_line(bench: Callable[..., tuple[int, str, str]], arguments: list[str], text: str) -> None:
    status, out, told = bench("--quiet", *arguments)
    assert status == 1 and out == ""
    assert told.startswith("error: ") and told.count("\n") == 1 and text in told


def test_a_model_without_a_tokenizer(bench: Callable[..., tuple[int, str, str]], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    status, _, told = bench("--quiet", "-t", str(tmp_path))
    assert status == 1 and told.startswith("error: ") and "tokenizer.json" in told and told.count("\n") == 1


# -- the clock -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny: Path, one_thread: None) -> Iterator[Engine]:
    settings: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "prefix_caching": False}
    running = start_engine(ServerConfig(model_id=str(tiny), max_total_tokens=128, max_batch_size=4, **settings))
    yield running
    running.close()


class FakeTime:
    """A second for every look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


class Slow(Display):
    """Wants a turn after every step, and takes a million seconds for it."""

    def __init__(self, clock: FakeTime) -> None:
        self.clock, self.num_turns = clock, 0

    def wants_turn(self, moment: Moment) -> bool:
        return moment is Moment.BETWEEN_STEPS

    def take_turn(self) -> None:
        self.num_turns += 1
        self.clock.now += 1e6


def test_the_clock_stands_still_while_the_screen_is_drawn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(batch_run, "time", clock)
    display = Slow(clock)
    requests = make_requests(list(range(10)), 3, 6, SamplingParams())
    done = run_batch(engine.loop, requests, display)
    assert display.num_turns == 5 and clock.now > 5e6
    assert 0 < done.prefill_seconds < 100 and 0 < done.decode_seconds < 100 and done.prefill_steps == 1


def test_nothing_of_a_batch_stays_in_the_engine(engine: Engine) -> None:
    class Impatient(Display):
        def wants_turn(self, moment: Moment) -> bool:
            raise KeyboardInterrupt

    requests = make_requests(list(range(10)), 3, 6, SamplingParams())
    with pytest.raises(KeyboardInterrupt):
        run_batch(engine.loop, requests, Impatient())
    done = run_batch(engine.loop, requests, Display())
    assert done.prefill_steps == 1 and not engine.loop.has_work
    engine.loop.scheduler.check()


def test_a_failed_request_ends_it(engine: Engine) -> None:
    bad = make_requests([0] * 10, 1, 6, SamplingParams(logit_bias={0: float("nan")}))
    with pytest.raises(EngineError):
        run_batch(engine.loop, bad, Display())


def test_the_floor_finds_the_matrices_of_a_model(engine: Engine) -> None:
    """What it looks for in a loaded model is there; a GPU is needed only to time them."""
    model = FloorModel.of(engine, find_rates("NVIDIA H200"))
    assert [tuple(matrix.shape) for matrix in model.layers] == 2 * [(128, 64), (64, 64), (192, 64), (64, 96)]
    assert tuple(model.head.shape) == (320, 64) and model.query_width == 2 * 64
    assert model.cache_bytes(10) == 2 * 10 * 2 * 2 * 16 * 4


def test_signals() -> None:
    with _terminating() as came, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert came == []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a job in the background has it
    try:
        with _terminating() as came:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


# -- in a terminal -------------------------------------------------------------------------------------------------

# The terminal becomes its own, as a shell's would; then a line of arguments for each run.
PROGRAM = """
import fcntl, json, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from text_generation_inference.bench.static.command import main
import torch
torch.set_num_threads(1)
print("ready", flush=True)
while line := sys.stdin.readline():
    print("exit", main(json.loads(line)), flush=True)
"""
_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([@-~])")


class Terminal:
    """A pseudo-terminal with the command in it, and what is on its screen."""

    def __init__(self, output: Path, columns: int = 80, rows: int = 24) -> None:
        self._controller, self._tty = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self._tty)
        self.output = output
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=self._tty,
                stdout=file,
                stderr=self._tty,
                env={**environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        self.received = b""
        self.alternate = False
        self.cursor = True
        self.screen: list[str] = []
        self.wait(lambda: b"ready" in self.output.read_bytes())

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._tty, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def start(self, *arguments: str) -> None:
        self.type(json.dumps(arguments).encode() + b"\n")

    def type(self, keys: bytes) -> None:
        os.write(self._controller, keys)

    @property
    def text(self) -> str:
        return "\n".join(self.screen)

    @property
    def shows_runs(self) -> bool:
        return self.alternate and re.search(r"Average +[0-9.]+ ms", self.text) is not None

    def is_full(self, columns: int, rows: int) -> bool:
        return len(self.screen) == rows and {len(line) for line in self.screen} == {columns}

    def wait(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Take what is drawn until the condition holds."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{self.text}\n{self.output.read_text()}"
            assert self.process.poll() is None, self.output.read_text()
            if select.select([self._controller], [], [], 0.05)[0]:
                self.received += os.read(self._controller, 65536)
                self._replay()

    def wait_for_exit(self, runs: int) -> tuple[int, str]:
        """(status, output) of the last of so many runs."""
        self.wait(lambda: self.output.read_text().count("exit ") == runs)
        before, _, status = self.output.read_text().rstrip("\n").rpartition("exit ")
        return int(status), before.rpartition("exit ")[2]

    def assert_restored(self) -> None:
        assert termios.tcgetattr(self._tty) == self.modes
        assert not self.alternate and self.cursor

    def close_window(self) -> None:
        os.close(self._tty)
        os.close(self._controller)

    def _replay(self) -> None:
        """Everything that came so far onto an empty screen: enough of a terminal for what is drawn here."""
        text = self.received.decode(errors="ignore")
        begin = text.rfind("\x1b[H")  # each frame starts there and covers everything
        for parameters, letter in _SEQUENCE.findall(text):
            if parameters == "?1049":
                self.alternate = letter == "h"
            elif parameters == "?25":
                self.cursor = letter == "h"
        if begin >= 0 and self.alternate:
            self.screen = _SEQUENCE.sub("", text[begin:]).replace("\r", "").split("\n")


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    started = Terminal(tmp_path_factory.mktemp("terminal") / "output")
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


def test_in_a_terminal(terminal: Terminal, tiny: Path, tmp_path: Path) -> None:
    """One process, because it takes seconds to start: keys and q, Ctrl-C, SIGTERM, a run to its end, a closed window."""
    model = ["-t", str(tiny), "--load-format", "dummy", "--device", "cpu"]
    long = [*model, "-b", "1,2,4", "-d", "64", "-r", "4000"]

    # keys and a new size, then q
    terminal.start(*long)
    terminal.wait(lambda: terminal.shows_runs and terminal.is_full(80, 24))
    assert terminal.alternate and not terminal.cursor
    for words in (
        "Sequence Length: 10 | Decode Length: 64",
        "1 ●",
        "Total Progress",
        " left",
        "Decode Total",
        "/ 4000",
    ):
        assert words in terminal.text
    terminal.type(b"\x1b[C")  # right: a batch size that waits
    terminal.wait(lambda: "no runs yet" in terminal.text)
    terminal.type(b"\x1b[D")
    terminal.wait(lambda: "no runs yet" not in terminal.text)
    terminal.type(b"\t")
    terminal.wait(lambda: "no runs yet" in terminal.text)
    terminal.type(b"\x1b[Z+-xyz")
    terminal.wait(lambda: "no runs yet" not in terminal.text)
    terminal.type(b"\x1a\x1c")  # Ctrl-Z and Ctrl-\\ do nothing
    for columns, rows in ((133, 41), (30, 7), (80, 24)):
        terminal.resize(columns, rows)
        terminal.wait(partial(terminal.is_full, columns, rows))
    terminal.type(b"q")
    status, out = terminal.wait_for_exit(1)
    terminal.wait(lambda: not terminal.alternate and terminal.cursor)
    terminal.assert_restored()
    assert status == 0
    assert "| Prefill        | 1          |" in out and "|                | 2" not in out
    terminal.wait(lambda: b"ended early: 0 of 3 batch sizes were measured, and " in terminal.received)

    # Ctrl-C
    file = tmp_path / "report.json"
    terminal.start(*long, "--json", str(file))
    terminal.wait(lambda: terminal.shows_runs)
    terminal.type(b"\x03")
    status, out = terminal.wait_for_exit(2)
    terminal.wait(lambda: not terminal.alternate and terminal.cursor)
    terminal.assert_restored()
    assert status == 130 and "| Decode  | 1          |" in out
    found = json.loads(file.read_text())
    assert not found["complete"] and [batch["batch_size"] for batch in found["batches"]] == [1]
    assert 0 < len(found["batches"][0]["prefill_ms"]) < 4000

    # to the end: the screen stays until it was seen
    terminal.start(*model, "-b", "1,2", "-r", "3", "--json", str(file))
    terminal.wait(lambda: terminal.alternate and "finished: q prints the tables" in terminal.text)
    assert "1 ✓" in terminal.text and "2 ✓" in terminal.text and "2 / 2" in terminal.text and "●" in terminal.text
    zoom_off = terminal.text
    terminal.type(b"+")
    terminal.wait(lambda: terminal.text != zoom_off)
    terminal.type(b"-")
    terminal.wait(lambda: terminal.text == zoom_off)
    assert json.loads(file.read_text())["complete"]
    terminal.type(b"\x03")
    status, out = terminal.wait_for_exit(3)
    terminal.wait(lambda: not terminal.alternate and terminal.cursor)
    terminal.assert_restored()
    assert status == 0 and "|                | 2          |" in out

    # SIGTERM
    terminal.start(*long)
    terminal.wait(lambda: terminal.shows_runs)
    terminal.process.send_signal(signal.SIGTERM)
    status, out = terminal.wait_for_exit(4)
    terminal.wait(lambda: not terminal.alternate and terminal.cursor)
    terminal.assert_restored()
    assert status == 143 and "| Prefill        | 1          |" in out

    # lines if they are asked for
    terminal.start(*model, "-b", "1", "-r", "1", "--plain")
    status, _ = terminal.wait_for_exit(5)
    terminal.wait(lambda: b"[1 of 1 batch sizes]" in terminal.received)
    assert status == 0 and not terminal.alternate

    # the window is closed
    file.unlink()
    terminal.start(*long, "--json", str(file))
    terminal.wait(lambda: terminal.shows_runs)
    terminal.close_window()
    assert terminal.process.wait(timeout=60) is not None
    assert "| Prefill        | 1          |" in terminal.output.read_text().rpartition("exit")[0][-3000:]
    assert terminal.output.read_text().rstrip().endswith("exit 129")
    assert not json.loads(file.read_text())["complete"]
