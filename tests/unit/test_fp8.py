"""The definitions of FP8: rows, matrices, the ops that quantise their result, caches; and what config.json may say."""

from dataclasses import replace

import pytest
import torch

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import FP8, Fp8Rows, Fp8Weight
from text_generation_inference.quant.choose import choose_quantization, detect
from text_generation_inference.quant.fp8 import ON_LOADING
from text_generation_inference.quant.fp8_formats import StoredQuantization


def weight(rows: int, columns: int, by_square: bool = False, input_scale: float | None = None) -> Fp8Weight:
    made = fp8.quantize_weight(torch.randn(rows, columns), by_square)
    made.input_scale = None if input_scale is None else torch.tensor(input_scale)
    return made


def same(a: Fp8Rows, b: Fp8Rows) -> bool:
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("columns", [5, 128, 300])
def test_rows(columns: int) -> None:
    x = torch.randn(7, columns) * torch.logspace(-6, 6, 7)[:, None]
    x[3] = 0
    for quantize_for in (weight(4, columns), weight(4, columns, by_square=True)):
        rows = fp8.quantize_rows(x, quantize_for)
        assert rows.data.dtype is FP8 and rows.scale.shape == (
            (7, -(-columns // 128)) if quantize_for.by_square else (7,)
        )
        wide = fp8.dequantize_rows(rows)
        # Three bits of mantissa: half a step is 1/16 of a value, or of the smallest normal one of the row.
        limit = torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) / 448 * 2**-9)
        assert bool(((wide - x).abs() <= limit * 1.0001).all())
        assert not wide[3].any()


def test_rows_of_one_scale_are_clamped() -> None:
    rows = fp8.quantize_rows(torch.tensor([[1.0, -1e6, 0.3]]), weight(2, 3, input_scale=0.5))
    assert fp8.dequantize_rows(rows).tolist() == [[1.0, -224.0, 0.3125]]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (130, 129), (2100, 40)])
@pytest.mark.parametrize("by_square", [False, True], ids=["rows", "squares"])
def test_matrices(rows: int, columns: int, by_square: bool) -> None:
    value = torch.randn(rows, columns)
    made = fp8.quantize_weight(value, by_square)
    assert made.scale.shape == ((-(-rows // 128), -(-columns // 128)) if by_square else (rows,))
    assert (fp8.dequantize_weight(made) - value).abs().max() <= value.abs().max() / 16
    assert made.data.float().abs().max() == 448


def test_linear_takes_rows_of_either_form() -> None:
    x, bias = torch.randn(3, 200, dtype=torch.bfloat16), torch.randn(6)
    for by_square in (False, True):
        matrix = weight(6, 200, by_square)
        rows = fp8.quantize_rows(x, matrix)
        out = reference.linear(x, matrix, bias)
        assert out.dtype is torch.bfloat16
        assert torch.equal(out, reference.linear(rows, matrix, bias, torch.bfloat16))
        exact = fp8.dequantize_rows(rows) @ fp8.dequantize_weight(matrix).T + bias
        torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=1e-2)
        assert reference.linear(x, matrix, bias, torch.float32).dtype is torch.float32


@pytest.mark.parametrize("kind", ["rows", "squares", "one scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_quantise_their_rounded_result(kind: str, dtype: torch.dtype) -> None:
    x, residual, norm = torch.randn(5, 192).to(dtype), torch.randn(5, 192).to(dtype), torch.rand(192).to(dtype)
    quantize_for = weight(8, 192, kind == "squares", 0.01 if kind == "one scale" else None)
    half = weight(8, 96, kind == "squares", 0.01 if kind == "one scale" else None)

    def expect(plain: object, matrix: Fp8Weight = quantize_for) -> Fp8Rows:
        assert isinstance(plain, torch.Tensor) and plain.dtype is dtype
        return fp8.quantize_rows(plain, matrix)

    assert same(reference.rms_norm(x, norm, 1e-5, quantize_for=quantize_for), expect(reference.rms_norm(x, norm, 1e-5)))  # pyright: ignore
    rows, total = reference.add_rms_norm(x, residual, norm, 1e-5, quantize_for=quantize_for)
    plain, plain_total = reference.add_rms_norm(x, residual, norm, 1e-5)
    assert isinstance(rows, Fp8Rows) and same(rows, expect(plain)) and torch.equal(total, plain_total)
    for op in (reference.silu_mul, reference.gelu_tanh_mul):
        rows = op(x, quantize_for=half)
        assert isinstance(rows, Fp8Rows) and same(rows, expect(op(x), half))


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_sees_what_the_cache_holds(by_head: bool, dtype: torch.dtype) -> None:
    """The values that are left in k and v are those in the cache, which attention reads."""
    tokens, heads, kv_heads, dim, block_size = 21, 4, 2, 8, 4
    scales = (0.01, 0.003)
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    angles = torch.arange(64)[:, None] * torch.rand(dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    table = torch.tensor([[3, 1, 6, 2, 5, 7]], dtype=torch.int32)
    positions = torch.arange(tokens)
    kv_index = table[0, positions // block_size].long() * block_size + positions % block_size
    lengths = torch.tensor([tokens], dtype=torch.int32)
    batch = Batch(positions, positions, kv_index, lengths, PagedMeta(table, 0, [0], [tokens], tokens))

    def cache(kind: torch.dtype) -> torch.Tensor:
        if by_head:
            return torch.zeros(8, kv_heads, block_size, dim, dtype=kind).transpose(1, 2)
        return torch.zeros(8, block_size, kv_heads, dim, dtype=kind)

    plain_k, plain_v, k_cache, v_cache = cache(dtype), cache(dtype), cache(FP8), cache(FP8)
    original_k, original_v = k.clone(), v.clone()
    rotated = reference.rotary_and_cache(q, k, v, cos_sin, batch, plain_k, plain_v)
    assert torch.equal(k, original_k) and torch.equal(v, original_v)
    reference.rotary_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache, scales)
    blocks, inside = kv_index // block_size, kv_index % block_size
    for mine, stored, plain, scale in ((k, k_cache, plain_k, scales[0]), (v, v_cache, plain_v, scales[1])):
        held, exact = stored.float()[blocks, inside] * scale, plain[blocks, inside]
        assert torch.equal(mine, held.to(dtype))
        assert (held - exact.float().clamp(-448 * scale, 448 * scale)).abs().max() <= 448 * scale / 16
    if dtype is not torch.float32:  # torch's products in bfloat16 end the process on some virtual machines
        return
    held_k, held_v = (
        stored.float().mul(scale).to(dtype) for stored, scale in zip((k_cache, v_cache), scales, strict=True)
    )
    for window, softcap in ((None, None), (5, None), (None, 20.0)):
        expected = reference.attention(rotated, k, v, held_k, held_v, batch, 0.35, window, softcap)
        found = reference.attention(rotated, k, v, k_cache, v_cache, batch, 0.35, window, softcap, scales)
        assert torch.equal(found, expected)
        step = replace(batch, meta=PagedMeta(table, 1, [], [], tokens))
        found = reference.attention(rotated[-1:], k[-1:], v[-1:], k_cache, v_cache, step, 0.35, window, softcap, scales)
        torch.testing.assert_close(found, expected[-1:], atol=1e-5, rtol=1e-5)


# -- config.json ----------------------------------------------------------------------------------------------------

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {**FLOAT8, "strategy": "token", "dynamic": True}


def compressed(weights: dict = FLOAT8, inputs: dict | None = TOKEN, **more: object) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["lm_head"], **more}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "vptq"}, "`quant_method` 'vptq' is not supported."),
        ({"bits": 4}, "`quant_method` '' is not supported"),
        ("fp8", "`quantization_config` must be an object"),
        ({"quant_method": 8}, "`quant_method` must be text"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "`fmt` 'e5m2' is not supported, e4m3 is"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "`activation_scheme` 'odd' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "`weight_block_size` [64, 64] is not supported"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "with `weight_block_size` only dynamic",
        ),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "`ignored_layers` must be a list of names"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "`activation_scale_ub` -1 is not supported"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_is_not_fp8_is_refused(config: object, text: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        detect({"quantization_config": config}, "config.json")
    assert text in str(caught.value)


def test_patterns() -> None:
    ignore = ["lm_head", "model.layers.1.mlp"]
    found = detect({"quantization_config": {"quant_method": "fp8", "ignored_layers": ignore}}, "config.json")
    assert isinstance(found, StoredQuantization)
    for name in ("lm_head", "model.layers.1.mlp.up_proj"):
        assert found.scheme_of(name) is None
    for name in ("model.layers.11.mlp.up_proj", "model.layers.1.self_attn.v_proj"):
        assert found.scheme_of(name) is not None


def test_the_setting() -> None:
    stored = detect({"quantization_config": compressed()}, "config.json")
    assert choose_quantization(None, None) is None
    assert choose_quantization("fp8", None) is ON_LOADING
    assert choose_quantization("fp8", stored) is choose_quantization("compressed-tensors", stored) is stored
    plain = detect({"quantization_config": {"quant_method": "fp8"}}, "config.json")
    for other, text in ((None, "is for checkpoints that say so"), (plain, "is not for this checkpoint")):
        with pytest.raises(StartError, match=text):
            choose_quantization("compressed-tensors", other)


def test_exl2_is_refused() -> None:
    with pytest.raises(StartError, match="`quantize` is set to 'exl2', which is not supported: use a GPTQ, AWQ or"):
        ServerConfig(quantize="exl2").check()


def test_settings_that_work() -> None:
    ServerConfig(quantize="fp8", kv_cache_dtype="fp8_e4m3fn").check()
    ServerConfig(quantize="compressed-tensors").check()
