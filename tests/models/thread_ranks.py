"""An engine over ranks that are threads of this process, each with a device of its own: any double can be one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from ranks import Meeting, ThreadCollectives

from text_generation_inference.engine.calibrate import Calibrated
from text_generation_inference.engine.rank import Rank, RankFacts, RankGraphs, RankMemory
from text_generation_inference.parallel import Parallel
from text_generation_inference.types import Place, StepPlan, StepResult
from text_generation_inference.weights.source import ModelFolder

T = TypeVar("T")


class _ThreadRank(Rank):
    def join_threads(self, parallel: Parallel) -> None:
        self._parallel = parallel


class ThreadRanks:
    """The face of `engine.ranks.Ranks`, in place of `open_rank`."""

    def __init__(self, calibrated: Calibrated, source: ModelFolder, *_: Any) -> None:
        count = calibrated.config.num_shard or 1
        meeting = Meeting(count)
        self._threads = [ThreadPoolExecutor(1) for _ in range(count)]
        self.ranks = [_ThreadRank(calibrated, source, Place(rank, count, rank, count)) for rank in range(count)]
        for number, rank in enumerate(self.ranks):
            collectives = ThreadCollectives(number, meeting)
            rank.join_threads(Parallel(number, count, collectives, calibrated.config.expert_parallel))

    def _call(self, work: Callable[[Rank], T]) -> list[T]:
        asked = [thread.submit(work, rank) for thread, rank in zip(self._threads, self.ranks, strict=True)]
        return [each.result() for each in asked]

    def load(self, *about: Any) -> RankFacts:
        facts = self._call(lambda rank: rank.load(*about))
        most = max(each.size.kv_bytes_per_token for each in facts)
        return msgspec.structs.replace(facts[0], size=msgspec.structs.replace(facts[0].size, kv_bytes_per_token=most))

    def measure(self) -> RankMemory:
        return min(self._call(lambda rank: rank.measure()), key=lambda memory: memory.cache_bytes)

    def allocate(self, *about: Any) -> None:
        self._call(lambda rank: rank.allocate(*about))

    def warm(self) -> RankGraphs:
        return self._call(lambda rank: rank.warm())[0]

    def fits(self) -> bool:
        return all(self._call(lambda rank: rank.fits()))

    def record(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ranks[0], name)

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        done: Future[StepResult] = Future()

        def finish(step: "Future[StepResult]") -> None:
            error = step.exception()
            done.set_result(step.result()) if error is None else done.set_exception(error)

        launched = [thread.submit(rank.launch, plan) for thread, rank in zip(self._threads, self.ranks, strict=True)]
        launched[0].add_done_callback(lambda first: first.result().add_done_callback(finish))
        return done

    def forget(self) -> None:
        self._call(lambda rank: rank.forget())

    def close(self) -> None:
        self._call(lambda rank: rank.close())
        for thread in self._threads:
            thread.shutdown()

    abandon = close
