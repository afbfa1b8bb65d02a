"""What follows from what is known of a model: what it weighs here, what its cache takes, and which limits are left.

Asks the parts that start an engine, in the order in which a start does; what was found until one refuses stays in the
report. Imports torch.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from text_generation_inference.config import ModelSize, ServerConfig, cache_folder, resolve
from text_generation_inference.devices.device import Device, choose_device
from text_generation_inference.devices.hardware import runs_on_gpu
from text_generation_inference.engine.memory import check_precision, check_weights_fit
from text_generation_inference.engine.rank import choose_dtype
from text_generation_inference.errors import StartError
from text_generation_inference.kernels.cpu.ops import BLOCKS
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.launch.check_facts import Facts
from text_generation_inference.launch.check_report import KvLayers, RankPart, Report
from text_generation_inference.layers.cache import (
    AnyCacheSpec,
    CrossCacheSpec,
    LatentCacheSpec,
    bytes_per_picture_row,
    bytes_per_token,
    common_window,
    partial_window,
    window_bytes_per_token,
)
from text_generation_inference.layers.experts import StackedMatrix
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.ranks import check_ranks
from text_generation_inference.models.registry import ARCHITECTURES, OTHERS, build, find_module, read_quantization
from text_generation_inference.parallel import SINGLE, Parallel
from text_generation_inference.quant.choose import (
    assign_methods,
    choose_quantization,
    describe_widened,
    name_quantization,
)
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.runner import kv_cache
from text_generation_inference.types import Limits
from text_generation_inference.units import gigabytes
from text_generation_inference.weights.headers import Headers
from text_generation_inference.weights.load import check_tensors, count_parameters, weight_bytes


@dataclass(frozen=True, slots=True)
class _StartChoice:
    """As a start makes it."""

    device: Device
    dtype: torch.dtype
    quantization: Quantization | None
    build: Callable[[Parallel], Model]


def fill(report: Report, config: ServerConfig, facts: Facts) -> None:
    report.download_bytes = facts.download_bytes
    architectures = facts.config.get("architectures")
    report.architecture = str(architectures[0])[:80] if isinstance(architectures, list) and architectures else None
    report.is_supported = report.architecture in ARCHITECTURES
    report.quantization = name_quantization(facts.config)
    model_config = Config(facts.config, facts.source)
    stored = read_quantization(model_config)
    described = build(model_config, Context(trusts_code=config.trust_remote_code))  # raises for what is served nowhere
    _describe(report, config, facts, described, find_module(model_config))
    chosen = _choose(report, config, model_config, stored)
    computed = _count(report, config, chosen)
    check_ranks(described, report.num_shard, config.expert_parallel)
    model, held = _weigh(report, config, facts.blocks, chosen, computed, None)
    caches = held.caches(kv_cache.choose_dtype(config.kv_cache_dtype, chosen.dtype))
    report.kv_bytes_per_token = max((part.kv_bytes_per_token for part in report.ranks), default=bytes_per_token(caches))
    report.kv_layers = _group_layers(caches)
    if config.load_format != "dummy":
        headers = facts.read_headers()
        model, held = _weigh(report, config, facts.blocks, chosen, computed, headers)
        may_leave = () if chosen.quantization is None else chosen.quantization.may_leave
        check_tensors(model, headers.shapes, (*model.ignored, *may_leave), report.model)
    report.notes = [*report.notes, *describe_widened(model, chosen.dtype), *model.describe_type(chosen.dtype)]
    report.quantization = name_quantization(facts.config, config.quantize)  # the setting alone may be wrong about it
    report.quantization_is_supported = report.quantization is not None
    left = _find_room(report, config, chosen, held)
    _size_cache(report, config, model, caches, chosen.device.limits, left)


def _describe(report: Report, config: ServerConfig, facts: Facts, described: Model, module: str) -> None:
    report.is_supported = True
    report.num_shard = config.num_shard or 1
    report.path = "transformers" if module == OTHERS else f"models/{module}.py"
    report.lost = list(described.lost)
    report.quantization_is_supported = report.quantization is not None
    report.tokenizer = facts.has_tokenizer
    if not facts.has_tokenizer:
        report.problems = [facts.lacks_tokenizer]
    facts.describe_text(report)
    report.chat_template = facts.finds_chat_template()
    report.notes = list(described.notes)
    if not report.chat_template:
        report.notes = [*report.notes, "there is no chat template: chat requests will be refused"]


def _choose(report: Report, config: ServerConfig, model_config: Config, stored: Quantization | None) -> _StartChoice:
    custom_kernels = config.custom_kernels and runs_on_gpu(config.device)  # those of the CPU would be compiled now
    device = choose_device(
        config.device, cache_folder(config), custom_kernels, config.num_threads, config.cuda_memory_fraction, config
    )
    dtype = choose_dtype(config, device)
    report.dtype = str(dtype).removeprefix("torch.")
    quantization = choose_quantization(config.quantize, stored)
    check_precision(config, quantization, device)

    def describe(parallel: Parallel) -> Model:
        step = 1 if quantization is None else quantization.width_step
        about = (device.ops, parallel, device.torch_device, dtype, config.trust_remote_code, step)
        return build(model_config, Context(*about))

    return _StartChoice(device, dtype, quantization, describe)


def _count(report: Report, config: ServerConfig, chosen: _StartChoice) -> Collection[str]:
    """Parameters and what they take in each type. Returns the types of blocks that the device computes from."""
    device, model = chosen.device, chosen.build(SINGLE)
    report.parameters = count_parameters(model)
    _count_experts(report, model)
    report.weight_bytes_by_dtype = {name: weight_bytes(model, getattr(torch, name)) for name in device.limits.dtypes}
    if not config.custom_kernels or device.torch_device.type != "cpu":
        return ()
    device.ops.low_bit_ops = Ops().low_bit_ops  # as the kernels hold matrices that a start builds
    return BLOCKS if report.dtype == "float32" else ()


def _weigh(
    report: Report,
    config: ServerConfig,
    blocks: Mapping[str, str],
    chosen: _StartChoice,
    computed: Collection[str],
    headers: Headers | None,
) -> tuple[Model, Model]:
    """All of the model, and the rank that holds most of it. Without headers config.json is asked alone how weights are
    stored."""
    named, is_plain = chosen.quantization, None
    if headers is not None:
        is_plain = headers.is_plain
        named = None if named is None else named.named_as_in(headers.shapes)

    def hold(parallel: Parallel) -> Model:
        part = chosen.build(parallel)
        if headers is not None:
            part.adapt(list(headers.shapes))
        assign_methods(part, named, blocks, computed, is_plain)
        return part

    whole = held = hold(SINGLE)
    most, report.ranks = weight_bytes(whole, chosen.dtype), []
    cache_dtype = kv_cache.choose_dtype(config.kv_cache_dtype, chosen.dtype)
    for rank in range(report.num_shard if report.num_shard > 1 else 0):
        part = hold(Parallel(rank, report.num_shard))
        size = RankPart(weight_bytes(part, chosen.dtype), bytes_per_token(part.caches(cache_dtype)))
        report.ranks = [*report.ranks, size]
        if rank == 0 or size.weight_bytes > most:
            most, held = size.weight_bytes, part
    report.weight_bytes = most
    return whole, held


def _find_room(report: Report, config: ServerConfig, chosen: _StartChoice, held: Model) -> int:
    """Bytes beside the weights."""
    device = chosen.device
    if runs_on_gpu(config.device):
        report.notes = [
            *report.notes,
            "what the largest step takes is measured at start, and is taken off the KV cache",
        ]
    report.free_bytes = device.free_bytes()
    if device.torch_device.type == "cpu":  # ranks of a machine share its memory
        report.free_bytes //= report.num_shard // config.nnodes
    device.close()
    check_weights_fit(config, held, chosen.dtype, device)
    assert report.weight_bytes is not None
    left = report.free_bytes - report.weight_bytes
    if left <= 0:
        raise StartError(
            f"the weights take {gigabytes(report.weight_bytes)}, {gigabytes(report.free_bytes)} of memory are free"
        )
    return left


def _size_cache(
    report: Report, config: ServerConfig, model: Model, caches: Sequence[AnyCacheSpec], limits: Limits, left: int
) -> None:
    crosses = model.sight is not None and model.sight.cross_rows and report.picture_tokens
    assert report.kv_bytes_per_token is not None
    size = ModelSize(
        max_positions=model.max_positions,
        may_be_longer=model.may_be_longer,
        kv_bytes_per_token=report.kv_bytes_per_token,
        window=common_window(caches),
        partial_window=partial_window(caches),
        window_bytes_per_token=window_bytes_per_token(caches),
        rows_per_picture=model.sight.cross_rows if model.sight is not None and crosses else 0,
        bytes_per_row=bytes_per_picture_row(caches),
    )
    if size.rows_per_picture:
        report.picture_layers = sum(isinstance(cache, CrossCacheSpec) for cache in caches)
        report.picture_bytes = size.rows_per_picture * size.bytes_per_row
    resolved = resolve(config, size, limits, left)
    report.max_cached_pictures = resolved.max_cached_pictures or None
    report.kv_cache_tokens = (resolved.num_blocks - 1) * resolved.block_size
    names = ("max_input_tokens", "max_total_tokens", "max_batch_prefill_tokens", "max_batch_size")
    report.limits = {name: getattr(resolved, name) for name in names}
    report.reasons = resolved.reasons
    report.window, report.partial_window = resolved.window, resolved.partial_window
    if resolved.partial_window is not None:
        report.far_bytes_per_token = size.kv_bytes_per_token - size.window_bytes_per_token
        report.window_cache_tokens = (resolved.num_window_blocks - 1) * resolved.block_size


def _count_experts(report: Report, model: Model) -> None:
    if model.experts is not None:
        count, chosen, idle = model.experts
        assert report.parameters is not None
        report.experts, report.active_parameters = [count, chosen], report.parameters - idle
    stacked = [module for _, module in model.walk() if isinstance(module, StackedMatrix)]
    if not stacked:
        return
    assert report.parameters is not None
    idle = 0
    for matrix in stacked:
        of_all = sum(math.prod(declared.shape) for declared in matrix.declare())
        idle += of_all // matrix.num_experts * (matrix.num_experts - matrix.top_k)
    report.active_parameters = report.parameters - idle
    report.experts = [stacked[0].num_experts, stacked[0].top_k]


def _group_layers(caches: Sequence[AnyCacheSpec]) -> list[KvLayers]:
    """Layers that keep the same, in the order in which they first come."""
    groups: dict[AnyCacheSpec, int] = {}
    for cache in caches:
        if not isinstance(cache, CrossCacheSpec):  # which keep nothing of a token
            groups[cache] = groups.get(cache, 0) + 1
    return [
        KvLayers(
            "latents" if isinstance(cache, LatentCacheSpec) else "keys and values",
            count,
            count * cache.bytes_per_token,
            cache.window,
        )
        for cache, count in groups.items()
    ]
