"""A KV cache in FP8: near an oracle that rounds keys and values, and the same tokens however requests are batched."""

import re
from pathlib import Path

import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, run, start
from fp8_writing import by_row, prompt_scores, round_fp8, write_fp8
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from text_generation_inference.errors import ModelFormatError, ResourceError, StartError

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 24
FP8_CACHE = {"kv_cache_dtype": "fp8_e4m3fn"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
WITH_SCALES = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FLOAT8, "strategy": "channel"},
            "input_activations": {**FLOAT8, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": FLOAT8,
}


def oracle_scores(tiny: Tiny, prompt: list[int], scales: dict[int, tuple[float, float]]) -> torch.Tensor:
    """With keys, once rotated, and values rounded as a cache would; scales by layer."""

    def attend(module, query, key, value, *rest, **named):
        k_scale, v_scale = scales.get(module.layer_idx, (1.0, 1.0))
        return sdpa_attention_forward(module, query, round_fp8(key, k_scale), round_fp8(value, v_scale), *rest, **named)

    ALL_ATTENTION_FUNCTIONS.register("rounded", attend)
    tiny.model.set_attn_implementation("rounded")
    try:
        return prompt_scores(tiny.model, prompt)
    finally:
        tiny.model.set_attn_implementation("sdpa")


def scores(folder: Path, prompt: list[int], **settings: object) -> torch.Tensor:
    engine = start(folder, **settings)
    output = run(engine, [make_request(0, prompt, 1, decoder_input_details=True)])[0]
    engine.close()
    return torch.tensor([output.prompt_logprobs[place] for place in range(1, len(prompt))])


@pytest.mark.parametrize("custom_kernels", [False, True], ids=["reference", "native"])
def test_cache_rounds_keys_and_values(tiny_llama: Tiny, custom_kernels: bool) -> None:
    prompt = random_prompts(320, [120])[0]
    expected = oracle_scores(tiny_llama, prompt, {})
    noise = (prompt_scores(tiny_llama.model, prompt) - expected).abs().mean()
    assert noise > 0.005
    # Chunks read what earlier ones have stored.
    found = scores(tiny_llama.folder, prompt, **FP8_CACHE, max_batch_prefill_tokens=33, custom_kernels=custom_kernels)
    assert (found - expected).abs().mean() < 0.1 * noise


NAMES = {
    "plain": ("self_attn.k_scale", "self_attn.v_scale"),
    "of-projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "of-outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "shared": ("self_attn.kv_scale", "self_attn.kv_scale"),
}


@pytest.mark.parametrize("names", NAMES)
def test_scales_of_the_checkpoint(tiny_llama: Tiny, tmp_path: Path, names: str) -> None:
    k_name, v_name = NAMES[names]
    # Small enough to cut off the largest values: a scale that is not used is seen.
    given = {0: (0.003, 0.002), 1: (0.004, 0.001), 2: (0.002, 0.003)}
    if names == "shared":
        given = {layer: (k, k) for layer, (k, _) in given.items()}
    extra = {}
    for layer, (k, v) in given.items():
        extra[f"model.layers.{layer}.{k_name}"] = torch.tensor(k)
        extra[f"model.layers.{layer}.{v_name}"] = torch.tensor([v])
    config = {"quantization_config": None}
    folder = write_fp8(tiny_llama, tmp_path, {}, by_row, keep=lambda name: True, extra=extra, config=config)
    prompt = random_prompts(320, [60])[0]
    expected = oracle_scores(tiny_llama, prompt, given)
    noise = (oracle_scores(tiny_llama, prompt, {}) - expected).abs().mean()
    assert noise > 0.05
    assert (scores(folder, prompt, **FP8_CACHE) - expected).abs().mean() < 0.05 * noise
    # A cache in the model's type has no use for them.
    plain = prompt_scores(tiny_llama.model, prompt)
    torch.testing.assert_close(scores(folder, prompt), plain, atol=1e-3, rtol=1e-3)


def test_scales_that_the_config_promises(tiny_llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"lacks the tensor model.layers.0.self_attn.k_scale"):
        start(write_fp8(tiny_llama, tmp_path, WITH_SCALES, by_row), **FP8_CACHE)


@pytest.mark.parametrize("weights", ["plain", "fp8"])
def test_batching_changes_nothing(tiny_llama: Tiny, weights: str) -> None:
    shared = random_prompts(320, [40], seed=1)[0]
    prompts = [shared + tail for tail in random_prompts(320, [3, 9, 1, 20, 5, 30], seed=2)]
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(prompts)]
    defaults = {**FP8_CACHE, "dtype": None, "quantize": "fp8" if weights == "fp8" else None}
    engine = start(tiny_llama.folder, **defaults, prefix_caching=False)
    expected = [run(engine, [request])[0].token_ids for request in requests]
    engine.close()
    for settings in (
        {},
        {"max_batch_total_tokens": 128, "max_total_tokens": 112},
        {"overlap": False},
        {"max_batch_prefill_tokens": 7},
        {"max_batch_size": 2},
        {"custom_kernels": False},
    ):
        engine = start(tiny_llama.folder, **defaults, **settings)
        for arrivals in (None, [0, 1, 3, 3, 10, 12]):
            assert [output.token_ids for output in run(engine, requests, arrivals)] == expected, settings
        if "max_total_tokens" in settings:
            assert engine.loop.scheduler.stats.num_preemptions > 0
        assert engine.loop.scheduler.stats.num_cached_prompt_tokens > 0
        engine.close()


def test_a_cache_takes_a_quarter_of_float32(tiny_llama: Tiny) -> None:
    def most_tokens(**settings: object) -> int:
        with pytest.raises(ResourceError) as caught:
            start(tiny_llama.folder, **settings, max_batch_total_tokens=10**15)
        found = re.search(r"At most (\d+) tokens fit", str(caught.value))
        assert found is not None
        return int(found[1])

    assert 3.5 < most_tokens(**FP8_CACHE) / most_tokens() < 4.5
    engine = start(tiny_llama.folder, **FP8_CACHE)
    assert "KV cache in fp8_e4m3fn" in engine.facts.notes and engine.facts.dtype == "float32"
    engine.close()


def test_latents_are_not_rounded(tmp_path: Path) -> None:
    with pytest.raises(
        StartError, match="`kv_cache_dtype` fp8_e4m3fn is for keys and values: this model keeps latents"
    ):
        start(make_tiny("DeepseekV2", {"num_hidden_layers": 1}, tmp_path).folder, **FP8_CACHE)


def test_other_types_are_refused(tiny_llama: Tiny) -> None:
    with pytest.raises(
        StartError, match="`kv_cache_dtype` is set to 'fp8_e5m2', which is not supported: use fp8_e4m3fn"
    ):
        start(tiny_llama.folder, kv_cache_dtype="fp8_e5m2")
