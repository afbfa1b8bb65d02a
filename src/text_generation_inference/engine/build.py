"""Brings an engine up from a configuration: resolve, load, allocate, ready."""

import gc
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from text_generation_inference.config import (
    ModelSize,
    Resolved,
    ServerConfig,
    cache_folder,
    resolve,
    uses_buckets,
)
from text_generation_inference.devices.buckets import BucketPlan
from text_generation_inference.devices.device import Device, check_present, choose_device
from text_generation_inference.engine.bucketing import (
    describe_plan,
    fit_prompts,
    guess_limits,
    limits_graphs,
    make_plan,
    plan_from,
)
from text_generation_inference.engine.calibrate import choose_cache, make_recorder, read_quant_config
from text_generation_inference.engine.loop import EngineLoop, is_out_of_memory
from text_generation_inference.engine.memory import (
    check_precision,
    check_weights_fit,
    largest_step_fits,
    measure_steps,
    most_captured_tokens,
)
from text_generation_inference.engine.warm_shapes import StepBytes, measure_shapes, warm_shapes
from text_generation_inference.errors import EngineError, ResourceError, StartError
from text_generation_inference.layers.cache import bytes_per_token
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.registry import build, judge, read_config, read_quantization
from text_generation_inference.models.spec import Config
from text_generation_inference.parallel import SINGLE, Parallel
from text_generation_inference.quant.choose import assign_methods, choose_quantization
from text_generation_inference.quant.inc.measure import Recorder
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.runner import kv_cache
from text_generation_inference.runner.bucketed_steps import BucketedSteps
from text_generation_inference.runner.runner import Runner
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import ModelFacts
from text_generation_inference.units import gigabytes
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.load import load_checkpoint, load_dummy
from text_generation_inference.weights.progress import Progress, silent
from text_generation_inference.weights.scratch import Scratch
from text_generation_inference.weights.source import ModelFolder, find_model
from text_generation_inference.weights.upload import Upload

SPARE_BYTES = 1 << 30
MOST_SPARE_BYTES = 4 * SPARE_BYTES


@dataclass
class Engine:
    """Everything that runs: the loop, and what the front end must know."""

    loop: EngineLoop
    facts: ModelFacts
    folder: Path
    device: Device
    resolved: Resolved
    grammars: GrammarCompiler  # shared with the runner: what is compiled here need not be there
    seconds: dict[str, float] = field(default_factory=dict)  # start-up stages
    notes: list[str] = field(default_factory=list)
    recorder: Recorder | None = None  # measures every pass
    buckets: BucketedSteps | None = None  # where steps have the shapes of a plan

    def close(self) -> None:
        self.device.close()
        if self.recorder is not None and self.recorder.has_news:
            self.recorder.save()


@dataclass
class _Ready:
    """A runner over its cache."""

    resolved: Resolved
    runner: Runner
    plan: BucketPlan | None


def start_engine(config: ServerConfig, progress: Progress = silent) -> Engine:
    config.check()
    calibrated = read_quant_config(config)
    config = calibrated.config
    seconds: dict[str, float] = {}
    cache_dir = cache_folder(config)
    check_present(config)
    with _timed(seconds, "resolve"):
        source = find_model(config, progress, judge=judge)
        model_config = read_config(source.path)
        stored = read_quantization(model_config)
    with _timed(seconds, "device"):
        device = choose_device(
            config.device, cache_dir, config.custom_kernels, config.num_threads, config.cuda_memory_fraction, config
        )
        if calibrated.measures and device.ops.block_kinds:  # its kernels keep matrices in forms of their own
            device.close()
            device = choose_device(
                config.device, cache_dir, False, config.num_threads, config.cuda_memory_fraction, config
            )
        stored = calibrated.quantize(stored, device)
        dtype = choose_dtype(config, device)
        check_precision(config, stored, device)
        quantization = choose_quantization(config.quantize, stored)
    with _timed(seconds, "load"):
        model = load_model(config, source, model_config, quantization, device, dtype, SINGLE, progress)
    grammars = GrammarCompiler(lambda: Tokenizer.load(source.path), model.vocab_size)
    cache_setting = choose_cache(config, quantization, model)
    cache_dtype = kv_cache.choose_dtype(cache_setting, dtype)
    caches = model.caches(cache_dtype)
    bucketed = uses_buckets(config, device.limits)
    step_bytes = StepBytes()
    if device.limits.measures_steps:
        progress("compile kernels", 0, 0)
        with _timed(seconds, "dry_run"):
            shallow = model.shallow()
            small = kv_cache.allocate(device, caches, num_blocks=1)
            step_bytes = _measure(config, device, shallow, small)
            del small
    size = ModelSize(max_positions=model.max_positions, kv_bytes_per_token=bytes_per_token(caches))

    def bring_up(spare_bytes: int) -> _Ready:
        with _timed(seconds, "cache"):
            free_bytes = device.free_bytes() - step_bytes.total - spare_bytes
            resolved = resolve(config, size, device.limits, max(0, free_bytes))
            if bucketed:
                resolved = fit_prompts(config, resolved)
            cache = kv_cache.allocate(device, caches, resolved.num_blocks)
        rows, length = resolved.max_batch_size, resolved.max_total_tokens
        try:
            with _timed(seconds, "prepare"):
                plan = make_plan(config, resolved) if bucketed else None
                runner = make_runner(config, device, model, cache, rows, length, grammars, plan)
                runner.prepare(progress)
                if runner.buckets is not None:
                    about = (config, resolved, device, runner.buckets, source.model_id, cache_dir, progress)
                    warm_shapes(*about, step_bytes.without_graph)
                return _Ready(resolved, runner, plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise EngineError(f"the device cannot compute: {error}") from error
            raise ResourceError(
                f"Not enough memory for {rows} requests of {length} tokens:"
                f" lower `max_batch_size` or `max_total_tokens` ({error})"
            ) from None

    ready = bring_up(0)
    spare_bytes = 0  # that the cache leaves because the largest step did not fit beside it
    while device.limits.measures_steps and not bucketed and spare_bytes < MOST_SPARE_BYTES:
        with _timed(seconds, "largest step"):
            if largest_step_fits(ready.runner, ready.resolved):
                break
        spare_bytes += SPARE_BYTES
        del ready
        model.unbind()
        gc.collect()  # captured steps refer to what refers to them
        device.forget_captures()
        ready = bring_up(spare_bytes)
    resolved, runner, plan = ready.resolved, ready.runner, ready.plan
    policy = BatchPolicy(
        max_batch_prefill_tokens=resolved.max_batch_prefill_tokens,
        max_batch_size=resolved.max_batch_size,
        max_total_tokens=resolved.max_total_tokens,
        max_step_ms=config.max_step_ms,
    )
    pool = BlockPool(resolved.num_blocks, resolved.block_size, config.prefix_caching and not bucketed)
    notes = [note for note in (source.note, device.ops.description) if note]
    if spare_bytes:
        notes.append(f"{gigabytes(spare_bytes)} less for the KV cache: the largest step did not fit beside it")
    notes += describe_precision(quantization, cache_setting) + calibrated.describe(quantization, model)
    notes += [f"{name}: {reason}" for name, reason in resolved.explain()]
    if plan is not None and runner.buckets is not None:
        notes += describe_plan(config, plan, runner.buckets.bucket_stats)
    facts = ModelFacts(
        model_id=source.model_id,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_input_tokens=resolved.max_input_tokens,
        max_total_tokens=resolved.max_total_tokens,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        device=device.name,
        folder=str(source.path),
        sha=source.sha,
        notes=notes,
    )
    prompts_fit = plan.fits if plan is not None else None
    scheduler = Scheduler(policy, pool, prompts_fit=prompts_fit, queue_threshold_ms=config.queue_threshold_ms)
    loop = EngineLoop(scheduler, runner, config.overlap, runner.forget)
    recorder = make_recorder(calibrated, model, resolved.block_size)
    return Engine(loop, facts, source.path, device, resolved, grammars, seconds, notes, recorder, runner.buckets)


def _measure(
    config: ServerConfig,
    device: Device,
    model: Model,
    cache: list[tuple[torch.Tensor, torch.Tensor]],  # of one block
) -> StepBytes:
    if uses_buckets(config, device.limits):
        plan = plan_from(guess_limits(config, model.max_positions, device), config)
        length = config.max_total_tokens or model.max_positions

        def make_bucketed(rows: int, length: int) -> Runner:
            return make_runner(config, device, model, cache, rows, length, None, plan)

        return measure_shapes(device, plan, make_bucketed, length)
    return StepBytes(
        measure_steps(
            config,
            model,
            device,
            lambda rows, length: make_runner(config, device, model, cache, rows, length, None),
        )
    )


def make_runner(
    config: ServerConfig,
    device: Device,
    model: Model,
    cache: list[tuple[torch.Tensor, torch.Tensor]],
    num_slots: int,
    max_total_tokens: int,
    grammars: GrammarCompiler | None,
    plan: BucketPlan | None = None,
) -> Runner:
    return Runner(
        device,
        model,
        cache,
        num_slots,
        max_total_tokens,
        (config.watermark_gamma, config.watermark_delta),
        grammars,
        capture_sizes=config.cuda_graphs,
        most_tokens=most_captured_tokens(config, model, device, num_slots, max_total_tokens),
        plan=plan,
        limit_graphs=limits_graphs(config, device),
    )


def choose_dtype(config: ServerConfig, device: Device) -> torch.dtype:
    """As asked, else the device's preference."""
    name = config.dtype or device.limits.dtypes[0]
    if name not in device.limits.dtypes:
        raise StartError(f"`dtype` {name} does not run on {device.name}: choose {', '.join(device.limits.dtypes)}")
    return getattr(torch, name)


def describe_precision(quantization: Quantization | None, cache_setting: str | None) -> list[str]:
    """What is computed or kept in FP8."""
    notes = [quantization.description] if quantization is not None and quantization.description else []
    if cache_setting is not None:
        notes.append(f"KV cache in {cache_setting}")
    return notes


def load_model(
    config: ServerConfig,
    source: ModelFolder,
    model_config: Config,
    quantization: Quantization | None,
    device: Device,
    dtype: torch.dtype,
    parallel: Parallel,
    progress: Progress,
) -> Model:
    model = build(model_config, Context(device.ops, parallel, device.torch_device))
    if config.load_format == "dummy":
        assign_methods(model, quantization)
        check_weights_fit(config, model, dtype, device)
        with device.loading() as pool:
            load_dummy(model, dtype, device.torch_device, config.seed, Scratch(pool))
        return model
    checkpoint = Checkpoint.open(source.weights_path)
    if quantization is not None:
        quantization = quantization.named_as_in(checkpoint.names())
    # Quantised blocks stand for float32 values.
    block_types = checkpoint.block_types if dtype is torch.float32 else {}
    assign_methods(model, quantization, block_types, device.ops.block_kinds)
    check_weights_fit(config, model, dtype, device)
    ignored = (*model.ignored, *(quantization.may_leave if quantization is not None else ()))
    copies_by_itself = device.limits.runs_ahead and device.torch_device.type != "cpu"
    uploading = Upload(device.torch_device) if copies_by_itself else nullcontext()
    with device.loading() as pool, uploading as checkpoint.upload:
        load_checkpoint(model, checkpoint, dtype, device.torch_device, ignored, progress, Scratch(pool))
    return model


class _timed:
    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + time.perf_counter() - self.start
