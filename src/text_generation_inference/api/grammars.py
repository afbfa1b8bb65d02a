"""Grammars of requests, compiled beside the event loop before the engine sees them.

Two lanes: what compiles in milliseconds never waits behind what must be tried out in a program of its own
first. In each lane callers take turns. A grammar is compiled once for all requests of a caller that wait for it, and no
longer than one of them does: when the last has left, it is taken out of the queue, or its trial is ended.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from text_generation_inference.api.callers import current_caller
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.api.turns import Turns
from text_generation_inference.errors import OverloadedError
from text_generation_inference.text.grammar import GrammarCompiler, is_plain
from text_generation_inference.text.grammar_trial import Trial
from text_generation_inference.types import Grammar

_MAX_WAIT_S = 10.0
_NUM_PLAIN, _NUM_HARD = 2, 2
_HARD_EACH = 1  # of one caller: a trial takes seconds at worst, and another caller should not wait for it


@dataclass(slots=True)
class _Work:
    task: "asyncio.Task[None]"
    num_waiting: int = 0


class GrammarQueue:
    def __init__(self, compiler: GrammarCompiler, metrics: Metrics) -> None:
        self._compiler = compiler
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(_NUM_PLAIN + _NUM_HARD, thread_name_prefix="tgi-grammar")
        self._plain = Turns(_NUM_PLAIN, _MAX_WAIT_S, lambda count: metrics.waiting("grammar", count))
        self._hard = Turns(_NUM_HARD, _MAX_WAIT_S, lambda count: metrics.waiting("hard_grammar", count), _HARD_EACH)
        self._work: dict[tuple[str, Grammar], _Work] = {}

    async def check(self, grammar: Grammar) -> None:
        """Returns when the grammar is compiled. Raises `ValidationError` with the reason, or `OverloadedError`."""
        if self._compiler.find(grammar) is not None:
            return
        # By caller: who joined another's would wait for that one's turn.
        key = (current_caller.get(), grammar)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = _Work(asyncio.create_task(self._compile(grammar)))
        work.num_waiting += 1
        try:
            await asyncio.shield(work.task)
        finally:
            work.num_waiting -= 1
            if not work.num_waiting and self._work.get(key) is work:
                del self._work[key]
                work.task.cancel()  # has no effect on one that is done

    async def _compile(self, grammar: Grammar) -> None:
        # Told by the text itself, which is close to what is compiled: whatever must be tried is tried in either lane.
        plain = is_plain(grammar.kind, grammar.value)
        lane, name = (self._plain, "grammar") if plain else (self._hard, "hard_grammar")
        trial, result = Trial(), "refused"
        try:
            await lane.run(self._threads, lambda: self._compiler.compile(grammar, trial=trial), trial.stop)
            result = "compiled"
        except OverloadedError:
            result = "overloaded"
            self._metrics.refuse_waiting(name)
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self._metrics.grammar(result)

    def close(self) -> None:
        for work in list(self._work.values()):
            work.task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
