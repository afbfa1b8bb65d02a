"""When steps are profiled: as PROF_* schedule it from the first step on, or between a start and a stop from outside.

The server's loop looks at `is_on` after each step, and does nothing more while that is False.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from text_generation_inference.config import ServerConfig, expand_home
from text_generation_inference.engine.rank_channel import ProfileAnswer, ProfileAsked
from text_generation_inference.errors import StartError
from text_generation_inference.runner.profile import StepProfiler, check_folder
from text_generation_inference.types import Profile, Profiled


class RankProfile:
    """Of one rank, until its steps are over. A profile that cannot be written does not end the engine."""

    def __init__(self, asked: ProfileAsked, rank: int) -> None:
        about = (asked.num_steps, asked.wait, asked.warm_up, asked.record_shapes, rank)
        self._profiler: StepProfiler | None = StepProfiler(Path(asked.folder), *about)

    @property
    def is_over(self) -> bool:
        return self._profiler is None

    def step(self) -> None:
        """A step is done."""
        profiler = self._profiler
        if profiler is None:
            return
        try:
            ended = profiler.step()
        except (OSError, RuntimeError) as error:
            print(f"the profile is lost: {error}", file=sys.stderr, flush=True)
            ended = True
        if ended:
            self._profiler = None
            if profiler.path is not None:
                print(f"profile written to {profiler.path}", file=sys.stderr, flush=True)

    def stop(self) -> str | None:
        """Where the trace is; None if no step that is kept was reached, or if it was over already."""
        path = self._profiler.stop() if self._profiler is not None else None
        return str(path) if path is not None else None


class Profiling:
    """`others`: tells further ranks, see `Rank.profile`."""

    def __init__(
        self, config: ServerConfig, others: Callable[[ProfileAsked | None], list[ProfileAnswer]] = lambda _: []
    ) -> None:
        self._folder = expand_home(config.prof_path, "prof_path")
        self._record_shapes = config.prof_record_shapes
        self._ranks, self._others = [rank for rank in config.prof_ranks if rank < (config.num_shard or 1)], others
        self._profile: RankProfile | None = None  # of rank 0
        self._left: int | None = None  # steps until that of other ranks is over, where rank 0 has none
        self.is_on = False
        if config.prof_step > 0 and self._ranks:
            self._start(config.prof_step, config.prof_waitstep, config.prof_warmupstep, config.prof_record_shapes)
        if config.admin_api_key:
            check_folder(self._folder)

    def handle(self, message: Profile) -> Profiled:
        try:
            if message.start:
                shapes = self._record_shapes if message.record_shapes is None else message.record_shapes
                if self.is_on:
                    return Profiled(message.number, error="a profile is being taken already")
                self._start(message.num_steps, 0, 0, shapes)
                return Profiled(message.number, str(self._folder))
            if not self.is_on:
                return Profiled(message.number, error="no profile is being taken")
            profile, self._profile, self.is_on = self._profile, None, False
            own = profile.stop() if profile is not None else None
            paths = [own, *(answer.path for answer in self._others(None))]
            path = next((path for path in paths if path is not None), None)
            if path is None:
                return Profiled(message.number, error="the profile ended before its first step")
            return Profiled(message.number, path)
        except (StartError, OSError, RuntimeError) as error:
            return Profiled(message.number, error=str(error))

    def step(self) -> None:
        """A step is done."""
        if self._profile is not None:
            self._profile.step()
            if self._profile.is_over:
                self._profile, self.is_on = None, False
        elif self._left is not None:
            self._left -= 1
            self.is_on = self._left > 0

    def _start(self, num_steps: int | None, wait: int, warm_up: int, record_shapes: bool) -> None:
        ranks = self._ranks or [0]
        asked = ProfileAsked(str(self._folder), ranks, num_steps, wait, warm_up, record_shapes)
        if 0 in ranks:
            self._profile = RankProfile(asked, 0)
        else:
            self._left = wait + warm_up + num_steps if num_steps is not None else None
        if any(ranks):
            failed = [answer.error for answer in self._others(asked) if answer.error is not None]
            if failed:
                print(f"the profile of a rank is lost: {failed[0]}", file=sys.stderr, flush=True)
        self.is_on = True
