"""Reads QUANT_CONFIG: the JSON with which Intel Neural Compressor, or the older Habana toolkit, is told what to do.

Both forms have the same keys, some under two names. What would change answers and cannot be done here is
refused with the way out; what has no effect is told in `notes`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from text_generation_inference.config import expand_home
from text_generation_inference.errors import StartError
from text_generation_inference.quant.inc.scales import (
    DEFAULT_METHOD,
    GENERATIONS,
    METHODS,
    CardGeneration,
    Rounding,
    Rule,
    ScaleMethod,
    Value,
)

# Classes of what is quantised here; the last two are both products of attention, by themselves and as one op.
LINEAR, KV_CACHE, MATMUL, FUSED_ATTENTION = _KINDS = ("Linear", "KVCache", "Matmul", "ModuleFusedSDPA")
_OTHER_NAMES = {"VLLMKVCache": KV_CACHE}  # that another engine has for one of them
_ANY_CASE = {name.lower(): name for name in (*_KINDS, *_OTHER_NAMES)}
HEAD = "lm_head"  # path of the head, whatever a checkpoint calls it
OBSERVERS = ("maxabs", "maxabs_per_channel")
_MODES = {
    "MEASURE": "",
    "QUANTIZE": "",
    "NONE": "",
    "SHAPE": "shapes are known from the model: use MEASURE",
    "LOAD": "a checkpoint in FP8 says so in its config.json: leave QUANT_CONFIG out",
    "AUTO": "use MEASURE, then QUANTIZE",
}
_PER_TOKEN = ("maxabs_pcs_pow2", "act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw")
_SAMPLED = "`quantize` fp8 finds scales from each input, without measuring"
# Keys with the values that can be served; others are refused with the reason.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp8_config": (("E4M3",), "products are computed from e4m3 values"),
    "dynamic_quantization": ((False,), _SAMPLED),
    "row_parallel_linear_allreduce_quantization": ((False,), "sums over ranks are not quantised"),
    "quantize_weight": ((True,), "a product in FP8 needs both sides in FP8: put the module on the blocklist"),
    "mod_dict": (({},), "classes of modules cannot be added"),
}
_NO_EFFECT = {
    "dump_stats_xlsx_path": "no spreadsheet is written",
    "scale_format": "scales are tensors on the device",
    "hp_dtype": "--dtype says it",
    "use_qdq": "the device's products are used where it has them",
    "fake_quant": "the device's products are used where it has them",
    "recalc_scales": "scales are always calculated from the statistics",
    "seperate_measure_files": "each rank has its file",
    "measure_on_hpu": "measuring runs where the model does",
}
_USED = frozenset(
    {
        "method",
        "mode",
        "observer",
        "dump_stats_path",
        "allowlist",
        "blocklist",
        "whitelist",
        "blacklist",
        "scale_method",
        "scale_params",
        "measure_exclude",
        "device_for_scales",
        "ignore_modules_wo_measures",
        "calibration_sample_interval",
    }
)
_EXCLUDES: dict[str, frozenset[str]] = {
    "NONE": frozenset(),
    "INPUT": frozenset({"inputs"}),
    "OUTPUT": frozenset({"outputs"}),
    "PARAMS": frozenset({"params"}),
    "ALL": frozenset({"inputs", "outputs", "params"}),
}


@dataclass(frozen=True, slots=True)
class Selection:
    types: tuple[str, ...] = ()  # names of classes
    names: tuple[str, ...] = ()  # regular expressions, searched in a module's path

    def matches(self, kind: str, path: str) -> bool:
        return kind in self.types or self.names_path(path)

    def names_path(self, path: str) -> bool:
        return any(re.search(pattern, path) for pattern in self.names)

    def __bool__(self) -> bool:
        return bool(self.types or self.names)


@dataclass(frozen=True, slots=True)
class ScaleMethods:
    """Which method a module's scales are made with."""

    default: ScaleMethod = METHODS[DEFAULT_METHOD]
    by_type: Mapping[str, ScaleMethod] = field(default_factory=dict[str, ScaleMethod])  # by class, in small letters
    by_layer: Mapping[str, ScaleMethod] = field(default_factory=dict[str, ScaleMethod])  # by regular expression
    by_node: Mapping[str, ScaleMethod] = field(default_factory=dict[str, ScaleMethod])  # by path

    @property
    def need_statistics(self) -> bool:
        methods = (self.default, *self.by_type.values(), *self.by_layer.values(), *self.by_node.values())
        return any(method.needs_statistics for method in methods)

    def find(self, kind: str, path: str) -> ScaleMethod:
        if path in self.by_node:
            return self.by_node[path]
        for pattern, method in self.by_layer.items():
            if re.search(pattern, path):
                return method
        return self.by_type.get(kind.lower(), self.default)


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    source: str  # the file, for errors
    mode: str = "QUANTIZE"
    observer: str = "maxabs"
    stats: Path = Path("stats")  # folder and first part of the names of all files
    allowed: Selection = Selection()
    blocked: Selection = Selection()
    methods: ScaleMethods = field(default_factory=ScaleMethods)
    generation: CardGeneration | None = None  # None: what fits the device
    excluded: frozenset[str] = _EXCLUDES["OUTPUT"]  # of inputs, outputs and params: what is not measured
    ignores_unmeasured: bool = False  # such modules stay as they are
    save_every: int = 0  # passes; 0: at the end
    notes: tuple[str, ...] = ()

    def selects(self, kind: str, path: str) -> bool:
        """Whether a module is measured or quantised."""
        if kind in self.blocked.types or self.blocked.names_path(path):
            return False
        return not self.allowed or self.allowed.matches(kind, path)


def read_calibration(path: Path) -> CalibrationConfig:
    try:
        value = json.loads(expand_home(str(path), "quant_config").read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(
            f"`quant_config` {path} cannot be read: {error.strerror}. It is the JSON file that says what to measure or"
            " to quantise."
        ) from None
    except (ValueError, RecursionError) as error:
        raise StartError(f"`quant_config` {path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartError(f"`quant_config` {path} must hold a JSON object")
    return _Reader(value, str(path)).read()


class _Reader:
    """A JSON object whose wrong members are named in the error."""

    def __init__(self, value: Mapping[str, Any], source: str) -> None:
        self._value = value
        self._source = source
        self._strangers: dict[str, None] = {}  # types of modules that nothing here is of

    def refuse(self, key: str, why: str) -> StartError:
        return StartError(f"{self._source}: `{key}` {self._value.get(key)!r} is not supported: {why}")

    def read(self) -> CalibrationConfig:
        for key, (served, why) in _ONLY.items():
            given = self._value.get(key)
            if isinstance(given, str):
                given = {"TRUE": True, "FALSE": False}.get(given.upper(), given.upper())
            if given is not None and given not in served:
                raise self.refuse(key, why)
        return CalibrationConfig(
            source=self._source,
            mode=self._mode(),
            observer=self._observer(),
            stats=self._stats(),
            allowed=self._selection("allowlist", "whitelist"),
            blocked=self._selection("blocklist", "blacklist"),
            methods=self._methods(),
            generation=self._generation(),
            excluded=_EXCLUDES[self._choice("measure_exclude", "OUTPUT", _EXCLUDES)],
            ignores_unmeasured=self._flag("ignore_modules_wo_measures"),
            save_every=self._count("calibration_sample_interval"),
            notes=self._notes(),
        )

    def _mode(self) -> str:
        mode = self._choice("mode", "QUANTIZE", _MODES)
        if _MODES[mode]:
            raise self.refuse("mode", _MODES[mode])
        return mode

    def _observer(self) -> str:
        observer = self._text("observer", "maxabs").lower()
        if observer == "shape":
            raise self.refuse("observer", "shapes are known from the model: use maxabs")
        if observer == "save":
            raise self.refuse("observer", "tensors are not dumped: use maxabs")
        if observer not in OBSERVERS:
            raise self.refuse("observer", f"use {' or '.join(OBSERVERS)}")
        return observer

    def _stats(self) -> Path:
        text = self._text("dump_stats_path", "stats")
        path = expand_home(text, "dump_stats_path")
        if not path.name or "\0" in text:
            raise self.refuse("dump_stats_path", "it is a folder and the first part of file names, such as out/measure")
        return path

    def _generation(self) -> CardGeneration | None:
        if self._value.get("device_for_scales") is None:
            return None
        return GENERATIONS[self._choice("device_for_scales", "", GENERATIONS)]

    def _selection(self, name: str, old_name: str) -> Selection:
        found = [self._one_selection(key) for key in (name, old_name) if self._value.get(key) is not None]
        if len(found) == 2 and found[0] != found[1]:
            raise StartError(f"{self._source}: `{name}` and `{old_name}` are two names of the same: give one of them")
        return found[0] if found else Selection()

    def _one_selection(self, key: str) -> Selection:
        value = self._value[key]
        if not isinstance(value, Mapping) or value.keys() - {"types", "names"}:
            raise StartError(f'{self._source}: `{key}` must be {{"types": [...], "names": [...]}}, it is {value!r}')
        lists = [value.get(part) or [] for part in ("types", "names")]
        for part, items in zip(("types", "names"), lists, strict=True):
            if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
                raise StartError(f"{self._source}: `{key}.{part}` must be a list of names, it is {items!r}")
        for pattern in lists[1]:
            self._check_pattern(pattern, f"{key}.names")
        return Selection(tuple(map(self._class_name, lists[0])), tuple(lists[1]))

    def _class_name(self, name: str) -> str:
        name = _OTHER_NAMES.get(name, name)
        if name not in _KINDS:
            self._strangers[name] = None
        return name

    def _check_pattern(self, pattern: str, key: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise StartError(f"{self._source}: `{key}` has {pattern!r}, which is no pattern: {error}") from None

    # -- scale methods ---------------------------------------------------------------------------------------------

    def _methods(self) -> ScaleMethods:
        given = self._value.get("scale_method")
        if isinstance(given, Mapping):
            unknown = given.keys() - {"default", "layer_types", "layers", "nodes"}
            if unknown:
                raise StartError(f"{self._source}: `scale_method` has no member {sorted(unknown)[0]!r}")
            default = self._with_params(METHODS[DEFAULT_METHOD])
            default = self._pair(given.get("default") or {}, default, "scale_method.default")
            by_type, by_layer, by_node = (
                self._pairs(given.get(key) or {}, default, f"scale_method.{key}")
                for key in ("layer_types", "layers", "nodes")
            )
            for pattern in by_layer:
                self._check_pattern(pattern, "scale_method.layers")
            by_type = {self._class_name(_ANY_CASE.get(name.lower(), name)).lower(): by_type[name] for name in by_type}
            return ScaleMethods(default, by_type, by_layer, by_node)
        name = self._text("scale_method", DEFAULT_METHOD).lower()
        if name in _PER_TOKEN:
            raise self.refuse("scale_method", f"it is for dynamic quantisation; {_SAMPLED}")
        if name not in METHODS:
            raise self.refuse("scale_method", f"use one of {', '.join(METHODS)}")
        return ScaleMethods(self._with_params(METHODS[name]))

    def _with_params(self, method: ScaleMethod) -> ScaleMethod:
        params = self._value.get("scale_params") or {}
        if not isinstance(params, Mapping) or params.keys() - {"weight_backoff", "input_backoff"}:
            raise self.refuse("scale_params", "weight_backoff and input_backoff can be given")
        weight, activation = method.weight, method.activation
        if "weight_backoff" in params:
            weight = replace(weight, backoff=self._backoff(params["weight_backoff"], "scale_params.weight_backoff"))
        if "input_backoff" in params:
            backoff = self._backoff(params["input_backoff"], "scale_params.input_backoff")
            activation = replace(activation, backoff=backoff)
        return ScaleMethod(weight, activation)

    def _pairs(self, value: Any, default: ScaleMethod, key: str) -> dict[str, ScaleMethod]:
        if not isinstance(value, Mapping):
            raise StartError(f"{self._source}: `{key}` must be an object, it is {value!r}")
        return {str(name): self._pair(pair, default, f"{key}.{name}") for name, pair in value.items()}

    def _pair(self, value: Any, default: ScaleMethod, key: str) -> ScaleMethod:
        if isinstance(value, str):
            if value.lower() not in METHODS:
                raise StartError(f"{self._source}: `{key}` {value!r} is not one of {', '.join(METHODS)}")
            return METHODS[value.lower()]
        if not isinstance(value, Mapping) or value.keys() - {"weight", "activation"}:
            raise StartError(f'{self._source}: `{key}` must be {{"weight": ..., "activation": ...}}, it is {value!r}')
        weight = self._rule(value.get("weight"), default.weight, f"{key}.weight")
        activation = self._rule(value.get("activation"), default.activation, f"{key}.activation")
        if activation.by_channel or activation.value is Value.OPT:
            raise StartError(
                f"{self._source}: `{key}.activation` is not supported: static scales of activations are PTS and MAXABS"
                " or FIXED_VALUE"
            )
        return ScaleMethod(weight, activation)

    def _rule(self, value: Any, default: Rule, key: str) -> Rule:
        if value is None:
            return default
        if not isinstance(value, Mapping):
            raise StartError(f"{self._source}: `{key}` must be an object, it is {value!r}")
        unknown = value.keys() - {"granularity", "scale_value_type", "rounding_method", "backoff", "params"}
        if unknown or value.get("params"):
            raise StartError(
                f"{self._source}: `{key}` has {sorted(unknown or {'params'})[0]!r}, which is not supported"
            )
        granularity = _member(value, "granularity", ("PTS", "PCS"), "PCS" if default.by_channel else "PTS")
        kind = _member(value, "scale_value_type", tuple(Value), default.value)
        rounding = _member(value, "rounding_method", tuple(Rounding), default.rounding)
        if granularity is None or kind is None or rounding is None:
            raise StartError(
                f"{self._source}: `{key}` {value!r} is not supported: granularity is PTS or PCS, scale_value_type one"
                f" of {', '.join(Value)}, rounding_method one of {', '.join(Rounding)}"
            )
        rule = Rule(Value(kind), Rounding(rounding), default.backoff, granularity == "PCS")
        fixed = (Rounding.UNIT, Rounding.FIRST_HARDWARE)
        if (rule.value is Value.FIXED) != (rule.rounding in fixed):
            raise StartError(f"{self._source}: `{key}`: FIXED_VALUE goes with {' or '.join(fixed)}, and these with it")
        if rule.value is Value.OPT and rule.rounding is Rounding.IDENTITY:
            raise StartError(f"{self._source}: `{key}`: OPT goes with POW2 or HW_ALIGNED")
        if "backoff" in value:
            rule = replace(rule, backoff=self._backoff(value["backoff"], f"{key}.backoff"))
        return rule

    def _backoff(self, value: Any, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise StartError(f"{self._source}: `{key}` must be above 0 and at most 1, it is {value!r}")
        return float(value)

    # -- plain members ---------------------------------------------------------------------------------------------

    def _notes(self) -> tuple[str, ...]:
        notes = [f"QUANT_CONFIG `{key}` has no effect: {why}" for key, why in _NO_EFFECT.items() if key in self._value]
        notes += [
            f"QUANT_CONFIG: type {name!r} has no effect: what is quantised has the types {', '.join(_KINDS)}"
            for name in self._strangers
        ]
        unknown = sorted(self._value.keys() - _USED - _ONLY.keys() - _NO_EFFECT.keys())
        return (*notes, *(f"QUANT_CONFIG `{key}` has no effect: it is not known" for key in unknown))

    def _text(self, key: str, default: str) -> str:
        value = self._value.get(key)
        if value is not None and not isinstance(value, str):
            raise StartError(f"{self._source}: `{key}` must be text, it is {value!r}")
        return value or default

    def _choice(self, key: str, default: str, choices: Mapping[str, Any]) -> str:
        value = self._text(key, default).upper()
        if value not in choices:
            raise self.refuse(key, f"use one of {', '.join(choices)}")
        return value

    def _flag(self, key: str) -> bool:
        """Samples have them as true and as "True"."""
        value = self._value.get(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is not None and not isinstance(value, bool):
            raise StartError(f"{self._source}: `{key}` must be true or false, it is {value!r}")
        return bool(value)

    def _count(self, key: str) -> int:
        value = self._value.get(key)
        value = 0 if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise StartError(f"{self._source}: `{key}` must be a number of passes, it is {value!r}")
        return value


def _member(value: Mapping[str, Any], key: str, choices: tuple[str, ...], default: str) -> str | None:
    given = value.get(key)
    if given is None:
        return default
    return given.upper() if isinstance(given, str) and given.upper() in choices else None
