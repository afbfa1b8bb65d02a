"""Several ranks behind the face of one: rank 0 in this process, the others in processes of their own.

Every call goes to all ranks; numbers that come back are those of the rank that has least. A step goes out as the same
bytes to all, and its result is that of rank 0: a sum over ranks ends on none before all have begun it. Steps have a
deadline, because a rank that hangs keeps the others in a sum that never ends.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from text_generation_inference.config import SECRETS, Resolved, ServerConfig
from text_generation_inference.devices.device import Device, failed_step
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.engine.calibrate import Calibrated
from text_generation_inference.engine.machines import free_port
from text_generation_inference.engine.rank import Rank, RankFacts, RankGraphs, RankMemory
from text_generation_inference.engine.rank_channel import (
    SUM_EVERY,
    AllocateCache,
    BeginRank,
    CheckFit,
    CompileGrammar,
    ForgetRequests,
    JoinRanks,
    LoadWeights,
    MeasureSteps,
    PingRank,
    ProfileAnswer,
    ProfileAsked,
    ProfileRank,
    RankOrder,
    ReleaseCache,
    RunStep,
    ShowPixels,
    TokenSum,
    WarmShapes,
)
from text_generation_inference.engine.rank_peers import TICK_S, RankPeers
from text_generation_inference.errors import EngineError, StartError, TgiError
from text_generation_inference.models.config import Config
from text_generation_inference.parallel.agreement import abort_collectives
from text_generation_inference.quant.inc.measure import Recorder
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.runner.runner import Runner
from text_generation_inference.runner.shapes import ShapePlan
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.types import BucketStats, Grammar, PictureSpan, Place, StepPlan, StepResult
from text_generation_inference.weights.progress import Progress, silent
from text_generation_inference.weights.source import ModelFolder

T = TypeVar("T")
_MARGIN_S = 30.0  # a step may take so much longer than the longest one so far
_LACK_S = 2.0  # after one rank lacked memory the others must have lacked it too, or have ended their steps
_FORGET_S = 5.0
NAMING_S = 2.0  # within which ranks say which of them hangs: whoever else looks for hangs waits so much longer
_RESORT_S = 5.0  # for the engine to end by itself
_LAG_S, _LAG_TIMES = 120.0, 3  # before the first request: what the slowest rank may take more than the first, at least
_PING_S = 0.5
_AWAY_S = 1.0  # who was away so long judges from when it is back
_NUM_SUMS = 8  # that are kept until all ranks have told theirs


def open_rank(
    calibrated: Calibrated,
    source: ModelFolder,
    progress: Progress = silent,
    folder: Path | None = None,
    last_resort: Callable[[TgiError], None] | None = None,
) -> "Rank | Ranks":
    """As many as the settings say. `folder`: private, for where they meet; None: one of their own. `last_resort`: ends
    this process, which is called a while after ranks have failed: rank 0 may wait for them in its device for ever."""
    count = calibrated.config.num_shard or 1
    if count == 1:
        return Rank(calibrated, source, progress=progress)
    return Ranks(calibrated, source, count, progress, folder, last_resort)


def _choose_address(config: ServerConfig, folder: str) -> str:
    """Where ranks meet for their sums."""
    if config.nnodes > 1:
        return f"tcp://{config.master_addr}:{free_port(config.master_addr)}"
    meeting = Path(folder) / "ranks"
    meeting.unlink(missing_ok=True)  # of an engine before this one
    return meeting.as_uri()


@dataclass(slots=True)
class _Pending:
    """A step under way."""

    future: "Future[StepResult]"
    since: float  # it was launched


class Ranks:
    def __init__(
        self,
        calibrated: Calibrated,
        source: ModelFolder,
        count: int,
        progress: Progress = silent,
        folder: Path | None = None,
        last_resort: Callable[[TgiError], None] | None = None,
    ) -> None:
        config = calibrated.config
        self._count, self._last_resort = count, last_resort
        self._called: tuple[int, str, float] | None = None  # number, name and time of a call that is under way
        if calibrated.measures:
            raise StartError("values are measured on one rank: leave `num_shard` out while QUANT_CONFIG measures")
        self._timeout_s = config.step_timeout_s
        self._progress = progress
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}  # by number of the order, oldest first
        self._longest_s: float | None = None  # step so far
        self._last_done = self._last_tick = self._forgiven = time.monotonic()
        self._lack: tuple[float, int, str] | None = None  # when a rank lacked memory in a step, which one, its words
        self._pinged: tuple[int, float] | None = None  # number and time of what tells who hangs
        self._sum = TokenSum()
        self._sums: dict[int, dict[int, int]] = {}  # by order and rank
        self._own_folder = tempfile.TemporaryDirectory(prefix="tgi-ranks-") if folder is None else None
        address = _choose_address(config, self._own_folder.name if self._own_folder is not None else str(folder))
        self._peers = RankPeers(config, self._on_lack, self._on_sum, self._on_failure, self._on_tick, progress)
        local = count // config.nnodes
        places = [Place(rank, count, rank % local, local) for rank in range(count)]
        try:
            told = msgspec.structs.replace(config, **dict.fromkeys(SECRETS))
            number = self._peers.begin([BeginRank(told, source, place) for place in places[1:]])
            self._rank = Rank(calibrated, source, places[0], self._tell_progress)
        except BaseException:
            self._end_peers()
            raise
        try:
            self._peers.collect(number)
            self._call(JoinRanks(address), lambda: self._rank.join(address), type(None))
        except BaseException:
            self.abandon()
            raise

    # -- before the first request ----------------------------------------------------------------------------------

    def load(self, model_config: Config, stored: Quantization | None) -> RankFacts:
        facts = self._call(LoadWeights(), lambda: self._rank.load(model_config, stored), RankFacts)
        first = facts[0]
        most = {
            name: max(getattr(rank.size, name) for rank in facts) for name in ("kv_bytes_per_token", "bytes_per_row")
        }
        # What is not kept where windows are is counted with care, too.
        most["window_bytes_per_token"] = min(rank.size.window_bytes_per_token for rank in facts)
        self._facts = msgspec.structs.replace(
            first,
            size=msgspec.structs.replace(first.size, **most),
            notes=[*first.notes, f"split over {len(facts)} ranks, {self._rank.sums}"],
            weight_bytes=max(rank.weight_bytes for rank in facts),
        )
        return self._facts

    def measure(self) -> RankMemory:
        return _least(self._call(MeasureSteps(), self._rank.measure, RankMemory))

    def allocate(self, resolved: Resolved, plan: ShapePlan, grammars: GrammarCompiler | None) -> None:
        facts = self._facts
        about = (facts.quantized, facts.is_capturable, facts.pictures is not None, facts.picture_sizes)
        order = AllocateCache(resolved, facts.limits, *about, facts.vocab_size)
        self._call(order, lambda: self._rank.allocate(resolved, plan, grammars), type(None))

    def warm(self) -> RankGraphs:
        graphs = self._call(WarmShapes(), self._rank.warm, RankGraphs)
        return RankGraphs(min(g.num_captured for g in graphs), max(g.num_lacking for g in graphs))

    def fits(self) -> bool:
        return all(self._call(CheckFit(), self._rank.fits, bool))

    def release(self) -> RankMemory:
        return _least(self._call(ReleaseCache(), self._rank.release, RankMemory))

    def record(self) -> Recorder | None:
        return self._rank.record()

    def compile(self, grammar: Grammar) -> None:
        """From any thread."""
        self._peers.tell(CompileGrammar(grammar))

    def profile(self, asked: ProfileAsked | None) -> list[ProfileAnswer]:
        return self._call(ProfileRank(asked), ProfileAnswer, ProfileAnswer)[1:]

    def _call(self, order: RankOrder, own: Callable[[], T], kind: type[T]) -> list[T]:
        """What each rank answers, rank 0 first. Raises what any of them raised."""
        number = self._peers.tell(order)
        self._called = (number, type(order).__name__, time.monotonic())
        try:
            mine = own()
        except Exception as error:
            raise self._cause(error) from error
        answers = self._peers.collect(number)
        self._called = None
        return [mine, *(msgspec.msgpack.decode(answer, type=kind) for answer in answers)]

    def _cause(self, error: Exception) -> Exception:
        """Rank 0 feels it when another one is gone: that other one is the reason then."""
        if isinstance(error, TgiError) and not isinstance(error, EngineError):
            return error
        return self._peers.wait_for_failure() or error

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        self._peers.check()  # nobody waits for the rest of a start that has failed
        self._progress(stage, done, total)

    # -- what rank 0 can tell alone --------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        return self._rank.device

    @property
    def runner(self) -> Runner:
        return self._rank.runner

    @property
    def bucket_stats(self) -> BucketStats | None:
        return self._rank.bucket_stats

    def take_news(self) -> list[str]:
        return self._rank.take_news()

    @property
    def pids(self) -> list[int]:
        """Of the processes of ranks 1, 2, ..."""
        return self._peers.pids

    # -- steps -----------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        lack = self._lack
        if lack is not None:  # nothing can follow a step that failed on some rank
            return failed_step(torch.OutOfMemoryError(lack[2]))
        for span in plan.encode:
            self._show(span)
        number = self._peers.tell(RunStep(plan))
        step: Future[StepResult] = Future()
        with self._lock:
            failure = self._peers.failure
            if failure is not None:
                return failed_step(failure)
            self._pending[number] = _Pending(step, time.monotonic())
        self._rank.launch(plan).add_done_callback(lambda own: self._finish(number, step, own))
        return step

    def wait_until_computing(self, step: "Future[StepResult]", seconds: float | None = None) -> None:
        pass  # it has plans to hand on

    def _show(self, span: PictureSpan) -> None:
        """Its pixels to all ranks, wherever they are. Read once: files come and go, and all must compute the same."""
        pixels = self._rank.read_pixels(span)
        self._peers.tell(ShowPixels(span.digest, pixels))
        self._rank.show(span.digest, pixels)

    def _finish(self, number: int, step: "Future[StepResult]", own: "Future[StepResult]") -> None:
        """Rank 0 is done with a step."""
        error = own.exception()
        if error is not None and is_out_of_memory(error):
            self._on_lack(0, number, str(error).split("\n")[0])
        elif error is not None:
            error = self._peers.wait_for_failure() or error
            self._peers.fail(EngineError(f"rank 0: {error}"))  # the first reason counts
        now = time.monotonic()
        with self._lock:
            pending = self._pending.pop(number, None)
            if pending is None:
                return  # it was given up
            began = max(pending.since, self._last_done)
            self._last_done = now
            if error is None:
                self._longest_s = max(self._longest_s or 0.0, now - began)
        if error is not None:
            step.set_exception(error)
            return
        result = own.result()
        value = self._sum.add(result)
        if number % SUM_EVERY == 0:
            self._on_sum(0, number, value)
        step.set_result(result)

    def forget(self) -> None:
        """Raises `EngineError` unless all ranks are where nobody waits for another."""
        number = self._peers.tell(ForgetRequests())
        self._rank.forget()
        try:
            answers = self._peers.collect(number, _FORGET_S)
        except EngineError as error:  # who lacked memory is the reason, not who waits for it
            raise EngineError(_alone(self._lack[2]) if self._lack is not None else str(error)) from error
        begun = [msgspec.msgpack.decode(answer, type=int) for answer in answers]
        with self._lock:
            self._lack = None
            self._sum, self._sums = TokenSum(), {}
        if any(count != self._rank.num_collectives for count in begun):
            self._peers.fail(EngineError("ranks lacked memory in different places of a step"))
            self._peers.check()

    def check(self) -> None:
        """Raises what ended the ranks, if something has: without a step nobody else would notice."""
        self._peers.check()

    def close(self) -> None:
        self._peers.begin_close()  # some groups end only together
        self._rank.close()
        self._peers.close()
        self._remove_folder()

    def abandon(self) -> None:
        """The start has failed: nothing of it stays."""
        self._end_peers()
        self._rank.abandon()

    def _end_peers(self) -> None:
        self._peers.abandon()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._own_folder is not None:
            with suppress(OSError):
                self._own_folder.cleanup()

    # -- on the watching thread ------------------------------------------------------------------------------------

    def _on_failure(self, error: TgiError) -> None:
        with self._lock:
            given_up = list(self._pending.values())
            self._pending.clear()
        for step in given_up:
            step.future.set_exception(error)
        with suppress(RuntimeError):
            abort_collectives()
        if self._last_resort is not None:
            resort = threading.Timer(_RESORT_S, self._last_resort, [error])
            resort.daemon = True
            resort.start()

    def _on_lack(self, rank: int, number: int, words: str) -> None:
        """All ranks take the step back, unless some of them wait for this one in the middle of it."""
        with self._lock:
            self._lack = self._lack or (time.monotonic(), rank, f"rank {rank}: {words}")

    def _on_sum(self, rank: int, number: int, value: int) -> None:
        with self._lock:
            known = self._sums.setdefault(number, {})
            known[rank] = value
            while len(self._sums) > _NUM_SUMS:
                del self._sums[next(iter(self._sums))]
            differ = len(set(known.values())) > 1
        if differ:
            self._peers.fail(EngineError(f"rank {rank} has chosen other tokens than the others"))

    def _on_tick(self) -> None:
        now = time.monotonic()
        if now - self._last_tick > _AWAY_S + TICK_S:
            self._forgiven = now
        self._last_tick = now
        with self._lock:
            oldest = next(iter(self._pending.values()), None)
            lack = self._lack
        if self._called is not None:
            self._check_lag(*self._called, now)
        if oldest is None:
            self._pinged = None
            return
        if lack is not None and now - lack[0] > _LACK_S:
            self._peers.fail(EngineError(_alone(lack[2])))
            return
        running_s = now - max(oldest.since, self._last_done, self._forgiven)
        limit_s = self._limit_s()
        if not limit_s or running_s < limit_s:
            self._pinged = None
        elif self._pinged is None:
            self._pinged = (self._peers.tell(PingRank()), now)
        elif now - self._pinged[1] > _PING_S:
            self._peers.fail(EngineError(f"{self._name_hanging(self._pinged[0])} hung: {running_s:.0f} s in a step"))

    def _check_lag(self, number: int, name: str, since: float, now: float) -> None:
        """A rank that lacked memory where the others did not has answered, and the others wait for it in a sum."""
        first = self._peers.first_answer(number)
        if first is not None and now - first > max(_LAG_S, _LAG_TIMES * (first - since)):
            self._peers.fail(EngineError(f"ranks do not end together: {name} takes some of them {now - since:.0f} s"))

    def _limit_s(self) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        if self._longest_s is None:
            return self.step_timeout_s
        # Where every shape is compiled, one that was not warmed up takes as long as it takes; so does a picture.
        varies = self._rank.device.limits.buckets or self._rank.sees
        return max(self._longest_s + _MARGIN_S, self.step_timeout_s if varies else 0.0)

    @property
    def step_timeout_s(self) -> float:
        return self._rank.step_timeout_s

    def _name_hanging(self, ping: int) -> str:
        """Ranks that do not answer, else those that have begun the fewest sums."""
        answers = {
            rank: msgspec.msgpack.decode(value, type=int) for rank, value in self._peers.take_answers(ping).items()
        }
        silent = [rank for rank in range(1, self._count) if rank not in answers]
        answers[0] = self._rank.num_collectives
        late = silent or [rank for rank, count in sorted(answers.items()) if count == min(answers.values())]
        return f"rank {', '.join(map(str, late))}"


def _alone(lack: str) -> str:
    """A rank lacked memory where the others did not."""
    return f"{lack}: in the middle of a step, which the other ranks cannot end"


def _least(memory: list[RankMemory]) -> RankMemory:
    least = min(memory, key=lambda rank: rank.cache_bytes)
    tokens = [rank.picture_tokens for rank in memory if rank.picture_tokens is not None]
    batch_pixels = min(rank.batch_pixels for rank in memory)
    return msgspec.structs.replace(least, picture_tokens=min(tokens, default=None), batch_pixels=batch_pixels)
