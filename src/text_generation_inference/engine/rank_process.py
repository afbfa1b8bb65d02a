"""A further rank as a process of its own: it does what the engine process tells it, in order, and reports.

It has a device and its part of the model, no scheduler and no clients. Its end of the socket comes with it. It ends
when its parent does, however that happens, and when it fails.
"""

import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from text_generation_inference import failpoints
from text_generation_inference.collection import resume_collection
from text_generation_inference.config import ServerConfig, failpoints_asked
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.engine.calibrate import read_quant_config
from text_generation_inference.engine.profile import RankProfile
from text_generation_inference.engine.rank import Rank
from text_generation_inference.engine.rank_channel import (
    LACK,
    SUM_EVERY,
    AllocateCache,
    BeginRank,
    CheckFit,
    CloseRank,
    CompileGrammar,
    ForgetRequests,
    JoinRanks,
    Link,
    LoadWeights,
    MeasureSteps,
    OrderReader,
    PingRank,
    ProfileAnswer,
    ProfileAsked,
    ProfileRank,
    RankAnswer,
    RankDone,
    RankFailed,
    RankOrder,
    RankReport,
    ReleaseCache,
    RunStep,
    ShowPixels,
    TokenSum,
    WarmShapes,
    encode,
)
from text_generation_inference.errors import EngineError, StartError, TgiError
from text_generation_inference.failpoints import failpoint
from text_generation_inference.models.registry import read_config, read_quantization
from text_generation_inference.runner.shapes import limits_from, plan_shapes
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import StepPlan, StepResult
from text_generation_inference.weights.source import ModelFolder, find_model

EXIT_FAILED = 4
# What another machine has its own of.
_OWN = (
    "model_id",
    "node_rank",
    "cache_dir",
    "huggingface_hub_cache",
    "weights_cache_override",
    "num_threads",
    "offline",
)
_PENDING_S = 2.0  # that steps under way may take when they are to be forgotten


class RankWorker:
    """What a rank does with its orders."""

    _source: ModelFolder
    _rank: Rank
    _number: int  # of this rank
    _grammars: GrammarCompiler

    def __init__(self, link: Link, own: ServerConfig | None = None) -> None:
        """`own`: the settings of another machine than that of the engine: where its files are."""
        self._link, self._own = link, own
        self._lock = threading.Lock()  # steps end on another thread
        self._last: Future[StepResult] | None = None
        self._sum = TokenSum()
        self._profile: RankProfile | None = None
        # What fails here fails again in the step that needs it, and is told by rank 0.
        self._compilers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tgi-grammar")

    def run(self) -> int:
        """The exit status."""
        orders = OrderReader(self._link)
        number = 0
        try:
            while (received := orders.receive()) is not None:
                number, order = received
                if isinstance(order, ShowPixels):
                    self._rank.show(order.digest, order.pixels)
                elif isinstance(order, RunStep):
                    self._launch(number, order.plan)
                    if self._profile is not None:
                        self._profile.step()
                elif isinstance(order, CompileGrammar):
                    self._compilers.submit(self._grammars.compile, order.grammar, tried=True)
                else:
                    value = self._obey(order)
                    self._report(number, RankAnswer(msgspec.Raw(encode(value))))
                    if isinstance(order, CloseRank):
                        return 0
        except Exception as error:
            self._fail(number, error)
        return EXIT_FAILED

    def _obey(self, order: RankOrder) -> Any:
        match order:
            case BeginRank():
                failpoints.configure(failpoints_asked(), order.place.rank)
                self._source, config, self._number = order.source, order.config, order.place.rank
                if self._own is not None:
                    config = msgspec.structs.replace(config, **{name: getattr(self._own, name) for name in _OWN})
                    self._source = _find_same(config, order.source)
                self._calibrated = read_quant_config(config)
                self._rank = Rank(self._calibrated, self._source, order.place)
                return None
            case JoinRanks():
                return self._rank.join(order.address)
            case LoadWeights():
                failpoint("rank.load")
                model_config = read_config(self._source.path)
                return self._rank.load(model_config, read_quantization(model_config))
            case MeasureSteps():
                return self._rank.measure()
            case AllocateCache():
                return self._allocate(order)
            case WarmShapes():
                graphs = self._rank.warm()
                resume_collection()
                if not self._calibrated.config.disable_grammar_support:
                    self._compilers.submit(self._grammars.prepare)  # takes long once
                return graphs
            case CheckFit():
                return self._rank.fits()
            case ReleaseCache():
                return self._rank.release()
            case ForgetRequests():
                return self._forget()
            case PingRank():
                return self._rank.num_collectives
            case ProfileRank():
                return self._take_profile(order.asked)
            case CloseRank():
                return self._rank.close()
            case RunStep() | ShowPixels() | CompileGrammar():
                raise AssertionError("these are not answered")

    def _allocate(self, order: AllocateCache) -> None:
        config, path = self._calibrated.config, self._source.path
        limits = limits_from(order.resolved)
        about = (order.quantized, order.is_capturable, order.sees, order.picture_sizes)
        plan = plan_shapes(config, order.limits, limits, *about)
        self._grammars = GrammarCompiler(lambda: Tokenizer.load(path), order.vocab_size)
        self._rank.allocate(order.resolved, plan, self._grammars)

    def _take_profile(self, asked: ProfileAsked | None) -> ProfileAnswer:
        """A profile that cannot be taken ends nothing."""
        try:
            if asked is not None:
                self._profile = RankProfile(asked, self._number) if self._number in asked.ranks else None
                return ProfileAnswer()
            profile, self._profile = self._profile, None
            return ProfileAnswer(profile.stop() if profile is not None else None)
        except (StartError, OSError, RuntimeError) as error:
            return ProfileAnswer(error=str(error))

    def _forget(self) -> int:
        if self._last is not None and not wait([self._last], _PENDING_S).done:
            raise EngineError("a step is under way that cannot end")
        self._last = None
        self._sum = TokenSum()
        self._rank.forget()
        return self._rank.num_collectives

    # -- steps -----------------------------------------------------------------------------------------------------

    def _launch(self, number: int, plan: StepPlan) -> None:
        step = self._last = self._rank.launch(plan)
        step.add_done_callback(lambda done: self._finish(number, done))

    def _finish(self, number: int, step: "Future[StepResult]") -> None:
        error = step.exception()
        if error is not None:
            self._fail(number, error, in_step=True)
            return
        value = self._sum.add(step.result())
        if number % SUM_EVERY == 0:
            self._report(number, RankDone(value))

    # -- reports ---------------------------------------------------------------------------------------------------

    def _fail(self, number: int, error: BaseException, in_step: bool = False) -> None:
        """After a lack of memory in a step this rank may go on, if the others lacked it too; else it ends."""
        lacks = in_step and is_out_of_memory(error)
        kind = LACK if lacks else type(error).__name__
        text = str(error).split("\n")[0] if not isinstance(error, TgiError) else str(error)
        self._report(number, RankFailed(text or type(error).__name__, kind))
        if not lacks:
            os._exit(EXIT_FAILED)  # the device may be in a state in which freeing what is on it hangs

    def _report(self, number: int, report: RankReport) -> None:
        with self._lock:
            try:
                self._link.send(number, encode(report))
            except OSError:
                os._exit(EXIT_FAILED)  # the engine is gone, and nobody else wants to know


def _find_same(config: ServerConfig, first: ModelFolder) -> ModelFolder:
    """On this machine the model that machine 0 has. Raises `StartError` if it is another one."""
    found = find_model(config)
    if found.sha != first.sha:
        raise StartError(
            f"machine {config.node_rank} has {config.model_id} in another version ({found.sha}) than machine 0"
            f" ({first.sha}): name one with `revision` on all machines"
        )
    return found


def main() -> int:
    """A program: the descriptor of its socket as its argument; with `--own-files` its settings as JSON on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # whoever stops a group signals this process too; its parent ends it
    own = None
    if "--own-files" in sys.argv:
        own = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    return RankWorker(Link(socket.socket(fileno=int(sys.argv[1]))), own).run()


def run() -> None:
    status = main()
    sys.stderr.flush()
    os._exit(status)
