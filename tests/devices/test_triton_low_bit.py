"""Products of matrices in few bits against their definition: on the GPU at real sizes, or in the interpreter at small."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from text_generation_inference.kernels import experts as reference_experts
from text_generation_inference.kernels import low_bit, reference
from text_generation_inference.kernels.low_bit import LowBitWeight

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton_interpreter import interpreter_as_hardware  # noqa: F401

from text_generation_inference.kernels.triton import small_gemm_low_bit
from text_generation_inference.kernels.triton.experts import GATES, TritonExperts
from text_generation_inference.kernels.triton.linear import TritonLinear
from text_generation_inference.kernels.triton.low_bit_codes import TritonLowBit, unpack_low_bit
from text_generation_inference.kernels.triton.low_bit_linear import Int8Weight, pack_low_bit
from text_generation_inference.kernels.triton.row_low_bit import RowTiling, choose_row_tiling, choose_warps
from text_generation_inference.kernels.triton.small_gemm_low_bit import LowBitGemmTiling, SmallGemmLowBit, choose_tiling

NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOATS = (*_POSITIVE, *(-value for value in _POSITIVE))  # of 4 bits
TABLES = {"nf4": NF4, "floats": FLOATS}

SWAPPED, SWAPPED_WIDE = LowBitGemmTiling(64, 64, 2, 2, 4, swap=True), LowBitGemmTiling(32, 128, 1, 2, 8, swap=True)
PAIRED = [
    LowBitGemmTiling(16, 128, 3, 3, 8, swap=True, paired=True),
    LowBitGemmTiling(32, 128, 2, 3, 4, swap=True, paired=True),
    LowBitGemmTiling(64, 256, 1, 3, 8, swap=True, paired=True),
]


@pytest.fixture(scope="module")
def device(device_name: str) -> torch.device:
    return torch.device(device_name)


@pytest.fixture(scope="module")
def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make(
    device: torch.device, n: int, k: int, bits: int = 4, group: int = 128, symmetric: bool = True,
    table: str | None = None, between: bool = False,
) -> LowBitWeight:  # fmt: skip
    """`group` 0: all columns of a row. `between`: offsets are no whole number of codes."""
    values = None if table is None else torch.tensor(TABLES[table], device=device)
    made = low_bit.quantize(torch.randn(n, k, device=device) * 0.05, bits, group or k, symmetric, values)
    made.scale, made.dtype = made.scale.half(), torch.float16
    if not symmetric:
        made.offset = made.scale.float() * torch.randint(-7, 8, made.scale.shape, device=device)
        made.offset += 0.3 * made.scale.float() if between else 0
    return made


def exact(x: Tensor, weight: LowBitWeight) -> Tensor:
    return x.double() @ low_bit.dequantize(weight).double().t()


def close(actual: Tensor, expected: Tensor, bound: float = 1e-3) -> None:
    assert actual.isfinite().all()
    assert float((actual.double() - expected).norm() / expected.norm()) < bound  # float16 has eleven bits


def linear(capability: tuple[int, int] = (0, 0)) -> TritonLinear:
    return TritonLinear(3, torch.cuda.get_device_capability() if torch.cuda.is_available() else capability)


KINDS = {
    "4 bits": {},
    "4 bits, groups of 64": {"group": 64},
    "4 bits, groups of 32": {"group": 32, "symmetric": False},
    "4 bits, groups of 16": {"group": 16},
    "4 bits, odd groups": {"group": 48, "symmetric": False},
    "4 bits by row": {"group": 0},
    "4 bits with offsets": {"symmetric": False},
    "4 bits with offsets between codes": {"symmetric": False, "between": True},
    "table": {"table": "nf4", "group": 64},
    "table, groups of 128": {"table": "nf4"},
    "floats": {"table": "floats", "group": 32},
    "floats, groups of 128": {"table": "floats"},
    "8 bits": {"bits": 8, "symmetric": False},
    "8 bits, groups of 32": {"bits": 8, "group": 32, "symmetric": False},
    "8 bits by row": {"bits": 8, "group": 0},
}
WITH_OFFSETS = ["4 bits with offsets", "4 bits with offsets between codes"]


@pytest.mark.parametrize("kind", KINDS)
def test_products(device: torch.device, is_gpu: bool, kind: str) -> None:
    """Rows and columns that fill no tile."""
    n, k = (1035, 4128) if is_gpu else (75, 416)
    weight = make(device, n, k, **KINDS[kind])
    op, packed = linear(), pack_low_bit(weight)
    for rows in (1, 2, 5, 16, 17, 40, 64, 65, 130, 300) if is_gpu else (1, 5, 70):
        x, bias = torch.randn(rows, k, device=device).half(), torch.randn(n, device=device).half()
        expected = exact(x, weight)
        for with_bias in (None, bias) if rows != 1 or is_gpu else (bias,):
            out = op(x, packed, with_bias, torch.float16)
            close(out, expected if with_bias is None else expected + bias.double())
    assert op(x[:0], packed, None, torch.float16).shape == (0, n)


@pytest.mark.parametrize("kind", ["4 bits, odd groups", "8 bits", "table", "floats"])
def test_packing_loses_nothing(device: torch.device, kind: str) -> None:
    weight = make(device, 3 * 13, 200, **KINDS[kind])
    packed = pack_low_bit(weight, 3)
    assert isinstance(packed, TritonLowBit) and packed.shape == weight.shape
    back = unpack_low_bit(packed)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(low_bit.dequantize(back), low_bit.dequantize(weight))


@pytest.mark.parametrize("kind", ["4 bits", "4 bits, groups of 32", "table", "floats", "floats, groups of 128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types(device: torch.device, is_gpu: bool, kind: str, dtype: torch.dtype) -> None:
    """Scales of bfloat16 or float32, and a model in float32."""
    weight = make(device, 64, 256, **KINDS[kind])
    weight.scale = weight.scale.to(dtype)
    x = torch.randn(70, 256, device=device)
    bound = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    for rows in (1, 3, 70):
        # The interpreter multiplies no bfloat16.
        given = x[:rows].to(torch.float16 if dtype is torch.bfloat16 and not is_gpu else dtype)
        close(linear()(given, pack_low_bit(weight), None, given.dtype), exact(given, weight), bound)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_an_order_of_columns(device: torch.device, rows: int, symmetric: bool) -> None:
    """Some inputs have no column, as where another rank has it, and some two."""
    weight = make(device, 40, 256, symmetric=symmetric)
    weight = replace(weight, order=torch.randint(0, 300, (256,), device=device, dtype=torch.int32), in_features=300)
    x = torch.randn(rows, 300, device=device).half()
    close(linear()(x, pack_low_bit(weight), None, torch.float16), exact(x, weight))


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize(
    "tiling",
    [
        LowBitGemmTiling(64, 64, 1, 2),
        LowBitGemmTiling(16, 64, 3, 3),
        LowBitGemmTiling(32, 32, 8, 2),
        SWAPPED,
        SWAPPED_WIDE,
    ],
)
def test_tilings(device: torch.device, is_gpu: bool, rows: int, tiling: LowBitGemmTiling) -> None:
    n, k = (1024, 4096) if is_gpu else (130, 384)
    op, weight = SmallGemmLowBit(2), make(device, n, k, symmetric=False)
    x = torch.randn(rows, k, device=device).half()
    expected = exact(x, weight)
    before = None
    for _ in range(2):  # the counters of the first time are clean, and parts are added up in the same order
        out = torch.full((rows, n), 7.0, device=device).half()
        op(x, pack_low_bit(weight), out, tiling=tiling)
        close(out, expected)
        assert before is None or torch.equal(out, before)
        before = out


@pytest.mark.parametrize("kind", ["4 bits", *WITH_OFFSETS, "4 bits, groups of 32", "table", "8 bits by row"])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("norm", [False, True])
def test_one_row(device: torch.device, is_gpu: bool, kind: str, gate: str | None, norm: bool) -> None:
    """What the norm, the product, the gate and the addition give one after the other."""
    n, k = (1030, 4096) if is_gpu else (44, 272)
    weight = make(device, n * (2 if gate else 1), k, **KINDS[kind])
    order = torch.randperm(k, device=device).to(torch.int32)
    x, gain = torch.randn(1, k, device=device).half(), torch.rand(k, device=device).half()
    bias, residual = torch.randn(weight.shape[0], device=device).half(), torch.randn(1, n, device=device).half()
    activate = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
    normed = reference.rms_norm(x, gain, 1e-5) if norm else x
    assert isinstance(normed, Tensor)
    for with_bias, add in ((True, True), (False, False)):
        each = replace(weight, order=order) if add else weight
        product = exact(normed, each) + (bias.double() if with_bias else 0)
        expected = activate[gate](product.half()) if gate else product
        out = residual.clone()
        op = SmallGemmLowBit(2)
        op(
            x, pack_low_bit(each), out, bias if with_bias else None, norm=(gain, 1e-5) if norm else None, gate=gate,
            add=add,
        )  # fmt: skip
        close(out, (expected + residual if add else expected).double(), 2e-3)


@pytest.mark.parametrize("tiling", PAIRED)
@pytest.mark.parametrize("kind", ["4 bits", "4 bits with offsets", "4 bits, groups of 32", "4 bits by row"])
def test_paired_columns(device: torch.device, is_gpu: bool, tiling: LowBitGemmTiling, kind: str) -> None:
    """Codes are the same as for any other kernel; columns, rows and outputs that fill no tile."""
    n, k = (1030, 4112) if is_gpu else (140, 400)
    weight = make(device, n, k, **KINDS[kind])
    for rows in (tiling.bm - 3, tiling.bm + 2):
        x, out = torch.randn(rows, k, device=device).half(), torch.empty(rows, n, device=device).half()
        SmallGemmLowBit(2)(x, pack_low_bit(weight), out, tiling=tiling)
        close(out, exact(x, weight))


@pytest.mark.parametrize(
    ("rows", "n", "k", "bn", "splits", "warps", "paired"),
    [
        (64, 28672, 4096, 256, 1, 8, True),
        (33, 57344, 8192, 256, 1, 8, True),
        (64, 22016, 4096, 64, 1, 4, False),  # a third of the processors would be idle
        (64, 4096, 14336, 64, 4, 4, False),
        (32, 28672, 4096, 128, 1, 4, True),
        (17, 4096, 14336, 128, 8, 4, True),
        (32, 6144, 4096, 64, 4, 4, True),
        (32, 4096, 4096, 64, 4, 4, True),
        (32, 8192, 28672, 128, 4, 4, True),
        (16, 28672, 4096, 64, 1, 2, False),
        (9, 4096, 14336, 128, 8, 8, True),
        (16, 4096, 4096, 128, 8, 8, True),
        (16, 6144, 4096, 32, 4, 2, False),
        (8, 4096, 4096, 32, 4, 2, False),
    ],
)
def test_tiles_that_were_measured(rows: int, n: int, k: int, bn: int, splits: int, warps: int, paired: bool) -> None:
    found = choose_tiling(rows, n, k // 128, False, 132, hopper=True, plain=True)
    assert (found.bn, found.splits, found.warps, found.paired) == (bn, splits, warps, paired)
    for changes in ({"hopper": False, "plain": True}, {"hopper": True, "plain": False}):
        assert not choose_tiling(rows, n, k // 128, False, 132, **changes).paired


ROWWISE = {
    "all tiles at once": (RowTiling(8, 2), 16, 2048),
    "tile by tile": (RowTiling(8), 32, 3072),
    "in turns": (RowTiling(4, 2), 32, 3072),
    "many warps": (RowTiling(16), 16, 4096),
    "all read at once": (RowTiling(4, ahead=4), 32, 2048),
    "some read ahead": (RowTiling(4, ahead=2), 16, 3072),
}


@pytest.mark.parametrize("way", ROWWISE)
@pytest.mark.parametrize("kind", ["4 bits", "4 bits with offsets", "4 bits, groups of 256", "4 bits by row"])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_one_row_by_warps(device: torch.device, way: str, kind: str, gate: str | None) -> None:
    """What the norm, the product, the gate and the addition give one after the other; scales of any type."""
    tiling, n, k = ROWWISE[way]
    options = {"group": 256, "symmetric": way != "tile by tile"} if kind.endswith("256") else KINDS[kind]
    weight = make(device, n * (2 if gate else 1), k, **options)
    if kind == "4 bits by row":
        weight.scale = weight.scale.bfloat16()
    packed = pack_low_bit(weight)
    assert isinstance(packed, TritonLowBit)
    x, gain = torch.randn(1, k, device=device).half(), torch.rand(k, device=device).half()
    bias, residual = torch.randn(weight.shape[0], device=device).half(), torch.randn(1, n, device=device).half()
    activate = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
    for with_bias, add, norm in ((True, True, False), (False, False, True), (False, True, True)):
        normed = reference.rms_norm(x, gain, 1e-5) if norm else x
        assert isinstance(normed, Tensor)
        product = exact(normed, weight) + (bias.double() if with_bias else 0)
        expected = activate[gate](product.half()) if gate else product
        out = residual.clone()
        SmallGemmLowBit(2)(
            x, packed, out, bias if with_bias else None, norm=(gain, 1e-5) if norm else None, gate=gate, add=add,
            tiling=tiling,
        )  # fmt: skip
        close(out, (expected + residual if add else expected).double(), 2e-3)


def test_one_row_takes_the_kernel_that_fits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, the product is the same; groups of 64 and outputs that fill no 16 have another one."""
    row = torch.randn(1, 1028, device=device).half()
    x = row[:, :1024]
    op, taken_at = linear((9, 0)), []
    multiply_row = small_gemm_low_bit.multiply_row
    monkeypatch.setattr(
        small_gemm_low_bit, "multiply_row", lambda *given: (taken_at.append(given[0]), multiply_row(*given))
    )
    for kind, n, taken in (
        ("4 bits", 48, True),
        ("4 bits with offsets", 48, True),
        ("4 bits", 40, False),
        ("4 bits, groups of 64", 48, False),
        ("4 bits with offsets between codes", 48, False),
        ("table, groups of 128", 48, False),
        ("floats, groups of 128", 48, False),
        ("8 bits", 48, False),
    ):
        weight = make(device, n, 1024, **KINDS[kind])
        packed = pack_low_bit(weight)
        assert isinstance(packed, TritonLowBit)
        taken_at.clear()
        close(op(x, packed, None, torch.float16), exact(x, weight))
        assert bool(taken_at) == taken, kind
        order = torch.randperm(1024, device=device).to(torch.int32)
        assert choose_row_tiling(x, replace(packed, order=order), n, False, 132) is None
    weight = make(device, 48, 1024)
    packed = pack_low_bit(weight)
    assert isinstance(packed, TritonLowBit)
    for first, taken in ((1, False), (2, False), (4, True)):  # of eight bytes are its loads
        x = row[:, first : first + 1024]
        taken_at.clear()
        close(op(x, packed, None, torch.float16), exact(x, weight))
        assert bool(taken_at) == taken


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "gate"),
    [(6144, 4096, None), (4096, 4096, None), (14336, 4096, "silu"), (4096, 14336, None), (8192, 8192, None)],
)
def test_one_row_of_real_matrices(
    device: torch.device, is_gpu: bool, n: int, k: int, gate: str | None, symmetric: bool, dtype: torch.dtype
) -> None:
    """The kernels that are chosen for an 8B model, many times one after the other, as captured steps have them."""
    if not is_gpu:
        pytest.skip("too many numbers for the interpreter")
    weight = make(device, n * (2 if gate else 1), k, symmetric=symmetric)
    packed = pack_low_bit(weight)
    assert isinstance(packed, TritonLowBit)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    roomy = torch.cuda.get_device_capability(device) >= (9, 0)
    op, x = SmallGemmLowBit(processors, roomy), torch.randn(1, k, device=device).to(dtype)
    product = exact(x, weight)
    expected = reference.silu_mul(product.to(dtype)) if gate else product
    outs = [torch.full((1, n), 7.0, device=device, dtype=dtype) for _ in range(8)]
    for out in outs:
        op(x, packed, out, gate=gate)
    close(outs[0], expected.double(), 2e-3 if dtype is torch.float16 else 1e-2)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_warps_that_were_measured() -> None:
    def found(n: int, k: int, gated: bool = False, zeros: bool = False) -> tuple[int, ...] | None:
        tiling = choose_warps(n, k // 128, gated, zeros, 132)
        assert tiling is None or k // 128 % (tiling.warps * tiling.tiles * tiling.ahead) == 0
        return tiling and (tiling.warps, tiling.tiles, tiling.ahead)

    assert found(6144, 4096) == (8, 4, 1)
    assert found(4096, 4096) == (16, 2, 1)
    assert found(14336, 4096, gated=True) == (8, 4, 1)
    assert found(4096, 14336) == found(8192, 28672) == (16, 1, 1)
    assert found(6144, 4096, zeros=True) == found(14336, 4096, gated=True, zeros=True) == (8, 1, 4)
    assert found(4096, 4096, zeros=True) == (16, 1, 2)
    assert found(4096, 14336, zeros=True) == (16, 1, 1)
    assert found(28672, 8192, gated=True) is None
    assert found(1024, 4096) is None  # 64 programs
    assert found(4096, 11008) is None  # 86 tiles
    assert found(5120, 25600) is None  # 25 turns


@pytest.mark.parametrize(("n", "k"), [(128, 256), (130, 272), (40, 72), (36, 41)])
@pytest.mark.parametrize("static", [False, True])
def test_integers_times_integers(device: torch.device, n: int, k: int, static: bool) -> None:
    weight = make(device, n, k, bits=8, group=k)
    weight.quantizes_inputs = True
    if static:
        weight.input_scale = torch.tensor(0.03, device=device)
    packed, bias = pack_low_bit(weight), torch.randn(n, device=device).half()
    assert isinstance(packed, Int8Weight)
    for rows in (1, 5, 64, 90):
        x = torch.randn(rows, k, device=device).half()
        close(linear()(x, packed, bias, torch.float16), low_bit.linear(x.float(), weight, bias, torch.float32).double())


def test_integers_in_groups(device: torch.device) -> None:
    """Rows are rounded, and multiplied as numbers."""
    weight = make(device, 48, 128, bits=8, group=32)
    weight.quantizes_inputs = True
    for rows in (1, 70):
        x = torch.randn(rows, 128, device=device).half()
        expected = low_bit.linear(x.float(), weight, None, torch.float32)
        close(linear()(x, pack_low_bit(weight), None, torch.float16), expected.double())


@pytest.mark.parametrize(
    ("kind", "gate", "tokens", "by_pair"),
    [
        ("4 bits", "silu", 1, None),
        ("4 bits with offsets", "silu", 9, False),
        ("4 bits with offsets between codes", "silu", 1, None),
        ("4 bits, groups of 32", "gelu_tanh", 3, True),
        ("table", "clamped_swiglu", 7, False),
        ("table, groups of 128", "clamped_swiglu", 1, None),
        ("floats", "clamped_swiglu", 7, None),
        ("floats", "clamped_swiglu", 1, True),
        ("8 bits by row", "gelu", 3, None),  # which no kernel has
        ("8 bits by row", "gelu_tanh", 3, None),
        ("8 bits, groups of 32", "silu", 40, None),
    ],
)
def test_experts(
    device: torch.device,
    is_gpu: bool,
    kind: str,
    gate: str,
    tokens: int,
    by_pair: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With biases, an order for each expert, inputs as integers, and a matrix that is plain."""
    count, top_k, hidden, width = (8, 2, 2880, 1440) if is_gpu else (5, 2, 144, 36)
    op = TritonExperts((9, 0))
    gate_up, down = (make(device, count * n, k, **KINDS[kind]) for n, k in ((2 * width, hidden), (hidden, width)))
    x = torch.randn(tokens, hidden, device=device).half()
    ids = torch.rand(tokens, count, device=device).argsort(1)[:, :top_k].to(torch.int32)
    weights = torch.rand(tokens, top_k, device=device)
    biases = (torch.randn(count, 2 * width, device=device).half(), torch.randn(count, hidden, device=device).half())

    def check(one: LowBitWeight, two: LowBitWeight | Tensor, scale_inputs: bool = False) -> None:
        packed = two if isinstance(two, Tensor) else pack_low_bit(two, count)
        given = (ids, weights)
        found = op(x, *given, pack_low_bit(one, count), packed, gate, biases, scale_inputs, by_pair=by_pair)
        wide = two.float() if isinstance(two, Tensor) else two
        expected = reference_experts.experts(
            x.float(), *given, one, wide, gate, (biases[0].float(), biases[1].float()), scale_inputs
        )
        close(found, expected.double(), 3e-3)

    check(gate_up, down)
    if gate == "silu":
        orders = torch.stack([torch.randperm(hidden, device=device) for _ in range(count)]).to(torch.int32)
        check(replace(gate_up, order=orders), down, scale_inputs=True)
        check(gate_up, low_bit.widen(down))
    if kind.startswith("8 bits") and gate in GATES:  # else the definition would be compared with itself in 16 bits
        # What lies between both products is in 16 bits, the gate's own value too: from float32 it may be rounded to
        # another integer.
        function = reference_experts.GATES[gate]
        monkeypatch.setitem(reference_experts.GATES, gate, lambda one, two: function(one.half(), two.half()).float())
        # One at a time: what the first product's inputs are rounded by would make other integers of the second's.
        check(replace(gate_up, quantizes_inputs=True), down)
        # Whole numbers and one scale, a power of two: the first product is exact in any order, and so is what the
        # second one's inputs are rounded from.
        x = torch.randint(-2, 3, x.shape, device=device).half()
        steps = torch.full_like(gate_up.scale, 2.0**-9)
        offset = None if gate_up.offset is None else steps.float() * torch.randint_like(gate_up.offset, -7, 8)
        check(replace(gate_up, scale=steps, offset=offset), replace(down, quantizes_inputs=True))


@pytest.mark.parametrize("rows", [3, 64, 65])
def test_values_beside_codes(device: torch.device, rows: int) -> None:
    weight = make(device, 48, 128)
    weight.order = torch.randperm(128, device=device, dtype=torch.int32)
    x = torch.randn(rows, 128, device=device).half()
    plain = linear()(x, pack_low_bit(weight))
    packed = pack_low_bit(replace(weight, keeps_wide=True))
    assert isinstance(packed, TritonLowBit) and packed.wide is not None
    close(linear()(x, packed), exact(x, weight))
    assert rows > 64 or torch.equal(linear()(x, packed), plain)
    packed.wide = packed.wide + 1  # what many rows are multiplied with
    assert torch.equal(linear()(x, packed), plain) == (rows <= 64)
