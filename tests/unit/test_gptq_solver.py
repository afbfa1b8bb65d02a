"""GPTQ against a plain statement of it, and its tensors against their bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_inference.errors import EngineError, StartError
from text_generation_inference.make_quantized.packing import pack, pack_words, unpack, unpack_words
from text_generation_inference.make_quantized.settings import MakingSettings
from text_generation_inference.make_quantized.solver import Inputs, Solved, find_grid, round_to_nearest, solve


def make_inputs(columns: int, tokens: int, seed: int) -> torch.Tensor:
    """Rows whose columns go together, as those of a model do."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn((columns, columns), generator=generator) / columns**0.5
    return torch.randn((tokens, columns), generator=generator) @ (mixing + 0.3 * torch.eye(columns))


def see(rows: torch.Tensor) -> Inputs:
    inputs = Inputs(rows.shape[1], torch.device("cpu"))
    for some in rows.split(50):
        inputs.add(some)
    return inputs


def solve_plainly(weight: torch.Tensor, rows: torch.Tensor, chosen: MakingSettings) -> torch.Tensor:
    """One column after the other, in float64: round it, then change all that follow so that products change least.

    The inverse of the Hessian of those that follow is found anew for each column.
    """
    count, columns = rows.shape
    hessian = (rows.double().t() @ rows.double()) / count
    hessian += chosen.percdamp * hessian.diagonal().mean() * torch.eye(columns)
    left = weight.double().clone()
    order = list(range(columns))
    if chosen.act_order or chosen.static_groups:
        order = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    size = columns if chosen.group_size == -1 else chosen.group_size
    importance = (rows.t() @ rows).diagonal() / count
    groups = [slice(start, start + size) for start in range(0, columns, size)]
    static = [find_grid(weight[:, some].t().contiguous(), chosen, importance[some]) for some in groups]
    for place, column in enumerate(order):
        if chosen.has_static_groups:
            scale, zero = static[column // size]
        elif place % size == 0:
            scale, zero = find_grid(left[:, order[place : place + size]].t().float().contiguous(), chosen)
        inverse = torch.linalg.inv(hessian[order[place:]][:, order[place:]])
        wanted = left[:, column].clone()
        code = ((wanted / scale).round() + zero).clamp(0, chosen.largest_code)
        left[:, column] = (code - zero) * scale
        error = (wanted - left[:, column]) / inverse[0, 0]
        left[:, order[place + 1 :]] -= error[:, None] * inverse[0, 1:]
    return left


CASES = [
    MakingSettings(group_size=32),
    MakingSettings(group_size=32, static_groups=False),
    MakingSettings(group_size=16, act_order=True),
    MakingSettings(group_size=16, symmetric=False, bits=3),
    MakingSettings(group_size=-1, bits=3, symmetric=False, static_groups=False),
    MakingSettings(group_size=256, bits=2, clip=False),
    MakingSettings(
        group_size=256, bits=2, clip=False, static_groups=False
    ),  # longer than the columns between which errors are kept back
    MakingSettings(group_size=128, bits=8, act_order=True, percdamp=0.1),
]


@pytest.mark.parametrize("chosen", CASES, ids=str)
def test_equals_the_plain_statement(chosen: MakingSettings) -> None:
    columns = 160 if chosen.group_size in (256, 128) else 80  # the last group is shorter
    rows = make_inputs(columns, 400, seed=1)
    weight = torch.randn((6, columns), generator=torch.Generator().manual_seed(2))
    before = weight.clone()
    found = solve(weight, see(rows), chosen).widen()
    assert torch.equal(weight, before)
    assert torch.allclose(found, solve_plainly(weight, rows, chosen).float(), atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    bits=st.sampled_from([2, 3, 4, 8]),
    size=st.sampled_from([-1, 16, 64]),
    order=st.sampled_from([{}, {"act_order": True}, {"static_groups": False}]),
    symmetric=st.booleans(),
)
def test_loses_less_than_the_nearest_codes(
    seed: int, bits: int, size: int, order: dict[str, bool], symmetric: bool
) -> None:
    chosen = MakingSettings(bits=bits, group_size=size, symmetric=symmetric, **order)
    rows = make_inputs(64, 300, seed)
    weight = torch.randn((16, 64), generator=torch.Generator().manual_seed(seed + 1))
    solved, nearest = solve(weight, see(rows), chosen), round_to_nearest(weight, chosen)
    lost, by_nearest = (((each.widen() - weight) @ rows.t()).square().sum() for each in (solved, nearest))
    assert lost < by_nearest
    assert solved.zero.min() >= 1, "the format stores zero points less 1"
    if symmetric:
        assert (solved.zero == 1 << (bits - 1)).all()


def test_groups_are_of_successive_inputs_unless_act_order_is_asked_for() -> None:
    """Nothing is sorted when such a file is read, though inputs were rounded in another order."""
    generator = torch.Generator().manual_seed(4)
    rows = make_inputs(64, 300, seed=4) * torch.rand(64, generator=generator)
    weight = torch.randn((16, 64), generator=generator)
    solved = [
        solve(weight, see(rows), MakingSettings(group_size=16, **each)) for each in ({}, {"static_groups": False})
    ]
    lost = [((each.widen() - weight) @ rows.t()).square().sum() for each in solved]
    assert all(torch.equal(each.group_of, torch.arange(64, dtype=torch.int32) // 16) for each in solved)
    assert not torch.equal(solved[0].codes, solved[1].codes) and lost[0] < lost[1]


def test_the_grid_with_least_error_loses_less() -> None:
    weight = torch.randn((128, 64), generator=torch.Generator().manual_seed(5))

    def lost(clip: bool) -> float:
        found = round_to_nearest(weight, MakingSettings(clip=clip, group_size=32)).widen()
        return float((found - weight).square().sum())

    assert lost(True) < lost(False)


def test_inputs_that_are_always_zero_get_the_nearest_codes() -> None:
    rows = make_inputs(32, 200, seed=3)
    rows[:, 5] = 0
    weight = torch.randn((4, 32), generator=torch.Generator().manual_seed(3))
    solved = solve(weight, see(rows), MakingSettings(group_size=16, clip=False))
    apart = (solved.widen() - weight)[:, 5].abs()
    # Of the largest weight of a group, and what the others have become, a symmetric grid lacks the last half step.
    assert (apart <= 1.01 * solved.scale[:, 0]).all()


def test_few_inputs_and_weights_of_zero() -> None:
    solved = solve(torch.zeros(4, 32), see(make_inputs(32, 2, seed=3)), MakingSettings(group_size=16))
    assert (solved.widen() == 0).all()


def test_inputs_that_are_not_finite_are_told() -> None:
    rows = make_inputs(32, 50, seed=3)
    rows[0, 0] = float("inf")
    with pytest.raises(EngineError, match="not finite"):
        solve(torch.randn(4, 32), see(rows), MakingSettings(group_size=16))


# -- the format ------------------------------------------------------------------------------------------------------


def read_bit_by_bit(words: torch.Tensor, bits: int) -> list[list[int]]:
    """Codes of each column: the stream of bits of its words, from the lowest on."""
    columns = []
    for column in words.t().tolist():
        stream = "".join(format(word & 0xFFFFFFFF, "032b")[::-1] for word in column)
        columns.append([int(stream[at : at + bits][::-1], 2) for at in range(0, len(stream), bits)])
    return columns


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_are_a_stream_of_bits(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (64, 5), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    words = pack_words(codes, bits)
    assert words.dtype is torch.int32
    assert words.shape == (64 * bits // 32, 5)
    assert read_bit_by_bit(words, bits) == codes.t().tolist()
    assert torch.equal(unpack_words(words, bits), codes)


def test_three_bits_cross_words_as_the_format_says() -> None:
    codes = torch.zeros((32, 1), dtype=torch.uint8)
    codes[10], codes[21] = 7, 7
    words = [word & 0xFFFFFFFF for word in pack_words(codes, 3)[:, 0].tolist()]
    assert words == [0b11 << 30, 1 | 1 << 31, 0b11]


@pytest.mark.parametrize(("bits", "word"), [(4, 0x77777777), (8, 0x7F7F7F7F)])
def test_zero_points_of_symmetric_matrices(bits: int, word: int) -> None:
    chosen = MakingSettings(bits=bits, group_size=32)
    tensors = pack(round_to_nearest(torch.randn(16, 64), chosen), bits)
    assert (tensors["qzeros"] == word).all()
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert shapes == {
        "qweight": ((64 * bits // 32, 16), torch.int32),
        "qzeros": ((2, 16 * bits // 32), torch.int32),
        "scales": ((2, 16), torch.float16),
        "g_idx": ((64,), torch.int32),
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_there_and_back(bits: int) -> None:
    chosen = MakingSettings(bits=bits, group_size=16, act_order=True, symmetric=False)
    solved = solve(torch.randn(32, 64), see(make_inputs(64, 200, seed=7)), chosen)
    assert not torch.equal(solved.group_of, solved.group_of.sort().values)
    back: Solved = unpack(pack(solved, bits), bits)
    for name in ("codes", "scale", "zero", "group_of"):
        assert torch.equal(getattr(back, name), getattr(solved, name)), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 5}, "--bits must be one of 2, 3, 4, 8. Given: 5"),
        ({"group_size": 100}, "--groupsize must be one of -1, 16"),
        ({"percdamp": 0.0}, "--percdamp must be between 0 and 1"),
        ({"num_samples": 0}, "--num-samples must be >= 1"),
        ({"sequence_length": 1}, "--sequence-length must be >= 2"),
    ],
)
def test_settings_that_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(StartError) as refusal:
        MakingSettings(**changes).check()
    assert said in str(refusal.value)
