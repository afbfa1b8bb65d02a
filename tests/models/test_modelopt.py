"""Checkpoints as ModelOpt writes them: NVFP4, whose global scale multiplies, and FP8."""

import json
from pathlib import Path

import pytest
import torch
from compressed_writing import load, matrices, tensors_of, write
from driving import Tiny, make_request, random_prompts, run, start
from fp8_writing import by_tensor, write_fp8
from ranks import check_ranks, logits_of_threads

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.quant.choose import detect
from text_generation_inference.quant.modelopt import ModelOpt

pytestmark = pytest.mark.usefixtures("one_thread")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
BESIDE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}


@pytest.mark.parametrize("is_beside", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_nvfp4(is_beside: bool, tmp_path: Path) -> None:
    """From the checkpoint that compressed-tensors wrote; up projections are plain, whatever the config says."""
    change: dict[str, torch.Tensor | None] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, packed in tensors_of("nvfp4").items():
        if not name.endswith("weight_packed"):
            continue
        module, old = name.removesuffix(".weight_packed"), tensors_of("nvfp4")
        scale, whole = old[f"{module}.weight_scale"], torch.tensor(0.003 + 0.001 * len(change))
        change |= {f"{module}.{each}": None for each in ("weight_packed", "weight_global_scale", "input_global_scale")}
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()
        wide = E2M1[codes] * (scale.float() * whole).repeat_interleave(16, 1)
        expected[module] = wide.bfloat16()
        if module.endswith("up_proj"):
            change |= {f"{module}.weight": wide.bfloat16(), f"{module}.weight_scale": None}
        else:
            change |= {f"{module}.weight": packed, f"{module}.weight_scale_2": whole}
            change[f"{module}.input_scale"] = torch.tensor(0.1)
    config = {"quantization_config": None if is_beside else NVFP4}
    folder = write("nvfp4", tmp_path, change, config)
    if is_beside:
        (folder / "hf_quant_config.json").write_text(json.dumps(BESIDE))
    model = load(folder, torch.bfloat16)
    found = matrices(model)
    for module, wide in expected.items():
        assert torch.equal(found[module][1], wide), module
    layer = model.model.layers[0]
    assert isinstance(layer.attention.qkv.weight, LowBitWeight) and isinstance(layer.mlp.down.weight, LowBitWeight)
    assert isinstance(layer.mlp.gate_up.weight, torch.Tensor)
    whole_logits = logits_of_threads(folder, 1, ops=Ops())
    check_ranks(folder, whole_logits, Ops())


def test_fp8(tiny_llama: Tiny, tmp_path: Path) -> None:
    """The tensors are those of `fp8` with static inputs."""
    prompt = random_prompts(320, [20])[0]

    def generate(name: str, config: dict) -> object:
        folder = write_fp8(tiny_llama, tmp_path / name, config, by_tensor, input_scale=lambda _: 0.1)
        engine = start(folder)
        found = run(engine, [make_request(0, prompt, 8)])
        notes = engine.notes
        engine.close()
        assert any("matrices in FP8, as the checkpoint has them" in note for note in notes)
        return found

    assert generate("modelopt", {"quant_method": "modelopt", "quant_algo": "FP8"}) == generate(
        "fp8", {"quant_method": "fp8", "activation_scheme": "static"}
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "`quant_algo` 'W4A16_AWQ' is not supported, FP8 or NVFP4 is"),
        ({"quantization": {"quant_algo": "MIXED_PRECISION"}}, "quantization: `quant_algo` 'MIXED_PRECISION' is not"),
        ({}, "`quant_algo` None is not supported"),
        ({"quant_algo": 4}, "`quant_algo` must be text"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "`group_size` 32 is not supported, 16 is"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "`kv_cache_quant_algo` 'NVFP4' is not supported"),
        ({"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme: `num_bits` 4 is not supported"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "`ignore` must be a list of names"),
    ],
    ids=str,
)
def test_what_is_refused(config: dict, text: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        detect({"quantization_config": {"quant_method": "modelopt", **config}}, "config.json")
    assert text in str(caught.value)


def test_notes() -> None:
    found = detect({"quantization_config": NVFP4}, "config.json")
    assert isinstance(found, ModelOpt) and not found.needs_fp8
    assert "matrices in NVFP4, as the checkpoint has them (modelopt); inputs stay" in found.description
