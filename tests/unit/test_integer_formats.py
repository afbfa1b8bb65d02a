"""GPTQ, AWQ and Marlin as libraries pack them: what is read equals what they dequantise, bit for bit; config.json."""

import json
from pathlib import Path

import pytest
import torch

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.kernels import low_bit
from text_generation_inference.quant import awq, gptq, marlin
from text_generation_inference.quant.choose import choose_quantization, detect, quantization_beside
from text_generation_inference.quant.low_bit import StoredLowBit
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.declare import Part

FOLDER = Path(__file__).parents[1] / "data/integers"  # written by the script there
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(FOLDER)


def cases() -> dict[str, StoredLowBit]:
    found: dict[str, StoredLowBit] = {
        "gptq4-rows": gptq.Gptq(gptq.Stored(4, None)),
        "awq": awq.Awq(awq.StoredAwq(4, 32)),
        "awq-rows": awq.Awq(awq.StoredAwq(4, None)),
        "marlin": marlin.Marlin(32),
        "marlin-rows": marlin.Marlin(None),
    }
    for bits in (2, 3, 4, 8):
        found[f"gptq{bits}"] = gptq.Gptq(gptq.Stored(bits, 32))
        found[f"gptq{bits}-zeros"] = gptq.Gptq(gptq.Stored(bits, 32, is_symmetric=False))
        found[f"gptq{bits}-zeros-order-v2"] = gptq.Gptq(gptq.Stored(bits, 32, False, True, 0))
    return found


@pytest.mark.parametrize("name", cases())
def test_what_libraries_wrote(checkpoint: Checkpoint, name: str) -> None:
    method, expected = cases()[name], checkpoint.read(f"{name}.values")
    rows, columns = expected.shape
    slices = [(None, 0, 0), (0, 0, rows // 2), (0, rows // 2, rows), (1, 0, 48), (1, 48, columns), (1, 40, 80)]
    for dim, start, end in slices:  # whole, and halves as ranks keep them, some within a group
        part = Part(f"{name}.weight", (rows, columns), dim, start, end)
        held = method.read_part(part.name, part, checkpoint, torch.device("cpu"))
        kept = expected if dim is None else expected.narrow(dim, start, end - start)
        assert torch.equal(low_bit.dequantize(held).half(), kept), (dim, start, end)
        holder, shape = method.holder(part)
        assert checkpoint.shape(holder) == shape
        for beside, shapes in method.declare(part).items():
            assert checkpoint.shape(beside) in shapes.shapes


def test_matrices_that_lie_the_other_way_round(checkpoint: Checkpoint) -> None:
    """A plain checkpoint of GPT-2 has `[in, out]`; what GPTQ stores is the same."""
    expected = checkpoint.read("gptq4.values")
    part = Part("gptq4.weight", (96, 32), 0, 32, 64, transposed=True)
    held = cases()["gptq4"].read_part(part.name, part, checkpoint, torch.device("cpu"))
    assert torch.equal(low_bit.dequantize(held).half(), expected[:, 32:64])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {**GPTQ, "checkpoint_format": "gptq_p"},
            "`checkpoint_format` 'gptq_p' is not supported, gptq, gptq_v2, marlin is",
        ),
        ({**GPTQ, "format": "bitblas"}, "`format` 'bitblas' is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin_24"}, "`checkpoint_format` 'marlin_24' is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin", "bits": 8}, "`bits` 8 is not supported, 4 is"),
        ({**GPTQ, "checkpoint_format": "marlin", "desc_act": True}, "`desc_act` True is not supported, with Marlin"),
        ({**GPTQ, "is_marlin_format": True, "sym": False}, "`sym` False is not supported, with Marlin true is"),
        ({**GPTQ, "bits": 5}, "`bits` 5 is not supported, 2 or 3 or 4 or 8 is"),
        ({**GPTQ, "bits": "4"}, "`bits` must be an integer"),
        ({**GPTQ, "group_size": 0}, "`group_size` 0 is not supported"),
        ({**GPTQ, "group_size": -2}, "`group_size` -2 is not supported"),
        ({**GPTQ, "group_size": 10**40}, "-1 or a number from 1 to 1073741824 is"),
        ({**AWQ, "q_group_size": 10**40}, "-1 or a number from 1 to 1073741824 is"),
        ({**GPTQ, "sym": "yes"}, "`sym` must be true or false"),
        ({**GPTQ, "pack_dtype": "int64"}, "`pack_dtype` 'int64' is not supported, int32 is"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, "`dynamic` has '+:(': it is no pattern"),
        ({**GPTQ, "dynamic": {"+:a": {"bits": 7}}}, "dynamic.+:a: `bits` 7 is not supported"),
        ({**GPTQ, "dynamic": {"+:a": 4}}, "dynamic.+:a must be an object"),
        ({**GPTQ, "modules_to_not_convert": "lm_head"}, "`modules_to_not_convert` must be a list of names"),
        ({**AWQ, "version": "gemv"}, "`version` 'gemv' is not supported, gemm is"),
        ({**AWQ, "version": "GEMV_fast"}, "`version` 'GEMV_fast' is not supported"),
        ({**AWQ, "version": "marlin"}, "`version` 'marlin' is not supported"),
        ({**AWQ, "backend": "llm-awq"}, "`backend` 'llm-awq' is not supported"),
        ({**AWQ, "bits": 3}, "`bits` 3 is not supported, 4 or 8 is"),
        ({"quant_method": "exl2", "bits": 4.5}, "`quant_method` 'exl2' is not supported"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_what_is_not_read_is_refused_by_name(config: dict, text: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        detect({"quantization_config": config}, "config.json")
    assert text in str(caught.value)


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "config",
    [
        {**GPTQ, "checkpoint_format": LONG},
        {**GPTQ, "checkpoint_format": [LONG]},
        {**GPTQ, "bits": LONG},
        {**GPTQ, "sym": LONG},
        {**GPTQ, "dynamic": LONG},
        {**GPTQ, "dynamic": {"+:a": LONG}},
        {**GPTQ, "modules_to_not_convert": {LONG: 1}},
        {"quant_method": "fp8", "ignored_layers": LONG},
    ],
    ids=lambda config: "-".join(key for key, value in config.items() if LONG in str(value)),
)
def test_an_error_is_no_longer_than_a_line(config: dict) -> None:
    with pytest.raises(ModelFormatError) as caught:
        detect({"quantization_config": config}, "config.json")
    assert "xxx..." in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("file", "content", "kind", "bits", "size"),
    [
        ("quantize_config.json", {"bits": 8, "group_size": 32, "desc_act": True}, gptq.GptqQuantization, 8, 32),
        ("quantize_config.json", {"bits": 4, "group_size": 64, "zero_point": True}, awq.AwqQuantization, 4, 64),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, awq.AwqQuantization, 4, 64),
        ("quant_config.json", {"w_bit": 4, "q_group_size": -1, "quant_method": None}, awq.AwqQuantization, 4, None),
    ],
)
def test_files_beside_config(tmp_path: Path, file: str, content: dict, kind: type, bits: int, size: int | None) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    found = detect(quantization_beside({}, tmp_path), "config.json")
    assert isinstance(found, gptq.GptqQuantization | awq.AwqQuantization) and isinstance(found, kind)
    assert (found.stored.bits, found.stored.group_size) == (bits, size)


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_text_config_may_say_it(name: str, tmp_path: Path) -> None:
    """Of a model that sees, whose text model was quantised by itself; what stands outside comes first."""
    inside = {"text_config": {"hidden_size": 64, name: {**GPTQ, "bits": 8}}}
    found = detect(quantization_beside(inside, tmp_path), "config.json")
    assert isinstance(found, gptq.GptqQuantization) and found.stored.bits == 8
    assert quantization_beside({**inside, "quantization_config": GPTQ}, tmp_path) == {}


def test_what_the_setting_may_stand_for() -> None:
    by_gptq, by_awq = (detect({"quantization_config": config}, "config.json") for config in (GPTQ, AWQ))
    assert choose_quantization("gptq", by_gptq) is by_gptq and choose_quantization("gptq", by_awq) is by_awq
    assert choose_quantization("awq", by_awq) is by_awq
    tiles = detect({"quantization_config": {**GPTQ, "checkpoint_format": "marlin"}}, "config.json")
    assert choose_quantization("marlin", tiles) is tiles
    for asked, stored in (("awq", by_gptq), ("marlin", by_gptq), ("fp8", by_awq), ("compressed-tensors", by_awq)):
        with pytest.raises(StartError, match=f"`quantize` {asked} is not for this checkpoint, which is stored in"):
            choose_quantization(asked, stored)
    for asked in ("gptq", "awq", "marlin"):
        untold = choose_quantization(asked, None)
        assert untold is not None
        with pytest.raises(StartError, match=f"`quantize` {asked} is for checkpoints in"):
            untold.named_as_in({"model.norm.weight": (64,)})


def test_rules_of_gptq() -> None:
    rules = {"-:.*v_proj": {}, r".*\.1\..*": {"bits": 8, "group_size": -1}, "+:.*down": {"bits": 2, "sym": False}}
    found = detect({"quantization_config": {**GPTQ, "dynamic": rules}}, "config.json")
    assert isinstance(found, gptq.GptqQuantization)
    stored = found.stored
    assert found.rule("model.layers.1.v_proj") is None
    assert found.rule("model.layers.1.down") == gptq.Stored(8, None)
    assert found.rule("model.layers.0.down") == gptq.Stored(2, 128, is_symmetric=False)
    assert found.rule("model.layers.0.up") == stored
