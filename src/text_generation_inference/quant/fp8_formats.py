"""How a checkpoint says that its matrices are in FP8, read from `quantization_config` of its config.json.

Two ways to write the same thing down (`fp8`, `fbgemm_fp8`) become one `StoredQuantization`;
`compressed_tensors` and `modelopt` are files of their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels.fp8 import SQUARE
from text_generation_inference.quant.config_fields import Fields, NamePattern
from text_generation_inference.quant.fp8 import Fp8Scheme, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization

_WAY_OUT = (
    "Matrices in FP8 (e4m3) are: `fp8` and `fbgemm_fp8`; `compressed-tensors` may have them in FP8 or few bits,"
    " `modelopt` in FP8 or NVFP4, and experts may be in `mxfp4`. Use such a version of the model, a GGUF file, or the"
    " unquantised model, with `quantize` fp8 if it should be small."
)


@dataclass(frozen=True, slots=True)
class StoredQuantization(Quantization):
    method: str
    scheme: Fp8Scheme
    ignored: tuple[NamePattern, ...] = ()  # matrices that are stored plainly
    has_cache_scales: bool = False
    may_leave: tuple[str, ...] = ()
    origin: str = "this checkpoint, whose matrices are in FP8,"
    needs_fp8: bool = True

    @property
    def width_step(self) -> int:
        return SQUARE if self.scheme.by_square else 1

    @property
    def description(self) -> str:
        return f"matrices in FP8, as the checkpoint has them ({self.method})"

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        return choose_stored(matrix, [self.scheme_of(name) for name in names])

    def scheme_of(self, matrix: str) -> Fp8Scheme | None:
        """`matrix` is the name of its tensor without `.weight`."""
        return None if any(_matches(pattern, matrix) for pattern in self.ignored) else self.scheme

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "StoredQuantization":
        """`fp8` was written by several tools, each with its own words."""
        if self.method != "fp8":
            return self
        last, scheme = {name.rpartition(".")[2] for name in stored}, self.scheme
        if "weight_scale_inv" in last:
            scheme = replace(scheme, scale_name="weight_scale_inv")
        if scheme.input_scale_name is not None and "activation_scale" in last:
            scheme = replace(scheme, input_scale_name="activation_scale")
        return replace(self, scheme=scheme)


def detect(config: Mapping[str, Any], source: str) -> StoredQuantization:
    """`config` is the section of config.json, `source` the name of the file for errors."""
    fields = Fields(config, f"{source}: `quantization_config`", _WAY_OUT)
    method = fields.text("quant_method", "")
    readers = {
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fbgemm,
    }
    if method not in readers:
        raise ModelFormatError(f"{fields.place}: `quant_method` {method!r} is not supported. {_WAY_OUT}")
    return readers[method](fields)


def _read_fp8(fields: Fields) -> StoredQuantization:
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
    return StoredQuantization("fp8", scheme, ignored, fields.get("kv_cache_scheme") == "static")


def _read_fbgemm(fields: Fields) -> StoredQuantization:
    bound = fields.get("activation_scale_ub")
    if bound is not None and (
        isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf
    ):
        raise fields.refuse("activation_scale_ub", "a number above 0")
    scheme = Fp8Scheme(input_bound=None if bound is None else float(bound))
    ignored = fields.patterns("modules_to_not_convert")
    return StoredQuantization("fbgemm_fp8", scheme, ignored, may_leave=("*.input_scale_ub",))


def _matches(pattern: NamePattern, matrix: str) -> bool:
    """A kind of layer, a regular expression, or some successive components of a name."""
    return pattern.text == "Linear" or pattern.matches(matrix) or f".{pattern.text}." in f".{matrix}."
