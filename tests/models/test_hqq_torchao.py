"""Checkpoints of HQQ and torchao against what the libraries make of them."""

import json
import re
from pathlib import Path

import pytest
import torch
from damage import damage, matrix_of
from driving import start
from gptq_writing import load_matrices
from hypothesis import given, settings
from hypothesis import strategies as st
from library_checkpoints import (
    DATA,
    check_tokens,
    check_values,
    expected_digests,
    library_tensors,
    oracle,
    read_matrices,
    whole_checkpoint,
    write_folder,
)
from ranks import PROMPT, check_ranks
from torch import Tensor

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.linear import Linear
from text_generation_inference.quant.choose import detect
from text_generation_inference.quant.hqq import Hqq
from text_generation_inference.quant.low_bit import LowBit, LowBitScheme
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.declare import Part

pytestmark = pytest.mark.usefixtures("one_thread")

K = "model.layers.0.self_attn.k_proj"
NAMES = ["hqq", "hqq-mixed", "torchao-int8", "torchao-intx", "torchao-int4"]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_the_library(name: str, tmp_path: Path) -> None:
    folder = whole_checkpoint(name, tmp_path)
    matrices, held = read_matrices(folder)
    # groups along the outputs are widened, and what is one matrix with them
    all_of_them = set(expected_digests()[name])
    assert held == ({key for key in all_of_them if "self_attn" in key} if name == "hqq-mixed" else all_of_them)
    check_values(name, matrices)
    model = oracle(folder, matrices)
    check_tokens(folder, model, custom_kernels=name != "hqq-mixed")
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    check_ranks(folder, logits)


def as_text(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(("columns", "is_held"), [(66, True), (99, False)])
def test_rows_that_bytes_do_not_end_with_are_widened(tmp_path: Path, columns: int, is_held: bool) -> None:
    """One group for each row, whatever its length."""
    codes = torch.randint(0, 16, (4, columns), dtype=torch.uint8)
    numbers = {"axis": 1, "group_size": columns, "quant_scale": 0, "quant_zero": 0}
    tensors = {
        "m.W_q": codes[:2] << 4 | codes[2:],
        "m.scale": torch.rand(4, 1),
        "m.zero": torch.rand(4, 1),
        "m.packing": as_text("4bit_u8"),
        "m.shape": torch.tensor([4, columns]),
        **{f"m.{name}": torch.tensor(value) for name, value in numbers.items()},
    }
    write_folder(tmp_path, {}, tensors)
    checkpoint = Checkpoint.open(tmp_path)
    stored = Hqq(LowBitScheme()).named_as_in({name: tuple(value.shape) for name, value in tensors.items()})
    for first, last in ((0, columns), (0, columns // 2), (columns // 2, columns)):
        matrix = Linear(Ops(), [Part("m.weight", (4, columns), 1, first, last)])
        method = stored.choose(matrix, ["m"])
        assert isinstance(method, LowBit) == is_held
        found = method.read([("m.weight", matrix.parts[0])], checkpoint, torch.float32, torch.device("cpu"))
        found = low_bit.dequantize(found) if is_held else found
        expected = ((codes - tensors["m.zero"]) * tensors["m.scale"])[:, first:last]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({f"{K}.packing": None}, f"has no tensor '{K}.packing'"),
        ({f"{K}.packing": as_text("2bit_u8")}, f"tensor {K}.packing in .* says '2bit_u8'"),
        ({f"{K}.packing": torch.full((9,), 255, dtype=torch.uint8)}, f"tensor {K}.packing in .* says"),
        ({f"{K}.axis": torch.tensor(0)}, rf"tensor {K}.axis in .* says \[0\]"),
        ({f"{K}.group_size": torch.tensor(32)}, rf"tensor {K}.group_size in .* says \[32\]"),
        ({f"{K}.shape": torch.tensor([64, 32])}, rf"tensor {K}.shape in .* says \[64, 32\]"),
        ({f"{K}.quant_zero": torch.tensor(1)}, rf"tensor {K}.quant_zero in .* says \[1\]"),
        ({f"{K}.scale": None}, f"{K}.scale: scales that are missing"),
        ({f"{K}.scale": torch.zeros(4096, 1)}, f"{K}.scale has 4096 scales, which 2048 values cannot share"),
        ({f"{K}.W_q": torch.tensor(0, dtype=torch.uint8)}, rf"tensor {K}.W_q in .* has shape \[\]"),
        ({f"{K}.zero": None}, f"lacks the tensor {K}.zero"),
        ({f"{K}.zero": torch.zeros(5, 1)}, rf"tensor {K}.zero in .* has shape \[5, 1\]"),
        ({f"{K}.zero": torch.full((32, 1), torch.inf)}, f"tensor {K}.zero in .* not finite"),
        ({f"{K}.W_q": torch.zeros(7, 64, dtype=torch.uint8)}, rf"tensor {K}.W_q in .* has shape \[7, 64\]"),
        ({f"{K}.W_q": torch.zeros(16, 64)}, f"tensor {K}.W_q in .* has type float32"),
        ({f"{K}.W_q": None}, f"lacks the tensor {K}.weight"),
    ],
    ids=str,
)
def test_wrong_tensors_of_hqq_are_named(tmp_path: Path, change: dict[str, Tensor | None], text: str) -> None:
    with pytest.raises(ModelFormatError, match=text):
        start(whole_checkpoint("hqq", tmp_path, change))


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("int8", {"qdata": None}, f"lacks the tensor {K}.weight"),
        ("int8", {"qdata": torch.zeros(32, 64)}, f"tensor {K}._weight_qdata in .* has type float32"),
        ("int8", {"qdata": torch.zeros(4, 1, 32, 4)}, f"{K}._weight_qdata has shape .*4.* packing for one kind"),
        ("int8", {"qdata": torch.zeros(32, 8)}, f"{K}._weight_qdata has shape .*8.* packing for one kind of device"),
        ("int8", {"scale": None}, f"lacks the tensor {K}._weight_scale"),
        ("int8", {"scale": torch.full((32, 1), torch.nan)}, f"tensor {K}._weight_scale in .* not finite"),
        ("int8", {"scale": torch.ones(3, 1)}, f"tensor {K}._weight_scale in .* has shape"),
        ("int8", {"zero_point": torch.ones(3, 1)}, f"tensor {K}._weight_zero_point in .* has shape"),
        ("int8", {"zero_point": torch.ones(32, 1).long()}, f"tensor {K}._weight_zero_point in .* has type int64"),
        ("int8", {"act_pre_scale": torch.ones(64)}, f"{K}._weight_act_pre_scale: inputs that are scaled"),
        ("intx", {"qdata": torch.full((32, 64), 9, dtype=torch.int8)}, f"tensor {K}._weight_qdata in .* beyond"),
        ("intx", {"zero_point": None}, f"lacks the tensor {K}._weight_zero_point"),
        ("int4", {"scale": torch.ones(2, 3)}, f"tensor {K}._weight_scale in .* has shape"),
        ("int4", {"zero_point": None}, f"lacks the tensor {K}._weight_zero_point"),
    ],
    ids=str,
)
def test_wrong_tensors_of_torchao_are_named(
    tmp_path: Path, name: str, change: dict[str, Tensor | None], text: str
) -> None:
    changed = {f"{K}._weight_{tensor}": value for tensor, value in change.items()}
    with pytest.raises(ModelFormatError, match=text):
        start(whole_checkpoint(f"torchao-{name}", tmp_path, changed))


_AO = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
_DAMAGED = {  # tensors by the ends of their names, and those that hold fractions
    "hqq": ((".W_q", ".packing", ".scale", ".zero"), (".scale", ".zero")),
    "torchao-int8": (_AO[:2], _AO[1:2]),  # which may lack zero points
    "torchao-intx": (_AO, _AO[1:2]),
    "torchao-int4": (_AO, _AO[1:]),
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_files_are_named(name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensors, metadata = library_tensors(name)
    named, floats = _DAMAGED["hqq" if name.startswith("hqq") else name]
    damaged, rank = damage(tensors, named, floats, data)
    config = json.loads((DATA / name / "config.json").read_text())
    folder = write_folder(tmp_path_factory.getbasetemp() / "damaged", config, tensors, metadata)
    with pytest.raises(ModelFormatError, match=re.escape(matrix_of(damaged))):
        load_matrices(folder, *rank)


def torchao(kind: str, **settings: object) -> dict:
    section = {"default": {"_type": kind, "_version": 2, "_data": settings}}
    return {"quantization_config": {"quant_method": "torchao", "quant_type": section}}


def test_packings_of_torchao_are_refused_by_name() -> None:
    for config, text in (
        (torchao("Float8WeightOnlyConfig"), "`quant_type` Float8WeightOnlyConfig is not supported"),
        (
            torchao("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}),
            "`int4_packing_format` tile_packed_to_4d is one for the kind of device that made it",
        ),
        ({"quantization_config": {"quant_method": "torchao"}}, "`quant_type` None is not supported"),
    ):
        with pytest.raises(StartError, match=f"{text}.*unquantised model with"):
            detect(config, "config.json")


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    config = json.loads((DATA / "torchao-int8" / "config.json").read_text())
    config["quantization_config"]["quant_type"] = "int4_weight_only"
    write_folder(tmp_path, config, {})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="Pickled weights can run code when opened and are refused"):
        start(tmp_path)


def test_one_scale_for_all_and_for_each_row(tmp_path: Path) -> None:
    """Without zero points, as earlier versions wrote it."""
    tensors = library_tensors("torchao-int8")[0]
    change: dict[str, Tensor | None] = {name: None for name in tensors if name.endswith("_zero_point")}
    change[f"{K}._weight_scale"] = torch.tensor([[0.5]])
    matrices, held = read_matrices(whole_checkpoint("torchao-int8", tmp_path, change))
    assert f"{K}.weight" in held
    assert torch.equal(matrices[f"{K}.weight"], tensors[f"{K}._weight_qdata"].float() * 0.5)
