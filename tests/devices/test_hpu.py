"""A Gaudi card as a device: its kernels against the definitions, its graphs, its memory, what it says when it is absent.

Runs on the stand-in of `tests/hpu_emulated` (hpu (emulated)), or with `--device hpu` on a card: see docs/gaudi.md.
"""

import gc
import itertools
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import low_bit_writing
import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, run, start
from gaudi import run_with_stand_in
from hpu_batches import HEADS, LIMITS, SIZE, Called, Made, close
from hpu_engines import SAMPLED, requests, sampled_requests
from hpu_pieces import gathered
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.kernels import block_lists, experts, fp8, low_bit, reference
from text_generation_inference.kernels.batch import PagedMeta
from text_generation_inference.kernels.block_lists import (
    PromptParts,
)
from text_generation_inference.kernels.experts import look_within
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.quant import choose
from text_generation_inference.runner.warm.warm_up import WarmUp
from text_generation_inference.types import DeviceMemory


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_decode_attention(hpu, data):
    rows = data.draw(st.integers(1, 5))
    lens = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=rows))
    used = sum(-(-n // SIZE) for n in lens)
    made = Made(hpu, lens, rows, True, blocks=used + data.draw(st.integers(0, 4)), **HEADS)
    window = data.draw(st.none() | st.integers(1, 300))
    softcap = data.draw(st.none() | st.just(3.0))
    expected_q = reference.rotary_and_cache(made.q, made.k, made.v, made.cos_sin, made.batch, made.k_cache, made.v_cache)  # fmt: skip
    expected = block_lists.decode_attention(expected_q, made.k_cache, made.v_cache, made.batch, 0.25, window, softcap)
    made2 = Made(hpu, lens, rows, True, blocks=made.batch.meta.block_list.shape[0], **HEADS)
    (q, k, v, table), batch, caches = made2.on(hpu)
    q = hpu.ops.rotary_and_cache(q, k, v, table, batch, *caches)
    close(q, expected_q)
    for there, here in zip(caches, (made.k_cache, made.v_cache), strict=True):
        close(there[1:], here[1:])
    found = hpu.ops.attention(q, k, v, *caches, batch, 0.25, window, softcap).cpu()
    close(found[made.real], expected[made.real])
    close(found[~made.real], torch.zeros_like(expected[~made.real]))


def decode_in_bfloat16(device) -> float:
    """How far off it is at most. Where the software has an op that joins blocks, that is used in this type alone."""
    most = 0.0
    for window, softcap in itertools.product((None, 1, 40, 129, 200), (None, 3.0)):
        made = Made(device, [400, 130, 1, 257], 5, True, blocks=11, **HEADS)
        for name in ("q", "k", "v", "k_cache", "v_cache"):
            setattr(made, name, getattr(made, name).bfloat16())
        (q, k, v, table), batch, caches = made.on(device)
        q = device.ops.rotary_and_cache(q, k, v, table, batch, *caches)
        found = device.ops.attention(q, k, v, *caches, batch, 0.25, window, softcap).cpu().float()
        here = [cache.cpu().float() for cache in caches]
        expected = block_lists.decode_attention(q.cpu().float(), *here, made.batch, 0.25, window, softcap)
        most = max(most, (found - expected).abs().nan_to_num(torch.inf).max().item())
    return most


@pytest.mark.parametrize("card", ["this one", "Gaudi3"])
def test_decode_attention_in_bfloat16(hpu, card):
    if card == "this one":
        most = decode_in_bfloat16(hpu)
    elif not hpu.bridge.emulated:
        pytest.skip("one card is there")
    else:
        program = """if True:
            import hpu_engines, test_hpu
            from text_generation_inference.devices.hpu import HpuDevice
            device = HpuDevice()
            most = test_hpu.decode_in_bfloat16(device)
            assert "block_softmax_adjustment" in hpu_engines.emulated_ops()
            print(most)
            device.close()"""
        most = float(run_with_stand_in(program, EMULATED_GAUDI=card, PT_HPU_LAZY_MODE="1"))
    assert most < 0.03


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_prefill_attention(hpu, data):
    rows = data.draw(st.integers(1, 4))
    lens = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=rows))
    length = max(lens) + data.draw(st.integers(0, 40))
    window, softcap = data.draw(st.none() | st.integers(1, 200)), data.draw(st.none() | st.just(3.0))
    made = Made(hpu, lens, rows, False, length=length, **HEADS)
    q = reference.rotary_and_cache(made.q, made.k, made.v, made.cos_sin, made.batch, made.k_cache, made.v_cache)
    expected = block_lists.prefill_attention(q, made.k_cache, made.v_cache, made.batch, 0.25, window, softcap)
    flash = data.draw(st.booleans())
    ops = hpu.ops if flash else load_plain(hpu)
    (q, k, v, table), batch, caches = Made(hpu, lens, rows, False, length=length, **HEADS).on(hpu)
    q = ops.rotary_and_cache(q, k, v, table, batch, *caches)
    found = ops.attention(q, k, v, *caches, batch, 0.25, window, softcap).cpu()
    close(found[made.real], expected[made.real])
    assert torch.isfinite(found).all()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_attention_of_parts(hpu, data):
    """Prompts after tokens in the cache; behind these may be anything."""
    lens = data.draw(st.lists(st.integers(1, 330), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, n - 1)) for n in lens]
    window, softcap = data.draw(st.none() | st.integers(1, 300)), data.draw(st.none() | st.just(3.0))
    length = max(n - start for n, start in zip(lens, starts, strict=True)) + data.draw(st.integers(0, 20))
    made = Made(hpu, lens, len(lens), False, length=max(lens), **HEADS)
    index = made.batch.kv_index.view(len(lens), -1)
    table = torch.zeros(len(lens), -(-max(starts) // SIZE) + -(-length // SIZE), dtype=torch.int32)
    own = torch.zeros(len(lens), length, dtype=torch.int64)
    real = torch.zeros(len(lens), length, dtype=torch.bool)
    for row, (n, first) in enumerate(zip(lens, starts, strict=True)):
        table[row, : -(-n // SIZE)] = index[row, :n:SIZE] // SIZE
        own[row, : n - first], real[row, : n - first] = index[row, first:n], True
        for cache in (made.k_cache, made.v_cache):
            cache[table[row, (n - 1) // SIZE], (n - 1) % SIZE + 1 :] = torch.nan
    positions = torch.tensor(starts)[:, None] + torch.arange(length)
    tokens = own.numel()
    q, k, v = made.q[:1].expand(tokens, -1, -1) * torch.randn(tokens, 1, 1), made.k[:1], made.v[:1]
    k, v = (x.expand(tokens, -1, -1) * torch.randn(tokens, 1, 1) for x in (k, v))
    parts = PromptParts(table, torch.tensor(starts, dtype=torch.int32))
    positions = torch.where(real, positions, 0).flatten()
    batch = replace(
        made.batch, input_ids=positions, positions=positions, kv_index=own.flatten(), meta=parts, logit_tokens=None
    )
    made.q, made.k, made.v, made.batch = q.clone(), k.clone(), v.clone(), batch
    ops = hpu.ops if data.draw(st.booleans()) else load_plain(hpu)
    (q, k, v, cos_sin), there, caches = made.on(hpu)
    expected = reference.rotary_and_cache(made.q, made.k, made.v, made.cos_sin, batch, made.k_cache, made.v_cache)
    expected = block_lists.prefill_attention(expected, made.k_cache, made.v_cache, batch, 0.25, window, softcap)
    q = ops.rotary_and_cache(q, k, v, cos_sin, there, *caches)
    found = ops.attention(q, k, v, *caches, there, 0.25, window, softcap).cpu()
    close(found[real.flatten()], expected[real.flatten()])
    assert torch.isfinite(found).all()


def load_plain(device):
    from text_generation_inference.kernels.hpu.ops import load_ops

    return load_ops(device.bridge, flash=False)


def test_nan_of_one_row_stays_there(hpu):
    """A block that was another's before may hold anything behind the row's end that is ever written there; a broken row
    breaks no other."""
    made = Made(hpu, [5, 200, 40], 4, True, blocks=6, **HEADS)
    (q, k, v, _), batch, caches = made.on(hpu)
    blocks = batch.meta.block_list.tolist()
    for cache, worst in zip(caches, (torch.nan, torch.finfo(torch.float32).max), strict=True):
        cache[blocks[0], 5:] = worst
        cache[0] = worst
    whole = hpu.ops.attention(q, k, v, *caches, batch, 0.25).cpu()
    assert torch.isfinite(whole).all()
    caches[0][blocks[1], 3] = torch.nan
    q[2] = torch.nan
    found = hpu.ops.attention(q, k, v, *caches, batch, 0.25).cpu()
    close(found[[0, 3]], whole[[0, 3]])
    assert found[1].isnan().any() and found[2].isnan().all()


def test_what_is_no_number_is_cached_as_a_key(hpu):
    """Values are read without a mask, so there is none among them; who looks at such a token learns it all the same."""
    made = Made(hpu, [5, 200, 40], 4, True, blocks=6, **HEADS)
    (q, k, v, table), batch, caches = made.on(hpu)
    v[0, 0, 3], v[1, :, 0] = torch.inf, torch.nan
    q = hpu.ops.rotary_and_cache(q, k, v, table, batch, *caches)
    assert torch.isfinite(caches[1].cpu()).all()
    found = hpu.ops.attention(q, k, v, *caches, batch, 0.25).cpu().view(4, HEADS["kv_heads"], -1)
    broken = found.isnan().any(-1)
    assert broken.any(-1).tolist() == [True, True, False, False]
    assert broken[1].all()


def test_partial_rotation(hpu):
    made = Made(hpu, [9, 3], 2, True, blocks=2, **HEADS)
    (q, k, v, table), batch, caches = made.on(hpu)
    half = torch.cat((table[:, :4], table[:, 8:12]), -1)
    expected = reference.rotary_and_cache(made.q, made.k, made.v, half.cpu(), made.batch, made.k_cache, made.v_cache)
    close(hpu.ops.rotary_and_cache(q, k, v, half, batch, *caches), expected)
    close(caches[0][1:], made.k_cache[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates(hpu, dtype):
    x, residual = (torch.randn(5, 64, dtype=dtype) for _ in range(2))
    weight = torch.rand(64, dtype=dtype)
    there = [t.to(hpu.torch_device) for t in (x, residual, weight)]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    close(hpu.ops.rms_norm(there[0], there[2], 1e-5), reference.rms_norm(x, weight, 1e-5), tolerance)
    pairs = zip(hpu.ops.add_rms_norm(*there, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5), strict=True)
    for found, expected in pairs:
        close(found, expected, tolerance)
    close(hpu.ops.silu_mul(there[0]), reference.silu_mul(x), tolerance)
    close(hpu.ops.gelu_tanh_mul(there[0]), reference.gelu_tanh_mul(x), tolerance)


# -- FP8 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fp8_ops(hpu):
    if not hpu.supports_fp8:
        pytest.skip("this card has no FP8")
    from text_generation_inference.kernels.hpu.fp8 import Fp8Ops

    return Fp8Ops(hpu.bridge)


@pytest.mark.parametrize("by_square", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_fp8_products(hpu, fp8_ops, by_square, static):
    """Weights made for 448 are fitted to the card; products are those of the values, within what FP8 keep."""
    weight, x, bias = torch.randn(200, 256), torch.randn(7, 256), torch.randn(200)
    made = fp8.quantize_weight(weight, by_square)
    if static:
        made.input_scale = x.abs().max() / fp8.FP8_MAX
    fitted = fp8_ops.pack_fp8(made)
    assert float(fitted.data.float().abs().max()) <= hpu.fp8_max
    assert not fitted.by_square
    moved = fp8.Fp8Weight(*(None if t is None else t.to(hpu.torch_device) for t in (fitted.data, fitted.scale, fitted.input_scale)))  # fmt: skip
    found = hpu.ops.linear(x.to(hpu.torch_device), moved, bias.to(hpu.torch_device), torch.float32).cpu()
    assert torch.isfinite(found).all()
    expected = x @ weight.T + bias
    assert float((found - expected).norm() / expected.norm()) < 0.06
    # exactly: what is quantised is what is multiplied
    rows = fp8_ops.quantize_rows(x.to(hpu.torch_device), moved)
    values = rows.data.cpu().float() * rows.scale.cpu()
    close(found, values @ fp8.dequantize_weight(fitted).cpu().T + bias, 1e-4)


def test_inputs_beyond_what_was_measured_are_brought_into_range(hpu, fp8_ops):
    """A cast beyond the card's range clips or gives no number, as it pleases."""
    data, scale = torch.full((4, 8), 120.0).to(fp8.FP8), torch.tensor(0.5)
    weight = fp8_ops.pack_fp8(fp8.Fp8Weight(data, torch.ones(4), scale, full_scale=hpu.fp8_max))
    weight = replace(weight, **{name: getattr(weight, name).to(hpu.torch_device) for name in ("data", "scale", "input_scale")})  # fmt: skip
    rows = fp8_ops.quantize_rows(torch.tensor([[1e4, -1e4, 3.0]]).to(hpu.torch_device), weight)
    assert rows.data.cpu().float().tolist() == [[hpu.fp8_max, -hpu.fp8_max, 6.0]]
    stored = fp8_ops.to_cache(torch.tensor([1e4, -1e4, 3.0]).to(hpu.torch_device), 0.5)
    assert stored.cpu().float().tolist() == [hpu.fp8_max, -hpu.fp8_max, 6.0]


def test_a_decode_graph_has_no_input_that_it_does_not_read(hpu, start_hpu, tmp_path, monkeypatch):
    """Without windows two of its tensors are known by their shapes alone; and nothing is left for the second replay."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("the stand-in tells what a graph reads")
    from habana_frameworks.torch.hpu.graphs import HPUGraph

    unread = []
    look = HPUGraph.count_unread
    monkeypatch.setattr(HPUGraph, "count_unread", lambda graph, count: unread.append(look(graph, count)) or unread[-1])
    folder = make_tiny("Llama", {"num_hidden_layers": 2}, tmp_path).folder
    engine = start_hpu(folder, max_batch_size=1, max_total_tokens=32)
    passes = engine.rank.runner.steps.passes._graphs
    assert passes.num_captured > 0
    of_passes = unread[: passes.num_captured]
    assert not any(of_passes)


def test_what_fits_is_left_alone(hpu, fp8_ops):
    """Scales that were measured for this card stay as they are. Of a checkpoint's, made for 448, that of inputs is
    changed, whether or not the part of a matrix that a rank has is within the card's range."""
    data = torch.full((4, 8), 120.0).to(fp8.FP8)
    scales = torch.full((4,), 0.5), torch.tensor(0.25)
    for full_scale in (hpu.fp8_max, fp8.FP8_MAX):
        packed = fp8_ops.pack_fp8(fp8.Fp8Weight(data, *scales, full_scale=full_scale))
        assert packed.data.cpu().view(torch.uint8).equal(data.view(torch.uint8))
        assert packed.scale.tolist() == [0.5] * 4
        assert packed.input_scale.item() == pytest.approx(0.25 * full_scale / hpu.fp8_max)
        assert packed.known_scale == packed.input_scale.item()


def test_fp8_cache(hpu, fp8_ops):
    made = Made(hpu, [130, 7], 2, True, blocks=4, **HEADS)
    (q, k, v, table), batch, _ = made.on(hpu)
    scales = (0.02, 0.03)
    here = [torch.zeros(made.k_cache.shape, dtype=torch.uint8).view(fp8.FP8) for _ in range(2)]
    there = [hpu.zeros(tuple(made.k_cache.shape), torch.uint8).view(fp8.FP8) for _ in range(2)]
    expected_q = reference.rotary_and_cache(made.q, made.k, made.v, made.cos_sin, made.batch, *here, scales)
    q = hpu.ops.rotary_and_cache(q, k, v, table, batch, *there, scales)
    for a, b in zip(here, there, strict=True):
        kept = a.float().clamp(-hpu.fp8_max, hpu.fp8_max)
        close(b.float()[1:], kept[1:])
    close(q, expected_q)
    found = hpu.ops.attention(q, k, v, *there, batch, 0.25, kv_scales=scales)
    caches = [cache.cpu() for cache in there]
    close(found, block_lists.decode_attention(expected_q, *caches, made.batch, 0.25, kv_scales=scales), 1e-4)


@pytest.mark.parametrize("padded", [True, False])
def test_what_is_cached_beyond_the_range_is_brought_into_it(hpu, fp8_ops, padded):
    """A plain cast gives no number there, in steps that are not padded too."""
    made = Made(hpu, [130, 7], 2, True, blocks=4, **HEADS)
    (q, k, v, table), batch, _ = made.on(hpu)
    batch = batch if padded else replace(batch, meta=PagedMeta(torch.zeros(2, 1), 2, [], [], 130))
    caches = [hpu.zeros(tuple(made.k_cache.shape), torch.uint8).view(fp8.FP8) for _ in range(2)]
    hpu.ops.rotary_and_cache(q, k, v, table, batch, *caches, (1e-3, 1e-3))
    for cache in caches:
        assert cache.cpu().float().abs().max() == hpu.fp8_max


def make_scales(made: Made, fp8_max: float) -> fp8.AttentionScales:
    """By which the largest of each reaches half of the range."""
    query, key, value = (float(x.abs().max()) / fp8_max * 2 for x in (made.q, made.k_cache, made.v_cache))
    return fp8.AttentionScales(query, key, 2 / fp8_max, value)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cached", [False, True], ids=["", "fp8-cache"])
@pytest.mark.parametrize("flash", [False, True], ids=["products", "fused"])
@pytest.mark.parametrize("lens", [[5, 90, 41], [130, 300, 7]], ids=["one-block", "blocks"])
@pytest.mark.parametrize("phase", ["decode", "prompts"])
def test_attention_in_fp8(hpu, fp8_ops, phase, lens, flash, cached, window, softcap):
    """Both products are those of values that FP8 hold. Weights of a row that decodes are relative to the largest in its
    block, so with several blocks they are rounded otherwise than by the definition."""
    decodes = phase == "decode"
    shape = {"blocks": 7} if decodes else {"length": max(lens) + 3}
    made = Made(hpu, lens, 4, decodes, **shape, **HEADS)
    ops = hpu.ops if flash else load_plain(hpu)
    (q, k, v, table), batch, caches = made.on(hpu)
    scales = make_scales(made, hpu.fp8_max)
    about = {"window": window, "softcap": softcap}
    if cached:
        about["kv_scales"] = (scales.key, scales.value)
        pairs = zip(caches, about["kv_scales"], strict=True)
        there = [fp8_ops.to_cache(cache, scale).view(torch.uint8) for cache, scale in pairs]
        caches = [hpu.zeros(tuple(cache.shape), torch.uint8) for cache in there]
        for to, cache in zip(caches, there, strict=True):
            to.copy_(cache)
        caches = [cache.view(fp8.FP8) for cache in caches]
    here = [cache.cpu() for cache in caches]
    expected_q = reference.rotary_and_cache(made.q, made.k, made.v, made.cos_sin, made.batch, *here, about.get("kv_scales", (1.0, 1.0)))  # fmt: skip
    attend = block_lists.decode_attention if decodes else block_lists.prefill_attention
    expected = attend(expected_q, *here, made.batch, 0.25, **about, in_fp8=scales)[made.real]
    noise = (expected - attend(expected_q, *here, made.batch, 0.25, **about)[made.real]).abs().mean()
    q = ops.rotary_and_cache(q, k, v, table, batch, *caches, about.get("kv_scales", (1.0, 1.0)))
    with Called() as called:
        found = ops.attention(q, k, v, *caches, batch, 0.25, **about, in_fp8=ops.pack_attention_scales(scales)).cpu()
    off = (found[made.real].float() - expected).abs()
    is_fused = flash and not decodes and softcap is None
    if decodes and max(lens) > SIZE:
        assert off.mean() < 0.7 * noise
    else:  # but for numbers that lie between two of FP8; what the fused op gives is in bfloat16
        assert off.max() < 1e-2 and (off > (1e-2 if is_fused else 1e-4)).float().mean() < 0.01
        assert off.mean() < 0.2 * noise
    assert torch.isfinite(found).all()
    assert ("hpu.fp8_sdpa_fwd.default" if is_fused else "hpu.fp8_gemm_v2.scalar") in called.names
    assert not {"aten.bmm.default", "aten.matmul.default"} & set(called.names)


# -- few bits --------------------------------------------------------------------------------------------------------


def test_products_of_4_bits(hpu):
    """Held in 4 bits and multiplied by the card's op; what that does not take is widened."""
    from text_generation_inference.kernels.hpu.uint4 import Uint4Weight

    plain, x, bias = torch.randn(48, 64), torch.randn(5, 64), torch.randn(48)
    symmetric, whole = low_bit.quantize(plain, 4, 32), low_bit.quantize(plain, 4, 16, is_symmetric=False)
    ordered = replace(whole, order=torch.randperm(64).to(torch.int32))
    halves = replace(whole, offset=None if whole.offset is None else whole.offset + 0.5)
    held = [symmetric, whole, ordered]
    widened = [halves, low_bit.quantize(plain, 8, 64), low_bit.quantize(plain[:13], 4, 32)]
    for weight in (*held, *widened):
        there = replace(
            weight,
            **{
                name: None if (tensor := getattr(weight, name)) is None else tensor.to(hpu.torch_device)
                for name in ("codes", "scale", "offset", "order")
            },
        )
        packed = hpu.ops.pack_low_bit(there)
        assert isinstance(packed, Uint4Weight) == any(weight is each for each in held)
        added = bias[: weight.shape[0]]
        found = hpu.ops.linear(x.to(hpu.torch_device), packed, added.to(hpu.torch_device))
        close(found, reference.linear(x, weight, added), 1e-4)


def test_a_model_of_4_bits(hpu, start_hpu, tmp_path, monkeypatch):
    monkeypatch.setitem(choose.METHODS, low_bit_writing.METHOD, low_bit_writing.detect)
    folder = low_bit_writing.write_low_bit(make_tiny("Mixtral", {}, tmp_path / "tiny"), "order", tmp_path).folder
    few, small = requests()[:3], {"max_batch_size": 2, "max_total_tokens": 32, "max_batch_total_tokens": 512}
    engine = start(folder, device="cpu", **small)
    expected = [output.token_ids for output in run(engine, few)]
    engine.close()
    engine = start_hpu(folder, **small)
    assert [output.token_ids for output in run(engine, few)] == expected
    layer = engine.rank.runner.model.model.layers[0]
    assert type(layer.attention.qkv.weight).__name__ == "Uint4Weight"
    assert isinstance(layer.mlp.down.weight, Tensor)  # of experts, which its op takes plain
    assert any("widened" in note for note in engine.notes)


# -- experts ---------------------------------------------------------------------------------------------------------


def make_experts(hpu):
    from text_generation_inference.kernels.hpu.experts import HpuExperts
    from text_generation_inference.kernels.hpu.fp8 import Fp8Ops

    return HpuExperts(hpu.bridge, Fp8Ops(hpu.bridge))


@pytest.mark.parametrize("per_call", [None, 3])
def test_experts(hpu, per_call):
    x, gate_up, down = torch.randn(6, 32), torch.randn(8, 48, 32) / 6, torch.randn(8, 32, 24) / 5
    shares, chosen = torch.randn(6, 8).softmax(-1).topk(2)
    expected = torch.zeros_like(x)
    for token in range(6):
        for share, expert in zip(shares[token], chosen[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += share * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    there = [t.to(hpu.torch_device) for t in (x, chosen, shares)]
    matrices = [part.flatten(0, 1).to(hpu.torch_device) for part in (gate_up, down)]
    op = make_experts(hpu)
    op._per_call = per_call
    close(op.experts(*there, *matrices), expected, 1e-4)


@pytest.mark.parametrize(
    ("form", "per_call"),
    [("fp8_fused_weights", None), ("fp8_fused_weights", 3), ("fp8_fused_weights_dynamic", None), ("", None)],
    ids=["known scales", "by threes", "found scales", "widened"],
)
def test_experts_in_fp8(hpu, caplog, form, per_call):
    """Rows of a matrix, tokens and experts are of different sizes, so that each scale is that of its own."""
    if not hpu.supports_fp8:
        pytest.skip("this card has no FP8")
    torch.manual_seed(0)
    count, hidden, width = 8, 32, 24
    sizes = [torch.rand(count * rows, 1).mul(4).exp2() for rows in (2 * width, hidden)]
    x = (torch.randn(6, hidden) * torch.rand(6, 1).mul(3).exp2()).bfloat16()
    shares, chosen = torch.randn(6, count).softmax(-1).topk(2)
    op = make_experts(hpu)
    given = [
        fp8.quantize_weight((torch.randn(size.shape[0], columns) * size / 8).bfloat16())
        for size, columns in zip(sizes, (hidden, width), strict=True)
    ]
    packed = [hpu.ops.pack_fp8(each) for each in given]
    wide = [fp8.dequantize_weight(Fp8Weight(each.data.cpu(), each.scale.cpu())) for each in packed]
    expected = experts.experts(x.float(), chosen, shares, *wide)
    if form == "fp8_fused_weights":
        within = look_within(x.float(), chosen, shares, wide[0], count, "silu", None, False)
        for each, seen in zip(given, (x.float(), within.gated), strict=True):
            each.input_scale = seen.abs().max() / fp8.FP8_MAX
        packed = [hpu.ops.pack_fp8(each) for each in given]
    op._per_call = per_call
    if not form:
        op._forms = {}
    there = [t.to(hpu.torch_device) for t in (x, chosen, shares)]
    with Called() as called, caplog.at_level("WARNING"):
        found = op.experts(*there, *packed)
    assert found.dtype is torch.bfloat16
    assert ("Experts in FP8 are widened in each pass" in caplog.text) == (not form)
    assert sum("mixture_of_experts" in name for name in called.names) == (3 if per_call else 1)
    assert f"hpu.mixture_of_experts.{form or 'fused_weights'}" in called.names
    error = (found.cpu().float() - expected).norm() / expected.norm()
    assert error < (0.1 if form else 0.02), error  # of a scale that is another's: about 1


def test_experts_in_fp8_that_no_form_takes(hpu):
    """Inputs of which some have a known scale, clamped inputs, results in float32: widened, like what is not compiled
    where there is no lazy mode."""
    from text_generation_inference.kernels.hpu import experts as on_card

    x, weight = torch.zeros(2, 4, dtype=torch.bfloat16), fp8.quantize_weight(torch.randn(8, 4))
    known = replace(weight, input_scale=torch.tensor(0.5))
    squares = fp8.quantize_weight(torch.randn(8, 4), by_square=True)
    bounded = replace(weight, input_bound=3.0)
    assert on_card._form_for(x, weight, weight) == "fp8_fused_weights_dynamic"
    assert on_card._form_for(x, known, known) == "fp8_fused_weights"
    assert not on_card._form_for(x.float(), known, known)
    for pair in ((known, weight), (weight, known), (squares, weight), (weight, squares), (bounded, weight), (weight, bounded)):  # fmt: skip
        assert not on_card._form_for(x, *pair)
    form = "fp8_fused_weights"
    assert on_card._find_form(form, on_card._GIVEN[form]) is not None
    assert on_card._find_form(form, on_card._GIVEN[form] - {"d_scale_w3"}) is None
    assert on_card._find_form(form, on_card._GIVEN[form] | {"another"}) is None
    assert on_card._find_form("of_another_release", set()) is None


# -- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With layers that look at a window of tokens."""
    return make_tiny("Mistral", {}, tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def on_cpu(tiny: Tiny) -> dict[str, list[list[int]]]:
    """Tokens of the requests below."""
    found = {}
    for name, extra in {"plain": {}, "fp8": {"kv_cache_dtype": "fp8_e4m3fn"}}.items():
        engine = start(tiny.folder, device="cpu", **LIMITS, **extra)
        found[name] = [output.token_ids for output in run(engine, requests())]
        if name == "plain":
            found["sampled"] = [output.token_ids for output in run(engine, sampled_requests())]
        engine.close()
    return found


SETTINGS = {
    "as it comes": {},
    "prompts in graphs, blocks in place": {"limit_hpu_graph": False, "vllm_contiguous_pa": True},
    "no graphs": {"enable_hpu_graph": False},
    "plain attention, narrow softmax": {
        "use_flash_attention": False,
        "vllm_fp32_softmax": False,
        "prefix_caching": False,
    },
    "linear buckets": {
        "bucket_strategy": "linear",
        "batch_bucket_size": 2,
        "pad_sequence_to_multiple_of": 64,
        "flash_attention_recompute": False,
    },
    "keys and values in FP8": {"kv_cache_dtype": "fp8_e4m3fn", "prefix_caching": False},
    "torch ops": {"custom_kernels": False, "prefix_caching": False},
}


def count_unread() -> int:
    """Inputs of all graphs captured so far that these do not read: each is copied at every replay."""
    from habana_frameworks.torch._emulation import books

    return books.unread_inputs


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_the_cpu_and_nothing_is_compiled_late(hpu, start_hpu, tiny, on_cpu, name, record_property):
    chosen = SETTINGS[name]
    if "kv_cache_dtype" in chosen and not hpu.supports_fp8:
        pytest.skip("this card has no FP8")
    unread = count_unread() if hpu.bridge.emulated else 0
    engine = start_hpu(tiny.folder, **chosen)
    warm, (fallen, _) = hpu.bridge.count_compilations(), hpu.bridge.count_fall_backs()
    found = [output.token_ids for output in run(engine, requests(), arrivals=[0, 0, 1, 3, 5, 5, 6, 9])]
    late = hpu.bridge.count_compilations() - warm
    fallen_now, which = hpu.bridge.count_fall_backs()
    record_property("compiled_after_warm_up", late)
    record_property("fell_back_to_the_host", which if fallen_now > fallen else "")
    assert found == on_cpu["fp8" if "kv_cache_dtype" in chosen else "plain"]
    stats = engine.rank.bucket_stats
    assert stats.num_unplanned == 0
    in_place = chosen.get("vllm_contiguous_pa", not chosen.get("prefix_caching", True))
    assert engine.rank.runner.steps.plan.has_contiguous is in_place  # as vllm-gaudi has it by default
    assert late == 0, f"{late} graphs were compiled after warm-up"
    if hpu.bridge.emulated:  # a card's own count is in the report
        assert fallen_now == fallen, which
        assert count_unread() == unread, "of passes, of prompts too, and of all of sampling"
    if chosen.get("enable_hpu_graph", True):
        assert stats.num_captured > 0
        assert (stats.num_captured == stats.num_planned) == (chosen.get("limit_hpu_graph") is False)


def test_latents(hpu, start_hpu, tmp_path):
    folder = make_tiny("DeepseekV2", {"num_hidden_layers": 2}, tmp_path).folder
    few = {"max_batch_size": 2, "max_total_tokens": 64}
    lists = [make_request(n, prompt, 9) for n, prompt in enumerate(random_prompts(320, [1, 17, 40], seed=3))]
    found = run(start_hpu(folder, warmup_enabled=False, **few), lists)
    engine = start(folder, device="cpu", **{**LIMITS, **few})
    expected = run(engine, lists)
    engine.close()
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_sampling_is_that_of_the_cpu(hpu, start_hpu, tiny, on_cpu, tmp_path):
    engine = start_hpu(tiny.folder, cache_dir=str(tmp_path))
    shapes = json.loads(next((tmp_path / "warmed").glob("*.json")).read_text())["shapes"]
    prompts = [num_bytes for phase, *_, num_bytes, captured in shapes if phase == "prefill" and not captured]
    if hpu.bridge.lazy or not hpu.bridge.emulated:  # the stand-in reckons with it where graphs would be
        assert max(prompts) > 0, "what a pass without a graph takes for a while is seen, too"
    warm, fallen = hpu.bridge.count_compilations(), hpu.bridge.count_fall_backs()
    assert [output.token_ids for output in run(engine, sampled_requests())] == on_cpu["sampled"]
    assert hpu.bridge.count_compilations() == warm
    assert hpu.bridge.count_fall_backs() == fallen or not hpu.bridge.emulated


def test_nothing_new_is_gathered_after_warm_up(hpu, start_hpu, tiny, monkeypatch):
    """Between passes too: choices of tokens, prompts that are scored, and what meets in one piece by chance."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("a card counts by itself; in eager mode nothing is gathered")
    engine = start_hpu(tiny.folder)  # with its own warm-up, and once more below where everything is seen
    runner, submit = engine.rank.runner, engine.rank.device.submit
    with gathered(submit, monkeypatch) as pieces:
        runner.sampling._sampler._warmed.clear()
        WarmUp(runner.steps).run()
        warm = set(pieces.met)
        assert len(warm) > len(runner.steps.passes.plan.prefill)
        ways = [
            {},
            {"decoder_input_details": True, "prompt_top_n_tokens": 3},
            SAMPLED,
            {"decoder_input_details": True, **SAMPLED},
            {"top_n_tokens": 3},
            {"watermark": True, "typical_p": 0.7},
            {"logit_bias": {5: 3.0}, "min_tokens": 9, "stop_token_ids": [7]},
        ]
        asked = [
            make_request(n, request.token_ids, 4, **ways[n % 7], seed=n) for n, request in enumerate(requests() * 2)
        ]
        run(engine, asked, arrivals=[n // 2 for n in range(16)])
        submit(pieces.close).result()
    assert pieces.met == warm, [piece[:2] for piece in pieces.met - warm]


def test_how_it_names_itself(hpu, start_hpu, tiny):
    engine = start_hpu(tiny.folder, warmup_enabled=False)
    assert engine.facts.device == ("hpu (emulated)" if hpu.bridge.emulated else "hpu")
    assert engine.facts.block_size == SIZE
    assert any(engine.facts.device in note and hpu.bridge.card in note for note in engine.notes)
    assert hpu.comm_backend == ("gloo" if hpu.bridge.emulated else "hccl")
    assert hpu.fp8_max == {1: 0.0, 2: 240.0, 3: 448.0}[hpu.bridge.generation]


def test_ranks_launch_what_was_gathered_before_they_sum(hpu, monkeypatch):
    """HCCL is told first who this is; then `mark_step` goes before each sum, where ops are gathered at all."""
    from habana_frameworks.torch.distributed import hccl

    from text_generation_inference.devices.hpu import HpuDevice
    from text_generation_inference.parallel.collectives import Meeting

    asked = []
    monkeypatch.setattr(hccl, "initialize_distributed_hpu", lambda *about: asked.append(about))
    monkeypatch.setattr(Meeting, "exchange", lambda meeting, what, said: ["elsewhere", said, said])
    monkeypatch.setattr(Meeting, "connect", lambda meeting, *about: asked.append(about))
    device = HpuDevice()
    device.join_ranks(Meeting(2, 3, None))
    assert asked == [(3, 2, 1), (device.comm_backend, device.bridge.mark_step if device.bridge.lazy else None)]


def test_fp8_need_gaudi_2(hpu):
    from text_generation_inference.devices.hpu import HpuDevice
    from text_generation_inference.engine.memory import check_precision
    from text_generation_inference.quant.fp8 import ON_LOADING

    device = HpuDevice()
    device.fp8_max = 0.0
    check_precision(ServerConfig(), None, device)
    for config, quantization in ((ServerConfig(), ON_LOADING), (ServerConfig(kv_cache_dtype="fp8_e4m3fn"), None)):
        with pytest.raises(StartError, match="needs Gaudi 2 or later, not hpu"):
            check_precision(config, quantization, device)


def test_memory_figures(hpu, monkeypatch):
    from text_generation_inference.devices.hpu import HpuDevice, HpuSettings

    device = HpuDevice(HpuSettings(memory_fraction=0.5, graph_share=0.25))
    figures = [1000, 600]
    monkeypatch.setattr(device.bridge.torch_hpu, "mem_get_info", lambda: (figures[0], 4000))
    assert device.free_bytes() == 500  # half is the run time's
    figures[0] = 620  # a cache of 380
    assert device.free_bytes() == 120
    assert device.memory() == DeviceMemory(3380, 4000)
    assert device.limits.memory_share == (0.75 if hpu.bridge.lazy else 1.0)
    assert HpuDevice(HpuSettings(graphs=False)).limits.memory_share == 1.0


def test_a_card_with_little_memory(hpu, start_hpu, tiny, on_cpu, monkeypatch):
    """Shapes for whose graphs there is no room run without; with less than a cache needs the start says what to lower."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("the stand-in's memory for graphs can be made small")
    from habana_frameworks.torch._emulation import books

    gc.collect()
    free = 11 << 20
    while True:  # less and less, until some shapes have no graph
        gc.collect()
        monkeypatch.setattr(books, "limit", books.in_use() + free)
        engine = start_hpu(tiny.folder, limit_hpu_graph=False, hpu_memory_fraction=0.5)
        stats = engine.rank.bucket_stats
        if stats.num_captured < stats.num_planned:
            break
        engine.close()
        free -= 1 << 20
    assert stats.num_captured > 0
    assert [output.token_ids for output in run(engine, requests())] == on_cpu["plain"]
    monkeypatch.setattr(books, "limit", books.in_use() + (4 << 20))
    with pytest.raises(ResourceError, match=r"Warm-up stopped before .*: it needs .* Warm are [1-9] of"):
        start_hpu(tiny.folder)
    monkeypatch.setattr(books, "limit", books.in_use() + (1 << 18))
    with pytest.raises(ResourceError, match="model is too large"):
        start_hpu(tiny.folder, limit_hpu_graph=False, max_batch_total_tokens=None)


# -- when it cannot start --------------------------------------------------------------------------------------------


def test_without_the_software(hpu, monkeypatch):
    from text_generation_inference.kernels.hpu import bridge

    for name in [name for name in sys.modules if name.startswith("habana_frameworks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "habana_frameworks", None)
    with pytest.raises(StartError, match="habana_frameworks, which is not installed.*docs/gaudi.md"):
        bridge.load_bridge.__wrapped__(True)


def test_without_a_card(hpu, monkeypatch):
    from text_generation_inference.kernels.hpu import bridge

    monkeypatch.setattr(hpu.bridge.torch_hpu, "is_available", lambda: False)
    with pytest.raises(StartError, match="no Gaudi card.*hl-smi"):
        bridge.load_bridge.__wrapped__(hpu.bridge.lazy)
    monkeypatch.undo()
    with pytest.raises(StartError, match="PT_HPU_LAZY_MODE is"):
        bridge.load_bridge.__wrapped__(not hpu.bridge.lazy)


ASK_FOR_LAZY_MODE = """if True:
    import sys
    sys.stderr = sys.stdout
    import torch
    assert "habana_frameworks.torch" in sys.modules, "it came with torch"
    from text_generation_inference.config import ServerConfig, prepare_process
    from text_generation_inference.errors import StartError
    from text_generation_inference.kernels.hpu.bridge import load_bridge
    for lazy in (True, None, False):
        prepare_process(ServerConfig(device="hpu", pt_hpu_lazy_mode=lazy))
        print(f"{lazy}:")
        try:
            print(load_bridge(lazy).lazy)
        except StartError as error:
            print("error", error)
"""


def test_software_that_came_eager_with_torch(hpu):
    """To a program that has imported torch before anybody could ask for lazy mode: never silently."""
    if not hpu.bridge.emulated:
        pytest.skip("of a process with the stand-in")
    told = run_with_stand_in(ASK_FOR_LAZY_MODE, PT_HPU_LAZY_MODE=None).splitlines()
    said = "habana_frameworks runs in eager mode, without HPU graphs, and lazy mode was wanted: it was imported,"
    assert told[0] == "True:" and told[1].startswith(f"error {said}") and "PT_HPU_LAZY_MODE=1" in told[1]
    assert told[2] == "None:" and told[3].startswith(said) and told[4:] == ["False", "False:", "False"]


def test_the_stand_in_is_not_chosen_by_itself(hpu, tmp_path):
    from text_generation_inference.devices.device import choose_device

    if not hpu.bridge.emulated:
        pytest.skip("there is a card")
    device = choose_device("auto", tmp_path, False, 1)
    assert not device.name.startswith("hpu")
    device.close()


def count_eager(*folders: str) -> None:
    """Ops on lists alone of a step without lazy mode, of decoding and of prompts, for each model."""
    from habana_frameworks.torch._card import card

    integers, also_bool = 0b11111, 0b100000011111  # bits of torch's types
    views = ("view", "as_strided", "slice", "select", "unsqueeze", "alias", "expand", "_reshape_alias")

    def on_lists() -> int:
        ops = card.ops().items()
        is_view = {name: name.removeprefix("aten::").partition(".")[0] in views for (name, _), _ in ops}
        return sum(
            calls for (name, types), calls in ops if types & integers and not types & ~also_bool and not is_view[name]
        )

    limits = {**LIMITS, "max_batch_size": 1, "max_total_tokens": 60, "pt_hpu_lazy_mode": False}
    for folder in folders:
        engine = start(Path(folder), device="hpu", **limits)
        queue, found = engine.rank.runner._queue, {}

        def counted(plan, previous, queue=queue, found=found):
            before = on_lists()
            finish = queue(plan, previous)
            found.setdefault(bool(plan.chunks), on_lists() - before)
            return finish

        engine.rank.runner._queue = counted
        run(engine, [make_request(0, list(range(9)), 4)])
        print(found[False], found[True])
        engine.close()


def test_lists_are_read_once_in_a_pass_without_lazy_mode_too(hpu, tmp_path):
    """As many ops on lists however many layers there are, with and without windows."""
    if not hpu.bridge.emulated:
        pytest.skip("the stand-in counts")
    windows = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    kinds = [("Llama", {}, 1), ("Llama", {}, 4), ("Qwen2", windows, 2), ("Qwen2", windows, 5)]
    folders = [
        str(make_tiny(kind, {**more, "num_hidden_layers": layers}, tmp_path / str(number)).folder)
        for number, (kind, more, layers) in enumerate(kinds)
    ]
    program = f"import test_hpu; test_hpu.count_eager(*{folders!r})"
    lines = run_with_stand_in(program, PT_HPU_LAZY_MODE="0").splitlines()[-4:]
    assert lines[0] == lines[1] and lines[2] == lines[3]
    assert all(int(number) > 0 for line in lines for number in line.split())


def test_nothing_is_queued_behind_a_step_that_could_not_be(hpu):
    """Even while the results of an earlier one are still to be read, so that nobody was told."""
    may_read, begun = threading.Event(), []

    def refuse():
        raise RuntimeError("no more")

    def follow():
        begun.append(True)
        return lambda: "done"

    first = hpu.launch(lambda: lambda: may_read.wait(60))
    refused, behind = hpu.launch(refuse), hpu.launch(follow)
    hpu.submit(lambda: None).result()  # all three had their turn
    may_read.set()
    assert first.result() and not begun
    for step in (refused, behind):
        with pytest.raises(RuntimeError, match="no more"):
            step.result()
    assert hpu.launch(follow).result() == "done"
