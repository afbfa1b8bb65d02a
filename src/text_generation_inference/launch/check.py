"""The command `tgi check`: will this model run here, and with which limits? Answers in seconds and loads no weights.

Reads the model's config and the headers of its weight files, locally or from the hub, and asks the same parts
that start an engine: the registry, the model's declared tensors, the device and `resolve`. Those import torch, so they
are imported when a model is looked at.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from text_generation_inference.config import ModelSize, ServerConfig, cache_folder, expand_home, resolve
from text_generation_inference.devices.driver import read_driver
from text_generation_inference.errors import StartError, TgiError
from text_generation_inference.launch.arguments import build_parser, read_arguments
from text_generation_inference.launch.command import EXIT_ERROR, EXIT_USAGE, run_guarded
from text_generation_inference.units import gigabytes

Shapes = dict[str, tuple[int, ...]]
_NARROW = 60  # columns below which values stand under their names


class Facts(msgspec.Struct, kw_only=True):
    """What is known of a model without loading it."""

    config: Mapping[str, Any]
    source: str  # where the config was read
    read_shapes: Callable[[], "Shapes"]  # of the weights: asked once the config is known to be served
    blocks: dict[str, str] = {}  # matrices in quantised blocks: their types
    has_tokenizer: bool
    finds_chat_template: Callable[[], bool]
    check_tokenizer: Callable[[], object] = lambda: None  # raises when it cannot be used
    download_bytes: int = 0  # not yet in the cache


class Report(msgspec.Struct, kw_only=True):
    """The answer. What could not be found out is None or empty."""

    model: str
    fits: bool = False
    problems: list[str] = []  # why it cannot be served
    notes: list[str] = []
    gpu: dict[str, str] = {}  # what is known of the GPU, where there is one
    architecture: str | None = None
    is_supported: bool = False  # the architecture, wherever it runs
    quantization: str | None = None  # as the checkpoint names it
    quantization_is_supported: bool = False
    parameters: int | None = None
    dtype: str | None = None
    weight_bytes: int | None = None  # on the device, as it would be loaded
    weight_bytes_by_dtype: dict[str, int] = {}
    kv_bytes_per_token: int | None = None
    window: int | None = None  # tokens that a request keeps in the KV cache, if not all
    free_bytes: int | None = None  # before loading
    kv_cache_tokens: int | None = None
    limits: dict[str, int] = {}
    reasons: dict[str, str] = {}  # of the limits
    tokenizer: bool | None = None
    chat_template: bool | None = None
    download_bytes: int | None = None


def main(arguments: Sequence[str] | None = None, prog: str = "tgi check") -> int:
    try:
        parser = build_parser(prog, "Say whether a model runs on this machine, and with which limits.")
        parser.usage = "%(prog)s [OPTIONS] [MODEL]"
        parser.add_argument("model", nargs="?", metavar="MODEL", help="as --model-id")
        parser.add_argument("--json", action="store_true", default=False, help="the report as JSON")
        options = parser.parse_args(arguments)
        launch = read_arguments(options, os.environ)
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
    report = Report(model=config.model_id, gpu=_look_at_gpu() if config.device != "cpu" else {})
    try:
        _fill(report, config, _look_at(config))
    except TgiError as error:
        report.problems = [*report.problems, str(error)]
    report.fits = not report.problems
    return report


def _look_at_gpu() -> dict[str, str]:
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
        facts["others"] = f"{len(driver.gpus) - 1}, not used"
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
    from text_generation_inference.weights.convert import GGML_TYPES
    from text_generation_inference.weights.gguf import GgufFile
    from text_generation_inference.weights.gguf_model import plan_tensors, read_config
    from text_generation_inference.weights.gguf_tokenizer import read_tokenizer

    file = GgufFile.open(path)
    config = read_config(file)
    plans = plan_tensors(file, config)
    read_tokenizer(file, config["vocab_size"])  # raises when there is none that can be used
    return Facts(
        config=config,
        source=str(path),
        read_shapes=lambda: {plan.name: plan.shape for plan in plans},
        blocks={
            plan.name: plan.source.type_name
            for plan in plans
            if plan.keeps_blocks and plan.source is not None and plan.source.type_name in GGML_TYPES
        },
        has_tokenizer=True,
        finds_chat_template=lambda: bool(file.metadata.get("tokenizer.chat_template")),
    )


def _look_at_folder(config: ServerConfig, folder: Path) -> Facts:
    weights = expand_home(config.weights_cache_override or str(folder), "weights_cache_override")
    dummy = config.load_format == "dummy"
    return _describe(folder, lambda: {} if dummy else _local_shapes(weights), (folder / "tokenizer.json").exists())


def _look_at_hub(config: ServerConfig) -> Facts:
    from text_generation_inference.weights.download import download_description, download_model, list_files, read_shapes
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
        facts = _describe(folder, lambda: read_shapes(model, revision, access), False)
    facts.has_tokenizer = any(file.name == "tokenizer.json" for file in files)
    facts.download_bytes = sum(file.num_bytes for file in files if not file.is_cached)
    return facts


def _describe(folder: Path, read_shapes: Callable[[], Shapes], has_tokenizer: bool) -> Facts:
    from text_generation_inference.models.registry import read_config
    from text_generation_inference.text.chat_template import ChatTemplate
    from text_generation_inference.text.tokenizer import Tokenizer

    config = read_config(folder)
    return Facts(
        config=config.fields,
        source=config.source,
        read_shapes=read_shapes,
        has_tokenizer=has_tokenizer,
        finds_chat_template=lambda: ChatTemplate.load(folder).found,
        check_tokenizer=lambda: Tokenizer.load(folder) if has_tokenizer else None,
    )


def _local_shapes(folder: Path) -> Shapes:
    from text_generation_inference.weights.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.shape(name) for name in checkpoint.names()}


# -- what follows from it ------------------------------------------------------------------------------------------


def _fill(report: Report, config: ServerConfig, facts: Facts) -> None:
    import torch

    from text_generation_inference.devices.device import choose_device
    from text_generation_inference.devices.hardware import runs_on_gpu
    from text_generation_inference.engine.memory import check_precision, check_weights_fit
    from text_generation_inference.engine.rank import choose_dtype
    from text_generation_inference.layers.cache import bytes_per_token, common_window
    from text_generation_inference.models.config import Config
    from text_generation_inference.models.model import Context
    from text_generation_inference.models.registry import ARCHITECTURES, build, read_quantization
    from text_generation_inference.quant.choose import assign_methods, choose_quantization, name_quantization
    from text_generation_inference.runner import kv_cache
    from text_generation_inference.weights.load import check_tensors, count_parameters, weight_bytes

    report.download_bytes = facts.download_bytes
    architectures = facts.config.get("architectures")
    report.architecture = str(architectures[0])[:80] if isinstance(architectures, list) and architectures else None
    report.is_supported = report.architecture in ARCHITECTURES
    report.quantization = name_quantization(facts.config)
    model_config = Config(facts.config, facts.source)
    stored = read_quantization(model_config)
    described = build(model_config)  # raises for what cannot be served anywhere
    report.is_supported = True
    report.quantization_is_supported = report.quantization is not None
    report.tokenizer = facts.has_tokenizer
    if not facts.has_tokenizer:
        report.problems = ["there is no tokenizer.json, so text cannot be turned into tokens"]
    facts.check_tokenizer()
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
    check_precision(config, stored, device)
    model = build(model_config, Context(device.ops, device=device.torch_device))
    report.parameters = count_parameters(model)
    report.weight_bytes_by_dtype = {name: weight_bytes(model, getattr(torch, name)) for name in device.limits.dtypes}
    quantization = choose_quantization(config.quantize, stored)
    computes_blocks = config.custom_kernels and report.dtype == "float32"  # the kernels of the CPU take all kinds
    block_types = facts.blocks if computes_blocks else {}
    assign_methods(model, quantization, block_types, {kind.lower() for kind in block_types.values()})
    report.weight_bytes = weight_bytes(model, dtype)
    if config.load_format != "dummy":
        shapes, may_leave = facts.read_shapes(), ()
        model.adapt(list(shapes))
        if quantization is not None:
            may_leave = quantization.may_leave
            assign_methods(model, quantization.named_as_in(list(shapes)))
        check_tensors(model, shapes, (*model.ignored, *may_leave), report.model)
    cache_dtype = kv_cache.choose_dtype(config.kv_cache_dtype, dtype)
    caches = model.caches(cache_dtype)
    report.kv_bytes_per_token = bytes_per_token(caches)
    if on_gpu:
        report.notes = [
            *report.notes,
            "what the largest step takes is measured at start, and is taken off the KV cache",
        ]
    report.free_bytes = device.free_bytes()
    device.close()
    check_weights_fit(config, model, dtype, device)
    left = report.free_bytes - report.weight_bytes
    if left <= 0:
        raise StartError(
            f"the weights take {gigabytes(report.weight_bytes)}, {gigabytes(report.free_bytes)} of memory are free"
        )
    size = ModelSize(
        max_positions=model.max_positions,
        kv_bytes_per_token=report.kv_bytes_per_token,
        window=common_window(caches),
    )
    resolved = resolve(config, size, device.limits, left)
    report.kv_cache_tokens = (resolved.num_blocks - 1) * resolved.block_size
    names = ("max_input_tokens", "max_total_tokens", "max_batch_prefill_tokens", "max_batch_size")
    report.limits = {name: getattr(resolved, name) for name in names}
    report.reasons = resolved.reasons
    report.window = resolved.window


# -- how it is shown -----------------------------------------------------------------------------------------------


def render(report: Report, width: int | None = None) -> str:
    """The report for a reader, in lines of at most `width` columns if that is given."""
    rows: list[tuple[str, str]] = []
    if report.gpu:
        rows.append(("GPU", f"{report.gpu['name']}, {report.gpu['memory']}, capability {report.gpu['capability']}"))
        rows.append(("", f"{report.gpu['features']}; the driver runs {report.gpu['driver']}"))
    if report.architecture is not None:
        known = "supported" if report.is_supported else "not supported"
        rows.append(("architecture", f"{report.architecture}, {known}"))
    if report.quantization is not None:
        known = "supported" if report.quantization_is_supported else "not supported"
        rows.append(("quantised with", f"{report.quantization}: {known}"))
    if report.parameters is not None:
        rows.append(("parameters", f"{report.parameters / 1e6:,.1f} million"))
    if report.weight_bytes is not None:
        others = ", ".join(f"{name} {gigabytes(size)}" for name, size in report.weight_bytes_by_dtype.items())
        rows.append(("weights", f"{gigabytes(report.weight_bytes)} as they would be loaded (all {others})"))
    if report.free_bytes is not None:
        rows.append(("memory", f"{gigabytes(report.free_bytes)} free"))
    if report.kv_bytes_per_token is not None:
        rows.append(("KV cache", f"{report.kv_bytes_per_token:,} bytes per token"))
    if report.window is not None and report.kv_bytes_per_token is not None:
        most = gigabytes(report.window * report.kv_bytes_per_token)
        rows.append(("", f"a request keeps the last {report.window:,} tokens ({most}), however long it gets"))
    if report.kv_cache_tokens is not None:
        reason = report.reasons.get("max_batch_total_tokens", "")
        rows.append(("", f"{report.kv_cache_tokens:,} tokens ({reason})"))
    rows += [(name, f"{value:,} ({report.reasons.get(name, '')})") for name, value in report.limits.items()]
    if report.tokenizer is not None:
        rows.append(("tokenizer", "found" if report.tokenizer else "missing"))
        rows.append(("chat template", "found" if report.chat_template else "missing"))
    if report.download_bytes:
        rows.append(("to download", gigabytes(report.download_bytes)))
    verdict = "it fits" if report.fits else f"it cannot be served: {'; '.join(report.problems)}"
    lines = [report.model]
    for name, text in rows:
        lines += _row(name, text, width)
    for note in report.notes:
        lines += _wrap(f"  note: {note}", width, 8)
    return "\n".join([*lines, *_row("verdict", verdict, width)])


def _row(name: str, text: str, width: int | None) -> list[str]:
    if width is None or width >= _NARROW:
        return _wrap(f"  {name:<25} {text}", width, 28)
    return [*([f"  {name}"[:width]] if name else []), *_wrap(f"    {text}", width, 4)]


def _wrap(line: str, width: int | None, indent: int) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(line, max(width, 2 * indent), subsequent_indent=" " * indent, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
