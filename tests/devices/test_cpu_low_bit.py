"""Native CPU products with matrices in few bits against their definition in `kernels.low_bit`."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from text_generation_inference.kernels import experts, low_bit
from text_generation_inference.kernels.cpu.experts import NativeExperts, PackedExperts
from text_generation_inference.kernels.cpu.low_bit import NativeLowBit
from text_generation_inference.kernels.cpu.ops import NativeOps, Packed
from text_generation_inference.kernels.low_bit import LowBitWeight

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLES = {"none": None, "e2m1": torch.cat((E2M1, -E2M1)), "curved": torch.linspace(-1, 1, 16) ** 3}
SIZES = (16, 32, 48, 64, 96, 128, 256, None)  # of groups; None: a whole row


def make(
    out: int, width: int, bits: int = 4, size: int | None = 128, symmetric: bool = True, table: str = "none"
) -> LowBitWeight:
    plain = torch.randn(out, width) / math.sqrt(width)
    return low_bit.quantize(plain, bits, size or width, symmetric, TABLES[table])


def pack(ops: NativeOps, weight: LowBitWeight) -> Packed:
    packed = NativeLowBit(ops).pack_low_bit(weight)
    assert isinstance(packed, Packed)
    return packed


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@st.composite
def weights(draw: st.DrawFn) -> LowBitWeight:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    bits = draw(st.sampled_from((4, 8)))
    table = draw(st.sampled_from(tuple(TABLES))) if bits == 4 else "none"
    width = 2 * draw(st.integers(1, 200))
    weight = make(draw(st.integers(1, 120)), width, bits, draw(st.sampled_from(SIZES)), draw(st.booleans()), table)
    weight.scale = weight.scale.to(draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16))))
    if draw(st.booleans()):  # fewer inputs than columns: some have two
        weight.in_features = draw(st.integers(1, width))
        weight.order = torch.randint(0, weight.in_features, (width,), dtype=torch.int32)
    weight.quantizes_inputs = draw(st.booleans())
    if weight.quantizes_inputs and draw(st.booleans()):
        weight.input_scale = torch.tensor(0.02)
    return weight


@settings(max_examples=60, deadline=None)
@given(weights(), st.integers(1, 20) | st.just(300), st.booleans())
def test_a_product_is_that_of_the_definition(ops: NativeOps, weight: LowBitWeight, rows: int, biased: bool) -> None:
    packed = pack(ops, weight)
    assert packed.shape == weight.shape
    x, bias = torch.randn(rows, weight.in_features), torch.randn(weight.shape[0]) if biased else None
    close(ops.linear(x, packed, bias), low_bit.linear(x, weight, bias, torch.float32))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("bits", "symmetric", "table"),
    [
        (4, True, "none"),
        (4, False, "none"),
        (8, True, "none"),
        (8, False, "none"),
        (4, True, "e2m1"),
        (4, True, "curved"),
    ],
)
def test_values_are_kept(ops: NativeOps, bits: int, symmetric: bool, table: str, size: int | None) -> None:
    for width in (160, 300):
        weight = make(61, width, bits, size, symmetric, table)
        packed = pack(ops, weight)
        assert torch.equal(ops.unpack(packed), low_bit.dequantize(weight))
        in_few_bits = size in (None, 32, 64, 96, 128, 256) or (size == 16 and table == "e2m1")
        assert (packed.kind != "float32") == in_few_bits
        weight.order = torch.randperm(width).int()
        assert torch.equal(ops.unpack(pack(ops, weight)), low_bit.dequantize(weight))


def test_bytes_stay_near_those_of_the_codes(ops: NativeOps) -> None:
    for bits, symmetric, share in ((4, True, 1.08), (4, False, 1.15), (8, True, 1.05)):
        weight = make(960, 1024, bits, 128, symmetric)
        assert pack(ops, weight).nbytes < share * weight.codes.nbytes


@pytest.mark.parametrize("size", [16, 32, 128, None])
@pytest.mark.parametrize(
    ("bits", "symmetric", "table"),
    [
        (4, True, "none"),
        (4, False, "none"),
        (8, True, "none"),
        (8, False, "none"),
        (4, True, "e2m1"),
        (4, True, "curved"),
    ],
)
def test_products_on_tiles(tiled: NativeOps, bits: int, symmetric: bool, table: str, size: int | None) -> None:
    for rows, width in ((5, 96), (33, 1792)):
        weight = make(97, width, bits, size, symmetric, table)
        x = torch.randn(rows, width)
        close(tiled.linear(x, pack(tiled, weight)), low_bit.linear(x, weight, None, torch.float32))


@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_times_integers_are_exact(ops: NativeOps, symmetric: bool) -> None:
    """The largest ones too, whose sums of two products need more than 16 bits."""
    weight = make(50, 4096, 8, None, symmetric)
    weight.codes[:9] = torch.tensor([0, 255, 1]).repeat_interleave(3)[:, None].to(torch.uint8)
    weight.quantizes_inputs, weight.input_scale = True, torch.tensor(1.0)
    x = torch.randint(-128, 128, (7, 4096)).float()
    x[:3] = torch.tensor([-128.0, 127.0, -300.0])[:, None]
    exact = (x.clamp(-128, 127).double() @ (weight.codes.double() - 128).T) * weight.scale[:, 0].double()
    if weight.offset is not None:
        exact -= x.clamp(-128, 127).double().sum(1, keepdim=True) * weight.offset[:, 0].double()
    found = ops.linear(x, pack(ops, weight)).double()
    largest = 4096 * 128 * 128 * weight.scale[:, 0].double()
    assert ((found - exact).abs() <= 3e-7 * largest).all()
    if symmetric:
        assert torch.equal(found.float(), (x.clamp(-128, 127) @ (weight.codes.float() - 128).T) * weight.scale[:, 0])


@pytest.mark.parametrize(("bits", "size"), [(4, 128), (4, 32), (8, 128), (8, None)])
@pytest.mark.parametrize("quantizes", [False, True])
def test_a_row_does_not_depend_on_the_others(ops: NativeOps, bits: int, size: int | None, quantizes: bool) -> None:
    weight = make(100, 672, bits, size, False)
    weight.quantizes_inputs = quantizes
    packed, x = pack(ops, weight), torch.randn(40, 672)
    few, many = torch.cat([ops.linear(row[None], packed) for row in x]), ops.linear(x, packed)
    close(few, many, 1e-4)
    for rows in (5, 8, 9, 17):
        assert torch.equal(ops.linear(x[:rows], packed), many[:rows])
        assert torch.equal(ops.linear(x[40 - rows :], packed), many[40 - rows :])


@pytest.mark.parametrize(("bits", "table"), [(4, "none"), (8, "none"), (4, "e2m1"), (4, "curved")])
@pytest.mark.parametrize("size", [32, 128, None])
def test_what_is_small_and_what_is_not_finite(ops: NativeOps, bits: int, table: str, size: int | None) -> None:
    weight = make(50, 512, bits, size, True, table)
    values = low_bit.dequantize(weight)
    x = torch.randn(6, 512) * 10.0 ** torch.linspace(-9, 6, 4).repeat_interleave(128)
    x[1], x[2], x[3, 40], x[4, 7] = 0.0, x[2] * 1e-33, math.nan, math.inf
    exact = (x.double() @ values.double().T).float()
    packed = pack(ops, weight)
    for rows in (slice(0, 1), slice(0, 3), slice(0, 6)):
        found = ops.linear(x[rows], packed)
        largest = values.abs().max() * x[rows].abs().nan_to_num(0, 0).amax(1, keepdim=True)
        for row, value in enumerate(found[:3]):
            assert (value - exact[row]).abs().max() <= 4e-6 * largest[row] + 1e-30
        assert not rows.stop > 4 or not found[3:5].isfinite().any()
        assert not rows.stop > 4 or found[5].isfinite().all()
    weight = make(50, 512, 8, None)
    weight.quantizes_inputs = True
    found = ops.linear(x, pack(ops, weight))
    assert not found[3:5].isfinite().any()
    assert found[[0, 1, 2, 5]].isfinite().all()


@pytest.mark.parametrize(("bits", "table"), [(4, "none"), (8, "none"), (4, "e2m1")])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("quantizes", [False, True])
def test_experts(ops: NativeOps, bits: int, table: str, ordered: bool, quantizes: bool) -> None:
    count, hidden, width, tokens = 5, 80, 96, 9
    gate_up, down = make(count * 2 * width, hidden, bits, 32, True, table), make(count * hidden, width, bits, 32, False)
    if ordered:
        gate_up.order = torch.stack([torch.randperm(hidden) for _ in range(count)]).int()
        down.order = torch.randperm(width).int()
    for each in (gate_up, down):
        each.quantizes_inputs = quantizes
    packed = [NativeLowBit(ops).pack_low_bit(each, count) for each in (gate_up, down)]
    assert all(isinstance(each, PackedExperts) for each in packed)
    assert [each.shape for each in packed] == [gate_up.shape, down.shape]
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])
    biases = (torch.randn(count, 2 * width), torch.randn(count, hidden))
    for given_ in ({"gate": "silu"}, {"gate": "clamped_swiglu", "biases": biases}):
        found = NativeExperts(ops).experts(x, ids, weights, *packed, **given_)
        expected = experts.experts(x, ids, weights, gate_up, down, **given_)
        # Rounding what the gates give to integers may go either way.
        close(found, expected, 5e-2 if quantizes else 1e-4)


def test_other_forms_of_rows(ops: NativeOps) -> None:
    weight = make(70, 96)
    packed, wide = pack(ops, weight), torch.randn(9, 200)
    expected = low_bit.linear(wide[:, 100:196], weight, None, torch.float32)
    close(ops.linear(wide[:, 100:196], packed), expected)
    close(ops.linear(wide[:, 100:196].bfloat16(), packed).float(), expected, 5e-2)
    assert ops.linear(wide[:0, :96], packed).shape == (0, 70)
    with pytest.raises(ValueError, match="features"):
        ops.linear(wide, packed)
    strided = replace(weight, codes=weight.codes.repeat(1, 2)[:, :48], scale=weight.scale.t().contiguous().t())
    close(ops.linear(wide[:, 100:196], pack(ops, strided)), expected)
