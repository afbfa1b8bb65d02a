"""How a checkpoint stores its matrices, read from `quantization_config` of its config.json.

Three ways to write the same thing down (`fp8`, `compressed-tensors`, `fbgemm_fp8`) become one `Quantization`;
what is not FP8 is refused with the reason. The matrices themselves are read in `fp8_matrix`.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.files import read_json_object
from text_generation_inference.weights.calibration import StaticScales
from text_generation_inference.weights.declare import Declared
from text_generation_inference.weights.model_files import QUANTIZATION_BESIDE

_WAY_OUT = (
    "Matrices in FP8 (e4m3) are: `fp8`, `compressed-tensors` with float weights of 8 bits, and `fbgemm_fp8`. Use such a"
    " version of the model, a GGUF file, or the unquantised model, with `quantize` fp8 if it should be small."
)


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """The tensors beside a matrix in FP8."""

    scale_name: str = "weight_scale"
    by_square: bool = False  # a scale per 128 x 128 values; else one for all, or one per output row
    input_scale_name: str | None = None  # inputs have one scale, which the checkpoint knows; None: each has its own
    input_bound: float | None = None
    quantizes_inputs: bool = True  # else the product is that of the widened matrix


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str  # as config.json names it
    groups: tuple[tuple[tuple[str, ...], Fp8Scheme], ...] = ()  # patterns of matrices, and how those are stored
    ignored: tuple[str, ...] = ()  # patterns of matrices that are stored plainly
    has_kv_scales: bool = False  # every layer has scales for a KV cache in FP8
    may_leave: tuple[str, ...] = ()  # file name patterns of tensors that nobody needs
    on_loading: bool = False  # the checkpoint is plain: each matrix is quantised when it has been read
    static: StaticScales | None = None  # with these; None: with scales that the matrices and inputs themselves give

    def quantizes(self, declared: Declared, matrices: Sequence[str]) -> bool:
        """Whether plain matrices, by their names without `.weight`, are put into FP8 on loading."""
        if not (self.on_loading and declared.quantizable):
            return False
        return not declared.delicate if self.static is None else self.static.find(matrices) is not None

    def scheme_of(self, matrix: str) -> Fp8Scheme | None:
        """`matrix` is the name of its tensor without `.weight`."""
        if any(_matches(pattern, matrix) for pattern in self.ignored):
            return None
        for patterns, scheme in self.groups:
            if any(_matches(pattern, matrix) for pattern in patterns):
                return scheme
        return None

    def named_as_in(self, names: Collection[str]) -> "Quantization":
        """With the names that a checkpoint has: `fp8` was written by several tools, each with its own words."""
        if self.method != "fp8" or self.on_loading:
            return self
        last = {name.rpartition(".")[2] for name in names}

        def rename(scheme: Fp8Scheme) -> Fp8Scheme:
            if "weight_scale_inv" in last:
                scheme = replace(scheme, scale_name="weight_scale_inv")
            if scheme.input_scale_name is not None and "activation_scale" in last:
                scheme = replace(scheme, input_scale_name="activation_scale")
            return scheme

        return replace(self, groups=tuple((patterns, rename(scheme)) for patterns, scheme in self.groups))


ON_LOADING = Quantization("fp8", on_loading=True)


def choose_quantization(asked: str | None, stored: Quantization | None) -> Quantization | None:
    """What the setting `quantize` means for a checkpoint."""
    if asked == "compressed-tensors" and (stored is None or stored.method != asked):
        raise StartError(
            "`quantize` compressed-tensors is for checkpoints that say so in config.json, which this one does not."
            " Leave it out, or use `quantize` fp8."
        )
    if asked == "fp8" and stored is None:
        return ON_LOADING
    return stored


def quantization_beside(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a quantised checkpoint says elsewhere than in `quantization_config`, as that would say it."""
    if config.get("quantization_config") or config.get("compression_config"):
        return {}
    elsewhere = config.get("quantization")
    if isinstance(elsewhere, Mapping) and "bits" in elsewhere:
        return {"quantization_config": {"quant_method": "mlx", **elsewhere}}
    for name, method in QUANTIZATION_BESIDE.items():
        try:
            found = read_json_object(folder / name)
        except (OSError, ModelFormatError):
            continue
        return {"quantization_config": {"quant_method": method, **found}}
    return {}


def name_quantization(config: Mapping[str, Any]) -> str | None:
    """The method by its name, with the number of bits where it says so; None: matrices are stored plainly."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    fields: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    bits = next((fields[name] for name in ("bits", "w_bit", "wfp8") if name in fields), None)
    for name, width in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        bits = width if fields.get(name) is True else bits
    method = str(fields.get("quant_method") or "a method without a name")
    return f"{method}, {bits} bits" if isinstance(bits, int) else method


def read_quantization(config: Mapping[str, Any], source: str) -> Quantization | None:
    """What config.json says; None: matrices are stored plainly. `source` names the file in errors."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    fields = _Fields(found, f"{source}: `quantization_config`")
    method = fields.text("quant_method", "")
    readers = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "fbgemm_fp8": _read_fbgemm,
    }
    if method not in readers:
        raise ModelFormatError(f"{fields.place}: `quant_method` {method!r} is not supported. {_WAY_OUT}")
    return readers[method](fields)


class _Fields:
    """A JSON object whose wrong members are named in the error."""

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, Mapping):
            raise ModelFormatError(f"{place} must be an object, it is {value!r}")
        self.value: Mapping[str, Any] = value
        self.place = place

    def refuse(self, name: str, supported: str) -> ModelFormatError:
        given = self.value.get(name)
        return ModelFormatError(f"{self.place}: `{name}` {given!r} is not supported, {supported} is. {_WAY_OUT}")

    def get(self, name: str) -> Any:
        return self.value.get(name)

    def text(self, name: str, default: str) -> str:
        value = self.value.get(name)
        if value is not None and not isinstance(value, str):
            raise ModelFormatError(f"{self.place}: `{name}` must be text, it is {value!r}")
        return default if value is None else value

    def below(self, name: str) -> "_Fields":
        return _Fields(self.value.get(name), f"{self.place}.{name}")

    def patterns(self, name: str) -> tuple[str, ...]:
        value = self.value.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise ModelFormatError(f"{self.place}: `{name}` must be a list of names, it is {value!r}")
        for item in value:
            try:
                re.compile(item.removeprefix("re:") if item.startswith("re:") else "")
            except re.error as error:
                raise ModelFormatError(f"{self.place}: `{name}` has {item!r}, which is no pattern: {error}") from None
        return tuple(value)


def _read_fp8(fields: _Fields) -> Quantization:
    if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.refuse("fmt", "e4m3")
    activations = fields.text("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise fields.refuse("activation_scheme", "dynamic or static")
    squares = fields.get("weight_block_size")
    if squares is not None:
        if squares != [128, 128]:
            raise fields.refuse("weight_block_size", "[128, 128]")
        if activations == "static":
            raise fields.refuse("activation_scheme", "with `weight_block_size` only dynamic")
    scheme = Fp8Scheme(
        scale_name="weight_scale" if squares is None else "weight_scale_inv",
        by_square=squares is not None,
        input_scale_name="input_scale" if activations == "static" else None,
    )
    ignored = (*fields.patterns("ignored_layers"), *fields.patterns("modules_to_not_convert"))
    return Quantization("fp8", ((("Linear",), scheme),), ignored, fields.get("kv_cache_scheme") == "static")


def _read_fbgemm(fields: _Fields) -> Quantization:
    bound = fields.get("activation_scale_ub")
    if bound is not None and (
        isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf
    ):
        raise fields.refuse("activation_scale_ub", "a number above 0")
    scheme = Fp8Scheme(input_bound=None if bound is None else float(bound))
    ignored = fields.patterns("modules_to_not_convert")
    return Quantization("fbgemm_fp8", ((("Linear",), scheme),), ignored, may_leave=("*.input_scale_ub",))


def _read_compressed_tensors(fields: _Fields) -> Quantization:
    if fields.get("sparsity_config") and fields.below("sparsity_config").text("format", "dense") != "dense":
        raise fields.below("sparsity_config").refuse("format", "dense")
    groups = fields.below("config_groups")
    schemes: list[tuple[tuple[str, ...], Fp8Scheme]] = []
    for name in groups.value:
        group = groups.below(name)
        schemes.append((group.patterns("targets"), _read_group(group)))
    has_kv_scales = False
    if fields.get("kv_cache_scheme") is not None:
        scheme = fields.below("kv_cache_scheme")
        _check_float8(scheme)
        if scheme.text("strategy", "tensor") != "tensor":
            raise scheme.refuse("strategy", "tensor")
        has_kv_scales = scheme.get("dynamic") is not True
    return Quantization("compressed-tensors", tuple(schemes), fields.patterns("ignore"), has_kv_scales)


def _read_group(group: _Fields) -> Fp8Scheme:
    weights = group.below("weights")
    _check_float8(weights)
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.refuse("strategy", "tensor, channel or block")
    by_square = strategy == "block"
    if by_square and weights.get("block_structure") not in ([128, 128], "128x128"):
        raise weights.refuse("block_structure", "[128, 128]")
    if group.get("output_activations") is not None:
        raise group.refuse("output_activations", "null")
    if group.get("input_activations") is None:
        return Fp8Scheme(by_square=by_square, quantizes_inputs=False)
    inputs = group.below("input_activations")
    _check_float8(inputs)
    if by_square:
        if inputs.get("dynamic") is not True or inputs.get("group_size") not in (None, 128):
            raise group.refuse("input_activations", "with weights in blocks, dynamic in groups of 128")
        return Fp8Scheme(by_square=True)
    is_static = inputs.get("dynamic") in (None, False)
    if inputs.text("strategy", "tensor") not in (("tensor",) if is_static else ("tensor", "token")):
        raise inputs.refuse("strategy", "tensor" if is_static else "token")
    return Fp8Scheme(input_scale_name="input_scale" if is_static else None)


def _check_float8(fields: _Fields) -> None:
    if fields.get("num_bits") != 8:
        raise fields.refuse("num_bits", "8")
    if fields.text("type", "int") != "float":
        raise fields.refuse("type", "float")
    if fields.get("symmetric") is False:
        raise fields.refuse("symmetric", "true")


def _matches(pattern: str, matrix: str) -> bool:
    """A kind of layer, a regular expression, or some successive components of a name."""
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), matrix) is not None
    return f".{pattern}." in f".{matrix}."
