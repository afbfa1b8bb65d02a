"""QUANT_CONFIG in the form of both toolkits: what each key means, and what is refused."""

import json
from pathlib import Path

import pytest

from text_generation_inference.errors import StartError
from text_generation_inference.quant.inc.config import KV_CACHE, LINEAR, CalibrationConfig, read_calibration
from text_generation_inference.quant.inc.scales import GAUDI2, METHODS, Rounding, Rule, ScaleMethod, Value

EMPTY = {"types": [], "names": []}
# As the samples of the older toolkit have it, and of the newer one.
HQT_MEASURE = {
    "method": "HOOKS",
    "mode": "MEASURE",
    "observer": "maxabs",
    "whitelist": EMPTY,
    "blacklist": EMPTY,
    "dump_stats_path": "./hqt_output/measure",
    "dump_stats_xlsx_path": "./hqt_output/measure/fp8stats.xlsx",
}
INC_QUANTIZE = {
    "method": "HOOKS",
    "mode": "QUANTIZE",
    "observer": "maxabs",
    "scale_method": "maxabs_hw",
    "allowlist": EMPTY,
    "blocklist": EMPTY,
    "dump_stats_path": "./hqt_output/measure",
}
DOWN = "model.layers.3.mlp.down_proj"


def read(tmp_path: Path, value: object) -> CalibrationConfig:
    path = tmp_path / "config.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return read_calibration(path)


def test_both_forms(tmp_path: Path) -> None:
    measure, quantize = read(tmp_path, HQT_MEASURE), read(tmp_path, INC_QUANTIZE)
    assert (measure.mode, quantize.mode) == ("MEASURE", "QUANTIZE")
    assert measure.stats == quantize.stats == Path("hqt_output/measure")
    assert quantize.methods.find(LINEAR, DOWN) == METHODS["maxabs_hw"]
    assert measure.excluded == {"outputs"}
    assert measure.notes == ("QUANT_CONFIG `dump_stats_xlsx_path` has no effect: no spreadsheet is written",)
    assert quantize.notes == ()
    assert all(quantize.selects(kind, DOWN) for kind in (LINEAR, KV_CACHE))


def test_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, {"calibration_sample_interval": None})
    assert (config.mode, config.observer, config.stats) == ("QUANTIZE", "maxabs", Path("stats"))
    assert config.methods.default == METHODS["maxabs_hw"]
    assert config.generation is None and not config.ignores_unmeasured and config.save_every == 0


@pytest.mark.parametrize("names", [("allowlist", "blocklist"), ("whitelist", "blacklist")])
def test_lists(tmp_path: Path, names: tuple[str, str]) -> None:
    allow, block = names
    config = read(tmp_path, {block: {"types": ["KVCache"], "names": [r"layers\.3\.mlp", "lm_head"]}})
    assert not config.selects(KV_CACHE, "model.layers.0.self_attn.k_cache")
    assert not config.selects(LINEAR, DOWN) and not config.selects(LINEAR, "lm_head")
    assert config.selects(LINEAR, "model.layers.30.mlp.down_proj")
    config = read(tmp_path, {allow: {"types": ["KVCache"], "names": ["down"]}, block: {"names": [r"\.30\."]}})
    assert config.selects(LINEAR, DOWN) and config.selects(KV_CACHE, "a.k_cache")
    assert not config.selects(LINEAR, "model.layers.3.mlp.up_proj")
    assert not config.selects(LINEAR, "model.layers.30.mlp.down_proj")


def test_values_are_read_in_any_case(tmp_path: Path) -> None:
    given = {"mode": "measure", "observer": "MAXABS", "scale_method": "MAXABS_POW2", "measure_exclude": "none"}
    config = read(tmp_path, {**given, "fp8_config": "e4m3", "ignore_modules_wo_measures": "True"})
    assert (config.mode, config.observer, config.excluded) == ("MEASURE", "maxabs", frozenset())
    assert config.methods.default == METHODS["maxabs_pow2"] and config.ignores_unmeasured


def test_methods_by_place(tmp_path: Path) -> None:
    by_row = {"granularity": "pcs", "scale_value_type": "opt", "rounding_method": "pow2", "backoff": 1}
    method = {
        "default": {"activation": {"rounding_method": "IDENTITY"}},
        "layer_types": {"KVCache": "maxabs_pow2"},
        "layers": {r"layers\.3\.": {"weight": by_row}},
        "nodes": {DOWN: "unit_scale"},
    }
    methods = read(tmp_path, {"scale_method": method, "scale_params": {"input_backoff": 0.5}}).methods
    usual = ScaleMethod(Rule(Value.MAXABS, Rounding.HARDWARE, 0.5), Rule(Value.MAXABS, Rounding.IDENTITY, 0.5))
    assert methods.find(LINEAR, "model.layers.0.mlp.up_proj") == usual
    assert methods.find(KV_CACHE, "model.layers.0.self_attn.k_cache") == METHODS["maxabs_pow2"]
    beside = methods.find(LINEAR, "model.layers.3.mlp.up_proj")
    assert beside == ScaleMethod(Rule(Value.OPT, Rounding.POW2, 1.0, by_channel=True), usual.activation)
    assert methods.find(LINEAR, DOWN) == METHODS["unit_scale"]


def test_backoffs(tmp_path: Path) -> None:
    config = read(tmp_path, {"scale_params": {"weight_backoff": 1, "input_backoff": 0.125}})
    assert (config.methods.default.weight.backoff, config.methods.default.activation.backoff) == (1.0, 0.125)


def test_generation(tmp_path: Path) -> None:
    assert read(tmp_path, {"device_for_scales": "gaudi2"}).generation == GAUDI2


def test_what_has_no_effect_is_told(tmp_path: Path) -> None:
    given = {"scale_format": "CONST", "use_qdq": True, "hp_dtype": "bf16", "colour": "red"}
    notes = read(tmp_path, given).notes
    assert len(notes) == 4
    assert notes[-1] == "QUANT_CONFIG `colour` has no effect: it is not known"
    lists = {"blocklist": {"types": ["Softmax", "Linear"]}, "scale_method": {"layer_types": {"lineer": "unit_scale"}}}
    served = "Linear, KVCache, Matmul, ModuleFusedSDPA"
    assert read(tmp_path, lists).notes == tuple(
        f"QUANT_CONFIG: type {name!r} has no effect: what is quantised has the types {served}"
        for name in ("Softmax", "lineer")
    )


def test_names_of_types(tmp_path: Path) -> None:
    given = {"blocklist": {"types": ["VLLMKVCache"]}, "scale_method": {"layer_types": {"linear": "unit_scale"}}}
    config = read(tmp_path, given)
    assert not config.selects(KV_CACHE, "a.k_cache") and config.selects(LINEAR, DOWN) and not config.notes
    assert config.methods.find(LINEAR, DOWN) == METHODS["unit_scale"]


REFUSED = {
    "mode LOAD": ({"mode": "LOAD"}, "leave QUANT_CONFIG out"),
    "mode SHAPE": ({"mode": "SHAPE"}, "use MEASURE"),
    "mode unknown": ({"mode": "x"}, "use one of MEASURE, QUANTIZE"),
    "observer save": ({"observer": "save"}, "tensors are not dumped"),
    "observer unknown": ({"observer": "mean"}, "use maxabs or maxabs_per_channel"),
    "e5m2": ({"fp8_config": "E5M2"}, "e4m3"),
    "dynamic": ({"dynamic_quantization": True}, "`quantize` fp8"),
    "dynamic as text": ({"dynamic_quantization": "True"}, "`quantize` fp8"),
    "dynamic method": ({"scale_method": "maxabs_pcs_pow2"}, "dynamic"),
    "method unknown": ({"scale_method": "best"}, "use one of unit_scale"),
    "classes": ({"mod_dict": {"A": "linear"}}, "classes of modules"),
    "weights stay": ({"quantize_weight": False}, "blocklist"),
    "sums": ({"row_parallel_linear_allreduce_quantization": True}, "sums over ranks"),
    "two lists": ({"allowlist": {"names": ["a"]}, "whitelist": {"names": ["b"]}}, "two names of the same"),
    "list of what": ({"blocklist": ["a"]}, "must be"),
    "no pattern": ({"blocklist": {"names": ["("]}}, "which is no pattern"),
    "names as text": ({"blocklist": {"names": "a"}}, "must be a list of names"),
    "backoff": ({"scale_params": {"input_backoff": 0}}, "above 0"),
    "params": ({"scale_params": {"std": 1}}, "weight_backoff and input_backoff"),
    "device": ({"device_for_scales": "GAUDI1"}, "use one of GAUDI2, GAUDI3"),
    "path": ({"dump_stats_path": "/"}, "first part of file names"),
    "no path": ({"dump_stats_path": "a\0b"}, "first part of file names"),
    "flag": ({"ignore_modules_wo_measures": "maybe"}, "must be true or false"),
    "interval": ({"calibration_sample_interval": -1}, "number of passes"),
    "by row": ({"scale_method": {"default": {"activation": {"granularity": "PCS"}}}}, "PTS and MAXABS"),
    "fixed": ({"scale_method": {"default": {"weight": {"scale_value_type": "FIXED_VALUE"}}}}, "FIXED_VALUE goes with"),
    "place": ({"scale_method": {"modules": {}}}, "has no member 'modules'"),
    "not JSON": ("{", "is not JSON"),
    "lists in lists": ("[" * 100_000, "is not JSON"),
    "no object": ("[]", "must hold a JSON object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_why(tmp_path: Path, case: str) -> None:
    value, words = REFUSED[case]
    with pytest.raises(StartError, match=words) as caught:
        read(tmp_path, value)
    assert "config.json" in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"`quant_config` .*nothing.json cannot be read"):
        read_calibration(tmp_path / "nothing.json")
