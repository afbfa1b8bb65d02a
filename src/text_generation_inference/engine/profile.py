"""When steps are profiled: as PROF_* schedule it from the first step on, or between a start and a stop from outside.

The server's loop looks at `is_on` after each step, and does nothing more while that is False.
"""

import sys

from text_generation_inference.config import ServerConfig, expand_home
from text_generation_inference.errors import StartError
from text_generation_inference.runner.profile import StepProfiler, check_folder
from text_generation_inference.types import Profile, Profiled

_RANK = 0


class Profiling:
    def __init__(self, config: ServerConfig) -> None:
        self._folder = expand_home(config.prof_path, "prof_path")
        self._record_shapes = config.prof_record_shapes
        self._profiler: StepProfiler | None = None
        self.is_on = False
        if config.prof_step > 0 and _RANK in config.prof_ranks:
            self._start(config.prof_step, config.prof_waitstep, config.prof_warmupstep, config.prof_record_shapes)
        if config.admin_api_key:
            check_folder(self._folder)

    def handle(self, message: Profile) -> Profiled:
        try:
            if message.start:
                shapes = self._record_shapes if message.record_shapes is None else message.record_shapes
                if self._profiler is not None:
                    return Profiled(message.number, error="a profile is being taken already")
                self._start(message.num_steps, 0, 0, shapes)
                return Profiled(message.number, str(self._folder))
            if self._profiler is None:
                return Profiled(message.number, error="no profile is being taken")
            profiler, self._profiler, self.is_on = self._profiler, None, False
            path = profiler.stop()
            if path is None:
                return Profiled(message.number, error="the profile ended before its first step")
            return Profiled(message.number, str(path))
        except (StartError, OSError, RuntimeError) as error:
            return Profiled(message.number, error=str(error))

    def step(self) -> None:
        """A step is done. A profile that cannot be written does not end the engine."""
        profiler = self._profiler
        if profiler is None:
            return
        try:
            ended = profiler.step()
        except (OSError, RuntimeError) as error:
            print(f"the profile is lost: {error}", file=sys.stderr, flush=True)
            ended = True
        if ended:
            self._profiler, self.is_on = None, False
            if profiler.path is not None:
                print(f"profile written to {profiler.path}", file=sys.stderr, flush=True)

    def _start(self, num_steps: int | None, wait: int, warm_up: int, record_shapes: bool) -> None:
        self._profiler = StepProfiler(self._folder, num_steps, wait, warm_up, record_shapes, _RANK)
        self.is_on = True
