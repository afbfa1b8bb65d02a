# pyright: basic, reportMissingImports=false
"""Sums and gathers over ranks whose buffers each of them can read, in one kernel with the norm that follows.

A program has a place of its own in every rank's buffer. It copies its part of the tensor there, signals all ranks'
programs of its number, waits for theirs, and reads what they have copied. One shot: each rank reads everything and sums
in the order of ranks, in float32. Two shots: each sums its share of the part and leaves it where it was; another
meeting, then everybody reads the finished shares. A value is summed alike in both, so all ranks get the same bits at
every size.

A place is two halves, used in turn: whoever has met the others in one call knows that all have left the call before,
so nothing is overwritten that somebody still reads. Signals are counted and never reset, and the counts are kept on
the device: a captured call can be replayed.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.matrices import Rows
from text_generation_inference.kernels.triton.launch import dependent_launch
from text_generation_inference.kernels.triton.norms_rotary import normalised
from text_generation_inference.kernels.triton.quantize import RowStore, store_columns

MAX_RANKS = 8
MAX_PROGRAMS = 64
PLACE_BYTES = 64 << 10  # of a program, in each half
SIGNAL_BYTES = 128  # apart, so that those of two programs are not in one line
BUFFER_BYTES = MAX_PROGRAMS * (SIGNAL_BYTES + 2 * PLACE_BYTES)
_CHUNK = 4096  # values of a row, where rows mean nothing
_MAX_POLLS = 1 << 29  # minutes: whoever is not there by then is gone, and nobody has ended this process

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}

ONE_SHOT, TWO_SHOT, GATHER = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _meet(signals, own, program, goal, WORLD: tl.constexpr, LANES: tl.constexpr, MAX_POLLS: tl.constexpr):
    """Until all ranks' programs of this number have come here `goal` times. What they wrote before can be read."""
    tl.debug_barrier()  # all threads have written
    tl.atomic_add(signals, 1, mask=tl.arange(0, LANES) < WORLD, sem="release", scope="sys")
    signal = (own + program * 128).to(tl.pointer_type(tl.int32))
    # The sum of all ranks' signals is enough: one that is ahead has met all others already. Differences may wrap.
    polls = 0
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") - goal * WORLD < 0:
        polls += 1
        if MAX_POLLS > 0 and polls > MAX_POLLS:
            tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [polls], tl.int32, False, 1)
    tl.debug_barrier()


@triton.jit
def _sum_peers(bases, place, at, mask, WORLD: tl.constexpr, kind: tl.constexpr):
    """In the order of ranks, in float32."""
    value = _peer(bases, 0, place, at, mask, kind).to(tl.float32)
    for peer in tl.static_range(1, WORLD):
        value += _peer(bases, peer, place, at, mask, kind).to(tl.float32)
    return value.to(kind)


@triton.jit
def _peer(bases, peer: tl.constexpr, place, at, mask, kind: tl.constexpr):
    base = tl.multiple_of((bases[peer] + place).to(tl.pointer_type(kind)), 16)
    return tl.load(base + at, mask=mask, other=0.0)


@triton.jit
def _bases(table, WORLD: tl.constexpr):
    """All ranks' buffers (MAX_RANKS; further ones are any), looked up once: nobody waits for that after a meeting."""
    return (
        tl.load(table), tl.load(table + 1 % WORLD), tl.load(table + 2 % WORLD), tl.load(table + 3 % WORLD),
        tl.load(table + 4 % WORLD), tl.load(table + 5 % WORLD), tl.load(table + 6 % WORLD), tl.load(table + 7 % WORLD),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "per_program"])
def _sum_kernel(
    x, out, residual, weight, normed, scales, input_scale, table, counts, eps, rank, numel, per_program, residual_row,
    scales_row, WIDTH: tl.constexpr, PAD: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, WAY: tl.constexpr,
    NORM: tl.constexpr, FORM: tl.constexpr, PROGRAMS: tl.constexpr, PLACE: tl.constexpr, SHARE: tl.constexpr,
    DEPENDENT: tl.constexpr, TRIGGER: tl.constexpr, MAX_POLLS: tl.constexpr,
):  # fmt: skip
    """`per_program` rows of WIDTH values. With NORM a row is added to one of `residual`, into `out`, and normalised
    into `normed`. GATHER: `out` has the values of all ranks, rank by rank."""
    program = tl.program_id(0)
    kind: tl.constexpr = x.dtype.element_ty
    i = tl.arange(0, PAD)
    inside = i < WIDTH
    if NORM:
        factors = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    bases, own_base, lanes = _bases(table, WORLD), tl.load(table + rank), tl.arange(0, LANES)
    signals = tl.load(table + lanes, mask=lanes < WORLD, other=0) + program * 128
    signals = signals.to(tl.pointer_type(tl.int32))
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        if TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
    meetings = tl.load(counts + 2 * program)
    calls = tl.load(counts + 2 * program + 1)
    place = PROGRAMS * 128 + ((calls & 1) * PROGRAMS + program).to(tl.int64) * PLACE
    own = tl.multiple_of((own_base + place).to(tl.pointer_type(kind)), 16)
    first_row = program.to(tl.int64) * per_program
    for n in range(per_program):
        at = (first_row + n) * WIDTH + i
        mask = inside & (at < numel)
        tl.store(own + n * WIDTH + i, tl.load(x + at, mask=mask, other=0.0), mask=mask)
    meetings += 1
    _meet(signals, own_base, program, meetings, WORLD, LANES, MAX_POLLS)
    share = 0
    if WAY == TWO_SHOT:
        total = per_program * WIDTH
        share = (total + WORLD * 16 - 1) // (WORLD * 16) * 16
        for first in range(0, share, SHARE):  # this rank's, to where its own part of it was
            j = first + tl.arange(0, SHARE)
            at = rank * share + j
            mask = (j < share) & (at < total)
            tl.store(own + at, _sum_peers(bases, place, at, mask, WORLD, kind), mask=mask)
        meetings += 1
        _meet(signals, own_base, program, meetings, WORLD, LANES, MAX_POLLS)
    for n in range(per_program):
        row = first_row + n
        at, here = row * WIDTH + i, n * WIDTH + i
        mask = inside & (at < numel)
        if WAY == GATHER:
            for peer in tl.static_range(0, WORLD):
                found = _peer(bases, peer, place, here, mask, kind)
                tl.store(out + peer * numel.to(tl.int64) + at, found, mask=mask)
        else:
            if WAY == ONE_SHOT:
                value = _sum_peers(bases, place, here, mask, WORLD, kind)
            else:
                value = tl.zeros((PAD,), kind)
                for peer in tl.static_range(0, WORLD):
                    mine = mask & (here >= peer * share) & (here < (peer + 1) * share)
                    value = tl.where(mine, _peer(bases, peer, place, here, mine, kind), value)
            if NORM:
                before = tl.load(residual + row * residual_row + i, mask=mask, other=0.0)
                value = (value.to(tl.float32) + before.to(tl.float32)).to(kind)
            tl.store(out + at, value, mask=mask)
            if NORM and row * WIDTH < numel:
                scaled = normalised(value, factors, eps, inside, weight.dtype.element_ty, WIDTH, False)
                scaled, to = scaled.to(kind).to(tl.float32), scales + row * scales_row
                store_columns(scaled, normed + row * WIDTH, to, input_scale, i, WIDTH, PAD, FORM)
    tl.store(counts + 2 * program, meetings)
    tl.store(counts + 2 * program + 1, calls + 1)


@dataclass(frozen=True)
class Peers:
    """The buffers of all ranks, each of BUFFER_BYTES and zeros at first, and what is this rank's own."""

    rank: int
    world: int
    table: Tensor  # [world] int64: addresses, here, of all ranks' buffers
    counts: Tensor  # [MAX_PROGRAMS, 2] int32, zeros at first
    num_programs: int = MAX_PROGRAMS  # at most: on a card that ranks share, programs of all of them must fit at once
    shared: bool = False  # such a card: no kernel may take room before this one has ended
    max_polls: int = _MAX_POLLS
    owner: object = None  # of the buffers: whoever has an address keeps them

    def most_values(self, dtype: torch.dtype) -> int:
        """That one call takes."""
        return self.num_programs * (PLACE_BYTES // dtype.itemsize // _CHUNK) * _CHUNK

    def fits_norm(self, x: Tensor) -> bool:
        rows, width = x.shape
        held = PLACE_BYTES // (width * x.dtype.itemsize)
        return rows <= held * self.num_programs and width * x.dtype.itemsize % 16 == 0

    def _launch(
        self, x: Tensor, out: Tensor, way: tl.constexpr, width: int, rows: int,
        norm: tuple[Tensor, Tensor, float, RowStore] | None = None,
    ) -> None:  # fmt: skip
        per_program = triton.cdiv(rows, self.num_programs)
        pad = max(128, triton.next_power_of_2(width))
        dependent = dependent_launch(rows)
        residual, weight, eps, store = norm or (x, x, 0.0, None)
        _sum_kernel[(triton.cdiv(rows, per_program),)](
            x, out, residual, weight, out if store is None else store.data, x if store is None else store.scales,
            x if store is None else store.input_scale, self.table, self.counts, eps, self.rank, x.numel(), per_program,
            residual.stride(0), 0 if store is None else store.scales_row, WIDTH=width, PAD=pad, WORLD=self.world,
            LANES=triton.next_power_of_2(self.world), WAY=way.value, NORM=norm is not None,
            FORM=0 if store is None else store.form, PROGRAMS=MAX_PROGRAMS, PLACE=PLACE_BYTES,
            SHARE=max(128, pad // triton.next_power_of_2(self.world)), DEPENDENT=dependent, TRIGGER=not self.shared,
            MAX_POLLS=self.max_polls, num_warps=min(16, max(4, pad // 512)), launch_pdl=dependent,
        )  # fmt: skip

    def all_reduce(self, x: Tensor, two_shot: bool) -> Tensor:
        """x, contiguous, which the sum replaces."""
        flat, most = x.view(-1), self.most_values(x.dtype)
        for first in range(0, flat.numel(), most):
            part = flat[first : first + most]
            width = _row_width(part.numel(), self.num_programs)
            self._launch(part, part, TWO_SHOT if two_shot else ONE_SHOT, width, triton.cdiv(part.numel(), width))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x, contiguous -> `[world, *x.shape]`."""
        words = _as_words(x)
        out = torch.empty((self.world, *x.shape), dtype=x.dtype, device=x.device)
        parts, most = _as_words(out).view(self.world, -1), self.most_values(words.dtype)
        for first in range(0, words.numel(), most):
            part = words[first : first + most]
            width = _row_width(part.numel(), self.num_programs)
            whole = part.numel() == words.numel()
            to = parts if whole else parts.new_empty((self.world, part.numel()))
            self._launch(part, to, GATHER, width, triton.cdiv(part.numel(), width))
            if not whole:
                parts[:, first : first + most] = to
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, two_shot: bool, quantize_for: Fp8Weight | None
    ) -> tuple[Rows, Tensor]:
        """x `[tokens, hidden]`, contiguous: (normalised, new residual), as `ops.add_rms_norm` of the sum over ranks."""
        rows, width = x.shape
        store = RowStore(rows, width, x.dtype, x.device, quantize_for)
        total = torch.empty_like(x)
        if rows:
            self._launch(x, total, TWO_SHOT if two_shot else ONE_SHOT, width, rows, (residual, weight, eps, store))
        return store.result, total


def _row_width(numel: int, num_programs: int) -> int:
    """Few values are spread over all programs."""
    return min(_CHUNK, max(512, triton.next_power_of_2(triton.cdiv(numel, num_programs))))


def _as_words(x: Tensor) -> Tensor:
    """Flat, as numbers of a type that kernels move."""
    return x.view(-1).view(_WORDS[x.dtype.itemsize])
