"""Matrices in few bits: what a code stands for, and that cutting and joining change no value."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import PackedWeight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.linear import Linear
from text_generation_inference.quant.low_bit import LowBit, LowBitScheme, keep_wide_copies, wide_copy_bytes
from text_generation_inference.weights.declare import Module, Part

NF4_LIKE = torch.linspace(-1, 1, 16)


@st.composite
def weights(draw: st.DrawFn, columns: int | None = None) -> LowBitWeight:
    bits = draw(st.sampled_from((4, 8)))
    table = NF4_LIKE if bits == 4 and draw(st.booleans()) else None
    columns = columns or 8 * draw(st.integers(1, 12))
    size = draw(st.sampled_from((8, 16, 32, 128)))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    plain = torch.randn(draw(st.integers(1, 9)), columns)
    return low_bit.quantize(plain, bits, size, draw(st.booleans()), table)


def test_a_value_is_scale_times_code_less_center_less_offset() -> None:
    codes = low_bit.pack_codes(torch.tensor([[0, 8, 15, 9], [1, 2, 3, 4]], dtype=torch.uint8), 4)
    assert codes.tolist() == [[0x80, 0x9F], [0x21, 0x43]]
    scale, offset = torch.tensor([[1.0, 2.0], [0.5, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    weight = LowBitWeight(codes, scale, offset, 4, 2, 4)
    assert low_bit.dequantize(weight).tolist() == [[-8, 0, 13, 1], [-3.5, -3, -5, -4]]
    weight.table = torch.arange(16) * 10.0
    assert low_bit.dequantize(weight).tolist() == [[0, 80, 299, 179], [5, 10, 30, 40]]


def test_columns_go_to_their_inputs() -> None:
    weight = low_bit.quantize(torch.randn(3, 8), 8, 4)
    plain = low_bit.dequantize(weight)
    weight.order = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], dtype=torch.int32)
    assert torch.equal(low_bit.dequantize(weight), plain.flip(1))
    weight.order = torch.stack((weight.order, weight.order.flip(0), weight.order))
    assert torch.equal(low_bit.dequantize(weight)[1], plain[1])
    assert torch.equal(low_bit.widen(weight)[2], plain[2].flip(0))


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.5), (8, 0.5)])
def test_quantising_rounds_to_the_nearest(bits: int, bound: float) -> None:
    plain = torch.randn(20, 96)
    for symmetric in (True, False):
        made = low_bit.quantize(plain, bits, 32, symmetric)
        steps = (low_bit.dequantize(made) - plain).abs() / low_bit.spread(made.scale, 32, 96)
        assert steps.max() <= bound + 1e-4


def test_groups_take_no_more_than_a_row() -> None:
    plain = torch.randn(3, 48)
    made, whole = low_bit.quantize(plain, 4, 1 << 40), low_bit.quantize(plain, 4, 48)
    assert made.group_size == 48 and torch.equal(low_bit.dequantize(made), low_bit.dequantize(whole))


@given(weights(), st.data())
def test_cutting_and_joining_change_nothing(weight: LowBitWeight, data: st.DataObject) -> None:
    plain = low_bit.dequantize(weight)
    step = 2 if weight.table is not None else 1
    start = step * data.draw(st.integers(0, weight.in_features // step - 1))
    end = step * data.draw(st.integers(start // step + 1, weight.in_features // step))
    assert torch.equal(low_bit.dequantize(low_bit.take_columns(weight, start, end)), plain[:, start:end])
    assert torch.equal(low_bit.widen(low_bit.take_rows(weight, 0, 1)), plain[:1])
    other = data.draw(weights(weight.in_features))
    if low_bit.can_join([weight, other]):
        assert torch.equal(
            low_bit.dequantize(low_bit.join([weight, other])), torch.cat([plain, low_bit.dequantize(other)])
        )


def test_a_product_with_integers_is_exact() -> None:
    plain, x = torch.randn(5, 64), torch.randn(3, 64)
    weight = low_bit.quantize(plain, 8, 64)
    weight.quantizes_inputs = True
    rows, scale = low_bit.quantize_rows(x)
    integers = rows.long() @ (weight.codes.long() - 128).T
    expected = integers * scale[:, None] * weight.scale[:, 0]
    torch.testing.assert_close(low_bit.linear(x, weight, None, torch.float32), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("room", "useful", "kept"), [(2048, True, 2048), (2047, True, 0), (2048, False, 0)])
def test_values_are_held_beside_codes_where_there_is_room(room: int, useful: bool, kept: int) -> None:
    class Two(Module):
        def __init__(self) -> None:
            ops = Ops(low_bit_keeps_wide=useful)
            self.one, self.other = (Linear(ops, [Part(f"{n}.weight", (16, 32))]) for n in range(2))

    model = Two()
    model.one.method, model.other.method = LowBit(LowBitScheme()), LowBit(LowBitScheme())
    codes = model.one.method.bytes((16, 32), torch.bfloat16)
    keep_wide_copies(model, torch.bfloat16, room)
    assert wide_copy_bytes(model, torch.bfloat16) == kept
    assert model.one.method.bytes((16, 32), torch.bfloat16) == codes + kept // 2


def test_matrices_are_of_one_kind_only_if_kernels_are_compiled_alike() -> None:
    """Steps are captured after one layer of each kind has run: kernels of another are not there yet."""

    class Packed(PackedWeight):
        shape = torch.Size((16, 64))

    def kind_of(bits: int = 4, size: int = 32, has_zeros: bool = False, **fields: object) -> object:
        matrix = Linear(Ops(pack_low_bit=lambda weight, num_experts=1: Packed()), [Part("weight", (16, 64))])
        matrix.weight = replace(low_bit.quantize(torch.randn(16, 64), bits, size, not has_zeros), **fields)  # pyright: ignore
        matrix.method = LowBit(LowBitScheme())
        matrix.finish()
        return matrix.kind

    order = torch.arange(64, dtype=torch.int32)
    kinds = [
        kind_of(),
        kind_of(bits=8),
        kind_of(size=64),
        kind_of(has_zeros=True),
        kind_of(table=NF4_LIKE),
        kind_of(order=order),
        kind_of(order=order.expand(2, -1)),
        kind_of(scale=torch.ones(16, 2).half()),
        kind_of(quantizes_inputs=True),
        kind_of(quantizes_inputs=True, input_scale=torch.tensor(1.0)),
    ]
    assert len(set(kinds)) == len(kinds)
    assert kind_of() == kinds[0]
