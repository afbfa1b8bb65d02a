"""Budgets of thoughts: a request that has thought for so many tokens is made to end its thoughts.

One `ThinkingBudgetState` for each slot whose request has a budget. It reads the bytes of the tokens that were sampled,
so that marks are found however a vocabulary cuts them, and says which token must come next once the budget is spent:
those that close the thoughts, one by one. Until then nobody waits for it: how many tokens are on their way is known
without them, and only when these may be the last ones of the budget does a step have to see those of the one before.
"""

from collections.abc import Callable, Sequence

from text_generation_inference.types import ThinkingBudget

_MAX_SPACE = 1024  # bytes before the opening mark; an answer begins with more


class ThinkingBudgetState:
    def __init__(
        self, budget: ThinkingBudget, bytes_of: Callable[[int], bytes], output_ids: Sequence[int] = ()
    ) -> None:
        """`output_ids` are those generated before a preemption."""
        self._budget, self._bytes_of = budget, bytes_of
        self._opens = [mark.encode() for mark in budget.opens]
        self._closes = [mark.encode() for mark in budget.closes]
        self._longest = max(map(len, (*self._opens, *self._closes)))
        self._inside = budget.opened
        self._text = b""  # since the last mark, as far as a mark may begin in it
        self._num_thoughts = 0  # tokens
        self._on_their_way = 0  # chosen in steps whose tokens have not been seen
        self._place = 0  # in `closing`, of the token that comes next; 0: nothing is forced
        self.done = False  # no thoughts can come any more
        for token_id in output_ids:
            self._follow(token_id)

    def _follow(self, token_id: int) -> None:
        """A token that was sampled before a preemption: some of them may have been forced."""
        if self._place or self._is_spent:
            self._force()
        self._see(token_id)

    @property
    def must_see(self) -> bool:
        """Whether the next token depends on some that have not been seen."""
        if self.done or self._place or not self._on_their_way:
            return False
        return self._num_thoughts + self._on_their_way >= self._budget.num_tokens

    def plan(self) -> int | None:
        """Called once for each token, before it is chosen: the one that must come, if only one may."""
        self._on_their_way += 1
        return self._force() if self._place or (self._on_their_way == 1 and self._is_spent) else None

    def take(self, token_id: int) -> None:
        """The next of the tokens that were chosen."""
        self._on_their_way -= 1
        self._see(token_id)

    @property
    def _is_spent(self) -> bool:
        return not self.done and self._inside and self._num_thoughts >= self._budget.num_tokens

    def _force(self) -> int:
        forced = self._budget.closing[self._place]
        self._place = (self._place + 1) % len(self._budget.closing)
        return forced

    def _see(self, token_id: int) -> None:
        if self.done:
            return
        self._num_thoughts += self._inside
        self._text += self._bytes_of(token_id)
        while self._find_mark():
            pass

    def _find_mark(self) -> bool:
        """Whether there was one, behind which another may be."""
        if not self._inside and not self._budget.reopens:
            return self._find_first()
        found = [
            (place, mark)
            for mark in (self._closes if self._inside else self._opens)
            if (place := self._text.find(mark)) >= 0
        ]
        if not found:
            self._text = self._text[max(0, len(self._text) - self._longest + 1) :]
            return False
        place, mark = min(found)
        self._text = self._text[place + len(mark) :]
        self._inside = not self._inside
        self.done = not self._inside and not self._budget.reopens
        return not self.done

    def _find_first(self) -> bool:
        """Thoughts begin with the answer, behind white space, or not at all."""
        words = self._text.lstrip()
        opened = next((mark for mark in self._opens if words.startswith(mark)), None)
        if opened is not None:
            self._text, self._inside = words[len(opened) :], True
            return True
        is_long = len(self._text) - len(words) > _MAX_SPACE
        self.done = is_long or not any(mark.startswith(words) for mark in self._opens)
        return False
