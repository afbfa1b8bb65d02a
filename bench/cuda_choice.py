# ruff: noqa: B023
"""The choice of tokens on a GPU: is it what the definition says, and what does it cost.

    python bench/cuda_choice.py [--vocab 128256] [--rows 1,64,256,1024] [--skip-checks]

Checks first, at 256 rows; then a table of microseconds per step. About a minute with compiling.
"""

import argparse
import time

import torch
from torch import Tensor

from text_generation_inference.bench.floor import graph_ms
from text_generation_inference.kernels import choice, slot_state
from text_generation_inference.kernels.choice import Adjustments, SamplingNeeds, Tops
from text_generation_inference.kernels.slot_state import FILTERS, SlotState
from text_generation_inference.kernels.triton.choice import Choice, greedy_into
from text_generation_inference.sampling import filters
from text_generation_inference.sampling.penalties import FIELDS as PENALTIES

NEUTRAL = dict(zip(FILTERS, (1.0, 0.0, 1.0, 1.0, 0.0, 1.0), strict=True))
WAYS: dict[str, dict[str, float]] = {
    "draw": {"temperature": 0.8},
    "k50 p.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "p.9": {"top_p": 0.9},
    "typical .9": {"typical_p": 0.9},
    "k50 typical .9": {"top_k": 50, "typical_p": 0.9},
    "min-p .05": {"min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 200, "top_p": 0.95, "typical_p": 0.9, "min_p": 0.01},
}
HISTORY = 1000


def make_state(rows: int, vocab: int) -> SlotState:
    state = SlotState(rows, 4096, 256 * rows, 16, torch.device("cuda"))
    state.pages.copy_(torch.randint(0, vocab, state.pages.shape))
    state.block_tables.copy_(torch.randperm(256 * rows).view(rows, 256))
    state.seeds.copy_(torch.randint(-(2**63), 2**63 - 1, (rows,)))
    state.lengths.fill_(HISTORY)
    state.num_prompt.fill_(HISTORY // 2)
    for name, value in zip(PENALTIES, (1.2, 0.5, 0.5, 0.0), strict=True):
        state.numbers[name].fill_(value)
    return state


def set_filters(state: SlotState, numbers: dict[str, float]) -> SamplingNeeds:
    for name, value in {**NEUTRAL, **numbers}.items():
        state.numbers[name].fill_(value)
    limits = "top_k" in numbers or "top_p" in numbers
    typical = "typical_p" in numbers
    return SamplingNeeds(filters=limits or typical or "min_p" in numbers, counts=limits, typical=typical)


def adjustments(rows: int, vocab: int, penalties: bool, mask: bool) -> Adjustments:
    index = torch.arange(rows, dtype=torch.int32, device="cuda")
    nothing = torch.full_like(index, -1)
    allowed = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device="cuda").to(torch.int32)
    return Adjustments(
        rows=torch.stack((index, nothing, index if mask else nothing), dim=1).contiguous(),
        places=index,
        penalised=index if penalties else None,
        longest=HISTORY,
        allowed=allowed if mask else None,
    )


def tops(rows: int, count: int) -> Tops:
    table = torch.stack((torch.full((rows,), count), torch.arange(rows)), dim=1).to(torch.int32).cuda()
    return Tops(table, torch.zeros((rows, 1 + 2 * (count + 8)), dtype=torch.int32, device="cuda"))


class KeptChoice(Choice):
    """Leaves what it worked with."""

    def _make_room(self, *arguments):
        self.spaces = super()._make_room(*arguments)
        return self.spaces


def graph_us(work, repeats: int = 15) -> float:
    return 1e3 * graph_ms(work, repeats, calls=4)


def check(name: str, op: KeptChoice, logits: Tensor, state: SlotState, needs: SamplingNeeds) -> None:
    """Print how many rows differ from the definition, and in how many ids what is kept differs."""
    rows = logits.shape[0]
    other = SlotState(rows, 4096, 256 * rows, 16, logits.device)
    other.words.copy_(state.words)
    index = torch.arange(rows, dtype=torch.int32, device="cuda")
    ours, again, expected = (torch.zeros((2, rows), dtype=torch.int32, device="cuda") for _ in range(3))
    before = state.words.clone()
    op(logits, index, state, ours, needs)
    state.words.copy_(before)
    op(logits, index, state, again, needs)
    choice.choose_into(logits, index, other, expected, needs)
    kept = ""
    if needs.filters and needs.adjustments is None:
        x = logits.float() / state.numbers["temperature"][:, None]
        exact = filters.keep(x, state.numbers) > float("-inf")
        floor, mean, _, reach = op.spaces[2][:rows].unbind(1)
        near = (x.amax(-1, keepdim=True) - x - mean[:, None]).abs() <= reach[:, None]
        found = (x >= floor[:, None]) & near
        kept = f", kept {float(exact.sum(1).float().mean()):.0f} ids, {int((exact != found).sum())} of all differ"
    gap = (ours[1].view(torch.float32) - expected[1].view(torch.float32)).abs()[ours[0] == expected[0]].max()
    print(
        f"{name:16s} {int((ours[0] != expected[0]).sum()):4d} of {rows} tokens differ, logprobs by {float(gap):.1e}, "
        f"{'the same' if torch.equal(ours, again) else 'NOT THE SAME'} again{kept}",
        flush=True,
    )


def run_checks(vocab: int) -> None:
    rows = 256
    op = KeptChoice()
    for spread, dtype in ((1.0, torch.bfloat16), (3.0, torch.float32)):
        logits = (torch.randn(rows, vocab, device="cuda") * spread).to(dtype)
        print(f"-- {rows} rows of {vocab} {dtype} scores, spread {spread}")
        for name, numbers in WAYS.items():
            state = make_state(rows, vocab)
            check(name, op, logits, state, set_filters(state, numbers))
        for name, penalties, mask in (("penalties", True, False), ("mask", False, True)):
            state = make_state(rows, vocab)
            needs = set_filters(state, {"sampling_mode": slot_state.ADJUSTED})
            needs.adjustments = adjustments(rows, vocab, penalties, mask)
            check(name, op, logits, state, needs)
        state = make_state(rows, vocab)
        found = [tops(rows, 5), tops(rows, 5)]
        index = torch.arange(rows, dtype=torch.int32, device="cuda")
        for choose, best in ((op, found[0]), (choice.choose_into, found[1])):
            out = torch.zeros((2, rows), dtype=torch.int32, device="cuda")
            needs = set_filters(state, {"sampling_mode": slot_state.ADJUSTED})
            needs.tops, needs.counts = best, True
            choose(logits, index, state, out, needs)
        room = found[0].room
        same = (found[0].out[:, : 1 + room] == found[1].out[:, : 1 + room]).all(dim=1)
        print(f"top 5            {int((~same).sum()):4d} of {rows} rows differ", flush=True)


def time_rows(rows: int, vocab: int) -> dict[str, float]:
    op, found = Choice(), {}
    logits = torch.randn(rows, vocab, device="cuda").bfloat16()
    peaked = (torch.randn(rows, vocab, device="cuda") * 3).bfloat16()
    index = torch.arange(rows, dtype=torch.int32, device="cuda")
    out = torch.zeros((2, rows), dtype=torch.int32, device="cuda")
    state = make_state(rows, vocab)
    state.numbers["sampling_mode"].fill_(slot_state.PLAIN)
    found["greedy"] = graph_us(lambda: greedy_into(logits, index, state, out))
    for name, numbers in WAYS.items():
        state = make_state(rows, vocab)
        needs = set_filters(state, numbers)
        found[name] = graph_us(lambda: op(logits, index, state, out, needs))
        if name == "p.9":
            found["p.9 peaked"] = graph_us(lambda: op(peaked, index, state, out, needs))
    for name, penalties, mask in (("penalties", True, False), ("mask", False, True)):
        state = make_state(rows, vocab)
        needs = set_filters(state, {"sampling_mode": slot_state.ADJUSTED})
        needs.adjustments = adjustments(rows, vocab, penalties, mask)
        found[name] = graph_us(lambda: op(logits, index, state, out, needs))
    state = make_state(rows, vocab)
    needs = set_filters(state, {"sampling_mode": slot_state.ADJUSTED})
    needs.tops, needs.counts = tops(rows, 5), True
    found["top 5"] = graph_us(lambda: op(logits, index, state, out, needs))
    needs = set_filters(state, WAYS["k50 p.9"])
    state.lengths.fill_(HISTORY)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        op(logits, index, state, out, needs)
    found["(host, k50 p.9)"] = (time.perf_counter() - started) / 20 * 1e6
    torch.cuda.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", default="1,64,256,1024")
    parser.add_argument("--skip-checks", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    started = time.perf_counter()
    if not options.skip_checks:
        run_checks(options.vocab)
        print(f"checks with compiling: {time.perf_counter() - started:.0f} s", flush=True)
    counts = [int(text) for text in options.rows.split(",")]
    columns = {rows: time_rows(rows, options.vocab) for rows in counts}
    print(f"\n{'us per step':16s}" + "".join(f"{rows:>9d}" for rows in counts))
    for name in columns[counts[0]]:
        print(f"{name:16s}" + "".join(f"{columns[rows][name]:9.1f}" for rows in counts))
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
