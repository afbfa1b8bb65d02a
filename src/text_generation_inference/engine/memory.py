"""Whether a model fits its device, before it is loaded; what its steps take, before there is a KV cache."""

from collections.abc import Callable

import torch

from text_generation_inference.config import Resolved, ServerConfig
from text_generation_inference.devices.device import Device
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.engine.dry_run import SHORTEST, DryRun, dry_run, run_largest
from text_generation_inference.engine.loop import StepRunner
from text_generation_inference.errors import EngineError, ResourceError, StartError
from text_generation_inference.models.model import Model
from text_generation_inference.quant.choose import assign_methods, is_quantized
from text_generation_inference.quant.fp8 import ON_LOADING
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.units import gigabytes
from text_generation_inference.weights.load import weight_bytes

_MOST_CAPTURED, _MOST_CAPTURED_IN_FP8 = 1024, 2048
_SHORTEST_CHECKED = 8  # tokens that a request of the largest step must be allowed


def check_precision(config: ServerConfig, stored: Quantization | None, device: Device) -> None:
    """Raise `StartError` if something is asked for in FP8 that the device cannot compute in it."""
    if device.supports_fp8:
        return
    asked = {
        "`quantize` fp8": config.quantize is not None,
        stored.origin if stored is not None else "": stored is not None,
        "`kv_cache_dtype` fp8_e4m3fn": config.kv_cache_dtype is not None,
    }
    what = next((name for name, given in asked.items() if given), None)
    if what is not None:
        raise StartError(
            f"{what} needs {device.fp8_needs}, not {device.description}. Use the model in"
            " float16 or bfloat16 without FP8 settings."
        )


def check_weights_fit(config: ServerConfig, model: Model, dtype: torch.dtype, device: Device) -> None:
    """Raise `ResourceError` if the weights alone, as they will be stored, are larger than the memory."""
    measured = device.limits.measures_steps
    if not measured and config.load_format != "dummy":  # the host maps files, and may keep them smaller
        return
    needed, free = weight_bytes(model, dtype), device.free_bytes()
    if needed < free:
        return
    ways = [f"a {'GPU' if measured else 'machine'} with more memory", "a smaller model"]
    if measured and config.cuda_memory_fraction < 1:
        ways.insert(0, f"a `cuda_memory_fraction` above {config.cuda_memory_fraction}")
    if not is_quantized(model) and device.supports_fp8:
        assign_methods(model, ON_LOADING)  # nothing will be loaded into this one
        in_fp8 = weight_bytes(model, dtype)
        if in_fp8 < free:
            ways.insert(0, f"`quantize` fp8 ({gigabytes(in_fp8)})")
    raise ResourceError(
        f"The model is too large: its weights take {gigabytes(needed)} in {str(dtype).removeprefix('torch.')},"
        f" {gigabytes(free)} of memory are free on {device.description}. What would help:"
        f" {', '.join(ways)}."
    )


def most_prompt_tokens(config: ServerConfig, device: Device, rows: int, length: int) -> int:
    """Of a step of at most so many requests, each of at most so many tokens."""
    return min(config.max_batch_prefill_tokens or device.limits.max_batch_prefill_tokens, rows * (length - 1))


def most_captured_tokens(config: ServerConfig, model: Model, device: Device, rows: int, length: int) -> int:
    """Of a captured step with prompt tokens: a large model computes more of them for longer than the host takes to
    queue the step op by op."""
    most = _MOST_CAPTURED_IN_FP8 if is_quantized(model) else _MOST_CAPTURED
    return min(most, most_prompt_tokens(config, device, rows, length))


def measure_steps(
    config: ServerConfig,
    model: Model,
    device: Device,
    make_runner: Callable[[int, int], StepRunner],  # for so many requests of so many tokens, over a cache of one block
) -> int:
    """Bytes that slots, captured steps and the largest permitted step take beside weights and cache."""
    rows = config.max_batch_size or device.limits.max_batch_size
    tokens = max(rows, config.max_batch_prefill_tokens or device.limits.max_batch_prefill_tokens)
    length = max(SHORTEST, config.max_total_tokens or model.max_positions)
    wanted = device.decode_sizes(rows) if config.cuda_graphs is None else config.cuda_graphs
    capture = [size for size in wanted if 0 < size <= rows]
    mixed = device.mixed_sizes(rows, most_captured_tokens(config, model, device, rows, length)) if capture else []
    largest = max((sum(size) for size in mixed), default=0)
    try:
        return dry_run(device, lambda: make_runner(rows, length), rows, tokens, length, capture, largest)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise EngineError(f"the device cannot compute: {error}") from error
        raise ResourceError(
            f"Not enough memory for a step of {tokens} tokens and {rows} requests once the weights are loaded: lower"
            f" `max_batch_prefill_tokens` or `max_batch_size` ({str(error).split('. ')[0]})"
        ) from None


def largest_step_fits(runner: StepRunner, resolved: Resolved) -> bool:
    """Whether the largest permitted steps run beside the cache, as they did before there was one. They take their
    memory now, and not while somebody waits. `runner` has no requests."""
    rows, length = resolved.max_batch_size, resolved.max_total_tokens
    if length < _SHORTEST_CHECKED:
        return True
    dry_run = DryRun(runner, rows, resolved.block_size)
    try:
        run_largest(dry_run, rows, max(rows, resolved.max_batch_prefill_tokens), length, times=1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise EngineError(f"the device cannot compute: {error}") from error
        return False
    dry_run.release()
    return True
