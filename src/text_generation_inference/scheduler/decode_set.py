"""The decode set: requests whose gap is one token. Each decode step moves all of them, so plans need not list them.

A step moves a member by one token or by up to `per_row`. What steps in flight may write is reserved; their results
confirm all of it or a part. A calendar says at which decode step a member's blocks may be full or it reaches its
length, which keeps planning proportional to what changes.
"""

from collections.abc import Iterator

from text_generation_inference.scheduler.request import Request


class DecodeSet:
    def __init__(self, per_row: int, block_size: int) -> None:
        self.per_row = per_row
        self.rows: list[Request] = []  # replaced, never changed in place: steps in flight refer to it
        self.joining: list[Request] = []  # from the next plan on
        self.leaving: list[int] = []  # slots: a change that the next plan carries
        self._block_size = block_size
        self._clock = 0  # decode steps planned so far
        self._applied_clock = 0  # those whose result came back
        self._calendar: dict[int, list[Request]] = {}  # clock -> members to look at before that step

    def __len__(self) -> int:
        return len(self.rows) + len(self.joining)

    def __iter__(self) -> Iterator[Request]:
        yield from self.rows
        yield from self.joining

    # -- tokens ----------------------------------------------------------------------------------------------------

    def num_reserved(self, request: Request) -> int:
        """The most tokens of a request, in the set or not, that steps in flight may leave computed."""
        if not request.decodes:
            return request.reserved
        in_flight = self._clock - max(request.join_clock, self._applied_clock)
        # While the step with its last chunk is in flight its first token is not known.
        confirmed = max(request.reserved, len(request.tokens) - 1)
        return min(confirmed + in_flight * self.per_row, request.total_limit - 1)

    def num_confirmed(self, request: Request) -> int:
        """The tokens of a request that are computed when all planned steps are, whatever these yield."""
        return max(request.reserved, len(request.tokens) - 1) if request.decodes else request.computed

    def num_needed(self, request: Request, reserved: int) -> int:
        """Tokens that a member must have blocks for in the coming step."""
        return min(reserved + self.per_row, request.total_limit - 1)

    # -- the calendar ----------------------------------------------------------------------------------------------

    @property
    def has_entries(self) -> bool:
        return bool(self._calendar)

    def take_due(self) -> Iterator[Request]:
        """Members to look at before the coming step, and those that join: each is to be scheduled, or dropped."""
        due = self._calendar.pop(self._clock, [])
        for request in self.joining:
            request.join_clock = request.next_event = self._clock
            due.append(request)
        for request in due:
            if request.next_event == self._clock:  # not preempted while an older one was served
                yield request

    def schedule(self, request: Request, reserved: int) -> None:
        """Enter when a member must be seen next: its blocks may be full, or it reaches its length."""
        room = len(request.blocks) * self._block_size
        if self.per_row > 1 and room >= request.total_limit - 1:
            request.next_event = -1  # it has all it can need, and who yields how many ends when results say so
            return
        when = self._clock + (min(room, request.total_limit - 1) - reserved) // self.per_row
        request.next_event = when
        self._calendar.setdefault(when, []).append(request)

    def unschedule(self, request: Request) -> None:
        entries = self._calendar.get(request.next_event)
        if entries is not None and request in entries:
            entries.remove(request)
            if not entries:
                del self._calendar[request.next_event]
        request.next_event = -1

    # -- in and out ------------------------------------------------------------------------------------------------

    def drop(self, request: Request) -> None:
        """It computes no more."""
        request.reserved = self.num_reserved(request)
        request.join_clock = -1
        self.unschedule(request)
        if request in self.joining:
            self.joining = [other for other in self.joining if other is not request]
        else:
            self.rows = [other for other in self.rows if other is not request]
            self.leaving.append(request.slot)

    def advance(self, decode: bool) -> tuple[list[int], list[int]]:
        """Plan a step, in which the set decodes or not: slots that leave, and slots that join."""
        leave, join = self.leaving, [request.slot for request in self.joining]
        self.leaving = []
        if self.joining:
            self.rows = self.rows + self.joining
            self.joining = []
        if decode:
            self._clock += 1
        return leave, join

    def confirm(self) -> None:
        """The result of a decode step came back."""
        self._applied_clock += 1

    def give_up(self) -> None:
        """Nothing is in flight any more."""
        self._applied_clock = self._clock
