"""Checkpoints in GPTQ, AWQ and Marlin: every matrix equals what its file stands for, on every rank; greedy tokens equal `transformers`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, reference, run, start
from gptq_writing import (
    Codes,
    Tensors,
    Written,
    awq_tensors,
    check_same,
    encode,
    gptq_tensors,
    load_matrices,
    marlin_tensors,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import PROMPT, check_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ModelFormatError
from text_generation_inference.launch.check import check_model

pytestmark = pytest.mark.usefixtures("one_thread")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Of two ranks one has 24 of the width, and the other begins half way in a group of 16."""
    sizes = {"num_hidden_layers": 2, "num_local_experts": 3, "intermediate_size": 40}
    return make_tiny("Mixtral", sizes, tmp_path_factory.mktemp("mixtral"))


def write_gptq(source: Path, folder: Path, config: dict | None = None, **changes: object) -> Written:
    """`changes` are those of the writer from what config.json says."""
    said = {**GPTQ, **(config or {})}
    fields = {**said, **changes}
    version = 2 if fields.get("checkpoint_format") == "gptq_v2" else 1
    bits, size = fields["bits"], fields["group_size"]

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        if name == "lm_head.weight" and not said.get("lm_head"):
            return None
        groups = None
        if fields["desc_act"]:  # the same for all matrices that have the same inputs
            kind = "down" if "down_proj" in name or ".w2." in name else "o" if "o_proj" in name else "in"
            number = name.split(".experts.")[-1][0] if ".experts." in name else ""
            generator = torch.Generator().manual_seed(sum(map(ord, kind + number)))
            groups = torch.randperm(weight.shape[1], generator=generator) // size
        made = encode(weight, bits, size, fields["sym"], groups, fields.get("scale_dtype", torch.float16))
        return made, gptq_tensors(made, version)

    return write(source, folder, said, quantize)


CASES: dict[str, dict] = {
    "4": {},
    "4-asym": {"sym": False},
    "4-v2-asym": {"sym": False, "checkpoint_format": "gptq_v2"},
    "4-rows": {"group_size": -1, "desc_act": False},
    "4-g16": {"group_size": 16},
    "2-asym": {"bits": 2, "sym": False, "group_size": 16},
    "3": {"bits": 3},
    "3-asym": {"bits": 3, "sym": False},
    "3-v2-asym-order": {"bits": 3, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "8-order": {"bits": 8, "desc_act": True},
    "8-asym": {"bits": 8, "sym": False},
    "4-order": {"desc_act": True},
    "4-asym-order": {"desc_act": True, "sym": False},
}


@pytest.mark.parametrize("name", CASES)
def test_matrices(tiny_llama: Tiny, tmp_path: Path, name: str) -> None:
    held = check_same(write_gptq(tiny_llama.folder, tmp_path, CASES[name]))
    assert len(held) == 7 * 3 * 4  # ranks, layers, matrices of a layer
    case = {**GPTQ, **CASES[name]}
    assert {weight.bits for weight in held} == {8 if case["bits"] == 8 else 4}
    assert {weight.offset is None for weight in held} == {case["sym"]}
    assert {weight.order is None for weight in held} == {not case["desc_act"]}


@pytest.mark.parametrize("changes", [{"group_size": 16}, {"group_size": 16, "desc_act": True, "sym": False}])
def test_experts(mixtral: Tiny, tmp_path: Path, changes: dict) -> None:
    """Each expert has an order of its own; on two ranks their groups of `w2` are uneven, each in another way."""
    held = check_same(write_gptq(mixtral.folder, tmp_path, changes))
    assert len(held) == 7 * 2 * 4
    orders = [weight.order for weight in held]
    if changes.get("desc_act"):
        assert {None if order is None else order.dim() for order in orders} == {1, 2}
    else:
        # Two matrices of the second rank begin half way in a group.
        assert [order.shape for order in orders if order is not None] == [torch.Size([32])] * 2


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tokens(tiny_llama: Tiny, mixtral: Tiny, tmp_path: Path, family: str) -> None:
    tiny = tiny_llama if family == "llama" else mixtral
    written = write_gptq(tiny.folder, tmp_path, {"group_size": 16, "desc_act": True, "sym": False})
    prompts = random_prompts(320, [7, 23])
    engine = start(written.folder)
    assert any("gptq: 4 bits, groups of 16" in note for note in engine.notes)
    outputs = run(engine, [make_request(number, prompt, 12) for number, prompt in enumerate(prompts)])
    engine.close()
    model = written.model
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == reference(model, prompt, 12)[0]
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    check_ranks(written.folder, expected)


def test_ranks_in_processes(mixtral: Tiny, tmp_path: Path) -> None:
    """An order for each expert, whole experts on each rank, shapes of buckets: as one rank without any of it."""
    written = write_gptq(mixtral.folder, tmp_path, {"group_size": 16, "desc_act": True, "sym": False})
    requests = [make_request(number, prompt, 12) for number, prompt in enumerate(random_prompts(320, [7, 23]))]
    shapes: dict[str, Any] = {"bucketing": True, "max_total_tokens": 64, "max_batch_size": 2, "device": "cpu"}
    engine = start(written.folder, num_shard=2, expert_parallel=True, **shapes)
    outputs = run(engine, requests)
    engine.close()
    for request, output in zip(requests, outputs, strict=True):
        assert output.token_ids == reference(written.model, request.token_ids, 12)[0]


def test_random_weights(tiny_llama: Tiny, tmp_path: Path) -> None:
    config = json.loads((tiny_llama.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    prompt = random_prompts(320, [20])[0]
    for folder, more in ((tmp_path, {}), (tmp_path / "plain", {"quantize": "gptq", "dtype": None})):
        engine = start(folder, load_format="dummy", **more)
        assert any("matrices in few bits" in note for note in engine.notes)
        assert len(run(engine, [make_request(0, prompt, 4)])[0].token_ids) == 4
        engine.close()


# -- AWQ and Marlin ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Matrices whose outputs on two ranks are not all whole tiles of 64."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
    return make_tiny("Llama", sizes, tmp_path_factory.mktemp("wide"))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("changes", [{}, {"group_size": -1}, {"bits": 8, "group_size": 16}, {"zero_point": False}])
def test_awq(tiny_llama: Tiny, tmp_path: Path, changes: dict) -> None:
    fields = {**AWQ, **changes}

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        if name.startswith("lm_head") or "layers.1.mlp" in name:  # which is not said anywhere
            return None
        made = encode(weight, fields["bits"], fields["group_size"], symmetric=not fields["zero_point"])
        tensors = awq_tensors(made)
        return made, tensors if fields["zero_point"] else {k: v for k, v in tensors.items() if k != "qzeros"}

    written = write(tiny_llama.folder, tmp_path, fields, quantize)
    held = check_same(written)
    assert len(held) == 7 * (3 * 4 - 2) and {weight.offset is None for weight in held} == {not fields["zero_point"]}
    if not changes:  # as TGI's flag, and where config.json says nothing
        (written.folder / "config.json").write_text((written.plain / "config.json").read_text())
        assert len(check_same(written, (2,), quantize="gptq")) == len(check_same(written, (2,), quantize="awq")) == 20


def test_activations_that_are_divided(tmp_path: Path) -> None:
    """A family whose activation is no product has its smoothing beside it."""
    tiny = make_tiny("Starcoder2", {"num_hidden_layers": 2}, tmp_path / "tiny")

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        made = encode(weight, 4, 32, symmetric=False)
        return None if name.startswith("lm_head") else (made, awq_tensors(made))

    width = tiny.model.config.intermediate_size
    extra = {f"model.layers.{layer}.mlp.act.scales": torch.rand(width).half() + 0.5 for layer in range(2)}
    divisors = {name.replace("act.scales", "c_proj.weight"): value.float() for name, value in extra.items()}
    written = write(tiny.folder, tmp_path, AWQ, quantize, extra, divisors)
    assert len(check_same(written)) == 7 * 2 * 3
    extra["model.layers.1.mlp.act.scales"][3] = 0
    damaged = write(tiny.folder, tmp_path / "damaged", AWQ, quantize, extra)
    with pytest.raises(ModelFormatError, match=r"model\.layers\.1\.mlp\.act\.scales in .* holds a divisor that is 0"):
        check_same(damaged)


@pytest.mark.parametrize("size", [-1, 64])
def test_marlin(wide: Tiny, tmp_path: Path, size: int) -> None:
    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        if name.startswith("lm_head"):
            return None
        made = encode(weight, 4, size)
        return made, marlin_tensors(made)

    config = {**GPTQ, "group_size": size, "checkpoint_format": "marlin"}
    written = write(wide.folder, tmp_path, config, quantize)
    assert len(check_same(written)) == 7 * 4
    (written.folder / "config.json").write_text((written.plain / "config.json").read_text())
    assert len(check_same(written, (1,), quantize="marlin")) == 4


# -- what else a file may have -----------------------------------------------------------------------------------------


def test_one_matrix_unlike_the_others(tiny_llama: Tiny, tmp_path: Path) -> None:
    """Bits by rule, a head, biases of zeros, an index of zeros; queries, keys and values in the bits that hold all."""
    rules = {
        "+:.*down_proj": {"bits": 8, "group_size": 16},
        "+:.*v_proj": {"bits": 8, "group_size": 16},
        "-:.*o_proj": {},
    }
    config = {**GPTQ, "dynamic": rules, "lm_head": True}

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        if "o_proj" in name:
            return None
        bits, size = (8, 16) if "down_proj" in name or "v_proj" in name else (4, 32)
        made = encode(weight, bits, size)
        tensors = gptq_tensors(made)
        tensors["g_idx"] = torch.zeros_like(tensors["g_idx"])
        return made, {**tensors, **({} if name == "lm_head.weight" else {"bias": torch.zeros(len(weight))})}

    held = check_same(write(tiny_llama.folder, tmp_path, config, quantize))
    assert sorted(weight.bits for weight in held) == [4] * 21 + [8] * 42  # gate_up; qkv and down of 3 layers on 7 ranks


def test_orders_that_differ(tiny_llama: Tiny, tmp_path: Path) -> None:
    """Queries and keys whose inputs are sorted in different ways cannot be one matrix in few bits."""

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        if name == "lm_head.weight":
            return None
        made = encode(weight, 4, 32, groups=torch.randperm(weight.shape[1]) // 32)
        return made, gptq_tensors(made)

    written = write(tiny_llama.folder, tmp_path, {**GPTQ, "desc_act": True}, quantize)
    assert len(check_same(written, (1,))) == 3 * 2
    engine = start(written.folder)
    assert run(engine, [make_request(0, [5, 9, 77], 4)])[0].token_ids == reference(written.model, [5, 9, 77], 4)[0]
    engine.close()


def test_files_of_tgi(tiny_llama: Tiny, tmp_path: Path) -> None:
    """Nothing in config.json, or something else: tensors tell."""

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        if name == "lm_head.weight":
            return None
        made = encode(weight, 8, 16, symmetric=False)
        return made, gptq_tensors(made)

    extra = {"gptq_bits": torch.tensor([8]), "gptq_groupsize": torch.tensor([16]), "gptq_sym": torch.tensor([0])}
    for number, config in enumerate((None, GPTQ)):
        written = write(tiny_llama.folder, tmp_path / str(number), config, quantize, extra)
        assert len(check_same(written, quantize="gptq")) == 7 * 3 * 4


def test_check_reads_what_tensors_tell(tiny_llama: Tiny, tmp_path: Path) -> None:
    """Bits and groups, where nothing else does; a head that config.json does not know of; on ranks, too."""

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors]:
        made = encode(weight, 8, 16, symmetric=False)
        return made, gptq_tensors(made)

    folder = write(tiny_llama.folder, tmp_path, None, quantize).folder
    for ranks in (1, 2):
        engine = start(folder, quantize="gptq", dtype=None, num_shard=ranks)
        taken = engine.facts.weight_bytes
        engine.close()
        told = check_model(ServerConfig(model_id=str(folder), quantize="gptq", device="cpu", num_shard=ranks))
        assert told.weight_bytes == taken and len(told.ranks) == (ranks if ranks > 1 else 0)


def test_biases_of_the_file(tiny_llama: Tiny, tmp_path: Path) -> None:
    """One that is not zero, in a model without biases, changes answers: it is not passed over."""

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        made = encode(weight)
        return made, {**gptq_tensors(made), "bias": torch.full((len(weight),), 0.5 if "layers.2.mlp.up" in name else 0)}

    written = write(tiny_llama.folder, tmp_path, {**GPTQ, "lm_head": True}, quantize)
    with pytest.raises(ModelFormatError, match=r"model.layers.2.mlp.up_proj.bias .* is a bias that this architecture"):
        load_matrices(written.folder)


DAMAGE = ("missing", "type", "shape", "index", "scale", "name")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_files_are_named(damaged: tuple[Written, Tensors], data: st.DataObject) -> None:
    written, tensors = damaged
    damage = data.draw(st.sampled_from(DAMAGE))
    kinds = {"index": ".g_idx", "scale": ".scales"}
    names = sorted(name for name in tensors if name.endswith(kinds.get(damage, (".qweight", ".qzeros", ".scales"))))
    name = data.draw(st.sampled_from(names))
    value, changed = tensors[name], dict(tensors)
    match damage:
        case "missing":
            del changed[name]
        case "name":
            changed[name + "x"] = changed.pop(name)
        case "type":
            kind = data.draw(st.sampled_from((torch.int64, torch.float64, torch.uint8, torch.int16)))
            changed[name] = value.to(kind)
        case "shape":
            shape = list(value.shape)
            place = data.draw(st.integers(0, 1))
            shape[place] += data.draw(st.sampled_from((-1, 1, shape[place])))
            changed[name] = torch.zeros(shape, dtype=value.dtype)
        case "index":
            value = value.clone()
            value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.sampled_from((-1, len(value), 2**30)))
            changed[name] = value
        case _:
            value = value.clone()
            value[0, data.draw(st.integers(0, value.shape[1] - 1))] = data.draw(st.sampled_from((math.inf, math.nan)))
            changed[name] = value
    save_file(changed, written.folder / "model.safetensors")
    with pytest.raises(ModelFormatError, match=re.escape(name)):
        load_matrices(written.folder, *data.draw(st.sampled_from(((0, 1), (1, 2)) if damage != "scale" else ((0, 1),))))


@pytest.fixture(scope="module")
def damaged(wide: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, Tensors]:
    folder = tmp_path_factory.mktemp("damaged")
    written = write_gptq(wide.folder, folder, {"desc_act": True, "sym": False})
    return written, load_file(written.folder / "model.safetensors")
