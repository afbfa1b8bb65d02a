"""`compressed-tensors`: which matrices a checkpoint has in which form, as `quantization_config` of config.json says.

Each group of matrices is one of `Fp8Scheme`, `StoredIntegers` and `StoredFp4`, which read it. Names decide as in the
library that writes such files: what is ignored is plain; then a group that has the whole name, then one with an
expression that fits, then one that has the class of layer. Where a group says how inputs are rounded and that is not
done, they are as precise as the model, and `description` says so.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from text_generation_inference.kernels.fp8 import SQUARE
from text_generation_inference.quant import fp8, low_bit
from text_generation_inference.quant.config_fields import Fields, NamePattern
from text_generation_inference.quant.fp4 import MXFP4, MXFP4_GROUP, NVFP4, NVFP4_GROUP, StoredFp4
from text_generation_inference.quant.fp8 import Fp8Scheme, WidenedFp8
from text_generation_inference.quant.integer_fields import MAX_GROUP_SIZE
from text_generation_inference.quant.integers import Integers, StoredIntegers
from text_generation_inference.quant.low_bit import StoredLowBit, WidenedLowBit
from text_generation_inference.quant.method import PLAIN, Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts, stack

_WAY_OUT = (
    "Read are weights in float8, in integers of 1 to 8 bits (`pack-quantized`, `int-quantized`, `naive-quantized`), and"
    " `nvfp4-pack-quantized` and `mxfp4-pack-quantized`. Use such a version of the model, or the unquantised one."
)
Scheme = Fp8Scheme | StoredIntegers | StoredFp4

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
_FORMATS_FP4 = {"nvfp4-pack-quantized": NVFP4_GROUP, "mxfp4-pack-quantized": MXFP4_GROUP}
_REFUSED = {
    "marlin-24": "it leaves out half of the values (2:4), which is not computed here",
    "sparse-24-bitmask": "it leaves out half of the values (2:4), which is not computed here",
    "sparse-bitmask": "it leaves out values that are 0",
    "mxfp6-pack-quantized": "its values have 6 bits",
    "mxfp8-quantized": "32 of its values share a scale",
    "dense": "its matrices are stored plainly, and would have to be rounded as they are read",
    "fakequant": "its matrices are stored plainly, and would have to be rounded as they are read",
}
_INPUTS_STAY = "inputs stay in the type of the model, which is more precise than what it says of them"


@dataclass(frozen=True, slots=True)
class CompressedTensors(Quantization):
    targets: tuple[tuple[NamePattern, Scheme | None], ...]  # names, expressions, classes: the first that fits counts
    ignored: tuple[NamePattern, ...] = ()
    has_cache_scales: bool = False
    stored: frozenset[str] | None = None  # names of the checkpoint's tensors; None: not known yet
    method: str = "compressed-tensors"
    origin: str = "this checkpoint"
    needs_fp8: bool = False

    @property
    def width_step(self) -> int:
        return math.lcm(*(_width_step(scheme) for _, scheme in self.targets))

    @property
    def description(self) -> str:
        schemes = [scheme for _, scheme in self.targets if scheme is not None]
        said = f"matrices in {_name_all(schemes)}, as the checkpoint has them ({self.method})"
        return f"{said}; {_INPUTS_STAY}" if any(_drops_inputs(scheme) for scheme in schemes) else said

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "CompressedTensors":
        return replace(self, stored=frozenset(stored))

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        schemes = [self.scheme_of(name, matrix.layer_class) for name in names]
        if not matrix.may_round:  # heads, embeddings and routers are often plain without a word
            schemes = [self._if_stored(name, scheme) for name, scheme in zip(names, schemes, strict=True)]
        found = [scheme for scheme in schemes if scheme is not None]
        if all(isinstance(scheme, Fp8Scheme) for scheme in found):
            return fp8.choose_stored(matrix, [each if isinstance(each, Fp8Scheme) else None for each in schemes])
        if all(isinstance(scheme, StoredLowBit) for scheme in found):
            return low_bit.choose_stored(matrix, [each if isinstance(each, StoredLowBit) else None for each in schemes])
        return WidenedParts({part.name: _widened(part, each) for part, each in zip(matrix.parts, schemes, strict=True)})

    def scheme_of(self, name: str, kind: str = "Linear") -> Scheme | None:
        """How the matrix `name` of a layer of this kind is stored; None: plainly."""
        if any(_is_named(pattern, name) or _is_class(pattern, kind) for pattern in self.ignored):
            return None
        named = (scheme for target, scheme in self.targets if _is_named(target, name))
        of_class = (scheme for target, scheme in self.targets if _is_class(target, kind))
        return next(chain(named, of_class), None)

    def _if_stored(self, name: str, scheme: Scheme | None) -> Scheme | None:
        return scheme if self.stored is not None and f"{name}.weight_scale" in self.stored else None


class WidenedParts(Method):
    """Parts that are stored in different ways, each widened to the model's type when it is read."""

    holds_fp8 = True  # some may be

    def __init__(self, methods: dict[str, Method]) -> None:
        self._methods = methods  # by the part's name

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return self._methods[part.name].holder(part)

    def declare(self, part: Part) -> dict[str, Beside]:
        return self._methods[part.name].declare(part)

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from self._methods[part.name].list_reads([(name, part)], checkpoint)

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        def read(name: str, part: Part) -> torch.Tensor:
            return self._methods[part.name].read([(name, part)], checkpoint, dtype, device)

        return stack(parts, read, dtype, device)


def _widened(part: Part, scheme: Scheme | None) -> Method:
    if scheme is None:
        return PLAIN
    if isinstance(scheme, Fp8Scheme):
        return WidenedFp8({part.name: scheme}, is_certain=True)
    return WidenedLowBit({part.name: scheme})


# -- names -----------------------------------------------------------------------------------------------------------


def _is_named(pattern: NamePattern, name: str) -> bool:
    return pattern.text == name or pattern.matches(name)


def _width_step(scheme: Scheme | None) -> int:
    if isinstance(scheme, StoredFp4):
        return scheme.stored.group_size
    return SQUARE if isinstance(scheme, Fp8Scheme) and scheme.by_square else 1


def _is_class(pattern: NamePattern, kind: str) -> bool:
    return pattern.text in (kind, "Module")


def _sort_targets(schemes: Mapping[NamePattern, Scheme | None]) -> tuple[tuple[NamePattern, Scheme | None], ...]:
    """Whole names before expressions, each in the order of the alphabet, as the library looks at them."""
    return tuple(sorted(schemes.items(), key=lambda item: ("re:" in item[0].text, item[0].text)))


# -- words -----------------------------------------------------------------------------------------------------------


def _name_all(schemes: Sequence[Scheme]) -> str:
    return " and ".join(dict.fromkeys(_name(scheme) for scheme in schemes)) or "the type of the model"


def _name(scheme: Scheme) -> str:
    if isinstance(scheme, Fp8Scheme):
        return "FP8"
    if isinstance(scheme, StoredFp4):
        return "MXFP4" if scheme.stored.global_scale is None else "NVFP4"
    inputs = " with inputs in 8 bits" if scheme.stored.inputs is not None else ""
    return f"integers of {scheme.stored.bits} bits{inputs}"


def _drops_inputs(scheme: Scheme) -> bool:
    return not isinstance(scheme, Fp8Scheme) and scheme.drops_inputs


# -- config.json -----------------------------------------------------------------------------------------------------


def detect(config: Mapping[str, Any], source: str) -> CompressedTensors:
    """`config` is the section of config.json, `source` the name of the file for errors."""
    fields = Fields(config, f"{source}: `quantization_config`", _WAY_OUT)
    if fields.get("sparsity_config") and fields.below("sparsity_config").text("format", "dense") != "dense":
        raise fields.below("sparsity_config").refuse("format", "dense")
    for name in ("transform_config", "moe_sparsity_config"):
        if fields.get(name) and any(fields.below(name).value.values()):  # one without members is none
            raise fields.refuse(name, "none")
    if fields.text("quantization_status", "compressed") not in ("compressed", "frozen"):
        raise fields.refuse("quantization_status", "compressed")
    groups = fields.below("config_groups")
    schemes: dict[NamePattern, Scheme | None] = {}
    for name in groups.value:
        group = _preset(groups, name) if isinstance(groups.get(name), list) else groups.below(name)
        scheme = _read_group(group, fields)
        schemes.update(dict.fromkeys(group.patterns("targets"), scheme))
    found = [scheme for scheme in schemes.values() if scheme is not None]
    return CompressedTensors(
        _sort_targets(schemes),
        fields.patterns("ignore"),
        _has_cache_scales(fields),
        origin=f"this checkpoint, whose matrices are in {_name_all(found)},",
        needs_fp8=any(isinstance(scheme, Fp8Scheme) for scheme in found),
    )


def _has_cache_scales(fields: Fields) -> bool:
    if fields.get("kv_cache_scheme") is None:
        return False
    scheme = fields.below("kv_cache_scheme")
    _check_float8(scheme)
    if scheme.text("strategy", "tensor") != "tensor":
        raise scheme.refuse("strategy", "tensor")
    return not scheme.truth("dynamic", False)


def _read_group(group: Fields, fields: Fields) -> Scheme | None:
    if group.get("output_activations") is not None:
        raise group.refuse("output_activations", "null")
    if group.get("weights") is None and group.get("input_activations") is None and "targets" in group.value:
        return None  # said to be plain
    weights = group.below("weights")
    kind = weights.text("type", "int").lower()
    if kind not in ("int", "float"):
        raise weights.refuse("type", "int or float")
    bits = weights.integer("num_bits", 8)
    name = _read_format(group, fields)
    if weights.truth("dynamic", False):
        raise weights.refuse("dynamic", "false")
    if kind == "float" and bits == 4:
        return _read_fp4(group, weights, name)
    if name in _FORMATS_FP4:
        raise weights.refuse("num_bits" if kind == "float" else "type", f"with `format` {name}, floats of 4 bits")
    if kind == "float":
        return _read_float8(group, weights)
    return _read_integers(group, weights, name)


def _read_format(group: Fields, fields: Fields) -> str:
    """Of the group, or of all; empty: neither says it."""
    place = group if group.get("format") is not None else fields
    name = place.text("format", "")
    if name == "mixed-precision" and place is fields:
        return ""
    if name in _REFUSED:
        raise place.refuse("format", f"({_REFUSED[name]}) another")
    if name and name not in _FORMATS and name not in _FORMATS_FP4:
        raise place.refuse("format", "one of those below")
    return name


def _read_strategy(args: Fields, allowed: tuple[str, ...]) -> tuple[str, int | None]:
    """With the size of groups, where there are any."""
    size = args.integer("group_size", 0)
    inferred = "tensor" if args.get("group_size") is None else "channel" if size == -1 else "group"
    strategy = args.text("strategy", inferred).lower()
    if strategy not in allowed:
        raise args.refuse("strategy", " or ".join(allowed))
    if strategy not in ("group", "tensor_group"):
        return strategy, None
    if not 1 <= size <= MAX_GROUP_SIZE:
        raise args.refuse("group_size", "with groups, their size")
    return strategy, size


def _read_integers(group: Fields, weights: Fields, name: str) -> StoredIntegers:
    bits, has_inputs = weights.integer("num_bits", 8), group.get("input_activations") is not None
    if not 1 <= bits <= 8:
        raise weights.refuse("num_bits", "1 to 8")
    if name == "float-quantized":
        raise weights.refuse("type", f"with `format` {name}, float")
    strategy, size = _read_strategy(weights, ("tensor", "channel", "group"))
    is_packed = name == "pack-quantized" if name else not has_inputs  # as the library infers it
    is_symmetric = weights.truth("symmetric", True)
    order = weights.get("actorder")
    if order not in (None, True, False, "group", "dynamic", "weight", "static"):
        raise weights.refuse("actorder", "group or weight")
    lists_groups = order in (True, "group", "dynamic")  # other orders leave no trace in the file
    inputs = _read_inputs(group.below("input_activations")) if has_inputs else None
    if bits != 8 or size is not None or not is_symmetric:  # integers are multiplied with one scale for each row
        inputs = None
    return StoredIntegers(
        Integers(
            bits,
            is_packed,
            strategy,
            size,
            is_symmetric,
            has_group_index=lists_groups and size is not None,
            inputs=inputs,
            drops_inputs=has_inputs and inputs is None,
            has_input_scales=has_inputs,
        )
    )


def _read_inputs(inputs: Fields) -> str | None:
    """How inputs are rounded to integers of 8 bits; None: they are not."""
    kind, bits = inputs.text("type", "int").lower(), inputs.integer("num_bits", 8)
    if kind not in ("int", "float"):
        raise inputs.refuse("type", "int or float")
    if bits not in (4, 8):
        raise inputs.refuse("num_bits", "4 or 8")
    if inputs.get("dynamic") not in (None, True, False, "local"):
        raise inputs.refuse("dynamic", "true, false or local")
    strategy, _ = _read_strategy(inputs, ("tensor", "token", "group", "tensor_group"))
    is_symmetric = inputs.truth("symmetric", True)
    is_static = inputs.get("dynamic") in (None, False)
    if is_static and strategy == "token":
        raise inputs.refuse("strategy", "tensor")
    if kind != "int" or bits != 8 or strategy not in ("tensor", "token"):
        return None
    # Products of integers know no zero points: with a scale of each row none is needed.
    return "static" if is_static and is_symmetric else "dynamic"


def _read_fp4(group: Fields, weights: Fields, name: str) -> StoredFp4:
    if not weights.truth("symmetric", True):
        raise weights.refuse("symmetric", "true")
    strategy, size = _read_strategy(weights, ("group", "tensor_group"))
    if size not in _FORMATS_FP4.values() or (strategy == "tensor_group") != (size == NVFP4_GROUP):
        raise weights.refuse("group_size", f"with `strategy` {strategy}, {16 if strategy == 'tensor_group' else 32}")
    if name and _FORMATS_FP4.get(name) != size:
        raise weights.refuse("group_size", f"with `format` {name}, {_FORMATS_FP4.get(name, 'none')}")
    has_inputs = group.get("input_activations") is not None
    if has_inputs:
        _read_inputs(group.below("input_activations"))
    return StoredFp4(NVFP4 if size == NVFP4_GROUP else MXFP4, drops_inputs=has_inputs)


def _read_float8(group: Fields, weights: Fields) -> Fp8Scheme:
    _check_float8(weights)
    strategy = weights.text("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.refuse("strategy", "tensor, channel or block")
    by_square = strategy == "block"
    if by_square and weights.get("block_structure") not in ([128, 128], "128x128"):
        raise weights.refuse("block_structure", "[128, 128]")
    if group.get("input_activations") is None:
        return Fp8Scheme(by_square=by_square, quantizes_inputs=False)
    inputs = group.below("input_activations")
    _check_float8(inputs)
    if by_square:
        if inputs.get("dynamic") is not True or inputs.get("group_size") not in (None, 128):
            raise group.refuse("input_activations", "with weights in blocks, dynamic in groups of 128")
        return Fp8Scheme(by_square=True)
    is_static = not inputs.truth("dynamic", False)
    if inputs.text("strategy", "tensor") not in (("tensor",) if is_static else ("tensor", "token")):
        raise inputs.refuse("strategy", "tensor" if is_static else "token")
    return Fp8Scheme(input_scale_name="input_scale" if is_static else None)


def _check_float8(fields: Fields) -> None:
    if fields.integer("num_bits", 8) != 8:
        raise fields.refuse("num_bits", "8")
    if fields.text("type", "int").lower() != "float":
        raise fields.refuse("type", "float")
    if not fields.truth("symmetric", True):
        raise fields.refuse("symmetric", "true")


# -- schemes that have a name ------------------------------------------------------------------------------------------

_INT8_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MXFP4_GROUP}
_W8A8 = ({"num_bits": 8, "type": "int", "strategy": "channel"}, _INT8_ROWS)
_NAMED: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "UNQUANTIZED": (None, None),
    "W8A8": _W8A8,
    "INT8": _W8A8,
    "FP8": ({**_FLOAT8, "strategy": "tensor"}, {**_FLOAT8, "strategy": "tensor"}),
    "FP8_DYNAMIC": ({**_FLOAT8, "strategy": "channel"}, {**_FLOAT8, "strategy": "token", "dynamic": True}),
    "FP8_BLOCK": (
        {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]},
        {**_FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "NVFP4": (_NVFP4, {**_NVFP4, "dynamic": "local"}),
    "NVFP4A16": (_NVFP4, None),
    "MXFP4": (_MXFP4, {**_MXFP4, "dynamic": True}),
    "MXFP4A16": (_MXFP4, None),
}


def _preset(groups: Fields, name: str) -> Fields:
    """A group that is a list of targets, under the name of a scheme."""
    found = _NAMED.get(name.upper())
    integers = re.fullmatch(r"W([2-8])A(4|8|16)(_ASYM)?", name.upper())
    if found is None and integers is not None:
        bits, inputs = int(integers[1]), int(integers[2])
        weights = {"num_bits": bits, "type": "int", "group_size": 128, "symmetric": integers[3] is None}
        found = (weights, None if inputs == 16 else {**_INT8_ROWS, "num_bits": inputs})
    if found is None:
        raise groups.refuse(name, f"a group as an object or one of {', '.join(_NAMED)}, W4A16 and its like")
    weights, inputs = found
    value = {"targets": groups.get(name), "weights": weights, "input_activations": inputs}
    return Fields(value, f"{groups.place}.{name}", groups.way_out, groups.work)
