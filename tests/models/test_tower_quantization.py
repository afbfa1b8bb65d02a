"""Towers in FP8: where a checkpoint has them so, never because `quantize` asks, and not where its rules leave them out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import run
from safetensors.torch import load_file, save_file
from served_pictures import NUM_NEW, PROMPTS, Served, serve
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.kernels.fp8 import FP8, Fp8Weight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.launch.check import check_model
from text_generation_inference.models.vision.blocks import TowerFeedForward, TowerLinear
from text_generation_inference.models.vision.tower import run_parts
from text_generation_inference.quant.fp8 import Fp8
from text_generation_inference.weights.load import load_dummy

TOWERS = {"llava_next": ("vision_tower", "multi_modal_projector"), "qwen2_vl": ("visual",)}


@pytest.fixture(scope="module", params=list(TOWERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(request.param, tmp_path_factory.mktemp(request.param))


def write_fp8(served: Served, folder: Path, with_tower: bool, dequantized: bool = False) -> Path:
    """All products in FP8, a scale for each row; or what they then are, as plain numbers."""
    folder.mkdir()
    for file in served.oracle.folder.iterdir():
        if file.is_file() and file.name not in ("model.safetensors", "config.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, Tensor] = {}
    of_tower = TOWERS[served.oracle.name]
    for name, value in load_file(served.oracle.folder / "model.safetensors").items():
        is_product = value.ndim == 2 and name.endswith("weight") and "embed" not in name and "lm_head" not in name
        if not is_product or (not with_tower and any(word in name for word in of_tower)):
            tensors[name] = value
            continue
        scale = value.abs().amax(1, keepdim=True).clamp(min=1e-6) / 448
        stored = (value / scale).to(FP8)
        if dequantized:
            tensors[name] = stored.float() * scale
        else:
            tensors[name], tensors[f"{name.removesuffix('weight')}weight_scale"] = stored, scale
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {**served.oracle.config}
    if not dequantized:
        ignored = ["lm_head"] if with_tower else ["lm_head", *(f"re:.*{word}.*" for word in of_tower)]
        rule = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ignored}
        config["quantization_config"] = rule
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def look(served: Served, folder: Path, **settings: Any) -> tuple[list[Tensor], list[bool], list[list[int]]]:
    """Features of a prompt's pictures, which matrices of the tower are in FP8, and answers."""
    here = Served(type(served.oracle)(served.oracle.name, folder, served.oracle.model), served.folder, served.expected)
    engine = here.start(custom_kernels=False, **settings)
    try:
        model = engine.rank.runner.model
        request = here.request(0, PROMPTS[2])
        pixels = [
            torch.frombuffer(bytearray((here.folder / span.digest).read_bytes()), dtype=torch.uint8).view(span.shape)
            for span in request.pictures
        ]
        with torch.inference_mode():
            features = run_parts(model.encode(pixels, [tuple(span.grid) for span in request.pictures]))
        kinds = [isinstance(each.weight, Fp8Weight) for _, each in model.tower.walk() if isinstance(each, TowerLinear)]
        answers = [output.token_ids for output in run(engine, [here.request(n, p) for n, p in enumerate(PROMPTS[:3])])]
        assert all(len(answer) == NUM_NEW for answer in answers)
        return features, kinds, answers
    finally:
        engine.close()


def test_a_tower_that_is_stored_in_fp8(served: Served, tmp_path: Path) -> None:
    """Its features are those of the same numbers widened, but for inputs that are rounded too."""
    found, kinds, _ = look(served, write_fp8(served, tmp_path / "fp8", True))
    widened, plain, _ = look(served, write_fp8(served, tmp_path / "wide", True, dequantized=True))
    assert sum(kinds) > len(kinds) / 2 and not any(plain)
    for ours, expected in zip(found, widened, strict=True):
        assert 0 < (ours - expected).norm() < 0.1 * expected.norm()


def test_check(served: Served, tmp_path: Path) -> None:
    """`tgi check` takes a tower as it is stored, and counts it so."""
    reports = [
        check_model(ServerConfig(model_id=str(write_fp8(served, tmp_path / str(with_tower), with_tower)), device="cpu"))
        for with_tower in (True, False)
    ]
    assert not any(report.problems for report in reports)
    in_fp8, plain = (report.weight_bytes or 0 for report in reports)
    assert 0 < in_fp8 < plain


def test_rules_that_leave_the_tower_out(served: Served, tmp_path: Path) -> None:
    found, kinds, _ = look(served, write_fp8(served, tmp_path / "fp8", False))
    expected, _, _ = look(served, served.oracle.folder)
    assert not any(kinds)
    assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected, strict=True))


def test_the_setting_leaves_towers_as_they_are(served: Served) -> None:
    found, kinds, answers = look(served, served.oracle.folder, quantize="fp8", dtype=None)
    expected, _, plain = look(served, served.oracle.folder)
    assert not any(kinds) and answers != plain
    assert all(torch.equal(ours, each) for ours, each in zip(found, expected, strict=True))


@pytest.mark.parametrize("rounded", [("up",), ("down",), ("up", "down")])
def test_a_width_that_grows_beside_one_that_is_stored(rounded: tuple[str, ...]) -> None:
    """A matrix in FP8 keeps its width, whatever the device multiplies faster; what is between fits both."""
    found: list[Tensor] = []
    for ops in (Ops(), Ops(fast_multiple=64)):
        of_gate = TowerFeedForward(ops, "mlp", ("gate", "up"), "down", (32, 48, 32), "silu", bias=True)
        for name in rounded:
            getattr(of_gate, name).method = Fp8()
        load_dummy(of_gate, torch.float32, torch.device("cpu"), 0)
        torch.manual_seed(0)
        found.append(of_gate.forward(torch.randn(5, 32)))
        assert of_gate.down.num_inputs == (48 if ops.fast_multiple == 1 or "down" in rounded else 64)
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
