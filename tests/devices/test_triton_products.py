"""Products for one row and for few rows in FP8 against their definitions: on the GPU, or in the interpreter."""

import importlib.util

import pytest
import torch
from torch import Tensor

from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.triton import norms_rotary

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from text_generation_inference.kernels.triton.gemv import vector_product
from text_generation_inference.kernels.triton.gemv_fp8 import GemvFp8, Shape, choose_shape
from text_generation_inference.kernels.triton.linear import TritonLinear
from text_generation_inference.kernels.triton.quantize import quantize_rows
from text_generation_inference.kernels.triton.small_gemm import TILINGS, SmallGemm, SmallGemmTiling, choose_tiling


@pytest.fixture(scope="module")
def device(device_name: str) -> torch.device:
    return torch.device(device_name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(actual: Tensor, expected: Tensor) -> None:
    difference = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert float(difference) < 3e-3  # float16 has eleven bits


@pytest.mark.parametrize(("n", "k"), [(40, 64), (33, 200), (7, 4500), (24, 1024)])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("norm", [False, True])
def test_one_row(device: torch.device, n: int, k: int, gate: str | None, norm: bool) -> None:
    x, gain = torch.randn(1, k, device=device).half(), torch.rand(k, device=device).half()
    weight = (torch.randn(n * (2 if gate else 1), k, device=device) * 0.05).half()
    bias = torch.randn(weight.shape[0], device=device).half()
    residual = torch.randn(1, n, device=device).half()
    activate = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
    normed = reference.rms_norm(x, gain, 1e-5) if norm else x
    for with_bias, add in ((True, True), (False, False)):
        product = normed.float() @ weight.float().t() + (bias.float() if with_bias else 0)
        expected = activate[gate](product.half()) if gate else product.half()
        out = residual.clone()
        vector_product(
            x, weight, out, bias if with_bias else None, norm=(gain, 1e-5) if norm else None, gate=gate, add=add
        )
        close(out, expected + residual if add else expected)


@pytest.mark.parametrize(("n", "k"), [(40, 64), (7, 4624), (24, 1040)])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_one_row_in_fp8(device: torch.device, n: int, k: int, gate: str | None, norm: bool, static: bool) -> None:
    """What the norm, the rows in FP8, the product, the gate and the addition give one after the other."""
    x, gain = torch.randn(1, k, device=device).half(), torch.rand(k, device=device).half()
    weight = fp8.quantize_weight(torch.randn(n * (2 if gate else 1), k, device=device) * 0.05)
    if static:
        weight.input_scale = torch.tensor(0.01, device=device)
    bias = torch.randn(weight.shape[0], device=device).half()
    residual = torch.randn(1, n, device=device).half()
    rows = quantize_rows(norms_rotary.rms_norm(x, gain, 1e-5) if norm else x, weight)
    for with_bias, add in ((bias, True), (None, False)):
        expected = fp8.linear(rows, weight, with_bias, torch.float16)
        expected = reference.silu_mul(expected) if gate else expected
        out = residual.clone()
        GemvFp8(2)(x, weight, out, with_bias, norm=(gain, 1e-5) if norm else None, gate=gate, add=add)
        close(out, expected + residual if add else expected)


@pytest.mark.parametrize(("k", "shape"), [(17408, None), (17408, Shape(4, 2, 4, 3, parts=4)), (20480, None)])
@pytest.mark.parametrize("static", [False, True])
def test_one_long_row_in_fp8(device: torch.device, static: bool, k: int, shape: Shape | None) -> None:
    """Whole, in parts that are no power of two, and in the parts that are chosen."""
    n = 13
    x = torch.randn(1, k, device=device).half()
    weight = fp8.quantize_weight(torch.randn(n, k, device=device) * 0.05)
    if static:
        weight.input_scale = torch.tensor(0.01, device=device)
    bias, residual = torch.randn(n, device=device).half(), torch.randn(1, n, device=device).half()
    op = GemvFp8(2)
    expected = fp8.linear(quantize_rows(x, weight), weight, bias, torch.float16)
    for add in (False, True):
        out = residual.clone()
        op(x, weight, out, bias, add=add, shape=shape)
        close(out, expected + residual if add else expected)


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(130, 256), (64, 208), (48, 1040)])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_few_rows_in_fp8(device: torch.device, rows: int, n: int, k: int, splits: int) -> None:
    op = SmallGemm(1)
    weight = fp8.quantize_weight(torch.randn(n, k, device=device) * 0.05)
    x = fp8.quantize_rows(torch.randn(rows, k, device=device), weight)
    bias = torch.randn(n, device=device).half()
    for with_bias in (None, bias, bias):  # twice: the counters of the first time are clean
        out = torch.full((rows, n), 7.0, device=device, dtype=torch.float16)
        op(x, weight, out, with_bias, SmallGemmTiling(64, 64, splits, 2))
        close(out, fp8.linear(x, weight, with_bias, torch.float32))


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 64, 64), (64, 64, 128), (65, 48, 128), (301, 256, 512), (5, 128, 640), (2, 256, 512), (70, 40, 72)],
)
@pytest.mark.parametrize("by_square", [False, True])
def test_linear_in_fp8(device: torch.device, rows: int, n: int, k: int, by_square: bool) -> None:
    capability = (
        torch.cuda.get_device_capability() if device.type == "cuda" else (0, 0)
    )  # 0: products without a library
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    op = TritonLinear(4, capability)
    weight = fp8.quantize_weight(torch.randn(n, k, device=device) * 0.05)
    if by_square:
        scale = torch.rand(-(-n // 128), -(-k // 128), device=device) + 0.5
        weight = fp8.Fp8Weight(weight.data, scale)
    x = fp8.quantize_rows(torch.randn(rows, k, device=device), weight)
    bias = torch.randn(n, device=device).to(dtype)
    for with_bias in (None, bias):
        out = op(x, weight, with_bias, dtype)
        expected = fp8.linear(x, weight, with_bias, torch.float32)
        assert out.dtype is dtype
        assert float((out.float() - expected).norm() / expected.norm()) < 1e-2
    assert op(fp8.Fp8Rows(x.data[:0], x.scale[:0]), weight, None, dtype).shape == (0, n)


def test_tilings_fill_the_processors() -> None:
    assert choose_tiling(1, 4096, 4096, 132).parts == 4
    assert choose_tiling(64, 12288, 4096, 132).parts == 1


def test_long_rows_are_multiplied_in_whole_parts() -> None:
    assert choose_shape(8192, 28672).parts == 7
    assert choose_shape(16384, 53248).parts == 13
    for n, k in ((4096, 11008), (8192, 8192), (8192, 29568), (5120, 27648), (57344, 28672)):
        assert choose_shape(n, k).parts == 1
    assert choose_shape(8192, 28672, plain=False).parts == choose_shape(8192, 28672, roomy=False).parts == 1


def test_tilings_are_measured_for_some_rows_of_some_matrices() -> None:
    n, k = 57344, 8192
    assert [choose_tiling(rows, n, k, 132, measured=True) for rows in (17, 32, 33, 64)] == [
        tiling for _, tiling in TILINGS[n, k] for _ in range(2)
    ]
    for rows, size in ((16, (n, k)), (64, (n, k + 128)), (64, (n + 64, k))):
        assert choose_tiling(rows, *size, 132, measured=True) == choose_tiling(rows, *size, 132)


@pytest.mark.parametrize("tiling", sorted({tiling for each in TILINGS.values() for _, tiling in each}), ids=str)
@pytest.mark.parametrize("rows", [17, 64])
def test_measured_tilings(device: torch.device, rows: int, tiling: SmallGemmTiling) -> None:
    """With outputs that do not fill a tile, and columns that do not fill the last one of a part."""
    if device.type == "cuda" and torch.cuda.get_device_capability() not in ((9, 0), (10, 0), (10, 3)):
        pytest.skip("tiles for larger GPUs")
    n, k = 130, 3 * tiling.columns + 64
    weight = fp8.quantize_weight(torch.randn(n, k, device=device) * 0.05)
    x = fp8.quantize_rows(torch.randn(rows, k, device=device), weight)
    bias, op = torch.randn(n, device=device).half(), SmallGemm(1)
    for with_bias in (None, bias):
        out = torch.full((rows, n), 7.0, device=device, dtype=torch.float16)
        op(x, weight, out, with_bias, tiling)
        close(out, fp8.linear(x, weight, with_bias, torch.float32))


def test_scales_applied_later(device: torch.device) -> None:
    """The ops after an unscaled product give what they give after a scaled one."""
    tokens, width = 5, 96
    dtype = torch.float16
    x = fp8.ScaledRows(
        torch.randn(tokens, 2 * width, device=device).to(dtype), torch.rand(tokens, device=device) + 0.5,
        torch.rand(2 * width, device=device) + 0.5,
    )  # fmt: skip
    plain = fp8.apply_scales(x)
    for name in ("silu_mul", "gelu_tanh_mul"):
        op, definition = getattr(norms_rotary, name), getattr(reference, name)
        close(op(x), op(plain))
        close(op(x), definition(x))
    residual, gain = (
        torch.randn(tokens, 2 * width, device=device).to(dtype),
        torch.rand(2 * width, device=device).to(dtype),
    )
    for got, scaled, defined in zip(
        norms_rotary.add_rms_norm(x, residual, gain, 1e-5),
        norms_rotary.add_rms_norm(plain, residual, gain, 1e-5),
        reference.add_rms_norm(x, residual, gain, 1e-5),
        strict=True,
    ):
        close(got, scaled)
        close(got, defined)


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("prompts", [False, True])
def test_rotation_of_an_unscaled_product(device: torch.device, rotary_dim: int, prompts: bool) -> None:
    tokens, heads, kv_heads, d = 5, 4, 2, 16
    width = (heads + 2 * kv_heads) * d
    product = fp8.ScaledRows(
        torch.randn(tokens, width, device=device).half(), torch.rand(tokens, device=device) + 0.5,
        torch.rand(width, device=device) + 0.5,
    )  # fmt: skip
    cos_sin = torch.randn(32, rotary_dim, device=device)
    nothing = torch.zeros(1, device=device)
    batch = Batch(
        input_ids=torch.zeros(tokens, device=device),
        positions=torch.arange(tokens, device=device) * 3,
        kv_index=torch.arange(tokens, device=device) + 2,
        seq_lens=nothing,
        meta=PagedMeta(nothing, 0, [], [], 0, prefill_tiles=nothing if prompts else None),
    )
    later = (product.rows, product.columns)
    results = []
    for op, fused, scales in (
        (norms_rotary.rotary_and_cache, fp8.apply_scales(product), None),
        (norms_rotary.rotary_and_cache, product.data.clone(), later),
        (reference.rotary_and_cache, product.data.clone(), later),
    ):
        caches = [torch.zeros(2, 8, kv_heads, d, device=device).half() for _ in range(2)]
        q, k, v = fused.view(tokens, -1, d).split((heads, kv_heads, kv_heads), dim=1)
        q = op(q, k, v, cos_sin, batch, caches[0], caches[1], scales=scales)
        results.append([q, *caches, *([k, v] if prompts else [])])
    scaled, unscaled, defined = results
    for got, expected in zip(unscaled, scaled, strict=True):
        close(got, expected)
    for got, expected in zip(unscaled[:3], defined[:3], strict=True):
        close(got, expected)
