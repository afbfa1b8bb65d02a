"""Brings an engine up from a configuration: resolve, load, allocate, ready.

Level 7.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tgi.config import ModelSize, Resolved, ServerConfig, cache_folder, resolve
from tgi.devices.device import Device, choose_device, is_queue
from tgi.engine.loop import EngineLoop, StepRunner
from tgi.errors import ResourceError, StartError
from tgi.models.decoder import CausalLM
from tgi.models.registry import read_config, read_spec
from tgi.models.spec import DecoderSpec
from tgi.parallel import SINGLE, Parallel
from tgi.runner import kv_cache
from tgi.runner.queued import QueuedRunner
from tgi.runner.runner import Runner
from tgi.scheduler.blocks import BlockPool
from tgi.scheduler.policy import BatchPolicy
from tgi.scheduler.scheduler import Scheduler
from tgi.text.grammar import GrammarCompiler
from tgi.text.tokenizer import Tokenizer
from tgi.types import ModelFacts
from tgi.weights.checkpoint import Checkpoint
from tgi.weights.load import load_checkpoint, load_dummy
from tgi.weights.progress import Progress, silent
from tgi.weights.source import ModelFolder, find_model


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

    def close(self) -> None:
        self.device.close()


def start_engine(config: ServerConfig, progress: Progress = silent) -> Engine:
    config.check()
    seconds: dict[str, float] = {}
    cache_dir = cache_folder(config)
    with _timed(seconds, "resolve"):
        source = find_model(config, progress)
        spec = read_spec(read_config(source.path))
    with _timed(seconds, "device"):
        device = choose_device(
            config.device, cache_dir, config.custom_kernels, config.num_threads, config.cuda_memory_fraction
        )
        dtype = choose_dtype(config, device)
    with _timed(seconds, "load"):
        model = load_model(config, source, spec, device, dtype, SINGLE, progress)
    with _timed(seconds, "cache"):
        size = ModelSize(
            max_positions=spec.max_positions,
            kv_bytes_per_token=spec.kv_bytes_per_token(spec.num_kv_heads, dtype.itemsize),
        )
        free_bytes = device.free_bytes()
        if device.runs_ahead:
            free_bytes = max(0, free_bytes - step_bytes(config, spec, device, dtype))
        resolved = resolve(config, size, device.limits, free_bytes)
        cache = kv_cache.allocate(
            device,
            spec.num_layers,
            resolved.num_blocks,
            resolved.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            dtype,
        )
    grammars = GrammarCompiler(lambda: Tokenizer.load(source.path), spec.vocab_size)
    try:
        with _timed(seconds, "prepare"):
            runner = make_runner(config, device, model, cache, resolved, grammars, progress)
    except RuntimeError as error:
        raise ResourceError(
            f"Not enough memory for {resolved.max_batch_size} requests of {resolved.max_total_tokens} tokens:"
            f" lower `max_batch_size` or `max_total_tokens` ({error})"
        ) from None
    policy = BatchPolicy(
        max_batch_prefill_tokens=resolved.max_batch_prefill_tokens,
        max_batch_size=resolved.max_batch_size,
        max_total_tokens=resolved.max_total_tokens,
        mixes_phases=device.limits.mixes_phases,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
    )
    pool = BlockPool(resolved.num_blocks, resolved.block_size, config.prefix_caching)
    notes = [note for note in (source.note, device.ops.description) if note]
    notes += [f"{name}: {reason}" for name, reason in resolved.explain()]
    facts = ModelFacts(
        model_id=source.model_id,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=spec.vocab_size,
        max_input_tokens=resolved.max_input_tokens,
        max_total_tokens=resolved.max_total_tokens,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        device=device.name,
        folder=str(source.path),
        sha=source.sha,
        notes=notes,
    )
    loop = EngineLoop(Scheduler(policy, pool), runner, config.overlap)
    return Engine(loop, facts, source.path, device, resolved, grammars, seconds, notes)


def make_runner(
    config: ServerConfig,
    device: Device,
    model: CausalLM,
    cache: list[tuple[torch.Tensor, torch.Tensor]],
    resolved: Resolved,
    grammars: GrammarCompiler,
    progress: Progress,
) -> StepRunner:
    size, length = resolved.max_batch_size, resolved.max_total_tokens
    watermark = (config.watermark_gamma, config.watermark_delta)
    if not is_queue(device):
        return Runner(device, model, cache, size, length, watermark, grammars)
    runner = QueuedRunner(device, model, cache, size, length, watermark, grammars, config.cuda_graphs)
    runner.prepare(progress)
    return runner


def step_bytes(config: ServerConfig, spec: DecoderSpec, device: Device, dtype: torch.dtype) -> int:
    """What the slots and the largest permitted step take on a device beside weights and cache, at most."""
    rows = config.max_batch_size or device.limits.max_batch_size
    tokens = (config.max_batch_prefill_tokens or device.limits.max_batch_prefill_tokens) + rows
    length = config.max_total_tokens or spec.max_positions
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = (5 * spec.hidden_size + 2 * qkv + 3 * spec.intermediate_size) * dtype.itemsize
    logits = spec.vocab_size * (2 * dtype.itemsize + 12)  # as they come, captured, and three times in float32
    return tokens * layer + rows * (logits + 5 * length)


def choose_dtype(config: ServerConfig, device: Device) -> torch.dtype:
    """As asked, else the device's preference."""
    name = config.dtype or device.limits.dtypes[0]
    if name not in device.limits.dtypes:
        raise StartError(f"`dtype` {name} does not run on {device.name}: choose {', '.join(device.limits.dtypes)}")
    return getattr(torch, name)


def load_model(
    config: ServerConfig,
    source: ModelFolder,
    spec: DecoderSpec,
    device: Device,
    dtype: torch.dtype,
    parallel: Parallel,
    progress: Progress,
) -> CausalLM:
    model = CausalLM(device.ops, parallel, spec, device.torch_device)
    if config.load_format == "dummy":
        load_dummy(model, dtype, device.torch_device, config.seed)
    else:
        checkpoint = Checkpoint.open(source.weights_path)
        load_checkpoint(model, checkpoint, dtype, device.torch_device, model.ignored, progress)
    return model


class _timed:
    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.stage] = time.perf_counter() - self.start
