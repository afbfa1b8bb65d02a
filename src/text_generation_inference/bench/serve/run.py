"""One run of `tgi bench serve`, from the first question to the server to the last table."""

import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from text_generation_inference.bench import report as reports
from text_generation_inference.bench.command_line import EXIT_ERROR, EXIT_INTERRUPTED
from text_generation_inference.bench.row_progress import StatusLines, describe_seconds, draw_bar
from text_generation_inference.bench.serve.apis import ApiCall
from text_generation_inference.bench.serve.client_pool import ClientPool, LoadProgress
from text_generation_inference.bench.serve.command import ServeTask
from text_generation_inference.bench.serve.messages import Settings
from text_generation_inference.bench.serve.modes import PhasePlan, PromptSource, Session, steps_of
from text_generation_inference.bench.serve.prompts import Counter, FilePrompts, PromptMaker, read_prompts
from text_generation_inference.bench.serve.results import Phase, ServeReport
from text_generation_inference.bench.serve.tables import error_lines, limit_line, tables
from text_generation_inference.bench.serve.target import Server, Target, ask_server, choose_call, find_target
from text_generation_inference.bench.serve.vocabulary import load_tokenizer
from text_generation_inference.bench.tables import show
from text_generation_inference.errors import StartError

_SECONDS_BETWEEN_WORDS = 0.25


def run_serve(task: ServeTask) -> int:
    """The exit status. Ctrl-C ends it with what was measured so far."""
    if task.json_path is not None:
        reports.check_writable(task.json_path)
    lines = StatusLines(task.quiet)
    seed = secrets.randbelow(2**32) if task.seed is None else task.seed
    target = find_target(task.url, task.api_key)
    server = ask_server(target)
    lines.pass_by("a first request")
    call = choose_call(target, server, task.api, task.model_name, task.ignore_eos, task.timeout_s)
    lines.pass_by("preparing prompts")
    tokenizer_name, prompts = _make_prompts(task, server, call, seed)
    report = _start_report(task, target, server, call, tokenizer_name, seed)
    settings = Settings(address=target.address, api=call.api, timeout_s=task.timeout_s)
    with ClientPool(settings, task.client_processes) as pool, _noted_interrupts() as is_stopped:
        session = Session(pool, target, call, prompts, seed, task.limits_ms, task.details)
        return _run_phases(task, session, report, lines, is_stopped)


def _run_phases(
    task: ServeTask, session: Session, report: ServeReport, lines: StatusLines, is_stopped: Callable[[], bool]
) -> int:
    interrupted = False
    problem: StartError | None = None
    _save(task, report)
    try:
        for number, step in enumerate(steps_of(task.modes, lambda: report.phases[-1] if report.phases else None)):
            progress = _PhaseProgress(task, step, number, lines)
            phase, interrupted = session.run(step, progress.tell, is_stopped)
            if not interrupted or phase.num_successful or phase.num_failed:
                report.phases.append(phase)
            report.notes = _notes(report, session, task)
            _save(task, report)
            lines.say(_describe(phase))
            for line in error_lines(phase):
                lines.say(f"  {line}")
            if interrupted:
                break
        report.complete = not interrupted
        _save(task, report)
    except StartError as error:
        problem = error
    finally:  # whatever ended it, what was measured is shown
        lines.clear()
        if report.phases:
            show(tables(report.phases))
    succeeded = any(phase.num_successful for phase in report.phases)
    for note in report.notes if succeeded else []:
        print(f"note: {note}", file=sys.stderr)
    if interrupted:
        print(f"interrupted: {len(report.phases)} of {task.modes.num_phases()} phases", file=sys.stderr)
        return EXIT_INTERRUPTED
    if problem is not None or not succeeded:
        counts: dict[str, int] = {}
        for phase in report.phases:
            for error, count in phase.errors.items():
                counts[error] = counts.get(error, 0) + count
        why = f" ({max(counts, key=lambda error: counts[error])})" if counts else ""
        print(f"error: {problem or 'no request succeeded'}{why}", file=sys.stderr)
        return EXIT_ERROR
    return 0


@contextmanager
def _noted_interrupts() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is noted, so that the phase can be ended in order; the second ends the command at once."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


# -- prompts -------------------------------------------------------------------------------------------------------


def _make_prompts(task: ServeTask, server: Server, call: ApiCall, seed: int) -> tuple[str, PromptSource]:
    """The name of the tokenizer, and where prompts come from."""
    needs_tokenizer = task.prompts_path is None or task.prompt_is_given
    name = task.tokenizer or (server.model if needs_tokenizer else None)
    if name is None and needs_tokenizer:
        raise StartError("the server does not name its model: say with --tokenizer whose tokens to count")
    counter = None
    if name is not None:
        counter = Counter(load_tokenizer(name, task.revision), with_special_tokens=call.api != "chat")
    if task.prompts_path is not None:
        lengths = task.prompt if task.prompt_is_given else None
        found = read_prompts(task.prompts_path, counter, lengths, task.output, seed)
        longest = max(found, key=lambda prompt: (prompt.num_tokens or 0) + prompt.max_new_tokens)
        _check_room(server, longest.num_tokens or 0, longest.max_new_tokens)
        return name or "", FilePrompts(found, seed)
    assert counter is not None and name is not None
    _check_room(server, task.prompt.highest, task.output.highest)
    if task.prompt.lowest <= counter.num_around:
        raise StartError(
            f"tokenizer {name} puts {counter.num_around} tokens around every text:"
            f" it cannot make a prompt of {task.prompt.lowest} tokens"
        )
    return name, PromptMaker(counter, task.prompt, task.output, seed, task.shared_prefix, name)


def _check_room(server: Server, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse what the server says it will refuse."""
    shorter = "ask for less with --prompt-tokens and --max-new-tokens"
    most_input, most = (server.facts.get(name) for name in ("max_input_tokens", "max_total_tokens"))
    if isinstance(most, int) and prompt_tokens + new_tokens > most:
        raise StartError(
            f"requests of up to {prompt_tokens} + {new_tokens} tokens do not fit the server, which takes {most}"
            f" (max_total_tokens): {shorter}"
        )
    if isinstance(most_input, int) and prompt_tokens > most_input:
        raise StartError(
            f"prompts of up to {prompt_tokens} tokens do not fit the server, which takes {most_input}"
            f" (max_input_tokens): {shorter}"
        )


# -- the report ----------------------------------------------------------------------------------------------------


def _start_report(
    task: ServeTask, target: Target, server: Server, call: ApiCall, tokenizer_name: str, seed: int
) -> ServeReport:
    modes = task.modes
    configuration: dict[str, Any] = {
        "mode": modes.mode,
        "prompt_tokens": "from file" if task.prompts_path and not task.prompt_is_given else str(task.prompt),
        "output_tokens": str(task.output),
        "ignore_eos": task.ignore_eos,
        "prompts": task.prompts_path,
        "shared_prefix": task.shared_prefix,
        "arrivals": modes.arrivals,
        "users": modes.users if modes.mode != "rate" else None,
        "rates": modes.rates,
        "num_rates": modes.num_rates if modes.mode == "sweep" else None,
        "duration_s": modes.seconds,
        "warmup_s": modes.warmup_seconds,
        "num_requests": modes.num_requests,
        "timeout_s": task.timeout_s,
        "client_processes": task.client_processes,
        "seed": seed,
        **task.extra,
    }
    return ServeReport(
        benchmark="serve",
        model=server.model or call.model or tokenizer_name,
        configuration={key: value for key, value in configuration.items() if value not in (None, False, [], 0)},
        **reports.describe_origin({"client": platform.machine(), "client_cpus": os.cpu_count()}),
        url=target.url,
        api=call.api,
        tokenizer=tokenizer_name,
        profile=task.profile if task.prompts_path is None else "file",
        server=server.facts,
    )


def _notes(report: ServeReport, session: Session, task: ServeTask) -> list[str]:
    """What a reader of the figures should know."""
    notes = [limit_line(report.phases)]
    if session.mismatch is not None:
        ours, theirs = session.mismatch
        notes.append(
            f"the server counts {theirs} tokens in a prompt that tokenizer {report.tokenizer} makes {ours}:"
            " is it the tokenizer of that model?"
        )
    if task.ignore_eos and session.num_short:
        notes.append("answers were shorter than asked although --ignore-eos was given: the server does not know it")
    return [note for note in notes if note is not None]


def _save(task: ServeTask, report: ServeReport) -> None:
    if task.json_path is not None:
        reports.write_report(report, task.json_path)


# -- progress ------------------------------------------------------------------------------------------------------


class _PhaseProgress:
    """One line while a phase runs, with the time left."""

    def __init__(self, task: ServeTask, step: PhasePlan, number: int, lines: StatusLines) -> None:
        self._step, self._lines, self._number = step, lines, number
        self._seconds = step.seconds if number == 0 and step.users == 1 else task.modes.planned_seconds(step.rate)
        self._later = task.modes.num_phases() - number - 1
        self._later_seconds = (task.modes.seconds or 0.0) * self._later
        self._num_requests = step.num_requests
        self._count = task.modes.num_phases()
        self._next = 0.0
        lines.pass_by(f"{step.name}: preparing requests")

    def tell(self, progress: LoadProgress) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_WORDS
        self._lines.progress(lambda bar: self.describe(progress, bar))

    def describe(self, progress: LoadProgress, bar: bool) -> str:
        elapsed = max(0.0, progress.elapsed)
        share, left = 0.0, None
        if self._seconds:
            share, left = min(1.0, elapsed / self._seconds), max(0.0, self._seconds - elapsed)
        elif self._num_requests:
            share = min(1.0, progress.num_ended / self._num_requests)
            left = elapsed / share - elapsed if share else None
        failed = f" ({progress.num_failed} failed)" if progress.num_failed else ""
        rate = progress.num_tokens / elapsed if elapsed > 0 else 0.0
        parts = [f"{progress.num_ended:,} requests{failed}", f"{rate:,.0f} tokens/s"]
        if left is not None:
            parts.append(f"{describe_seconds(left)} left" if left else "waiting for the last answers")
            if self._later and self._later_seconds:
                parts.append(f"{describe_seconds(left + self._later_seconds)} for all")
        place = f"({self._number + 1} of {self._count})"
        return f"{self._step.name} {place}: {draw_bar(share) + ' ' if bar else ''}{', '.join(parts)}"


def _describe(phase: Phase) -> str:
    parts = [f"{phase.name}: {phase.qps:.2f} req/s, {phase.output_tokens_per_s:,.1f} tokens/s"]
    if phase.ttft is not None:
        parts.append(f"TTFT {phase.ttft.average:.1f} ms")
    if phase.itl is not None:
        parts.append(f"ITL {phase.itl.average:.2f} ms")
    parts.append(f"{phase.num_successful} of {phase.num_successful + phase.num_failed} requests succeeded")
    return ", ".join(parts)
