"""The command `tgi check`: will this model run here, and with which limits? Answers in seconds and loads no weights.

Reads the model's config and the headers of its weight files, locally or from the hub, and asks the same parts
that start an engine: the registry, the model's declared tensors, the device and `resolve`. Those import torch, so they
are imported when a model is looked at.
"""

import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from text_generation_inference.config import (
    ModelSize,
    ServerConfig,
    cache_folder,
    expand_home,
    prepare_process,
    resolve,
)
from text_generation_inference.devices import visible
from text_generation_inference.devices.driver import read_driver
from text_generation_inference.errors import StartError, TgiError
from text_generation_inference.launch.arguments import build_parser, read_arguments
from text_generation_inference.launch.check_report import KvLayers, RankPart, Report, render
from text_generation_inference.launch.command import EXIT_ERROR, EXIT_USAGE, run_guarded
from text_generation_inference.units import gigabytes
from text_generation_inference.weights.headers import Headers

if TYPE_CHECKING:
    from text_generation_inference.layers.cache import AnyCacheSpec
    from text_generation_inference.models.model import Model


class Facts(msgspec.Struct, kw_only=True):
    """What is known of a model without loading it."""

    config: Mapping[str, Any]
    source: str  # where the config was read
    read_headers: Callable[[], Headers]  # of the weights: asked once the config is known to be served
    blocks: dict[str, str] = {}  # matrices in quantised blocks: their types
    has_tokenizer: bool
    lacks_tokenizer: str = ""  # why, and what to do
    finds_chat_template: Callable[[], bool]
    describe_text: Callable[[Report], None] = lambda _: None  # raises when the tokenizer cannot be used
    download_bytes: int = 0  # not yet in the cache


def main(arguments: Sequence[str] | None = None, prog: str = "tgi check") -> int:
    try:
        parser = build_parser(prog, "Say whether a model runs on this machine, and with which limits.")
        parser.usage = "%(prog)s [OPTIONS] [MODEL]"
        parser.add_argument("model", nargs="?", metavar="MODEL", help="as --model-id")
        parser.add_argument("--json", action="store_true", default=False, help="the report as JSON")
        options = parser.parse_args(arguments)
        launch = read_arguments(options, os.environ, needs_cards=False)
        config = launch.config
        if getattr(options, "model", None) is not None:
            config = msgspec.structs.replace(config, model_id=options.model)
            config.check()
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run_guarded(lambda: _run(config, launch.notes, options.json))


def _run(config: ServerConfig, notes: list[str], as_json: bool) -> int:
    report = check_model(config)
    report.notes = [*notes, *report.notes]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else render(report, width))
    return 0 if report.fits else EXIT_ERROR


def check_model(config: ServerConfig) -> Report:
    """Everything that can be said; a failure on the way ends the report and is its last problem."""
    prepare_process(config)
    report = Report(model=config.model_id, gpu=_look_at_gpu(config.num_shard or 1) if config.device != "cpu" else {})
    try:
        _fill(report, config, _look_at(config))
        visible.check_cards(config, os.environ)
    except TgiError as error:
        report.problems = [*report.problems, str(error).removeprefix("Invalid argument: ")]
    report.fits = not report.problems
    return report


def _look_at_gpu(num_ranks: int) -> dict[str, str]:
    driver = read_driver()
    if not driver.gpus:
        return {}
    gpu = driver.gpus[0]
    features = ["bfloat16" if gpu.capability >= (8, 0) else "no bfloat16"]
    features.append("FP8" if gpu.capability >= (8, 9) else "no FP8")
    facts = {
        "name": gpu.name,
        "memory": gigabytes(gpu.memory_bytes),
        "capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "features": ", ".join(features),
        "driver": driver.runs or "unknown",
    }
    if len(driver.gpus) > 1:
        facts["others"] = f"{len(driver.gpus) - 1}{', not used' if num_ranks == 1 else ''}"
    return facts


# -- what is known of the model ------------------------------------------------------------------------------------


def _look_at(config: ServerConfig) -> Facts:
    from text_generation_inference.weights import embedded
    from text_generation_inference.weights.model_files import CONFIG
    from text_generation_inference.weights.source import find_only_gguf, may_be_hub_id, not_found

    model = config.model_id
    path = expand_home(model, "model_id")
    if model == embedded.NAME:
        return _look_at_gguf(embedded.find_embedded())
    if model and path.is_file():
        return _look_at_gguf(path)
    if model and path.is_dir():
        return _look_at_folder(config, path) if (path / CONFIG).exists() else _look_at_gguf(find_only_gguf(path))
    if not may_be_hub_id(model):
        raise not_found(model)
    return _look_at_hub(config)


def _look_at_gguf(path: Path) -> Facts:
    from text_generation_inference.weights.convert import GGML_TYPES, describe_gguf
    from text_generation_inference.weights.gguf import GgufFile
    from text_generation_inference.weights.gguf_model import plan_tensors, read_config

    file = GgufFile.open(path)
    config = read_config(file)
    plans = plan_tensors(file, config)
    texts = describe_gguf(file, config)  # raises when there is no tokenizer that can be used

    def describe_text(report: Report) -> None:
        with TemporaryDirectory() as folder:
            for name, text in texts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            _describe_text(report, Path(folder), config)

    return Facts(
        config=config,
        source=str(path),
        read_headers=lambda: Headers(
            {plan.name: plan.shape for plan in plans}, dict.fromkeys((plan.name for plan in plans), "F32")
        ),
        blocks={
            plan.name: plan.source.type_name
            for plan in plans
            if plan.keeps_blocks and plan.source is not None and plan.source.type_name in GGML_TYPES
        },
        has_tokenizer=True,
        finds_chat_template=lambda: bool(file.metadata.get("tokenizer.chat_template")),
        describe_text=describe_text,
    )


def _look_at_folder(config: ServerConfig, folder: Path) -> Facts:
    from text_generation_inference.weights.checkpoint import Checkpoint

    weights = expand_home(config.weights_cache_override or str(folder), "weights_cache_override")
    dummy = config.load_format == "dummy"
    names = [path.name for path in folder.iterdir()]
    return _describe(folder, lambda: Headers({}, {}) if dummy else Checkpoint.open(weights).headers, names)


def _look_at_hub(config: ServerConfig) -> Facts:
    from text_generation_inference.text.tokenizer_files import explain_missing, has_tokenizer
    from text_generation_inference.weights.download import (
        download_description,
        download_model,
        list_files,
        read_headers,
    )
    from text_generation_inference.weights.source import hub_access

    model, revision, access = config.model_id, config.revision, hub_access(config)
    elsewhere = config.load_format == "dummy" or config.weights_cache_override is not None
    if access.offline:
        return _look_at_folder(config, download_model(model, revision, access, weights=not elsewhere))
    folder = download_description(model, revision, access)
    files = list_files(model, revision, access)
    weights = [file.is_cached for file in files if file.name.endswith(".safetensors")]
    if elsewhere or (weights and all(weights)):
        facts = _look_at_folder(config, folder)
    else:
        facts = _describe(folder, lambda: read_headers(model, revision, access), ())
    names = [file.name for file in files]
    facts.has_tokenizer, facts.lacks_tokenizer = has_tokenizer(names), explain_missing(names)
    facts.download_bytes = sum(file.num_bytes for file in files if not file.is_cached)
    return facts


def _describe(folder: Path, read_headers: Callable[[], Headers], names: Collection[str]) -> Facts:
    from text_generation_inference.models.registry import read_config
    from text_generation_inference.text.chat_template import ChatTemplate
    from text_generation_inference.text.tokenizer_files import explain_missing, has_tokenizer

    config = read_config(folder)

    def describe_text(report: Report) -> None:
        if has_tokenizer(names):
            _describe_text(report, folder, config.fields)

    return Facts(
        config=config.fields,
        source=config.source,
        read_headers=read_headers,
        has_tokenizer=has_tokenizer(names),
        lacks_tokenizer=explain_missing(names),
        finds_chat_template=lambda: ChatTemplate.load(folder).found,
        describe_text=describe_text,
    )


def _describe_text(report: Report, folder: Path, fields: Mapping[str, Any]) -> None:
    """What tokenizer and chat template say: how texts end, calls are written, thoughts marked, pictures counted."""
    from text_generation_inference.api.pictures import picture_costs
    from text_generation_inference.pictures.rules import find_rule
    from text_generation_inference.text.chat_template import ChatTemplate
    from text_generation_inference.text.picture_prompt import PictureWords
    from text_generation_inference.text.reasoning import detect_reasoning_format
    from text_generation_inference.text.tokenizer import Tokenizer
    from text_generation_inference.text.tools import detect_tool_format

    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    report.stop_tokens = [tokenizer.token_of(token_id) or str(token_id) for token_id in sorted(tokenizer.eos_ids)]
    if template.found:
        report.tool_calls = detect_tool_format(template, tokenizer).family
        thinking = detect_reasoning_format(template, tokenizer)
        report.thinking = None if thinking is None else thinking.name
    rule = find_rule(folder, fields)
    if rule is not None:
        report.picture_tokens = picture_costs(rule, PictureWords.of(rule, tokenizer), tokenizer)


# -- what follows from it ------------------------------------------------------------------------------------------


def _fill(report: Report, config: ServerConfig, facts: Facts) -> None:
    import torch

    from text_generation_inference.devices.device import choose_device
    from text_generation_inference.devices.hardware import runs_on_gpu
    from text_generation_inference.engine.memory import check_precision, check_weights_fit
    from text_generation_inference.engine.rank import choose_dtype
    from text_generation_inference.kernels.cpu.ops import BLOCKS
    from text_generation_inference.kernels.ops import Ops
    from text_generation_inference.layers.cache import (
        CrossCacheSpec,
        bytes_per_picture_row,
        bytes_per_token,
        common_window,
        partial_window,
        window_bytes_per_token,
    )
    from text_generation_inference.models.config import Config
    from text_generation_inference.models.model import Context
    from text_generation_inference.models.ranks import check_ranks
    from text_generation_inference.models.registry import ARCHITECTURES, OTHERS, build, find_module, read_quantization
    from text_generation_inference.parallel import SINGLE, Parallel
    from text_generation_inference.quant.choose import (
        assign_methods,
        choose_quantization,
        describe_widened,
        name_quantization,
    )
    from text_generation_inference.runner import kv_cache
    from text_generation_inference.weights.load import check_tensors, count_parameters, weight_bytes

    report.download_bytes = facts.download_bytes
    architectures = facts.config.get("architectures")
    report.architecture = str(architectures[0])[:80] if isinstance(architectures, list) and architectures else None
    report.is_supported = report.architecture in ARCHITECTURES
    report.quantization = name_quantization(facts.config)
    model_config = Config(facts.config, facts.source)
    stored = read_quantization(model_config)
    trusts_code = config.trust_remote_code
    described = build(model_config, Context(trusts_code=trusts_code))  # raises for what cannot be served anywhere
    report.is_supported = True
    num_ranks = report.num_shard = config.num_shard or 1
    module = find_module(model_config)
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
    on_gpu = runs_on_gpu(config.device)
    custom_kernels = config.custom_kernels and on_gpu  # those of the CPU would be compiled now
    device = choose_device(
        config.device, cache_folder(config), custom_kernels, config.num_threads, config.cuda_memory_fraction, config
    )
    dtype = choose_dtype(config, device)
    report.dtype = str(dtype).removeprefix("torch.")
    quantization = choose_quantization(config.quantize, stored)
    check_precision(config, quantization, device)

    def describe(parallel: Parallel) -> "Model":
        step = 1 if quantization is None else quantization.width_step
        about = (device.ops, parallel, device.torch_device, dtype, trusts_code, step)
        return build(model_config, Context(*about))

    model = describe(SINGLE)
    report.parameters = count_parameters(model)
    _count_experts(report, model)
    report.weight_bytes_by_dtype = {name: weight_bytes(model, getattr(torch, name)) for name in device.limits.dtypes}
    computed: Collection[str] = ()
    if config.custom_kernels and device.torch_device.type == "cpu":  # as the kernels hold matrices that a start builds
        device.ops.low_bit_ops = Ops().low_bit_ops
        computed = BLOCKS if report.dtype == "float32" else ()
    cache_dtype = kv_cache.choose_dtype(config.kv_cache_dtype, dtype)
    check_ranks(described, num_ranks, config.expert_parallel)

    def weigh(headers: Headers | None) -> "tuple[Model, Model, int]":
        """All of the model; the rank that holds most of it, and the bytes of that. Without headers config.json is asked
        alone how weights are stored."""
        named, is_plain = quantization, None
        if headers is not None:
            is_plain = headers.is_plain
            named = None if quantization is None else quantization.named_as_in(headers.shapes)

        def hold(parallel: Parallel) -> "Model":
            part = describe(parallel)
            if headers is not None:
                part.adapt(list(headers.shapes))
            assign_methods(part, named, facts.blocks, computed, is_plain)
            return part

        whole = held = hold(SINGLE)
        most, report.ranks = weight_bytes(whole, dtype), []
        for rank in range(num_ranks if num_ranks > 1 else 0):
            part = hold(Parallel(rank, num_ranks))
            size = RankPart(weight_bytes(part, dtype), bytes_per_token(part.caches(cache_dtype)))
            report.ranks = [*report.ranks, size]
            if rank == 0 or size.weight_bytes > most:
                most, held = size.weight_bytes, part
        return whole, held, most

    model, held, report.weight_bytes = weigh(None)
    caches = held.caches(cache_dtype)
    report.kv_bytes_per_token = max((part.kv_bytes_per_token for part in report.ranks), default=bytes_per_token(caches))
    report.kv_layers = _group_layers(caches)
    if config.load_format != "dummy":
        headers = facts.read_headers()
        model, held, report.weight_bytes = weigh(headers)
        may_leave = () if quantization is None else quantization.may_leave
        check_tensors(model, headers.shapes, (*model.ignored, *may_leave), report.model)
    report.notes = [*report.notes, *describe_widened(model, dtype), *model.describe_type(dtype)]
    report.quantization = name_quantization(facts.config, config.quantize)  # the setting alone may be wrong about it
    report.quantization_is_supported = report.quantization is not None
    if on_gpu:
        report.notes = [
            *report.notes,
            "what the largest step takes is measured at start, and is taken off the KV cache",
        ]
    report.free_bytes = device.free_bytes()
    if device.torch_device.type == "cpu":  # ranks of a machine share its memory
        report.free_bytes //= num_ranks // config.nnodes
    device.close()
    check_weights_fit(config, held, dtype, device)
    left = report.free_bytes - report.weight_bytes
    if left <= 0:
        raise StartError(
            f"the weights take {gigabytes(report.weight_bytes)}, {gigabytes(report.free_bytes)} of memory are free"
        )
    crosses = model.sight is not None and model.sight.cross_rows and report.picture_tokens
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
    resolved = resolve(config, size, device.limits, left)
    report.max_cached_pictures = resolved.max_cached_pictures or None
    report.kv_cache_tokens = (resolved.num_blocks - 1) * resolved.block_size
    names = ("max_input_tokens", "max_total_tokens", "max_batch_prefill_tokens", "max_batch_size")
    report.limits = {name: getattr(resolved, name) for name in names}
    report.reasons = resolved.reasons
    report.window, report.partial_window = resolved.window, resolved.partial_window
    if resolved.partial_window is not None:
        report.far_bytes_per_token = size.kv_bytes_per_token - size.window_bytes_per_token
        report.window_cache_tokens = (resolved.num_window_blocks - 1) * resolved.block_size


def _count_experts(report: Report, model: "Model") -> None:
    from text_generation_inference.layers.experts import StackedMatrix

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


def _group_layers(caches: "Sequence[AnyCacheSpec]") -> list[KvLayers]:
    """Layers that keep the same, in the order in which they first come."""
    from text_generation_inference.layers.cache import CrossCacheSpec, LatentCacheSpec

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


if __name__ == "__main__":
    sys.exit(main())
