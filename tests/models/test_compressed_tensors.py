"""Checkpoints that the library compressed-tensors wrote: its matrices bit for bit, its model's tokens, ranks, damage.

`tests/data/compressed_tensors/write.py` wrote them, and says what is in the files.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from compressed_writing import DOCUMENT, FORMS, load, matrices, tensors_of, write
from damage import damage, matrix_of
from driving import make_request, make_tiny, run, start
from gptq_writing import load_matrices
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import check_ranks, logits_of_threads
from safetensors.torch import load_file, save_file
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.ops import Ops

pytestmark = pytest.mark.usefixtures("one_thread")

# Matrices that are not held in few bits: parts of different forms, floats of 8 bits whose inputs are not.
WIDENED = {"fp8-weights": {"qkv", "out", "gate_up", "down"}, "mixed": {"qkv", "gate_up"}}


def digest(matrix: Tensor) -> str:
    return hashlib.sha256((matrix + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:24]


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_the_librarys(form: str, tmp_path: Path) -> None:
    folder = write(form, tmp_path)
    model = load(folder, torch.bfloat16)
    found = matrices(model)
    expected = FORMS[form]["matrices"]
    assert {name: digest(found[name][1]) for name in expected} == expected
    layer = model.model.layers[0]
    mlp = layer.mlp
    places = {"qkv": layer.attention.qkv, "out": layer.attention.out, "gate_up": mlp.gate_up, "down": mlp.down}
    assert {name for name, matrix in places.items() if isinstance(matrix.weight, Tensor)} == WIDENED.get(form, set())


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    engine = start(write(form, tmp_path))
    assert any("as the checkpoint has them (compressed-tensors)" in note for note in engine.notes)
    expected = FORMS[form]["generated"]
    requests = [
        make_request(number, prompt, len(each["tokens"]))
        for number, (prompt, each) in enumerate(zip(DOCUMENT["prompts"], expected, strict=True))
    ]
    outputs = run(engine, requests)
    engine.close()
    for output, each in zip(outputs, expected, strict=True):
        assert output.token_ids == each["tokens"]
        # Inputs in integers may be rounded the other way now and then, where sums have another order.
        torch.testing.assert_close(output.logprobs, each["logprobs"], atol=2e-2 if "w8a8" in form else 1e-4, rtol=0)


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form not in ("w8a8", "w8a8-static-asymmetric")]
)  # each rank finds scales of its own half of a row
def test_ranks(form: str, tmp_path: Path) -> None:
    folder = write(form, tmp_path)
    whole = logits_of_threads(folder, 1, ops=Ops())
    check_ranks(folder, whole, Ops())


def decode(tensors: dict[str, Tensor], module: str) -> Tensor:
    """Of 4 bits with zero points and an index of groups, in plain torch."""
    words, zeros, scale, index = (
        tensors[f"{module}.weight_{name}"].long() if name != "scale" else tensors[f"{module}.weight_scale"].float()
        for name in ("packed", "zero_point", "scale", "g_idx")
    )
    places = torch.arange(0, 32, 4)
    codes = (words[..., None] >> places & 15).flatten(1)
    zero = (zeros[:, None] >> places[:, None] & 15).flatten(0, 1)[: len(codes)]
    return ((codes - zero[:, index]) * scale[:, index]).bfloat16()


@pytest.mark.parametrize("form", ["w4a16-actorder", "experts-w4a16"])
def test_each_part_may_have_an_order_of_its_own(form: str, tmp_path: Path) -> None:
    """Queries and keys that differ are widened; experts keep an order each."""
    tensors, random = tensors_of(form), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        columns = tensors[name].shape[1] * 8
        index = torch.arange(columns)[torch.randperm(columns, generator=random)] // 32
        same = tensors.get(name.replace("w3.", "w1.").replace("packed", "g_idx"), index)  # gate and up share inputs
        tensors[name.replace("packed", "g_idx")] = (same if "w3." in name else index).int().clone()
    config = json.loads(json.dumps(FORMS[form]["quantization_config"]))
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    folder = write(form, tmp_path, dict(tensors), {"quantization_config": config})
    model = load(folder, torch.bfloat16)
    found = matrices(model)
    for module in FORMS[form]["matrices"]:
        assert torch.equal(found[module][1], decode(tensors, module)), module
    layer = model.model.layers[0]
    assert isinstance(layer.attention.qkv.weight, Tensor) and not isinstance(layer.mlp.down.weight, Tensor)
    assert isinstance(layer.mlp.gate_up.weight, Tensor) == (form == "w4a16-actorder")
    whole = logits_of_threads(folder, 1, ops=Ops())
    check_ranks(folder, whole, Ops())


def test_parts_in_different_bits_are_held_in_the_most(tmp_path: Path) -> None:
    """Queries in 8 bits by row, keys and values in 4 by group."""
    values, plain = "model.layers.0.self_attn.v_proj", tensors_of("w4a16")
    config = json.loads(json.dumps(FORMS["mixed"]["quantization_config"]))
    del config["config_groups"]["group_2"]
    change: dict[str, Tensor | None] = {name: each for name, each in plain.items() if name.startswith(values)}
    folder = write("mixed", tmp_path, {f"{values}.weight": None, **change}, {"quantization_config": config})
    model = load(folder, torch.bfloat16)
    weight = model.model.layers[0].attention.qkv.weight
    assert isinstance(weight, LowBitWeight) and weight.bits == 8 and weight.group_size == 32
    expected = {**FORMS["mixed"]["matrices"], values: FORMS["w4a16"]["matrices"][values]}
    assert {name: digest(matrices(model)[name][1]) for name in expected} == expected
    whole = logits_of_threads(folder, 1, ops=Ops())
    check_ranks(folder, whole, Ops())


def test_groups_that_were_never_listed(tmp_path: Path) -> None:
    """Older files have an index of -1 where groups come one after the other."""
    form = "w4a16-asymmetric"
    config = json.loads(json.dumps(FORMS[form]["quantization_config"]))
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    names = {f"{module}.weight_g_idx": 96 if "down" in module else 64 for module in FORMS[form]["matrices"]}
    indices = {name: torch.full((count,), -1, dtype=torch.int32) for name, count in names.items()}
    found = matrices(load(write(form, tmp_path, dict(indices), {"quantization_config": config}), torch.bfloat16))
    expected = FORMS[form]["matrices"]
    assert {name: digest(found[name][1]) for name in expected} == expected


@pytest.mark.parametrize(("name", "kind"), [("lm_head", "Linear"), ("model.embed_tokens", "Embedding")])
def test_a_vocabulary_in_few_bits_is_widened(name: str, kind: str, tmp_path: Path) -> None:
    codes = torch.randint(0, 16, (320, 64), generator=torch.Generator().manual_seed(0))
    scale = torch.rand(320, 2, generator=torch.Generator().manual_seed(1)).bfloat16() / 10
    words = (codes.unflatten(1, (8, 8)) << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)
    packed = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([320, 64])}
    quantization = json.loads(json.dumps(FORMS["w4a16"]["quantization_config"]))
    quantization["config_groups"]["group_0"]["targets"] = ["Linear", kind]
    config = {"tie_word_embeddings": False, "quantization_config": quantization}
    plain: dict[str, Tensor | None] = {"lm_head.weight": tensors_of("w4a16")["model.embed_tokens.weight"].flip(0)}
    plain[f"{name}.weight"] = (codes - 8) * scale.float().repeat_interleave(32, 1)
    expected = logits_of_threads(write("w4a16", tmp_path / "plain", plain, config), 1)
    change = {**plain, f"{name}.weight": None, **{f"{name}.{each}": tensor for each, tensor in packed.items()}}
    check_ranks(write("w4a16", tmp_path / "packed", change, config), expected)


def test_scales_of_a_cache(tmp_path: Path) -> None:
    quantization = FORMS["w4a16"]["quantization_config"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = {"quantization_config": {**quantization, "kv_cache_scheme": scheme}}
    scales = {
        f"model.layers.0.self_attn.{side}_scale": torch.tensor([size]) for side, size in (("k", 0.5), ("v", 0.25))
    }
    model = load(write("w4a16", tmp_path, scales, config), torch.float32)
    attention = model.model.layers[0].attention
    assert attention.cache_scales.of(torch.float8_e4m3fn) == (0.5, 0.25)
    for asked in (None, "fp8_e4m3fn"):  # the checkpoint alone does not put the cache into FP8
        engine = start(tmp_path, kv_cache_dtype=asked)
        assert any("KV cache in fp8_e4m3fn" in note for note in engine.notes) == (asked is not None)
        engine.close()
    with pytest.raises(ModelFormatError, match=r"lacks the tensor model.layers.0.self_attn.k_scale"):
        load(write("w4a16", tmp_path, {}, config), torch.float32)


def test_random_weights_have_the_form(tmp_path: Path) -> None:
    """Without a checkpoint: sizes are those of the form."""
    for form in ("w4a16-asymmetric", "w8a8-static", "nvfp4"):
        engine = start(write(form, tmp_path), load_format="dummy")
        output = run(engine, [make_request(0, [1, 2, 3], 4)])[0]
        assert len(output.token_ids) == 4 and all(logprob < 0 for logprob in output.logprobs)
        engine.close()


# -- checkpoints that are wrong ----------------------------------------------------------------------------------------

DOWN = "model.layers.0.mlp.down_proj"


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("form", "name", "value", "text"),
    [
        ("w4a16", "weight_packed", None, f"lacks the tensor {DOWN}.weight_packed"),
        ("w4a16", "weight_scale", None, f"lacks the tensor {DOWN}.weight_scale"),
        ("w4a16", "weight_packed", int32(64, 11), "has shape [64, 11], config.json makes it [64, 12]"),
        ("w4a16", "weight_packed", int32(12, 64), "has shape [12, 64]"),
        ("w4a16", "weight_packed", torch.zeros(64, 12), "has type float32, config.json makes it int32"),
        ("w4a16", "weight_scale", torch.ones(64, 2), "has shape [64, 2], config.json makes it [64, 3]"),
        ("w4a16", "weight_scale", int32(64, 3), "has type int32, config.json makes it float16 or bfloat16 or float32"),
        ("w4a16", "weight_scale", torch.full((64, 3), torch.inf), "holds a scale that is not finite"),
        ("w4a16", "weight_shape", torch.tensor([96, 64]), "says [96, 64], config.json makes it [64, 96]"),
        ("w4a16", "weight_shape", torch.tensor([64.0, 96.0]), "has type float32, config.json makes it int32 or int64"),
        ("w4a16", "weight_zero_point", int32(8, 3), f"does not use: {DOWN}.weight_zero_point"),
        ("w4a16", "weight_g_idx", int32(96), f"does not use: {DOWN}.weight_g_idx"),
        ("w4a16", "weight", torch.zeros(64, 96), f"does not use: {DOWN}.weight"),
        ("w4a16-asymmetric", "weight_zero_point", None, f"lacks the tensor {DOWN}.weight_zero_point"),
        ("w4a16-asymmetric", "weight_zero_point", int32(64, 3), "has shape [64, 3], config.json makes it [8, 3]"),
        ("w4a16-asymmetric", "weight_zero_point", torch.zeros(8, 3), "has type float32, config.json makes it int32"),
        ("w4a16-tensor-asymmetric", "weight_zero_point", int32(1), "has type int32, config.json makes it int8"),
        ("w4a16-actorder", "weight_g_idx", None, f"lacks the tensor {DOWN}.weight_g_idx"),
        ("w4a16-actorder", "weight_g_idx", int32(64), "has shape [64], config.json makes it [96]"),
        ("w4a16-actorder", "weight_g_idx", torch.arange(96), "names groups from 0 to 95, there are 3"),
        ("w4a16-actorder", "weight_g_idx", torch.zeros(96), "has type float32, config.json makes it int32"),
        ("w3a16", "weight_packed", int32(64, 8), "has shape [64, 8], config.json makes it [64, 9] or [64, 10]"),
        ("w8a8", "weight", torch.zeros(64, 96), f"tensor {DOWN}.weight in"),
        ("w8a8", "weight_scale", torch.ones(3), f"tensor {DOWN}.weight_scale in"),
        ("w8a8-static", "input_scale", None, f"lacks the tensor {DOWN}.input_scale"),
        ("w8a8-static", "input_scale", torch.zeros(1), "must be one number above 0"),
        ("w4a8", "weight", torch.full((64, 96), 8, dtype=torch.int8), "holds values that 4 bits do not hold"),
        ("nvfp4", "weight_global_scale", None, f"lacks the tensor {DOWN}.weight_global_scale"),
        ("nvfp4", "weight_global_scale", torch.zeros(1), "must be one number above 0"),
        ("nvfp4", "weight_scale", torch.full((64, 6), torch.nan).to(torch.float8_e4m3fn), "a scale that is not finite"),
        ("nvfp4", "weight_scale", torch.ones(64, 6), "has type float32, config.json makes it float8_e4m3fn"),
        ("nvfp4", "weight_packed", int32(64, 48), "has type int32, config.json makes it uint8"),
        ("nvfp4", "weight_packed", torch.zeros(64, 96, dtype=torch.uint8), "config.json makes it [64, 48]"),
        ("mxfp4", "weight_scale", torch.full((64, 3), 255, dtype=torch.uint8), "holds a scale that is not finite"),
    ],
    ids=lambda value: f"{str(value.dtype)[6:]} {tuple(value.shape)}" if isinstance(value, Tensor) else str(value),
)
def test_wrong_tensors_are_named(form: str, name: str, value: Tensor | None, text: str, tmp_path: Path) -> None:
    folder = write(form, tmp_path, {f"{DOWN}.{name}": value})
    with pytest.raises(ModelFormatError) as caught:
        load(folder, torch.float32)
    assert text in str(caught.value) and f"{DOWN}.{name}" in str(caught.value)


_TENSORS = (
    ".weight_packed",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_global_scale",
    "_proj.weight",
)
_SCALES = (".weight_scale", ".weight_global_scale")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_files_are_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    # In 3 and 6 bits a row may have the words of either packing.
    form = data.draw(st.sampled_from([form for form in FORMS if not form.startswith(("w3a16", "w6a16"))]))
    folder = write(form, tmp_path_factory.getbasetemp() / "damaged")
    tensors = dict(tensors_of(form))
    scales = tuple(n for n in tensors if n.endswith(_SCALES) and tensors[n].is_floating_point())
    of_form = FORMS[form]["matrices"]  # some matrices are plain
    stored = tuple(n for n in tensors if n.endswith(_TENSORS) and matrix_of(n) in of_form)
    damaged, rank = damage(tensors, stored, scales, data)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFormatError, match=re.escape(matrix_of(damaged))):
        load_matrices(folder, *rank)


def test_scales_that_are_too_large_together_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=f"{DOWN}.weight_scale in .* not finite"):
        load(write("nvfp4", tmp_path, {f"{DOWN}.weight_global_scale": torch.tensor([1e-44])}), torch.float32)


def test_a_plain_file_with_such_a_config(tmp_path: Path) -> None:
    change: dict[str, Tensor | None] = dict.fromkeys(tensors_of("w4a16"))
    change |= {name.replace("_packed", ""): torch.zeros(2) for name in change if name.endswith("packed")}
    with pytest.raises(ModelFormatError, match="lacks the tensor"):
        load(write("w4a16", tmp_path, change), torch.float32)


def write_linear(source: Path, folder: Path, targets: list[str]) -> tuple[Path, Path]:
    """All matrices of layers, which `transformers` computes with `Linear`, in integers of 8 bits; and their values."""
    stored: dict[str, Tensor] = {}
    values = load_file(source / "model.safetensors")
    for name, value in values.items():
        if not re.search(r"layers\..*(_proj|_proj_with_mqa)\.weight$", name):
            stored[name] = value
            continue
        scale = value.abs().amax(1, keepdim=True) / 127
        codes = (value / scale).round()
        stored |= {name: codes.to(torch.int8), f"{name}_scale": scale}
        values[name] = codes * scale
    said = json.loads((source / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": targets, "weights": weights}}
    section = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    paths = folder / "plain", folder / "stored"
    for path, tensors, more in ((paths[0], values, {}), (paths[1], stored, {"quantization_config": section})):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**said, **more}))
    return paths


@pytest.mark.parametrize("family", ["DeepseekV3", "GptOss", "Llama4"])
def test_a_class_has_all_layers_of_it(family: str, tmp_path: Path) -> None:
    """That which makes keys and values of latents too, and no experts that are one tensor: that is no layer."""
    source = make_tiny(family, {}, tmp_path / "tiny").folder
    plain, stored = write_linear(source, tmp_path, ["Linear"])
    check_ranks(stored, logits_of_threads(plain, 1), Ops())


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    source = make_tiny("GptOss", {}, tmp_path / "tiny").folder
    stored = write_linear(source, tmp_path, ["Linear", "re:.*experts.*"])[1]
    tensors = load_file(stored / "model.safetensors")
    tensors |= {name: value.to(torch.int8) for name, value in tensors.items() if name.endswith("gate_up_proj")}
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ModelFormatError, match="experts.gate_up_proj: its experts lie in one tensor"):
        load_matrices(stored)
