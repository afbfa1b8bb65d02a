"""How a checkpoint says that its matrices are in FP8, read from `quantization_config` of its config.json.

Three ways to write the same thing down (`fp8`, `compressed-tensors`, `fbgemm_fp8`) become one `StoredQuantization`;
what is not FP8 is refused with the reason.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.quant.fp8 import Fp8Scheme, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization

_WAY_OUT = (
    "Matrices in FP8 (e4m3) are: `fp8`, `compressed-tensors` with float weights of 8 bits, and `fbgemm_fp8`; experts"
    " may be in `mxfp4`. Use such a version of the model, a GGUF file, or the unquantised model, with `quantize` fp8 if"
    " it should be small."
)


@dataclass(frozen=True, slots=True)
class StoredQuantization(Quantization):
    method: str
    groups: tuple[tuple[tuple[str, ...], Fp8Scheme], ...] = ()  # patterns of matrices, and how those are stored
    ignored: tuple[str, ...] = ()  # patterns of matrices that are stored plainly
    has_cache_scales: bool = False
    may_leave: tuple[str, ...] = ()
    origin: str = "this checkpoint, whose matrices are in FP8,"
    needs_fp8: bool = True

    @property
    def description(self) -> str:
        return f"matrices in FP8, as the checkpoint has them ({self.method})"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        return choose_stored(matrix, [self.scheme_of(name) for name in names])

    def scheme_of(self, matrix: str) -> Fp8Scheme | None:
        """`matrix` is the name of its tensor without `.weight`."""
        if any(_matches(pattern, matrix) for pattern in self.ignored):
            return None
        for patterns, scheme in self.groups:
            if any(_matches(pattern, matrix) for pattern in patterns):
                return scheme
        return None

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "StoredQuantization":
        """`fp8` was written by several tools, each with its own words."""
        if self.method != "fp8":
            return self
        last = {name.rpartition(".")[2] for name in stored}

        def rename(scheme: Fp8Scheme) -> Fp8Scheme:
            if "weight_scale_inv" in last:
                scheme = replace(scheme, scale_name="weight_scale_inv")
            if scheme.input_scale_name is not None and "activation_scale" in last:
                scheme = replace(scheme, input_scale_name="activation_scale")
            return scheme

        return replace(self, groups=tuple((patterns, rename(scheme)) for patterns, scheme in self.groups))


def detect(config: Mapping[str, Any], source: str) -> StoredQuantization:
    """`config` is the section of config.json, `source` the name of the file for errors."""
    fields = _Fields(config, f"{source}: `quantization_config`")
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


def _read_fp8(fields: _Fields) -> StoredQuantization:
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
    return StoredQuantization("fp8", ((("Linear",), scheme),), ignored, fields.get("kv_cache_scheme") == "static")


def _read_fbgemm(fields: _Fields) -> StoredQuantization:
    bound = fields.get("activation_scale_ub")
    if bound is not None and (
        isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf
    ):
        raise fields.refuse("activation_scale_ub", "a number above 0")
    scheme = Fp8Scheme(input_bound=None if bound is None else float(bound))
    ignored = fields.patterns("modules_to_not_convert")
    return StoredQuantization("fbgemm_fp8", ((("Linear",), scheme),), ignored, may_leave=("*.input_scale_ub",))


def _read_compressed_tensors(fields: _Fields) -> StoredQuantization:
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
    return StoredQuantization("compressed-tensors", tuple(schemes), fields.patterns("ignore"), has_kv_scales)


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
