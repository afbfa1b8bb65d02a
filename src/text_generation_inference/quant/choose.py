"""Which quantisation a model has, and with it which method each of its matrices.

A checkpoint says in config.json how it is stored (`detect`), a setting may ask for more (`choose_quantization`), and
`assign_methods` hands the methods out before anything is loaded.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.files import read_json_object
from text_generation_inference.quant import (
    auto_round,
    awq,
    bitsandbytes,
    bitsandbytes_codes,
    compressed_tensors,
    eetq,
    fp8_formats,
    gguf,
    gptq,
    hqq,
    marlin,
    modelopt,
    mxfp4,
    torchao,
)
from text_generation_inference.quant.cache_scales import CacheScales
from text_generation_inference.quant.config_fields import Fields
from text_generation_inference.quant.fp8 import ON_LOADING as FP8_ON_LOADING
from text_generation_inference.quant.low_bit import WidenedLowBit, as_held
from text_generation_inference.quant.method import PLAIN, Matrix
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.units import gigabytes
from text_generation_inference.weights.declare import Module
from text_generation_inference.weights.model_files import QUANTIZATION_BESIDE

# Who reads which `quant_method` of config.json.
METHODS = {
    "fp8": fp8_formats.detect,
    "compressed-tensors": compressed_tensors.detect,
    "fbgemm_fp8": fp8_formats.detect,
    "modelopt": modelopt.detect,
    "mxfp4": mxfp4.detect,
    "gptq": gptq.detect,
    "bitsandbytes": bitsandbytes.detect,
    "hqq": hqq.detect,
    "torchao": torchao.detect,
    "awq": awq.detect,
    "marlin": marlin.detect,
    "auto-round": auto_round.detect,
    "auto_round": auto_round.detect,
    "intel/auto-round": auto_round.detect,
}
# What the setting `quantize` puts plain matrices into as they are loaded.
ON_LOADING: dict[str, Quantization] = {
    "fp8": FP8_ON_LOADING,
    "eetq": eetq.ON_LOADING,
    **bitsandbytes_codes.ON_LOADING,
}
_BITS_ON_LOADING = {"fp8": 8, "eetq": 8, "bitsandbytes": 8, "bitsandbytes-nf4": 4, "bitsandbytes-fp4": 4}
# Of checkpoints whose method, or algorithm, has no other number of bits.
_BITS_BY_NAME = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4, "marlin": 4, "FP8": 8, "NVFP4": 4}
# What it means for a checkpoint whose config.json says nothing, and for random weights.
_UNTOLD: dict[str, Quantization] = {
    "gptq": gptq.UNTOLD,
    "awq": awq.UNTOLD,
    "marlin": marlin.UNTOLD,
}
# Which `quant_method` of a checkpoint the setting `quantize` stands for, where it stands for more than its own name.
_MEANS = {
    "gptq": ("gptq", "awq", "marlin"),  # TGI converted them into each other
    "bitsandbytes-nf4": ("bitsandbytes",),
    "bitsandbytes-fp4": ("bitsandbytes",),
}


def detect(config: Mapping[str, Any], source: str) -> Quantization | None:
    """What config.json says; None: matrices are stored plainly. `source` names the file in errors."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    fields = Fields(found, f"{source}: `quantization_config`")
    method = fields.text("quant_method", "") or _untold_method(fields.value)
    if method not in METHODS:
        raise ModelFormatError(
            f"{fields.place}: `quant_method` {method!r} is not supported. Read are {', '.join(METHODS)} and GGUF files:"
            " use such a version of the model, or the unquantised one with `quantize` fp8 or bitsandbytes-nf4 if it"
            " should be small."
        )
    return METHODS[method](found, source)


def _untold_method(fields: Mapping[str, Any]) -> str:
    """bitsandbytes was the only one when `transformers` began to write how a model is stored, and had no name."""
    return "bitsandbytes" if any(fields.get(f"load_in_{bits}bit") is True for bits in (4, 8)) else ""


def choose_quantization(asked: str | None, stored: Quantization | None) -> Quantization | None:
    """What the setting `quantize` means for a checkpoint."""
    if asked is None or (stored is not None and stored.method in _MEANS.get(asked, (asked,))):
        return stored
    if asked == "fp8" and isinstance(stored, mxfp4.Mxfp4Experts):
        return mxfp4.Mxfp4Experts(needs_fp8=True)
    if asked == "fp8" and stored is not None and stored.needs_fp8:
        return stored
    if stored is None and (asked in ON_LOADING or asked in _UNTOLD):
        return ON_LOADING.get(asked) or _UNTOLD[asked]
    if stored is not None:
        raise StartError(
            f"`quantize` {asked} is not for this checkpoint, which is stored in {stored.method}. Leave `quantize` out."
        )
    raise StartError(
        f"`quantize` {asked} is for checkpoints that say so in config.json, which this one does not. Leave it out, or"
        f" use one that quantises on loading: {', '.join(ON_LOADING)}."
    )


def assign_methods(
    model: Module,
    quantization: Quantization | None,
    block_types: Mapping[str, str] | None = None,
    computed: Collection[str] = (),
    is_plain: Callable[[str], bool] | None = None,
) -> None:
    """Give each matrix its method. `block_types` are those that a file has matrices in, `computed` those of the ops;
    `is_plain`: whether a checkpoint has the matrix of this name in a type that numbers are computed in."""

    def is_left(matrix: Matrix, names: Sequence[str]) -> bool:
        """Stored plainly, and not to be rounded: whatever config.json lists, which may be in other names."""
        if not matrix.only_as_stored and not has_others:
            return False
        return is_plain is None or all(map(is_plain, names))

    if quantization is not None and not has_matrices(model):
        raise StartError("a model that is served through transformers cannot be quantised: leave `quantize` out")
    has_others = quantization is not None and not quantization.rounds_plain and _are_some_stored(model, is_plain)
    for prefix, module in model.walk():
        if isinstance(module, Matrix):
            names = module.names(prefix)
            method = None
            if quantization is not None and not is_left(module, names):
                method = quantization.choose(module, names)
            if method is None and block_types:
                method = gguf.detect(module, [prefix + part.name for part in module.parts], block_types, computed)
            module.method = as_held(method or PLAIN, module)
        elif isinstance(module, CacheScales) and quantization is not None:
            module.needed = quantization.has_cache_scales
            for side in ("k", "v"):
                scale = quantization.cache_scale(prefix.removesuffix("."), side)
                if scale is not None:
                    module.set_measured(side, scale)
            module.products = quantization.attention_scales(prefix.removesuffix("."), module.softmax_scale)


def has_matrices(model: Module) -> bool:
    """Whether it has some that a method can hold: not if it is served through `transformers`."""
    return any(isinstance(module, Matrix) for _, module in model.walk())


def _are_some_stored(model: Module, is_plain: Callable[[str], bool] | None) -> bool:
    """Whether a checkpoint has any matrix of a layer otherwise than plainly; without one a file is not what it says."""
    if is_plain is None:
        return False
    layers = ((prefix, each) for prefix, each in model.walk() if isinstance(each, Matrix) and each.may_round)
    return not all(is_plain(name) for prefix, matrix in layers for name in matrix.names(prefix))


def is_quantized(model: Module) -> bool:
    """Whether any matrix is stored otherwise than plainly."""
    return any(isinstance(module, Matrix) and module.method is not PLAIN for _, module in model.walk())


def describe_widened(model: Module, dtype: torch.dtype) -> list[str]:
    """What a user should know of matrices that take more memory here than in their file."""
    matrices = [module for _, module in model.walk() if isinstance(module, Matrix) and module.may_round]
    widened = [matrix for matrix in matrices if isinstance(matrix.method, WidenedLowBit)]
    if not widened:
        return []
    num_bytes = sum(matrix.method.bytes(matrix.shape, dtype) for matrix in widened)
    name = str(dtype).removeprefix("torch.")
    return [f"{len(widened)} matrices in few bits are widened to {name} when they are read: {gigabytes(num_bytes)}"]


# -- what config.json says, for people -------------------------------------------------------------------------------


def quantization_beside(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a quantised checkpoint says elsewhere than in `quantization_config`, as that would say it."""
    if config.get("quantization_config") or config.get("compression_config"):
        return {}
    elsewhere, text = config.get("quantization"), config.get("text_config")
    if isinstance(elsewhere, Mapping) and "bits" in elsewhere:
        return {"quantization_config": {"quant_method": "mlx", **elsewhere}}
    for name in ("quantization_config", "compression_config"):
        if isinstance(text, Mapping) and text.get(name):  # of a model that sees, whose text model was quantised alone
            return {"quantization_config": text[name]}
    for name, method in QUANTIZATION_BESIDE.items():
        try:
            found = read_json_object(folder / name)
        except (OSError, ModelFormatError):
            continue
        if "zero_point" in found:  # AWQ's word, whatever the file is called
            method = "awq"
        method = found.get("quant_method") or method
        return {"quantization_config": {**found, "quant_method": method}}
    return {}


def name_quantization(config: Mapping[str, Any], asked: str | None = None) -> str | None:
    """The method by its name, with the number of bits where it says so; None: matrices are plain.

    `asked` is the setting `quantize`, which may put plain ones into few bits on loading.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return f"{asked}, {_BITS_ON_LOADING[asked]} bits, on loading" if asked in _BITS_ON_LOADING else asked
    fields: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    bits = next((fields[name] for name in ("bits", "w_bit", "wfp8") if name in fields), None)
    if bits is None:
        bits = _BITS_BY_NAME.get(str(fields.get("quant_algo") or fields.get("quant_method")))
    for name, width in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        bits = width if fields.get(name) is True else bits
    method = str(fields.get("quant_method") or _untold_method(fields) or "a method without a name")
    widths = {bits} if isinstance(bits, int) else _list_widths(fields)
    return f"{method}, {' and '.join(map(str, sorted(widths)))} bits" if widths else method


def _list_widths(fields: Mapping[str, Any]) -> set[int]:
    """Bits of the weights of all groups of compressed-tensors, or of HQQ."""
    groups, common = fields.get("config_groups"), fields.get("quant_config")
    listed = groups.values() if isinstance(groups, Mapping) else ()
    settings = [each.get("weights") for each in listed if isinstance(each, Mapping)]
    settings.append(common.get("weight_quant_params") if isinstance(common, Mapping) else None)
    found = (each.get(name) for each in settings if isinstance(each, Mapping) for name in ("num_bits", "nbits"))
    return {width for width in found if isinstance(width, int)}
