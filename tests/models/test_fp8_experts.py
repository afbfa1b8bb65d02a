"""Experts in FP8: as checkpoints store them, and quantised on loading."""

import json
from pathlib import Path

import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, run, start
from fp8_writing import by_row, by_square, by_tensor, prompt_scores, spread, write_fp8
from safetensors.torch import load_file
from torch import Tensor

from text_generation_inference.engine.build import Engine
from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.fp8 import Fp8Weight, dequantize_weight
from text_generation_inference.runner.runner import Runner

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", "gate"]}
SQUARES = {**FP8, "weight_block_size": [128, 128]}
FORMATS = {"by-tensor": (FP8, by_tensor, "weight_scale"), "squares": (SQUARES, by_square, "weight_scale_inv")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """All matrices are whole squares of 128."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 128,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
    }
    return make_tiny("Mixtral", sizes, tmp_path_factory.mktemp("mixtral"))


def feed_forward(engine: Engine, layer: int = 0) -> tuple[object, object]:
    runner = engine.rank.runner
    assert isinstance(runner, Runner)
    found = runner.model.model.layers[layer].mlp
    return found.gate_up.weight, found.down.weight


def check_scores(engine: Engine, tiny: Tiny) -> None:
    """Not far from the plain model, and not the same."""
    prompt = random_prompts(320, [60])[0]
    output = run(engine, [make_request(0, prompt, 1, decoder_input_details=True)])[0]
    found = torch.tensor([output.prompt_logprobs[place] for place in range(1, len(prompt))])
    plain = prompt_scores(tiny.model, prompt)
    assert (found - plain).abs().mean() > 0.01
    assert torch.corrcoef(torch.stack((found, plain)))[0, 1] > 0.9  # that of experts in another order is near 0


@pytest.mark.parametrize("name", FORMATS)
def test_stored(tiny: Tiny, tmp_path: Path, name: str) -> None:
    quantization, quantize, scale_name = FORMATS[name]
    folder = write_fp8(tiny, tmp_path, quantization, quantize, scale_name, also=lambda each: ".experts." in each)
    engine = start(folder)
    first, second = feed_forward(engine)
    stored = load_file(folder / "model.safetensors")

    def widened(expert: int, matrix: str) -> Tensor:
        base = f"model.layers.0.block_sparse_moe.experts.{expert}.{matrix}."
        data = stored[base + "weight"]
        return data.float() * spread(stored[base + scale_name], data.shape)

    assert isinstance(first, Fp8Weight) and isinstance(second, Fp8Weight)
    expected = torch.cat([widened(expert, matrix) for expert in range(4) for matrix in ("w1", "w3")])
    torch.testing.assert_close(dequantize_weight(first), expected, rtol=1e-6, atol=1e-7)
    expected = torch.cat([widened(expert, "w2") for expert in range(4)])
    torch.testing.assert_close(dequantize_weight(second), expected, rtol=1e-6, atol=1e-7)
    check_scores(engine, tiny)
    engine.close()


def test_fused_experts_in_fp8_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Nobody has said how their scales lie."""
    tiny.model.save_pretrained(tmp_path, save_original_format=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    with pytest.raises(ModelFormatError, match="experts.gate_up_proj: its experts lie in one tensor"):
        start(tmp_path)


def test_on_loading(tiny: Tiny) -> None:
    engine = start(tiny.folder, quantize="fp8", dtype=None)
    first, second = feed_forward(engine)
    assert isinstance(first, Fp8Weight) and isinstance(second, Fp8Weight)
    name = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    plain = load_file(tiny.folder / "model.safetensors")[name]
    data, scale = by_row(plain)
    torch.testing.assert_close(dequantize_weight(first)[5 * 128 : 6 * 128], data.float() * scale, rtol=1e-6, atol=1e-7)
    assert not any(isinstance(each, Fp8Weight) for each in feed_forward(engine, 1))  # nothing evens its errors out
    check_scores(engine, tiny)
    engine.close()


def test_what_a_shared_expert_keeps(tmp_path: Path) -> None:
    """Its gate is one row, which stays as it is; so does what the last layer adds."""
    folder = make_tiny("Qwen2Moe", {"num_hidden_layers": 2, "mlp_only_layers": []}, tmp_path).folder
    engine = start(folder, dtype=None, quantize="fp8")
    runner = engine.rank.runner
    assert isinstance(runner, Runner)
    shared = [layer.mlp.shared for layer in runner.model.model.layers]
    found = [[isinstance(each.weight, Fp8Weight) for each in (s.gate, s.dense.gate_up, s.dense.down)] for s in shared]
    assert found == [[False, True, True], [False, True, False]]
    engine.close()
