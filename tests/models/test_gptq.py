"""Checkpoints in GPTQ: every matrix equals what its file stands for, on every rank; greedy tokens equal `transformers`."""

import json
from pathlib import Path

import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, reference, run, start
from gptq_writing import Codes, Tensors, Written, check_same, encode, gptq_tensors, write
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Mixtral", {"num_hidden_layers": 2, "num_local_experts": 3}, tmp_path_factory.mktemp("mixtral"))


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
    assert len(held) == 3 * 3 * 4  # ranks, layers, matrices of a layer
    case = {**GPTQ, **CASES[name]}
    assert {weight.bits for weight in held} == {8 if case["bits"] == 8 else 4}
    assert {weight.offset is None for weight in held} == {case["sym"]}
    assert {weight.order is None for weight in held} == {not case["desc_act"]}


@pytest.mark.parametrize("changes", [{"group_size": 16}, {"group_size": 16, "desc_act": True, "sym": False}])
def test_experts(mixtral: Tiny, tmp_path: Path, changes: dict) -> None:
    """Each expert has an order of its own; on two ranks their groups of `w2` are uneven, each in another way."""
    held = check_same(write_gptq(mixtral.folder, tmp_path, changes))
    assert len(held) == 3 * 2 * 4
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


def test_random_weights(tiny_llama: Tiny, tmp_path: Path) -> None:
    config = json.loads((tiny_llama.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    prompt = random_prompts(320, [20])[0]
    for folder, settings in ((tmp_path, {}), (tmp_path / "plain", {"quantize": "gptq", "dtype": None})):
        engine = start(folder, load_format="dummy", **settings)
        assert any("matrices in few bits" in note for note in engine.notes)
        assert len(run(engine, [make_request(0, prompt, 4)])[0].token_ids) == 4
        engine.close()
