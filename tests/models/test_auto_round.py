"""Checkpoints of AutoRound: tensors of GPTQ or AWQ under its own words; greedy tokens equal the dequantised model's."""

import json
import re
from pathlib import Path

import pytest
import transformers
from driving import Tiny, make_request, random_prompts, reference, run, start
from gptq_writing import Codes, Tensors, Written, awq_tensors, check_same, encode, gptq_tensors, write
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.quant import awq, gptq
from text_generation_inference.quant.choose import choose_quantization, detect, name_quantization

pytestmark = pytest.mark.usefixtures("one_thread")

SAID = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "sym": True}
# By the words of its packing: the method, and what is taken off stored zero points.
FORMS: dict[str, tuple[dict, int | None]] = {
    "gptq": ({"packing_format": "auto_round:auto_gptq"}, 1),
    "gptq-short": ({"quant_method": "auto_round", "packing_format": "auto_round:gptq", "backend": "awq"}, 1),
    "gptq-plain": ({"packing_format": "auto_gptq"}, 1),
    "unsaid": ({"backend": "auto"}, 1),
    "own": ({"packing_format": "auto_round"}, 0),
    "gptqmodel": ({"packing_format": "auto_round:gptqmodel"}, 0),
    "awq": ({"packing_format": "auto_round:auto_awq"}, None),
    "awq-short": ({"packing_format": "auto_round:awq"}, None),
    "awq-plain": ({"packing_format": "auto_awq"}, None),
    "old-gptq": ({"quant_method": "intel/auto-round", "backend": "gptq:exllamav2"}, 1),
    "old-own-gptq": ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}, 1),
    "old-own": ({"quant_method": "intel/auto-round", "backend": "autoround:exllamav2"}, 0),
    "old-awq": ({"quant_method": "intel/auto-round", "backend": "auto_round:awq:gemm"}, None),
}
# A name, an expression that it also matches, and one that matches within names.
EXTRA = {
    r".*layers\.1\..*": {"bits": 8},
    "model.layers.1.mlp.down_proj": {"bits": 4, "group_size": 16},
    r"layers\.2\.self_attn\.[qkv]_proj": {"group_size": 16, "sym": True, "data_type": "int", "act_bits": 16},
    "model.layers.2.mlp.up_proj": {"bits": 16, "data_type": "fp"},
    "model.layers.2.mlp.gate_proj": {"bits": 16},
    "mlp.never": {},
}


def write_auto_round(source: Path, folder: Path, form: str, **said: object) -> Written:
    words, less = FORMS[form]
    fields = {**SAID, **words, **said}
    extra = fields.get("extra_config") or {}

    def quantize(name: str, weight: Tensor) -> tuple[Codes, Tensors] | None:
        if name == "lm_head.weight":
            return None
        name = name.removesuffix(".weight")
        found = extra.get(name) or next((extra[key] for key in extra if re.search(key, name)), {})
        each = {**fields, **found}
        if each["bits"] == 16:
            return None
        made = encode(weight, each["bits"], each["group_size"], each["sym"])
        tensors = awq_tensors(made) if less is None else gptq_tensors(made, 1 if less else 2, with_index=False)
        return made, tensors

    return write(source, folder, fields, quantize)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-points"])
def test_matrices(tiny_llama: Tiny, tmp_path: Path, form: str, symmetric: bool) -> None:
    """Bit for bit, whichever version zero points are in."""
    held = check_same(write_auto_round(tiny_llama.folder, tmp_path, form, sym=symmetric), (1, 2))
    assert len(held) == 3 * 3 * 4
    has_zeros = not symmetric or FORMS[form][1] is None  # AWQ's files have them always, and they are read
    assert {weight.offset is not None for weight in held} == {has_zeros}


@pytest.mark.parametrize("form", ["gptq", "own", "awq"])
def test_matrices_with_rules(tiny_llama: Tiny, tmp_path: Path, form: str) -> None:
    """Names come before expressions, which match anywhere; 16 bits are plain."""
    written = write_auto_round(tiny_llama.folder, tmp_path, form, sym=False, extra_config=EXTRA)
    held = check_same(written, (1, 2))
    # On each of three ranks: qkv, o and gate_up of the second layer have 8 bits, gate_up of the third is plain.
    assert sorted(weight.bits for weight in held) == [4] * 24 + [8] * 9
    sizes = {weight.group_size for weight in held if weight.bits == 4}
    assert sizes == {16, 32}


@pytest.mark.parametrize("form", ["gptq", "own", "awq"])
def test_tokens(tiny_llama: Tiny, tmp_path: Path, form: str) -> None:
    written = write_auto_round(tiny_llama.folder, tmp_path, form, sym=False, extra_config=EXTRA)
    engine = start(written.folder)
    prompts = random_prompts(320, [7, 23])
    outputs = run(engine, [make_request(number, prompt, 12) for number, prompt in enumerate(prompts)])
    engine.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == reference(written.model, prompt, 12)[0]


def test_random_weights(tiny_llama: Tiny, tmp_path: Path) -> None:
    config = json.loads((tiny_llama.folder / "config.json").read_text())
    for form in ("gptq", "awq"):
        section = {**SAID, **FORMS[form][0], "extra_config": EXTRA}
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
        engine = start(tmp_path, load_format="dummy")
        assert any(f"{form}: 4 bits, groups of 32" in note for note in engine.notes)
        assert len(run(engine, [make_request(0, [5, 9, 77], 4)])[0].token_ids) == 4
        engine.close()


def test_rules() -> None:
    """Whole parts of names count, so that what a matrix is in may be named too."""
    extra = {"layers.1": {"bits": 8}, "layers.1.mlp.up": {"bits": 2}, "lm_head": {"bits": 8}, "o_proj$": {"bits": 16}}
    config = {**SAID, "packing_format": "auto_round", "extra_config": extra}
    found = detect({"quantization_config": config}, "config.json")
    assert isinstance(found, gptq.GptqQuantization) and found.has_head
    names = ("layers.1.mlp.up", "layers.1.mlp.down", "layers.11.mlp.up", "lm_head", "layers.0.o_proj")
    stored = [found.rule(f"model.{name}") for name in names]
    assert [each and each.bits for each in stored] == [2, 8, 4, 8, None]
    assert choose_quantization("gptq", found) is found
    by_awq = detect({"quantization_config": {**SAID, "packing_format": "auto_round:auto_awq"}}, "config.json")
    assert isinstance(by_awq, awq.AwqQuantization) and choose_quantization("awq", by_awq) is by_awq
    assert name_quantization({"quantization_config": config}) == "auto-round, 4 bits"


def test_what_is_left_out_is_as_its_own_config_has_it() -> None:
    """Unlike what a config of GPTQ leaves out."""
    said = transformers.AutoRoundConfig()
    for form, (words, _) in FORMS.items():
        found = detect({"quantization_config": {"quant_method": "auto-round", **words}}, "config.json")
        assert isinstance(found, gptq.GptqQuantization | awq.AwqQuantization), form
        stored = found.stored
        symmetric = stored.is_symmetric if isinstance(stored, gptq.Stored) else not stored.has_zeros
        assert (stored.bits, stored.group_size, symmetric) == (said.bits, said.group_size, said.sym)
    all_inputs = detect({"quantization_config": {**SAID, "group_size": -1, "sym": False}}, "config.json")
    assert isinstance(all_inputs, gptq.GptqQuantization)
    assert all_inputs.stored.group_size is None and not all_inputs.stored.is_symmetric
    others = detect({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "config.json")
    assert isinstance(others, gptq.GptqQuantization)
    assert others.stored.group_size is None and not others.stored.is_symmetric


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "`packing_format` 'auto_round:llm_compressor' is not"),
        ({"packing_format": "auto_round:fp8_static"}, "`packing_format` 'auto_round:fp8_static' is not supported"),
        ({"packing_format": "mlx"}, "`packing_format` 'mlx' is not supported"),
        ({"packing_format": 4}, "`packing_format` must be text"),
        ({"backend": "itrex"}, "`backend` 'itrex' is not supported, auto_round:auto_gptq, auto_round:auto_awq"),
        ({"data_type": "mx_fp"}, "`data_type` 'mx_fp' is not supported, int is"),
        ({"data_type": "fp8"}, "`data_type` 'fp8' is not supported, int is"),
        ({"act_bits": 8}, "`act_bits` 8 is not supported, 16 (inputs that are not rounded) is"),
        ({"spinquant_config": {"r3": True}}, "`spinquant_config` {'r3': True} is not supported, none is"),
        ({"bits": 6}, "`bits` 6 is not supported, 2 or 3 or 4 or 8 is"),
        ({"bits": 3, "packing_format": "auto_round:auto_awq"}, "`bits` 3 is not supported, 4 or 8 is"),
        ({"group_size": 0}, "`group_size` 0 is not supported"),
        ({"extra_config": []}, None),
        ({"extra_config": [1]}, "extra_config must be an object"),
        ({"extra_config": {"a": 4}}, "extra_config.a must be an object"),
        ({"extra_config": {"a": {"bits": 5}}}, "extra_config.a: `bits` 5 is not supported"),
        ({"extra_config": {"a": {"data_type": "nv_fp"}}}, "extra_config.a: `data_type` 'nv_fp' is not supported"),
        ({"extra_config": {"a(": {"bits": 8}}}, "`extra_config` has 'a('"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(changes: dict, text: str | None) -> None:
    config = {"quantization_config": {**SAID, **changes}}
    if text is None:
        detect(config, "config.json")
        return
    with pytest.raises(ModelFormatError, match=re.escape(text)):
        detect(config, "config.json")
