"""Starts an engine in this process and takes it through the rows of `tgi bench offline`.

Level 9.
"""

import gc
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tgi.bench import report as reports
from tgi.bench.command import EXIT_INTERRUPTED, Task
from tgi.bench.results import Report, Row
from tgi.bench.shapes import write_shape
from tgi.bench.work import run_row, warm_up
from tgi.config import ServerConfig
from tgi.devices.device import Device
from tgi.engine import warm_up as engine_warm_up
from tgi.engine.build import Engine, start_engine
from tgi.errors import StartError
from tgi.models.registry import read_config, read_spec
from tgi.progress import StageBars
from tgi.weights.source import find_model

_MOST_AT_A_TIME = 2048
_SLACK_TOKENS = 32  # two blocks for each request: a cache that is just large enough lets fewer in
_WARM_UP_SEED = 1 << 16


def run_offline(task: Task) -> int:
    """The exit status. Ctrl-C ends it with what was measured so far."""
    if task.json_path is not None:
        reports.check_writable(task.json_path)
    with _model_folder(task) as model_id, StageBars(enabled=not task.quiet) as bars:
        source = find_model(ServerConfig(**{**task.settings, "model_id": model_id}), bars.update)
        max_positions = read_spec(read_config(source.path)).max_positions
        config = make_config(task, model_id, max_positions)
        engine = start_engine(config, bars.update)
    try:
        return _measure(task, config, engine)
    finally:
        engine.close()


@contextmanager
def _model_folder(task: Task) -> Iterator[str]:
    """The model's name; for a shape, a folder that is gone afterwards."""
    if task.shape is None:
        yield task.settings.get("model_id", "embedded")
        return
    folder = Path(tempfile.mkdtemp(prefix="tgi-bench-"))
    try:
        yield str(write_shape(task.shape, folder / task.shape))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_config(task: Task, model_id: str, max_positions: int) -> ServerConfig:
    """As asked; what was not is as large as the rows need, so that the requests of a row run all at a time."""
    rows = task.rows
    if task.profile is not None:
        from tgi.bench.step_profile import new_tokens

        shown = task.profile
        rows = [*rows, Row(shown.context, new_tokens(shown.rows, shown.context), shown.rows)]
    longest = max(rows, key=lambda row: row.length)
    if longest.length > max_positions:
        raise StartError(
            f"row {longest.inputs}/{longest.outputs}/{longest.requests} needs {longest.length} tokens,"
            f" {task.shape or model_id} has {max_positions} positions: shorten it"
        )
    derived = {
        "max_total_tokens": min(max_positions, longest.length + _SLACK_TOKENS),
        "max_batch_size": min(_MOST_AT_A_TIME, max(row.requests for row in rows)),
    }
    config = ServerConfig(**{**derived, **task.settings, "model_id": model_id})
    if config.max_total_tokens is not None and config.max_total_tokens < longest.length:
        raise StartError(
            f"`max_total_tokens` {config.max_total_tokens} is less than the longest row needs: {longest.length}"
        )
    return config


def _measure(task: Task, config: ServerConfig, engine: Engine) -> int:
    device, rows = engine.device, task.rows
    on_gpu = device.torch_device.type == "cuda"
    if (task.floor or task.profile) and not on_gpu:
        raise StartError(f"--floor and --profile are about a GPU; the model runs on {device.name}")
    interrupted = False
    report = _start_report(task, config, engine)
    try:
        engine.seconds["warm-up"] = engine_warm_up.warm_up(engine, grammars=False)
        report.stages = {stage: round(seconds, 3) for stage, seconds in engine.seconds.items()}
        report.ready_seconds = round(reports.seconds_since_process_start(), 3)
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in engine.seconds.items())
        _say(task, f"ready after {report.ready_seconds:.1f} s ({stages})")
        _save(task, report)
        for number, row in enumerate(rows, 1):
            for again in range(task.warmups):
                _say(task, f"{row}: warm-up", passing=True)
                warm_up(engine, row, _WARM_UP_SEED + number * 1000 + again)
            result = run_row(engine, row, task.seed * 1000 + number, _teller(task, row))
            result.peak_memory_gb = round(_peak_bytes(device) / 1e9, 3)
            report.rows.append(result)
            _save(task, report)
            _say(task, f"{row}: {result.output_tokens_per_s:,.1f} tokens/s, {result.step_ms or 0:.3f} ms per step")
        if task.profile is not None:
            from tgi.bench.step_profile import profile_step

            _say(task, f"profile of {task.profile.rows} rows at {task.profile.context} tokens", passing=True)
            report.profile = profile_step(engine, task.profile.rows, task.profile.context)
            _save(task, report)
        if task.floor:
            _add_floors(task, report, engine)
        report.complete = True
        _save(task, report)
    except KeyboardInterrupt:
        interrupted = True
    finally:  # whatever ended it, what was measured is shown
        if report.rows:
            print(reports.rows_table(report.rows))
        if report.profile is not None:
            print(f"\n{reports.profile_table(report.profile)}")
    if interrupted:
        print(f"\ninterrupted: {len(report.rows)} of {len(rows)} rows were measured", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _add_floors(task: Task, report: Report, engine: Engine) -> None:
    """Last, when the engine can give its cache back: products of many rows want memory that it holds."""
    from tgi.bench.floor import FloorModel, measure_floor

    model = FloorModel.of(engine)
    runner: Any = engine.loop._runner
    runner.kv_cache.clear()
    gc.collect()
    torch.cuda.empty_cache()
    for row, result in zip(task.rows, report.rows, strict=True):
        _say(task, f"{row}: floor", passing=True)
        try:
            step_ms, tokens_per_s = measure_floor(model, row)
        except RuntimeError as error:  # too little memory, or a product that the library refuses
            _say(task, f"{row}: no floor: {error}")
            continue
        result.floor_step_ms, result.floor_tokens_per_s = round(step_ms, 4), round(tokens_per_s, 2)
        result.of_floor = round(result.output_tokens_per_s / tokens_per_s, 4)
        _save(task, report)


def _start_report(task: Task, config: ServerConfig, engine: Engine) -> Report:
    return Report(
        benchmark="offline",
        model=task.shape or config.model_id,
        configuration={**dict(config.__rich_repr__()), "warmup": task.warmups, "seed": task.seed},
        versions=reports.describe_versions(),
        hardware=_describe_hardware(engine.device),
        commit=reports.find_commit(),
        notes=engine.notes,
    )


def _describe_hardware(device: Device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": device.name, "cpus": os.cpu_count(), "machine": platform.machine()}
    if device.torch_device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device.torch_device)
        found["gpu"], found["gpu_gb"] = properties.name, round(properties.total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda
    else:
        found["threads"] = torch.get_num_threads()
    return found


def _peak_bytes(device: Device) -> int:
    if device.torch_device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_reserved(device.torch_device)


def _save(task: Task, report: Report) -> None:
    if task.json_path is not None:
        reports.write_report(report, task.json_path)


# -- progress ------------------------------------------------------------------------------------------------------


def _say(task: Task, text: str, passing: bool = False) -> None:
    """A line on standard error; on a terminal a passing one is replaced by the next. No thread draws while a row is
    measured."""
    if task.quiet:
        return
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="" if passing else "\n", file=sys.stderr, flush=True)
    elif not passing:
        print(text, file=sys.stderr, flush=True)


def _teller(task: Task, row: Row):  # noqa: ANN202 - a function of the number of tokens
    total = row.outputs * row.requests

    def tell(num_tokens: int) -> None:
        _say(task, f"{row}: {num_tokens:,} of {total:,} tokens ({num_tokens / total:.0%})", passing=True)

    return tell
