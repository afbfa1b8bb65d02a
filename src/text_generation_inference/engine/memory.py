"""Whether a model fits its device, before it is loaded."""

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.device import Device
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.devices.visible import card_bytes
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.registry import build, read_config, read_quantization
from text_generation_inference.quant.choose import (
    assign_methods,
    choose_quantization,
    has_matrices,
    is_quantized,
)
from text_generation_inference.quant.fp8 import ON_LOADING
from text_generation_inference.quant.low_bit import keep_wide_copies
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.units import gigabytes
from text_generation_inference.weights.load import weight_bytes

_SHARE_OF_COPIES = 8  # one in so many bytes of free memory


def check_precision(config: ServerConfig, quantization: Quantization | None, device: Device) -> None:
    """Raise `StartError` if something is asked for in FP8 that the device cannot compute in it."""
    if device.supports_fp8:
        return
    what = "`kv_cache_dtype` fp8_e4m3fn" if config.kv_cache_dtype is not None else None
    if quantization is not None and quantization.needs_fp8:
        what = quantization.origin
    if what is not None:
        raise StartError(
            f"{what} needs {device.fp8_needs}, not {device.description}. Use the model in"
            " float16 or bfloat16 without FP8 settings."
        )


def hold_wide_copies(model: Model, dtype: torch.dtype, device: Device) -> None:
    """Hold the values of matrices in few bits beside their codes, where that costs little of the memory."""
    if device.limits.measures_steps:
        keep_wide_copies(model, dtype, device.free_bytes() // _SHARE_OF_COPIES)


def check_described(config: ServerConfig, folder: Path) -> None:
    """Raise `ResourceError` if a model of which only the description is there is larger than the cards, even empty."""
    card = card_bytes(config.device)
    if card is None or config.load_format == "dummy":
        return
    model_config = read_config(folder)
    quantization = choose_quantization(config.quantize, read_quantization(model_config))
    if config.quant_config is not None:
        quantization = ON_LOADING
    dtype: torch.dtype = getattr(torch, config.dtype or "bfloat16")
    model = build(model_config, Context(dtype=dtype, trusts_code=config.trust_remote_code))
    assign_methods(model, quantization)
    ranks = config.num_shard or 1
    needed, there = weight_bytes(model, dtype), card * ranks
    if needed < there:
        return
    where = "the card has" if ranks == 1 else f"{ranks} cards have"
    ways = "more cards (`num_shard`), `quantize` fp8, a smaller model" if has_matrices(model) else "a smaller model"
    raise ResourceError(
        f"The model is too large: its weights take {gigabytes(needed)} in {str(dtype).removeprefix('torch.')},"
        f" {where} {gigabytes(there)}. What would help: {ways}."
        " Nothing was downloaded or loaded."
    )


@contextmanager
def explain_loading(device: Device) -> Generator[None]:
    """A lack of memory while weights are loaded becomes `ResourceError`, whenever the device tells of it."""
    try:
        yield
        if device.settle is not None:
            device.settle()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # its variables hold tensors
        raise ResourceError(
            f"Not enough memory on {device.description} while the weights were loaded: what else uses it? A smaller"
            f" model, or one in fewer bits (`quantize`), needs less. ({error})"
        ) from None


def check_weights_fit(config: ServerConfig, model: Model, dtype: torch.dtype, device: Device) -> None:
    """Raise `ResourceError` if the weights alone, as they will be stored, are larger than the memory."""
    measured = device.limits.measures_steps or device.limits.meters_memory
    if not measured and config.load_format != "dummy":  # the host maps files, and may keep them smaller
        return
    needed, free = weight_bytes(model, dtype), device.all_free_bytes()
    if needed < free:
        return
    place = "GPU" if device.limits.measures_steps else "card" if measured else "machine"
    ways = [f"a {place} with more memory", "a smaller model"]
    if measured and config.cuda_memory_fraction < 1:
        ways.insert(0, f"a `cuda_memory_fraction` above {config.cuda_memory_fraction}")
    if has_matrices(model) and not is_quantized(model) and device.supports_fp8:
        assign_methods(model, ON_LOADING)  # nothing will be loaded into this one
        in_fp8 = weight_bytes(model, dtype)
        if in_fp8 < free:
            ways.insert(0, f"`quantize` fp8 ({gigabytes(in_fp8)})")
    raise ResourceError(
        f"The model is too large: its weights take {gigabytes(needed)} in {str(dtype).removeprefix('torch.')},"
        f" {gigabytes(free)} of memory are free on {device.description}. What would help:"
        f" {', '.join(ways)}."
    )
