"""A profile of engine steps: what the host and the device did, as a trace that Chrome and TensorBoard open.

Whoever runs the loop calls `step` after each step, only while there is a profile; the file is written when the
steps are over, or on `stop`.
"""

import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, schedule, supported_activities

from text_generation_inference.errors import StartError


class StepProfiler:
    """Started when it is created. Only one may exist in a process at a time."""

    def __init__(
        self,
        folder: Path,
        num_steps: int | None = None,  # None: until `stop`
        wait: int = 0,  # steps before it that are not looked at
        warm_up: int = 0,  # and then those that are, but not kept
        record_shapes: bool = False,
        rank: int = 0,
    ) -> None:
        check_folder(folder)
        self.path: Path | None = None  # of the trace, once it is written
        self._folder, self._rank = folder, rank
        self._left = None if num_steps is None else wait + warm_up + num_steps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no steps to warm up were asked for
            steps = None
            if num_steps is not None:
                steps = schedule(wait=wait, warmup=warm_up, active=num_steps, repeat=1)
        self._profile = profile(
            activities=supported_activities(),
            schedule=steps,
            on_trace_ready=self._write,
            record_shapes=record_shapes,
            acc_events=True,
            experimental_config=_all_threads(),
        )
        self._profile.start()

    def step(self) -> bool:
        """A step is done. True if it was the last one: the trace is written, and this is of no more use."""
        if self._left is None:
            return False
        self._left -= 1
        self._profile.step()
        if self._left > 0:
            return False
        self._profile.stop()
        return True

    def stop(self) -> Path | None:
        """End now. Where the trace is; None if no step that is kept was reached."""
        self._profile.stop()
        return self.path

    def _write(self, finished: "profile") -> None:
        path = self._folder / f"rank{self._rank}_{os.getpid()}.{time.time_ns() // 1_000_000}.pt.trace.json"
        finished.export_chrome_trace(str(path))
        if not _is_whole(path):  # nothing is raised where the folder is gone or the disk is full
            raise OSError(f"{path} could not be written")
        self.path = path


def _is_whole(path: Path) -> bool:
    """Whether a trace is there to its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def _all_threads() -> _ExperimentalConfig | None:
    """Steps may run on a thread of their own; and nothing but the file is wanted, which saves seconds.

    Older versions of torch lack one or both.
    """
    known: list[dict[str, Any]] = [{"profile_all_threads": True, "trace_only": True}, {"profile_all_threads": True}]
    for wanted in known:
        with suppress(TypeError):
            return _ExperimentalConfig(**wanted)
    return None


def check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"`prof_path` {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise StartError(f"`prof_path` {folder} cannot be written to")
