"""Which tokens the running requests allow next: those of their grammars, no end before its time, no endless thoughts.

Each slot with a grammar has a matcher, made on admission, advanced by the sampled tokens, dropped on release.
Matchers work on a thread of their own: as soon as a step's tokens are known the masks for the next step are computed,
while the model runs; `masks` waits for them. Whatever fails here is remembered as the error of one request.

A request with `min_tokens` has its ends masked for so many tokens. That depends on their number alone: every call of
`masks` is one token more, and nobody waits. One with a budget for its thoughts is made to close them (`thinking`).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from torch import Tensor

from text_generation_inference.errors import ValidationError
from text_generation_inference.runner.thinking import ThinkingBudgetState
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.text.grammar import CompiledGrammar, GrammarCompiler, describe_error, is_worn
from text_generation_inference.types import Admission, Grammar

_NO_GRAMMAR = Grammar("regex", "")  # of a request that cannot go on for another reason


@dataclass(slots=True)
class _Constraint:
    slot: int
    grammar: Grammar
    ends: frozenset[int]  # ids that may follow a complete text; none when EOS is ignored
    compiled: CompiledGrammar | None = None
    matcher: LLMatcher | None = None
    taken: list[int] = field(default_factory=list)  # what the matcher has seen
    renewed: bool = False
    own_ends: bool = False  # `ends` are not exactly the model's
    ended: bool = False
    error: str | None = None


@dataclass(slots=True)
class _HeldEnds:
    """Ends that may not come yet."""

    ends: frozenset[int]
    num_tokens: int  # for so many tokens more


@dataclass(slots=True)
class _Vocabulary:
    """What of the tokenizer the masks depend on."""

    eos_ids: list[int]
    masks: Tensor  # [slots, words] int32, on the host
    words: np.ndarray = field(init=False)  # the same memory

    def __post_init__(self) -> None:
        self.words = self.masks.numpy().view(np.uint32)


class SlotGrammars:
    def __init__(self, compiler: GrammarCompiler | None, num_slots: int, vocab_size: int) -> None:
        self._compiler = compiler
        self._num_slots, self._vocab_size = num_slots, vocab_size
        self._constraints: dict[int, _Constraint] = {}  # by slot
        self._held: dict[int, _HeldEnds] = {}  # by slot, while ends are masked
        self._thinking: dict[int, ThinkingBudgetState] = {}  # by slot
        # Made when the first constrained request comes:
        self._vocabulary: _Vocabulary | None = None
        self._executor: LLExecutor | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None  # the newest work; the worker goes in order

    def admit(self, admission: Admission) -> None:
        """Begin to match, or go on behind the tokens generated before a preemption."""
        request = admission.request
        ends = frozenset(token_id for token_id in request.stop_token_ids if token_id < self._vocab_size)
        num_held = request.sampling.min_tokens - len(admission.output_ids)
        if num_held > 0 and ends:
            self._held[admission.slot] = _HeldEnds(ends, num_held)
        budget = request.sampling.thinking
        if budget is not None:
            try:
                bytes_of = self._decoder()
            except ValidationError as error:
                self._constraints[admission.slot] = _Constraint(admission.slot, _NO_GRAMMAR, ends, error=str(error))
                return
            self._thinking[admission.slot] = ThinkingBudgetState(budget, bytes_of, admission.output_ids)
        if request.grammar is None:
            return
        constraint = _Constraint(admission.slot, request.grammar, ends)
        self._constraints[admission.slot] = constraint
        self._submit([constraint], lambda: self._begin(constraint, admission.output_ids))

    @property
    def active(self) -> bool:
        """Whether some mask depends on tokens that the host must have seen."""
        return bool(self._constraints)

    def must_see(self, rows: list[int]) -> bool:
        """Whether thoughts of these rows (slots) may have to end now."""
        return bool(self._thinking) and any(state.must_see for _, state in self.thinking(rows))

    def thinking(self, rows: list[int]) -> list[tuple[int, ThinkingBudgetState]]:
        """The rows (slots) whose thoughts are counted, which are to be told the tokens of this step."""
        if not self._thinking:
            return []
        return [(row, state) for row, slot in enumerate(rows) if (state := self._thinking.get(slot)) is not None]

    def release(self, slots: Sequence[int]) -> None:
        if self._constraints or self._held or self._thinking:
            for slot in slots:
                self._constraints.pop(slot, None)
                self._held.pop(slot, None)
                self._thinking.pop(slot, None)

    def masks(self, rows: list[int]) -> RowMasks | None:
        """What the constrained ones among the rows (slots) allow; None when all are free. Called once for a token."""
        if not (self._constraints or self._held or self._thinking):
            return None
        forced = {rows[row]: token_id for row, state in self.thinking(rows) if (token_id := state.plan()) is not None}
        limited = (self._constraints, self._held, forced)
        found = [(row, slot) for row, slot in enumerate(rows) if any(slot in known for known in limited)]
        if not found:
            return None
        if self._pending is not None and any(slot in self._constraints for _, slot in found):
            self._pending.result()
        errors = {
            row: error
            for row, slot in found
            if slot in self._constraints and (error := self._constraints[slot].error) is not None
        }
        masked = [(row, slot) for row, slot in found if row not in errors]
        num_words = -(-self._vocab_size // 32) if self._vocabulary is None else self._vocabulary.words.shape[1]
        words = np.full((len(masked), num_words), 0xFFFFFFFF, dtype=np.uint32)
        for place, (_, slot) in enumerate(masked):
            if slot in self._constraints:
                assert self._vocabulary is not None
                words[place] = self._vocabulary.words[slot]
            if slot in self._held:
                self._hold_ends(slot, words[place])
            if slot in forced:
                _force(words[place], forced[slot])
        return RowMasks([row for row, _ in masked], words.view(np.int32), errors)

    def _decoder(self) -> Callable[[int], bytes]:
        """Raises `ValidationError` where nothing is known of the tokens' texts."""
        if self._compiler is None:
            raise ValidationError("a budget of thoughts is not supported")
        tokenizer = self._compiler.prepare()
        return lambda token_id: tokenizer.decode_bytes([token_id])

    def _hold_ends(self, slot: int, words: np.ndarray) -> None:
        """Take the ends from a mask, for one token. Where a grammar allows nothing else they stay."""
        held = self._held[slot]
        before = words.copy()
        for token_id in held.ends:
            words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        if not words.any():
            words[:] = before
        held.num_tokens -= 1
        if held.num_tokens == 0:
            del self._held[slot]

    def advance(self, rows: list[int], token_ids: list[int]) -> None:
        """Take what was sampled for the rows (slots), and begin with the masks of the next step."""
        if not self._constraints:
            return
        taken: list[tuple[_Constraint, int]] = []
        for slot, token_id in zip(rows, token_ids, strict=True):
            constraint = self._constraints.get(slot)
            if constraint is None or constraint.error is not None or constraint.ended:
                continue
            if token_id in constraint.ends:
                constraint.ended = True  # the scheduler ends the request; one more step may be on its way
            else:
                taken.append((constraint, token_id))
        if taken:
            self._submit([constraint for constraint, _ in taken], lambda: self._take(taken))

    # -- on the worker ---------------------------------------------------------------------------------------------

    def _submit(self, constraints: list[_Constraint], work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # a panic of llguidance is no `Exception`
                for constraint in constraints:
                    constraint.error = constraint.error or f"grammar error: {error}"

        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tgi-masks")
        self._pending = self._worker.submit(guarded)

    def _begin(self, constraint: _Constraint, output_ids: list[int]) -> None:
        if self._compiler is None:
            constraint.error = "grammar is not supported"
            return
        try:
            vocabulary = self._prepare(self._compiler.prepare())
            constraint.compiled = self._compiler.compile(constraint.grammar, tried=True)
        except ValidationError as error:
            constraint.error = str(error)
            return
        matcher = constraint.matcher = constraint.compiled.matcher()
        constraint.own_ends = constraint.ends != frozenset(vocabulary.eos_ids)
        if output_ids:
            constraint.taken += output_ids
            matcher.consume_tokens(output_ids)
        self._fill(vocabulary, [constraint])

    def _prepare(self, tokenizer: LLTokenizer) -> _Vocabulary:
        if self._vocabulary is None:
            shape = (self._num_slots, -(-tokenizer.vocab_size // 32))
            self._executor = LLExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)))
            self._vocabulary = _Vocabulary(list(tokenizer.eos_tokens), torch.zeros(shape, dtype=torch.int32))
        return self._vocabulary

    def _take(self, taken: list[tuple[_Constraint, int]]) -> None:
        assert self._executor is not None and self._vocabulary is not None
        pairs = [(constraint.matcher, token_id) for constraint, token_id in taken if constraint.matcher is not None]
        for constraint, token_id in taken:
            constraint.taken.append(token_id)
        self._executor.consume_token_par(pairs)
        self._fill(self._vocabulary, [constraint for constraint, _ in taken])

    def _fill(self, vocabulary: _Vocabulary, constraints: list[_Constraint]) -> None:
        """Compute the masks of these constraints, each into the row of its slot."""
        self._compute(vocabulary, constraints)
        worn = [c for c in constraints if c.matcher is not None and is_worn(c.matcher) and not c.renewed]
        if worn:
            for constraint in worn:
                self._renew(constraint)
            self._compute(vocabulary, worn)
        for constraint in constraints:
            assert constraint.matcher is not None
            words = vocabulary.words[constraint.slot]
            if constraint.matcher.is_error():
                constraint.error = f"grammar error: {describe_error(constraint.matcher)}"
                continue
            if constraint.own_ends:
                _replace_ends(words, vocabulary.eos_ids, constraint.ends)
            _clear_from(words, self._vocab_size)
            if not words.any():
                constraint.error = "grammar error: no token of the model can follow"

    def _compute(self, vocabulary: _Vocabulary, constraints: list[_Constraint]) -> None:
        assert self._executor is not None
        num_slots, num_words = vocabulary.masks.shape
        pairs = [(c.matcher, c.slot) for c in constraints if c.matcher is not None and not c.matcher.is_error()]
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, vocabulary.masks.data_ptr(), num_words * 4, num_slots)

    def _renew(self, constraint: _Constraint) -> None:
        """Go on with a fresh lexer: this one is full of what other requests with the grammar have met.

        Once for a request: one that fills two is too much for the limits by itself.
        """
        assert self._compiler is not None and constraint.compiled is not None
        constraint.renewed = True
        try:
            constraint.compiled = self._compiler.renew(constraint.grammar, constraint.compiled)
        except ValidationError:
            return  # the matcher's own error is told
        constraint.matcher = constraint.compiled.matcher()
        constraint.matcher.consume_tokens(constraint.taken)


def _force(words: np.ndarray, token_id: int) -> None:
    """Leave nothing but one id of a mask. Where a grammar does not allow it, it has its way."""
    bit = np.uint32(1 << (token_id & 31))
    if words[token_id >> 5] & bit:
        words[:] = 0
        words[token_id >> 5] = bit


def _replace_ends(words: np.ndarray, eos_ids: list[int], ends: frozenset[int]) -> None:
    """Where EOS may follow, let the request's own ends follow instead.

    A request that ignores EOS has none: it goes on as long as anything else may follow, and then repeats EOS.
    """
    if not any(words[i >> 5] >> (i & 31) & 1 for i in eos_ids):
        return
    for token_id in eos_ids:
        words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    for token_id in ends or (() if words.any() else eos_ids):
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _clear_from(words: np.ndarray, vocab_size: int) -> None:
    """Drop the ids that the tokenizer has beyond the model."""
    first, shift = divmod(vocab_size, 32)
    if first < len(words):
        words[first] &= np.uint32((1 << shift) - 1)
        words[first + 1 :] = 0
