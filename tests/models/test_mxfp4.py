"""GPT-OSS as it is published: experts in MXFP4."""

from pathlib import Path

import mxfp4_writing
import pytest
import torch
from driving import Tiny
from ranks import PROMPT, check_ranks, logits_of_threads
from safetensors.torch import load_file, save_file

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.launch.check import check_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Two ranks have 16 columns of `down_proj` each: half a group."""
    return mxfp4_writing.write(tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("mxfp4"))


def test_what_is_stored_is_what_is_computed(tiny: Tiny) -> None:
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    for ops in (None, Ops()):  # widened, and as they are
        torch.testing.assert_close(logits_of_threads(tiny.folder, 1, ops=ops), expected, atol=1e-4, rtol=1e-4)
        check_ranks(tiny.folder, expected, ops)
    small = logits_of_threads(tiny.folder, 2, quantize="fp8")
    assert not torch.allclose(small, expected, atol=1e-2, rtol=1e-2)
    assert torch.corrcoef(torch.stack((small.flatten(), expected.flatten())))[0, 1] > 0.98


def test_check(tiny: Tiny) -> None:
    """Experts are counted as what they are held in: values of 4 bits with scales of 16, or widened."""
    sizes = {name: each.numel() for name, each in tiny.model.named_parameters()}
    in_few_bits = sum(size for name, size in sizes.items() if ".experts." in name and name.endswith("_proj"))
    parameters = sum(sizes.values())
    small = 4 * (parameters - in_few_bits) + in_few_bits // 32 * (16 + 2)
    for custom_kernels, expected in ((True, small), (False, 4 * parameters)):
        config = ServerConfig(model_id=str(tiny.folder), device="cpu", dtype="float32", custom_kernels=custom_kernels)
        report = check_model(config)
        assert report.is_supported
        assert (report.parameters, report.weight_bytes) == (parameters, expected)


def test_damaged_files_are_named(tiny: Tiny, tmp_path: Path) -> None:
    tensors = load_file(tiny.folder / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    blocks = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    cases = {
        f"lacks the tensor {scales}": {name: tensor for name, tensor in tensors.items() if name != scales},
        f"{scales} .* has shape": {**tensors, scales: tensors[scales][:, :3].contiguous()},
        f"{scales} .* not finite": {**tensors, scales: torch.full_like(tensors[scales], 255)},
        f"{blocks} .* has type int8": {**tensors, blocks: tensors[blocks].view(torch.int8)},
    }
    for message, changed in cases.items():
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelFormatError, match=message):
            logits_of_threads(tmp_path, 1)
