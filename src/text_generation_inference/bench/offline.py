"""Starts an engine in this process and takes it through the rows of `tgi bench offline`."""

import gc
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from text_generation_inference.bench import report as reports
from text_generation_inference.bench.command_line import EXIT_INTERRUPTED
from text_generation_inference.bench.floor import FloorModel, find_rates, measure_floor
from text_generation_inference.bench.generation_flags import describe_throughput
from text_generation_inference.bench.offline_command import OfflineTask, Shown
from text_generation_inference.bench.offline_tables import profile_table, rows_table
from text_generation_inference.bench.results import OfflineReport, Row, RowResult, SkippedRow
from text_generation_inference.bench.row_progress import RowProgress, StatusLines
from text_generation_inference.bench.shapes import write_shape
from text_generation_inference.bench.tables import show
from text_generation_inference.bench.work import Iteration, run_once, summarise, warm_up
from text_generation_inference.collection import resume_collection
from text_generation_inference.config import Resolved, ServerConfig, least_blocks
from text_generation_inference.devices.device import check_present
from text_generation_inference.devices.hardware import (
    describe_hardware,
    gpu_name,
    peak_memory_gb,
    refuse_emulation,
    runs_on_gpu,
)
from text_generation_inference.engine import warm_up as engine_warm_up
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.errors import StartError
from text_generation_inference.models.model import Context
from text_generation_inference.models.registry import build, read_config
from text_generation_inference.progress import StageBars
from text_generation_inference.weights.source import find_model

_MOST_AT_A_TIME = 2048
_SLACK_TOKENS = 32  # two blocks for each request: a cache that is just large enough lets fewer in
_WARM_UP_SEED = 1 << 16
_ITERATION_BITS = 20  # where a seed has the number of the iteration


def run_offline(task: OfflineTask) -> int:
    """The exit status. Ctrl-C ends it with what was measured so far."""
    if (task.floor or task.profiles) and not runs_on_gpu(task.settings.get("device", "auto")):
        raise StartError("--floor and --profile are about a GPU, on which this model does not run here")
    if task.floor and (gpu := gpu_name()) is not None:
        find_rates(gpu)
    if task.json_path is not None:
        if task.asked is not None:
            Path(task.json_path).parent.mkdir(parents=True, exist_ok=True)  # its program makes the folder too
        reports.check_writable(task.json_path)
    lines = StatusLines(task.quiet)
    with _model_folder(task) as model_id, StageBars(enabled=not task.quiet) as bars:
        asked = ServerConfig(**{**task.settings, "model_id": model_id})
        check_present(asked)
        source = find_model(asked, bars.update)
        model = build(read_config(source.path), Context(trusts_code=asked.trust_remote_code))
        rows, skipped = choose_rows(task, model.max_positions)
        config = make_config(task, rows, model_id, model.max_positions)
        engine = start_engine(config, bars.update)
    try:
        if task.dry_run:
            return _try_rows(rows, engine)
        refuse_emulation(engine.rank.device)
        for note in [] if task.asked is None else task.asked.notes:
            lines.say(note)
        report = _start_report(task, config, engine)
        report.skipped = skipped
        return _Run(task, rows, engine, report, lines).measure()
    finally:
        engine.close()


def _try_rows(rows: list[Row], engine: Engine) -> int:
    """The only way on a stand-in for a card, whose speed says nothing."""
    num_tried = 0
    for number, row in enumerate(rows):
        if (lack := find_lack(row, engine.resolved)) is not None:
            print(f"{row}: skipped: {lack}", flush=True)
            continue
        found = run_once(engine, row, _WARM_UP_SEED + number * 1000)
        print(f"{row}: {found.num_tokens} tokens on {engine.facts.device}, not timed", flush=True)
        num_tried += 1
    if not num_tried:
        raise StartError("no row fits this machine")
    return 0


@contextmanager
def _model_folder(task: OfflineTask) -> Iterator[str]:
    """The model's name; for a shape, a folder that is gone afterwards."""
    if task.shape is None:
        yield task.settings.get("model_id", "embedded")
        return
    folder = Path(tempfile.mkdtemp(prefix="tgi-bench-"))
    try:
        yield str(write_shape(task.shape, folder / task.shape))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def choose_rows(task: OfflineTask, max_positions: int) -> tuple[list[Row], list[SkippedRow]]:
    """Rows of a preset that are too long for the model are left out; rows that somebody wrote are kept, and refused."""
    if task.preset is None:
        return task.rows, []
    rows = [row for row in task.rows if row.length <= max_positions]
    if not rows:
        raise StartError(f"no row of {task.preset} fits into the model's {max_positions} positions")
    skipped = [
        _skip(row, f"needs {row.length:,} positions, the model has {max_positions:,}")
        for row in task.rows
        if row.length > max_positions
    ]
    return rows, skipped


def _skip(row: Row, reason: str) -> SkippedRow:
    return SkippedRow(row.inputs, row.outputs, row.requests, reason)


def make_config(task: OfflineTask, rows: list[Row], model_id: str, max_positions: int) -> ServerConfig:
    """As asked; what was not is as large as the rows need, so that the requests of a row run all at a time."""
    for shown in task.profiles:
        from text_generation_inference.bench.step_profile import new_tokens

        new = 1 if shown.prompts else new_tokens(shown.rows, shown.context)
        rows = [*rows, Row(shown.context, new, shown.rows)]
    longest = max(rows, key=lambda row: row.length)
    if longest.length > max_positions:
        raise StartError(
            f"row {longest.inputs}/{longest.outputs}/{longest.requests} needs {longest.length} tokens,"
            f" {task.shape or model_id} has {max_positions} positions: shorten it"
        )
    derived = {
        "max_total_tokens": min(max_positions, longest.length + _SLACK_TOKENS),
        "max_batch_size": min(_MOST_AT_A_TIME, max(row.requests for row in rows)),
        "max_step_ms": 0,
    }
    config = ServerConfig(**{**derived, **task.settings, "model_id": model_id})
    if config.max_total_tokens is not None and config.max_total_tokens < longest.length:
        raise StartError(
            f"`max_total_tokens` {config.max_total_tokens} is less than the longest row needs: {longest.length}"
        )
    return config


class _Run:
    """An engine taken through the rows, and the report that grows with it."""

    def __init__(
        self, task: OfflineTask, rows: list[Row], engine: Engine, report: OfflineReport, lines: StatusLines
    ) -> None:
        self.task, self.rows, self.engine, self.report, self.lines = task, rows, engine, report, lines
        self.done: list[Row] = []  # beside `report.rows`

    def measure(self) -> int:
        task, report = self.task, self.report
        interrupted = False
        try:
            self.get_ready()
            rows = self.leave_out_what_does_not_fit()
            for number, row in enumerate(rows, 1):
                self.measure_row(row, number, len(rows))
            for shown in task.profiles:
                self.profile(shown)
            if task.floor:
                self.add_floors()
            report.complete = True
            self.save()
        except KeyboardInterrupt:
            interrupted = True
        finally:  # whatever ended it, what was measured is shown
            self.lines.clear()
            self.show()
        if interrupted:
            print(f"\ninterrupted: {len(report.rows)} of {len(self.rows)} rows were measured", file=sys.stderr)
            return EXIT_INTERRUPTED
        if not report.rows and not report.profiles:
            raise StartError("no row fits this machine")
        return 0

    def get_ready(self) -> None:
        engine, report = self.engine, self.report
        engine.seconds["warm-up"] = engine_warm_up.warm_up(engine, grammars=False)
        resume_collection()
        report.stages = {stage: round(seconds, 3) for stage, seconds in engine.seconds.items()}
        report.ready_seconds = round(reports.seconds_since_process_start(), 3)
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in engine.seconds.items())
        self.lines.say(f"ready after {report.ready_seconds:.1f} s ({stages})")

    def leave_out_what_does_not_fit(self) -> list[Row]:
        """Of a preset: a row whose requests cannot all run at a time would not be what was published."""
        if self.task.preset is None:
            self.save()
            return self.rows
        reasons = {row: find_lack(row, self.engine.resolved) for row in self.rows}
        self.report.skipped += [_skip(row, reason) for row, reason in reasons.items() if reason is not None]
        for left_out in self.report.skipped:
            self.lines.say(f"{left_out.row}: skipped: {left_out.reason}")
        self.save()
        return [row for row, reason in reasons.items() if reason is None]

    def measure_row(self, row: Row, number: int, num_rows: int) -> None:
        task, engine = self.task, self.engine
        for again in range(task.warmups):
            self.lines.pass_by(f"{row}: warm-up")
            (run_once if task.whole_warmups else warm_up)(engine, row, _WARM_UP_SEED + number * 1000 + again)
        progress = RowProgress(row, task.iterations, f"row {number} of {num_rows}")

        def tell(num_tokens: int) -> None:
            progress.tell(num_tokens)
            self.lines.progress(progress.describe)

        iterations: list[Iteration] = []
        try:
            for again in range(task.iterations):
                progress.start_iteration()
                self.lines.progress(progress.describe)
                seed = task.seed * 1000 + number + (again << _ITERATION_BITS)
                iterations.append(run_once(engine, row, seed, tell))
        finally:  # after Ctrl-C, the iterations that were finished
            if iterations:
                self.add(row, summarise(row, iterations))

    def add(self, row: Row, result: RowResult) -> None:
        result.peak_memory_gb = peak_memory_gb(self.engine.rank.device)
        result.published = self.task.published.get(row)
        self.done.append(row)
        self.report.rows.append(result)
        self.save()
        self.lines.say(f"{row}: {result.output_tokens_per_s:,.1f} tokens/s, {result.step_ms or 0:.3f} ms per step")

    def profile(self, shown: Shown) -> None:
        from text_generation_inference.bench.step_profile import profile_prompts, profile_step

        self.lines.pass_by(f"profile of {shown}")
        take_apart = profile_prompts if shown.prompts else profile_step
        self.report.profiles.append(take_apart(self.engine, shown.rows, shown.context))
        self.save()

    def add_floors(self) -> None:
        """Last, when the engine can give its cache back: products of many rows want memory that it holds."""
        model = FloorModel.of(self.engine, find_rates(gpu_name() or "no GPU"))
        runner: Any = self.engine.rank.runner
        runner.kv_cache.clear()
        gc.collect()
        self.engine.rank.device.free_bytes()  # gives back what the allocator keeps
        for row, result in zip(self.done, self.report.rows, strict=True):
            self.lines.pass_by(f"{row}: floor")
            try:
                step_ms, tokens_per_s = measure_floor(model, row)
            except RuntimeError as error:  # too little memory, or a product that the library refuses
                self.lines.say(f"{row}: no floor: {error}")
                continue
            result.floor_step_ms, result.floor_tokens_per_s = round(step_ms, 4), round(tokens_per_s, 2)
            result.of_floor = round(result.output_tokens_per_s / tokens_per_s, 4)
            self.save()

    def show(self) -> None:
        if self.report.rows:
            show(rows_table(self.report.rows))
        if self.report.rows and self.task.asked is not None:
            show(f"\n{describe_throughput(self.report.rows[0])}")
        for profile in self.report.profiles:
            show(f"\n{profile_table(profile)}")

    def save(self) -> None:
        if self.task.json_path is not None:
            reports.write_report(self.report, self.task.json_path)


def find_lack(row: Row, resolved: Resolved) -> str | None:
    """What the engine lacks to compute all requests of a row at a time."""
    if row.requests > resolved.max_batch_size:
        return f"{row.requests:,} requests at a time, {resolved.max_batch_size:,} are possible"
    blocks = -(-row.length // resolved.block_size)
    if resolved.window is not None:
        blocks = min(blocks, least_blocks(resolved.window, resolved.block_size))
    pools = [(blocks, resolved.num_blocks)]
    if resolved.partial_window is not None:
        held = min(blocks, least_blocks(resolved.partial_window, resolved.block_size))
        pools.append((held, resolved.num_window_blocks))
    for each, num_blocks in pools:
        needed, usable, size = each * row.requests, num_blocks - 1, resolved.block_size  # one belongs to nobody
        if needed > usable:
            return f"needs a KV cache of {needed * size:,} tokens, {usable * size:,} fit into the memory"
    return None


def _start_report(task: OfflineTask, config: ServerConfig, engine: Engine) -> OfflineReport:
    return OfflineReport(
        benchmark="offline",
        model=task.shape or config.model_id,
        preset=task.preset,
        configuration={
            **{name: value for name, value in config.__rich_repr__() if not (task.shape and name == "model_id")},
            "iterations": task.iterations,
            "warmup": task.warmups,
            "seed": task.seed,
        },
        **reports.describe_origin(describe_hardware(engine.rank.device)),
        notes=[note for note in engine.notes if not (task.shape and config.model_id in note)],
    )
