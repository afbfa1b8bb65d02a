"""All layers for one row, in Triton's interpreter, against the same layers one by one."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import FP8, Fp8Weight
from text_generation_inference.kernels.fused_decode import FusedExperts
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.routing import SoftmaxRouting
from text_generation_inference.layers.attention import Attention
from text_generation_inference.layers.experts import Experts
from text_generation_inference.models import registry
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context
from text_generation_inference.quant.choose import assign_methods
from text_generation_inference.quant.config_fields import NamePattern
from text_generation_inference.quant.fp8 import ON_LOADING, Fp8Scheme
from text_generation_inference.quant.fp8_formats import StoredQuantization
from text_generation_inference.quant.low_bit import LowBit, LowBitScheme
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.load import load_dummy

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from text_generation_inference.kernels.triton import experts
from text_generation_inference.kernels.triton.experts import TritonExperts
from text_generation_inference.kernels.triton.fused_decode import MakeFusedDecode
from text_generation_inference.kernels.triton.linear import TritonLinear
from text_generation_inference.kernels.triton.ops import load_ops

CPU = torch.device("cpu")
STATIC = Fp8Scheme(input_scale_name="input_scale")
IN_PARTS = StoredQuantization("fp8", STATIC, ignored=(NamePattern("o_proj"),))
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
    "intermediate_size": 48, "sliding_window": 10,
}  # fmt: skip


class _InFewBits(Quantization):
    method = "few bits"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        if not matrix.may_round:
            return None
        return LowBit(LowBitScheme(group_size=16 if matrix.is_stacked else None, is_symmetric=not matrix.is_stacked))


IN_FEW_BITS = _InFewBits()
TOKENS = 23  # in the cache, with the row's own
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": None, "n_routed_experts": 6, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "topk_method": "greedy",
}  # fmt: skip
Cache = list[tuple[torch.Tensor, ...]]


@pytest.fixture(autouse=True)
def _interpreter(device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_name != "cpu":
        pytest.skip("runs in Triton's interpreter")
    monkeypatch.setattr(experts, "choose_shape", lambda k: (16, 64, 1))  # fewer programs, which it is slow at
    torch.manual_seed(0)


def build(quantization: Quantization | None, cache_dtype: torch.dtype, **changes: Any) -> tuple[CausalLM, Cache]:
    """Of odd sizes; what a GPU with eight-bit types would multiply it with."""
    linear = TritonLinear(3, (8, 9))
    loaded = load_ops(3)
    assert isinstance(loaded, Ops)
    fuse = MakeFusedDecode(loaded.attention, loaded.latent_attention, TritonExperts((9, 0)), 3, fp8=True)
    ops = replace(loaded, linear=linear, linear_unscaled=linear.linear_unscaled, make_fused_decode=fuse)
    fields = {
        "vocab_size": 40, "hidden_size": 80, "intermediate_size": 208, "num_hidden_layers": 2,
        "num_attention_heads": 4, "head_dim": 20, "max_position_embeddings": 64, "hidden_act": "silu", **changes,
    }  # fmt: skip
    model = registry.build(Config(fields, "config.json"), Context(ops))
    assert isinstance(model, CausalLM)
    if quantization is not None:
        assign_methods(model, quantization)
    load_dummy(model, torch.float16, CPU, 1)
    for number, layer in enumerate(model.model.layers):
        layer.attention_norm.weight.uniform_(20, 40)  # so that everything can be seen in the result
        matrices = [layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
        if isinstance(layer.attention, Attention):
            scales = layer.attention.cache_scales
            scales.k, scales.v = 0.25 + number, 0.75
            matrices.append(layer.attention.qkv)
        if isinstance(layer.mlp, Experts) and layer.mlp.shared is not None:
            layer.mlp.shared.dense.down.weight.mul_(20)
        for matrix in matrices:
            if matrix.bias is not None:
                matrix.bias.normal_()
    shapes = [spec.shapes for spec in model.caches(cache_dtype)]
    cache = [tuple(torch.randn(4, 16, *shape).to(cache_dtype) for shape in each) for each in shapes]
    model.bind(cache, 64)
    return model, cache


def compute(model: CausalLM, cache: Cache) -> tuple[torch.Tensor, Cache]:
    """The row's hidden state, and what the cache then holds."""
    cache = [tuple(part.clone() for part in each) for each in cache]
    if model.fused_decode is not None:
        pairs = zip(model.fused_decode.layers, cache, strict=True)  # pyright: ignore
        layers = [replace(layer, k_cache=each[0], v_cache=each[-1]) for layer, each in pairs]
        model.fused_decode = replace(model.fused_decode, layers=layers)  # pyright: ignore
    place = 1 * 16 + (TOKENS - 1) % 16
    tables, rows = torch.tensor([[0, 0], [3, 1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    beside = torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)  # of layers that read a window
    batch = Batch(
        input_ids=torch.tensor([5]),
        positions=torch.tensor([TOKENS - 1]),
        kv_index=torch.tensor([place]),
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
        meta=PagedMeta(tables, 1, [], [], TOKENS, table_rows=rows, window_tables=beside),
        window_index=torch.tensor([place + 16]),
    )
    return model.forward(batch, cache), cache


@pytest.mark.parametrize(
    ("quantization", "cache_dtype", "changes"),
    [
        (
            ON_LOADING,  # the last matrix stays in 16 bits
            FP8,
            {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        ),
        (
            IN_PARTS,
            torch.float16,
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": 10},
        ),
        (None, torch.float16, {**QWEN3, "norm_topk_prob": True}),
        (None, FP8, {**QWEN3, "mlp_only_layers": [0], "num_experts": 130, "attention_bias": True}),
        (ON_LOADING, torch.float16, {**QWEN3, "num_experts_per_tok": 3}),
        (
            IN_FEW_BITS,
            torch.float16,
            {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, "mlp_bias": True},
        ),
        (
            IN_FEW_BITS,  # of whole tiles
            torch.float16,
            {
                "architectures": ["LlamaForCausalLM"],
                "num_key_value_heads": 2,
                "hidden_size": 1024,
                "head_dim": 32,
                "intermediate_size": 1024,
                "num_hidden_layers": 1,
            },
        ),
        (IN_FEW_BITS, torch.float16, GPT_OSS),
        (None, torch.float16, GPT_OSS),
        (None, torch.float16, DEEPSEEK),
        (None, torch.float16, {**DEEPSEEK, "q_lora_rank": 40, "num_hidden_layers": 1, "first_k_dense_replace": 0}),
    ],
    ids=[
        "biases",
        "windows",
        "experts",
        "many experts and a dense layer",
        "experts in FP8",
        "few bits",
        "few bits in whole tiles",
        "experts in few bits",
        "sinks",
        "latents",
        "two latents",
    ],
)
def test_equals_layers_one_by_one(quantization: Quantization | None, cache_dtype: torch.dtype, changes: dict) -> None:
    model, cache = build(quantization, cache_dtype, **changes)
    assert model.fused_decode is not None
    found, found_cache = compute(model, cache)
    model.fused_decode = None
    expected, expected_cache = compute(model, cache)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    for ours, theirs in zip(found_cache, expected_cache, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2)


def test_what_it_does_not_take() -> None:
    model, cache = build(ON_LOADING, torch.float16, architectures=["LlamaForCausalLM"])
    layers = [layer.as_fused_layer(pair) for layer, pair in zip(model.model.layers, cache, strict=True)]
    norm = model.model.norm.weight

    def is_taken(activation: str = "silu", fp8: bool = True, **changes: Any) -> bool:
        changed = [layers[0], replace(layers[1], **changes)]
        fuse = MakeFusedDecode(model.ops.attention, model.ops.latent_attention, TritonExperts((9, 0)), 3, fp8)
        made = fuse(changed, norm, model.tables[0], heads=4, eps=1e-5, scale=1.0, activation=activation)
        return made is not None

    weight = layers[1].qkv
    assert isinstance(weight, Fp8Weight)
    assert is_taken()
    assert not is_taken(fp8=False)
    assert not is_taken(activation="relu")
    assert is_taken(q_norm=torch.ones(20), k_norm=torch.ones(20))
    router = FusedExperts(torch.zeros(4, 80, dtype=torch.float16), None, None, SoftmaxRouting(2), "silu")
    assert is_taken(experts=router)
    assert not is_taken(experts=replace(router, gate="gelu"))
    assert not is_taken(experts=replace(router, router=torch.zeros(4, 80)))
    assert not is_taken(qkv=replace(weight, input_bound=1.0))
    assert not is_taken(qkv=replace(weight, scale=torch.ones(2, 1)))
    assert not is_taken(down=torch.zeros(80, 208))
    assert not is_taken(experts=router, shared=(torch.zeros(96, 80), torch.zeros(80, 48)))
