"""Starts an engine in this process and takes it through the batch sizes of `text-generation-benchmark`."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from text_generation_inference.bench import report as reports
from text_generation_inference.bench.static.batch_run import make_requests, run_batch
from text_generation_inference.bench.static.display import Display, Moment, ProgressLines, Quit
from text_generation_inference.bench.static.prompt import make_prompt
from text_generation_inference.bench.static.results import StaticReport
from text_generation_inference.bench.static.screen import Screen
from text_generation_inference.bench.static.state import State
from text_generation_inference.bench.static.tables import all_tables
from text_generation_inference.bench.static.task import StaticTask
from text_generation_inference.bench.static.terminal import has_terminal
from text_generation_inference.bench.tables import show
from text_generation_inference.config import ServerConfig, least_blocks
from text_generation_inference.devices.hardware import describe_hardware, memory_bytes
from text_generation_inference.engine import warm_up as engine_warm_up
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.models.model import Model
from text_generation_inference.models.registry import build, read_config
from text_generation_inference.progress import StageBars
from text_generation_inference.quant.method import Matrix
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.weights.source import find_model

_SLACK_TOKENS = 32  # two blocks for each request: a cache that is just large enough lets fewer in
_STEP_SHARE = 0.25  # of the memory, what the values of one prefill step may take
_EXIT_SIGNALLED = 128  # and the number of the signal
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_static(task: StaticTask) -> int:
    """The exit status. Ctrl-C, q and SIGTERM end it with what was measured so far."""
    if task.json_path is not None:
        reports.check_writable(task.json_path)
    for note in task.notes:
        _say(f"note: {note}")
    with StageBars(enabled=not task.quiet) as bars:
        source = find_model(ServerConfig(**{**task.settings, "model_id": task.model}), bars.update)
        model = build(read_config(source.path))
        config = make_config(task, model, memory_bytes(task.settings.get("device", "auto")))
        prompt = make_prompt(Tokenizer.load(source.path), task.sequence_length, model.vocab_size, task.model)
        engine = start_engine(config, bars.update)
        try:
            check_cache(task, engine)
            engine_warm_up.warm_up(engine, grammars=False)
        except BaseException:
            engine.close()
            raise
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        return _measure(task, config, engine, prompt)
    finally:
        engine.close()
        signal.signal(signal.SIGINT, on_interrupt)


def make_config(task: StaticTask, model: Model, memory: int) -> ServerConfig:
    """As asked; what was not is as large as the batches need, so that each is computed whole and at once."""
    length = task.sequence_length + task.decode_length
    if length > model.max_positions:
        raise StartError(
            f"--sequence-length {task.sequence_length} and --decode-length {task.decode_length} make {length} tokens,"
            f" {task.model} has {model.max_positions} positions: shorten them"
        )
    largest, longest = max(task.batch_sizes), min(model.max_positions, length + _SLACK_TOKENS)
    most = max(longest, int(memory * _STEP_SHARE) // step_bytes_per_token(model))
    derived = {
        "max_total_tokens": longest,
        "max_batch_size": largest,
        "max_step_ms": 0,
        "max_batch_prefill_tokens": min(
            most, max(longest, largest * task.sequence_length), task.settings.get("max_batch_total_tokens") or most
        ),
    }
    return ServerConfig(**{**derived, **task.settings, "model_id": task.model})


def step_bytes_per_token(model: Model) -> int:
    """What a token of a prefill step takes beside the KV cache, roughly and rather too much: what the matrices of a
    layer put out, twice, and the stream they add to."""
    found = [module for _, module in model.walk() if isinstance(module, Matrix)]
    matrices = [matrix for matrix in found if matrix.may_round and not matrix.only_as_stored]
    outputs = sum(matrix.outputs_per_token for matrix in matrices) // len(model.caches(torch.float32))
    return 4 * 2 * (outputs + matrices[-1].outputs_per_token)


def check_cache(task: StaticTask, engine: Engine) -> None:
    """Raise `ResourceError` if the largest batch does not fit the KV cache: a part of it is no static batch."""
    resolved, size, num_blocks = engine.resolved, engine.resolved.block_size, engine.resolved.num_blocks - 1
    blocks = max(-(-task.sequence_length // size) + 1, -(-(task.sequence_length + task.decode_length) // size))
    if resolved.partial_window is not None:  # windows of all, and their prompts, which are computed in one step
        held = least_blocks(resolved.partial_window, size) + 1
        prompts = -(-resolved.max_batch_prefill_tokens // size)
        needed = min(blocks * max(task.batch_sizes), held * max(task.batch_sizes) + prompts)
        if needed > resolved.num_window_blocks - 1:
            raise ResourceError(
                f"a batch of {max(task.batch_sizes)} needs {needed * size} tokens in layers that read a window, which"
                f" have room for {(resolved.num_window_blocks - 1) * size}"
            )
    if max(task.batch_sizes) * blocks > num_blocks:
        raise ResourceError(
            f"a batch of {max(task.batch_sizes)} needs {max(task.batch_sizes) * blocks * size} tokens in the KV cache,"
            f" which has room for {num_blocks * size}: at most --batch-size {num_blocks // blocks} fits"
        )


def _start_report(task: StaticTask, config: ServerConfig, engine: Engine) -> StaticReport:
    return StaticReport(
        benchmark="static",
        model=task.model,
        configuration={**dict(config.__rich_repr__()), **task.sampling.given(), "batch_sizes": task.batch_sizes},
        **reports.describe_origin(describe_hardware(engine.rank.device)),
        sequence_length=task.sequence_length,
        decode_length=task.decode_length,
        runs=task.runs,
        warmups=task.warmups,
        notes=engine.notes,
    )


def _measure(task: StaticTask, config: ServerConfig, engine: Engine, prompt: list[int]) -> int:
    state = State(task, about=f"{engine.rank.device.name}, {config.quantize or engine.facts.dtype}")
    report = _start_report(task, config, engine)

    def save() -> None:
        report.batches = [batch for batch in state.batches if batch.prefill_ms]
        if task.json_path is not None:
            reports.write_report(report, task.json_path)

    ended = 0  # the signal that ended it
    quit_early = False
    try:
        with _terminating() as signals, _make_display(task, state) as display:
            try:
                _run_batches(task, engine, prompt, state, display, save)
                report.complete = True
                save()
                display.finish()
            except Quit:
                quit_early = not report.complete
            except KeyboardInterrupt:
                ended = 0 if report.complete else signals[0] if signals else signal.SIGINT
    finally:  # whatever ended it, what was measured is shown and kept
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rest is short
        try:
            save()
        finally:
            if report.batches:
                show(all_tables(task, report.batches))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a step in flight is waited for; Ctrl-C need not
    if ended or quit_early:
        _say(f"ended early: {_describe_progress(state)}")
    for batch in report.batches:
        if batch.prefill_steps > 1:
            _say(f"note: {_describe_steps(batch.batch_size, batch.prefill_steps, engine)}")
    return _EXIT_SIGNALLED + ended if ended else 0


def _run_batches(
    task: StaticTask, engine: Engine, prompt: list[int], state: State, display: Display, save: Callable[[], None]
) -> None:
    lengths = (task.sequence_length, task.decode_length)
    for index, batch in enumerate(state.batches):
        state.start_batch(index)
        requests = make_requests(prompt, batch.batch_size, task.decode_length, task.sampling.params())
        for number in range(state.rounds_per_batch):
            if display.wants_turn(Moment.BETWEEN_ROUNDS):
                display.take_turn()
            done = run_batch(engine.loop, requests, display)
            if number >= task.warmups:
                batch.add_run(lengths, done.prefill_seconds, done.decode_seconds)
                batch.prefill_steps = max(batch.prefill_steps, done.prefill_steps)
            state.end_round()
        save()
    state.finish()


def _make_display(task: StaticTask, state: State) -> Display:
    if task.quiet:
        return Display()
    return Screen(state) if has_terminal() and not task.plain else ProgressLines(state)


@contextmanager
def _terminating() -> Iterator[list[int]]:
    """Inside, SIGTERM and SIGHUP end the measurement as Ctrl-C does. Holds those that came.

    A signal that was ignored before stays so: a shell has a job in the background ignore Ctrl-C, and nohup SIGHUP.
    """
    came: list[int] = []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _ENDING}

    def end(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            came.append(number)
            signal.raise_signal(signal.SIGINT)  # which may be put off: see `uninterrupted`
        elif came or before[number] != signal.SIG_IGN:
            raise KeyboardInterrupt

    for number, action in before.items():
        if action != signal.SIG_IGN or number == signal.SIGINT:
            signal.signal(number, end)
    try:
        yield came
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr)


def _describe_progress(state: State) -> str:
    done = f"{state.num_finished} of {len(state.batches)} batch sizes were measured"
    if state.finished or not state.batches[state.current].prefill_ms:
        return done
    batch = state.batches[state.current]
    return f"{done}, and {len(batch.prefill_ms)} of {state.task.runs} runs of batch size {batch.batch_size}"


def _describe_steps(batch_size: int, num_steps: int, engine: Engine) -> str:
    return (
        f"the prefill of batch size {batch_size} took {num_steps} steps of at most"
        f" {engine.resolved.max_batch_prefill_tokens} tokens; requests that had their first token decoded meanwhile"
    )
