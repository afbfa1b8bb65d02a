"""Decides what each step computes, and turns its result into tokens for the callers.

Pure Python. There are no phases: each request has known and computed tokens, and a step spends a token budget
closing the gap. Prefill, chunked prefill, decode and recompute after preemption are all that one rule.

Requests whose gap is one token form the *decode set* (`decode_set`); which blocks running requests hold is in `tables`.
Where some layers keep a window and others all, a request joins where there are enough blocks of each kind. A plan may
be made while the step before it still runs: then `tokens` lacks the newest value, and a request that turns out to be
finished has computed one token that is dropped.

Who joins a step is for `admission` to say: by tokens, or by shapes where steps have those of a bucket plan
(`PromptShapes`).
"""

import time
from collections import deque
from collections.abc import Callable

import msgspec

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.admission import AdmissionByShapes, AdmissionByTokens, PromptShapes
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.decode_set import DecodeSet
from text_generation_inference.scheduler.encoding import EncodeWork
from text_generation_inference.scheduler.features import Coming, FeatureBook, whole_runs
from text_generation_inference.scheduler.pace import StepPace, StepRoom, StepWork, attended
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.queue import make_queue
from text_generation_inference.scheduler.request import Request
from text_generation_inference.scheduler.shares import Shares
from text_generation_inference.scheduler.step_limit import StepLimit
from text_generation_inference.scheduler.tables import BlockTables
from text_generation_inference.types import (
    Admission,
    Admitted,
    Chunk,
    Finish,
    GenerationRequest,
    PicturePolicy,
    PictureWork,
    StepPlan,
    StepResult,
    TokenOut,
    TopTokens,
)

_MAX_BLOCKS_AHEAD = 64
_MOST_ENDED = 64  # requests in the queue that have ended, beyond as many as have not


class SchedulerStats(msgspec.Struct):
    """Counters since the start."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_rollbacks: int = 0  # steps taken back for lack of memory


class _InFlight(msgspec.Struct, frozen=True):
    """The rows of a planned step whose result has not come back."""

    step: int
    decode_rows: list[Request]
    chunk_rows: list[Request]  # every chunk, in plan order
    sampling_rows: list[Request]  # the chunks that yield a token
    work: StepWork
    encoding: EncodeWork
    encoding_for: set[Request]

    @property
    def num_tokens(self) -> int:
        return self.work.decode_rows + self.work.prompt_tokens


class Scheduler:
    def __init__(
        self,
        policy: BatchPolicy,
        pool: BlockPool,
        clock: Callable[[], int] = time.monotonic_ns,
        shapes: PromptShapes | None = None,  # None: prompts are computed in chunks, as tokens allow
        queue_threshold_ms: int | None = None,
        pictures: PicturePolicy | None = None,  # None: the model sees none
    ) -> None:
        self.policy = policy
        at_once = shapes is not None and not shapes.in_parts
        self._features = FeatureBook(pictures or PicturePolicy(), at_once)
        self.pool = pool
        self.stats = SchedulerStats()
        self._limit = StepLimit(policy)
        self._pace = StepPace(policy.max_step_ms / 1000 or None, pool.block_size, pool.window)
        self._now = clock
        self._decoding = DecodeSet(policy.tokens_per_row, pool.block_size)
        self._tables = BlockTables(pool, self._decoding)
        self._admission = (
            AdmissionByTokens(policy, pool, self._pace, self._tables.give_back_ahead)
            if shapes is None
            else AdmissionByShapes(policy, pool, self._pace, shapes)
        )
        self._requests: dict[int, Request] = {}  # every unfinished request
        # May hold finished ones, which are dropped when reached, or when they are more than the others.
        self._waiting = make_queue(queue_threshold_ms, clock)
        self._awaiting: list[Request] = []  # that would be let in if their pictures were there
        self._prefilling: list[Request] = []  # running, outside the decode set, oldest first
        self._free_slots = list(range(policy.max_batch_size - 1, -1, -1))
        self._shares = Shares(policy.max_batch_size)  # of the slots
        self._num_arrived = 0
        self._step = 0  # last planned step
        self._applied_step = 0  # last step whose result came back
        self._in_flight: deque[_InFlight] = deque()
        self._admitted: list[Admitted] = []  # since the last result
        # Changes that the next plan will carry:
        self._release: list[int] = []

    # -- calls of the engine loop ----------------------------------------------------------------------------------

    def add(self, source: GenerationRequest) -> None:
        """Queue a request. Raises `ValidationError` if it can never run."""
        if source.id in self._requests:
            raise ValidationError(f"request id {source.id} is already in use")
        if source.adapter:
            raise ValidationError("adapter is not supported")
        self._features.check(source, self.policy.max_batch_prefill_tokens, self.policy.max_total_tokens)
        total = len(source.token_ids) + source.max_new_tokens
        room = min(self.policy.max_total_tokens, self.pool.longest)
        if not source.token_ids:
            raise ValidationError("`inputs` cannot be empty")
        if total > room:
            raise ValidationError(
                f"`inputs` tokens + `max_new_tokens` must be <= {room}. Given: {len(source.token_ids)} `inputs` tokens"
                f" and {source.max_new_tokens} `max_new_tokens`"
            )
        self._admission.check(source)
        self._num_arrived += 1
        request = self._make_request(source)
        self._requests[source.id] = request
        self._shares.see(source.caller, request.arrived_ns)
        self._waiting.append(request)

    def _make_request(self, source: GenerationRequest) -> Request:
        policy = self._features.policy
        depends_on = str(source.id) if policy.whole_prompts else ""  # on what follows, too: nobody shares anything
        if policy.cross_rows and source.pictures and source.pictures[0].start > 0:
            # Tokens before all pictures read all of them, and so whatever comes depends on all.
            depends_on = " ".join(span.digest for span in source.pictures)
        return Request(source, self._num_arrived, self._now(), whole_runs(source, policy), depends_on)

    def abort(self, request_id: int) -> bool:
        """End a request without a word. False if it is not known (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    @property
    def picture_work(self) -> PictureWork | None:
        return self._features.work

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - self.num_running

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._in_flight)

    def count_tokens(self) -> tuple[int, int]:
        """(tokens of waiting requests, tokens the running ones may reach together). Looks at every request."""
        running = sum(request.total_limit for request in self._requests.values() if request.running)
        return sum(len(request.tokens) for request in self._requests.values() if not request.running), running

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute now."""
        self._features.open()
        self._grow_decode_set()
        num_decode = len(self._decoding)
        room = self._admission.open(num_decode, self._limit.tokens)
        if self._features.is_busy:
            self._pace.keep_for_encoder(room)
        if self._awaiting:
            self._look_again()
        chunks, chunk_rows = self._continue_prefills(room)
        admit, new_chunks, new_rows = self._admit(room)
        chunks += new_chunks
        chunk_rows += new_rows
        if not num_decode and not chunks and not admit and not self._features.is_busy:
            return None
        encoder_s = self._pace.encoder_seconds(num_decode, room)
        return self._commit(admit, chunks, chunk_rows, num_decode > 0, encoder_s)

    def apply(self, result: StepResult, step_s: float = 0.0) -> TokenOut:
        """Take the result of the oldest planned step, which took the device `step_s`, and tell the callers."""
        flight = self._in_flight.popleft()
        assert flight.step == result.step, f"result of step {result.step} came, {flight.step} is due"
        self._applied_step = flight.step
        self._pace.on_step(flight.work, step_s - result.encode_s)
        if flight.encoding.num_parts:
            self._features.on_step(flight.encoding, result.encode_s)
        rows = flight.decode_rows + flight.sampling_rows if flight.sampling_rows else flight.decode_rows
        if flight.decode_rows:
            self._decoding.confirm()
        self._limit.on_step(*self._size(flight), bool(rows))
        scored = [(flight.chunk_rows[p.row - len(flight.decode_rows)], p) for p in result.prompt_logprobs]
        prompts = [msgspec.structs.replace(p, row=request.id) for request, p in scored if not request.finished]
        finished = [self._end(rows[row], "error", text) for row, text in result.errors if not rows[row].finished]
        if result.counts is not None:
            rows = [request for request, count in zip(rows, result.counts, strict=True) for _ in range(count)]
        top_by_row = {top.row: top for top in result.top_tokens}
        ids: list[int] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        tops: list[TopTokens] = []
        for row, (request, token, logprob) in enumerate(zip(rows, result.token_ids, result.logprobs, strict=True)):
            if request.finished:  # before this step, or by a token before this one
                continue
            if row in top_by_row:
                top = top_by_row[row]
                tops.append(TopTokens(len(ids), top.token_ids, top.logprobs))
            ids.append(request.source.id)
            tokens.append(token)
            logprobs.append(logprob)
            known = request.tokens
            known.append(token)
            if len(known) >= request.total_limit:
                finished.append(self._end(request, "length"))
            elif token in request.stop_ids:
                finished.append(self._end(request, "eos_token"))
        admitted, self._admitted = self._admitted, []
        return TokenOut(ids, tokens, logprobs, tops, prompts, finished, admitted)

    def rollback(self, error: str) -> TokenOut:
        """The oldest planned step was too large for the device, which has forgotten every request.

        All results that have not come back are given up. Running requests wait again, in their order, to be computed
        anew in smaller steps; nothing in the cache is trusted. A request that did not fit alone ends with `error`.
        """
        flight = self._in_flight[0]
        self._in_flight.clear()
        self._applied_step = self._step
        self._decoding.give_up()
        self.stats.num_rollbacks += 1
        self.pool.forget()
        running = sorted((*self._decoding, *self._prefilling), key=lambda request: request.order)
        for request in reversed(running):
            self._preempt(request, forget=True)
        self._release, self._decoding.leaving = [], []
        self._tables.take_changes()
        self._admission.forget()
        self._features.forget()
        for request in reversed(self._awaiting):
            self._waiting.appendleft(request)
        self._awaiting = []
        rows = [*flight.decode_rows, *flight.chunk_rows]
        is_smaller = not rows or self._limit.shrink(*self._size(flight))
        if flight.encoding.num_parts:  # pictures are computed one by one from now on, and then they are to blame
            is_smaller, rows = self._features.shrink(), sorted(flight.encoding_for, key=lambda request: request.order)
        finished: list[Finish] = []
        if not is_smaller:
            finished = [self._end(request, "error", error) for request in rows if not request.finished]
        admitted, self._admitted = self._admitted, []
        return TokenOut(finished=finished, admitted=admitted)

    def check(self) -> None:
        """Raise AssertionError unless slots and blocks balance."""
        running = [*self._decoding, *self._prefilling]
        self.pool.check(running)
        assert self.pool.num_promised == sum(request.num_promised for request in running), "promises do not balance"
        self._features.verify(set(self._requests.values()))
        assert all(not request.running and not request.finished for request in self._awaiting)
        assert len(self._decoding) or not self._decoding.has_entries, "the calendar names who has left"
        slots = [request.slot for request in running if not request.finished]
        assert len(set(slots)) == len(slots), "two requests share a slot"
        assert sorted([*slots, *self._free_slots]) == list(range(self.policy.max_batch_size)), "slots do not balance"
        assert self._shares.num_held == len(slots), "shares of slots do not balance"
        for request in running:
            assert not request.finished and request.running
            self._tables.check(request)
        for request in self._waiting:
            assert request.finished or not (request.running or request.blocks), "a waiting request holds something"

    def _size(self, flight: _InFlight) -> tuple[int, int]:
        """Requests and tokens of a step, for its limit."""
        return self._admission.measure(len(flight.decode_rows) + len(flight.chunk_rows), flight.num_tokens)

    # -- parts of a plan -------------------------------------------------------------------------------------------

    def _grow_decode_set(self) -> None:
        """Serve the calendar for the coming decode step: members at their length leave, others get their next block."""
        decoding = self._decoding
        for request in decoding.take_due():
            reserved = decoding.num_reserved(request)
            if reserved + 1 >= request.total_limit and decoding.per_row == 1:
                self._leave_decode_set(request)
                continue
            if self._tables.gives_back:
                self._tables.give_back_behind(request)
            room = len(request.blocks) * self.pool.block_size
            num_needed = decoding.num_needed(request, reserved)
            if num_needed > room:
                taken = self._take_blocks_for(request, num_needed - room, request.total_limit - 1 - room)
                if taken is None:
                    continue
                self._tables.extend(request, *taken)
            decoding.schedule(request, reserved)

    def _take_blocks_for(
        self, request: Request, least_tokens: int, most_tokens: int
    ) -> tuple[list[int], list[int]] | None:
        """Blocks for the next tokens of a member of the decode set, and as many beside, where there are such; None if
        it had to be preempted for lack of them.

        Where empty blocks abound more are taken at once, up to a fair share of half of them, so that the next visit
        comes later. Where blocks lack, those taken ahead are given back, then the newest requests are preempted.
        """
        size = self.pool.block_size
        if request.num_promised:
            count = min(request.num_promised, -(-least_tokens // size))
            request.num_promised -= count
            return self.pool.take_promised(count), []
        share = self._tables.num_empty // (2 * self.num_running)
        count = max(-(-least_tokens // size), min(share, _MAX_BLOCKS_AHEAD, -(-most_tokens // size)))
        while (taken := self._tables.try_take(count)) is None:
            if self._tables.give_back_ahead():
                continue
            newest = max(
                (other for other in (*self._decoding, *self._prefilling) if other.running),
                key=lambda other: other.order,
            )
            self._preempt(newest)
            if newest is request:
                return None
        return taken

    def _continue_prefills(self, room: StepRoom) -> tuple[list[Chunk], list[Request]]:
        """Chunks for running requests that are still behind, oldest first."""
        chunks: list[Chunk] = []
        rows: list[Request] = []
        for request in list(self._prefilling):
            if room.is_open and self._is_behind(request):
                if not self._tables.move(request, self._admission.most_held, self._admission.most_beside):
                    self._preempt(request)
                    continue
                chunk = self._chunk(request, room)
                if chunk is not None:
                    chunks.append(chunk)
                    rows.append(request)
        return chunks, rows

    def _is_behind(self, request: Request) -> bool:
        return request.reserved < len(request.tokens)

    def _chunk(self, request: Request, room: StepRoom) -> Chunk | None:
        """Plan the next run of known tokens. Its blocks can be found at once: the device works in plan order.

        None: it waits for room for its pictures, or has no place in the step's shape.
        """
        known = len(request.tokens)
        start, most = request.reserved, self._tables.room(request)
        end = room.reach(start, min(known, most), not request.wants_prompt_logprobs)
        if end == start:
            return None
        if request.source.pictures or request.whole_runs:
            end = self._features.reach(request, start, end, room.is_untouched)
            if end == start or end > most:
                return None
        room.spend(start, end)
        request.reserved = end
        self.pool.publish(request, end)
        self._admission.on_chunk(request, start, end)
        return Chunk(request.slot, start, end, end == known)

    def _admit(self, room: StepRoom) -> tuple[list[Admission], list[Chunk], list[Request]]:
        """Let waiting requests in, in the order of the queue, until tokens, slots or blocks run out."""
        admit: list[Admission] = []
        chunks: list[Chunk] = []
        rows: list[Request] = []
        while room.is_open and self._free_slots and self.num_running < self._limit.rows:
            request = self._waiting.head(self._shares.may_take)
            if request is None:
                break
            if request.finished:
                self._waiting.take(request)
                continue
            if request.busy_until > self._applied_step:
                break
            coming = self._features.ask(request)
            if coming is Coming.ON_THE_WAY:
                self._waiting.take(request)
                self._awaiting.append(request)
                continue
            if coming is Coming.NO_ROOM and self._features.take_back(self._awaiting):
                continue
            if coming is Coming.NO_ROOM or not self._admission.try_join(request, self.num_running):
                break
            self._waiting.take(request)
            admit.append(self._start(request))
            chunk = self._chunk(request, room)
            if chunk is not None:
                chunks.append(chunk)
                rows.append(request)
        return admit, chunks, rows

    def _look_again(self) -> None:
        """Those whose pictures are there by now wait at the head of the queue."""
        for request in reversed(self._awaiting):
            if self._features.ask(request) is Coming.THERE:
                self._awaiting.remove(request)
                self._waiting.appendleft(request)

    def _start(self, request: Request) -> Admission:
        request.slot = self._free_slots.pop()
        self._shares.take(request.source.caller)
        self._prefilling.append(request)
        if request.admitted_ns is None:
            request.admitted_ns = self._now()
            request.num_cached_tokens = request.reserved
            queue_ns = request.admitted_ns - request.arrived_ns
            self._admitted.append(Admitted(request.source.id, request.reserved, queue_ns))
            self.stats.num_prompt_tokens += request.num_prompt
            self.stats.num_cached_prompt_tokens += request.reserved
        tables = (list(request.blocks), list(request.beside))
        return Admission(request.slot, request.source, request.tokens[request.num_prompt :], *tables)

    def _commit(
        self,
        admit: list[Admission],
        chunks: list[Chunk],
        chunk_rows: list[Request],
        decode: bool,
        encoder_s: float,
    ) -> StepPlan:
        """Number the step, move the decode set, and remember the rows."""
        self._step += 1
        leave, join = self._decoding.advance(decode)
        decode_rows = self._decoding.rows if decode else []
        sampling = [request for request, chunk in zip(chunk_rows, chunks, strict=True) if chunk.samples]
        for request in chunk_rows:
            request.busy_until = self._step
        for request in sampling:
            self._prefilling.remove(request)
            self._decoding.joining.append(request)
        drop, encoding, encoding_for = self._features.take(encoder_s)
        grow, grow_beside = self._tables.take_changes()
        plan = StepPlan(
            self._step,
            self._release,
            admit,
            leave,
            join,
            grow,
            decode,
            chunks,
            drop,
            encoding.pictures,
            encoding.num_parts,
            grow_beside,
        )
        self._release = []
        work = StepWork(
            len(decode_rows),
            sum(chunk.end - chunk.start for chunk in chunks),
            sum(attended(chunk.start, chunk.end, self.pool.window) for chunk in chunks),
        )
        about = (decode_rows, chunk_rows, sampling, work, encoding, encoding_for)
        self._in_flight.append(_InFlight(self._step, *about))
        return plan

    # -- ways out --------------------------------------------------------------------------------------------------

    def _leave_decode_set(self, request: Request) -> None:
        """Its last token is in flight: it keeps its blocks until the result ends it, but computes no more."""
        self._drop_row(request)
        self._prefilling.append(request)

    def _drop_row(self, request: Request) -> None:
        request.busy_until = self._step
        self._decoding.drop(request)

    def _stop_running(self, request: Request, forget: bool = False) -> None:
        """Give slot and blocks back; what was computed stays findable."""
        self._features.let_go(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        else:
            self._drop_row(request)
        self._tables.let_go(request, forget)
        self._release.append(request.slot)
        self._free_slots.append(request.slot)
        self._shares.give_back(request.source.caller)
        request.slot = -1

    def _preempt(self, request: Request, forget: bool = False) -> None:
        """Back to the head of the queue; its tokens will be computed again."""
        self.stats.num_preemptions += 1
        self._stop_running(request, forget)
        self._waiting.appendleft(request)

    def _end(self, request: Request, reason: str = "aborted", error: str | None = None) -> Finish:
        if request.running:
            self._stop_running(request, forget=reason == "error")
        elif request.source.pictures:
            self._features.let_go(request)
            self._awaiting = [other for other in self._awaiting if other is not request]
        if reason == "error":
            self._features.distrust(request)
        request.finished = True
        del self._requests[request.id]
        if len(self._waiting) > 2 * self.num_waiting + _MOST_ENDED:  # or they would stay as long as the head waits
            self._waiting.drop_finished()
        now = self._now()
        admitted = request.admitted_ns if request.admitted_ns is not None else now
        return Finish(
            request.id, reason, error, request.num_cached_tokens, admitted - request.arrived_ns, now - admitted
        )
