"""Brings an engine up from a configuration: resolve, load, allocate, ready."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from text_generation_inference.config import Resolved, ServerConfig, reads_in_place, resolve
from text_generation_inference.devices.device import check_present
from text_generation_inference.engine.calibrate import read_quant_config
from text_generation_inference.engine.loop import EngineLoop
from text_generation_inference.engine.memory import check_described
from text_generation_inference.engine.rank import Rank, RankFacts, RankMemory
from text_generation_inference.engine.ranks import Ranks, open_rank
from text_generation_inference.errors import TgiError
from text_generation_inference.models.registry import judge, read_config, read_quantization
from text_generation_inference.quant.inc.measure import Recorder
from text_generation_inference.runner.shapes import BucketPlan, describe_plan, limits_from, plan_shapes
from text_generation_inference.scheduler.blocks import BlockPool, WindowBlocks
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.text.grammar import CompiledGrammar, GrammarCompiler
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Grammar, ModelFacts, PicturePolicy
from text_generation_inference.units import gigabytes
from text_generation_inference.weights.progress import Progress, silent
from text_generation_inference.weights.source import ModelFolder, find_model

SPARE_BYTES = 1 << 30
MOST_SPARE_BYTES = 4 * SPARE_BYTES


@dataclass
class Engine:
    """Everything that runs: the loop, and what the front end must know."""

    loop: EngineLoop
    facts: ModelFacts
    folder: Path
    rank: Rank | Ranks
    resolved: Resolved
    grammars: GrammarCompiler  # shared with the runner: what is compiled here need not be there
    seconds: dict[str, float] = field(default_factory=dict)  # start-up stages
    notes: list[str] = field(default_factory=list)
    recorder: Recorder | None = None  # measures every pass

    def compile_grammar(self, grammar: Grammar, tried: bool = False) -> CompiledGrammar:
        """On all ranks. See `GrammarCompiler.compile`; from any thread."""
        if self.grammars.find(grammar) is None:
            self.rank.compile(grammar)
        return self.grammars.compile(grammar, tried=tried)

    def close(self) -> None:
        self.rank.close()
        if self.recorder is not None and self.recorder.has_news:
            self.recorder.save()


def start_engine(
    config: ServerConfig,
    progress: Progress = silent,
    folder: Path | None = None,
    last_resort: Callable[[TgiError], None] | None = None,
) -> Engine:
    """`folder` and `last_resort` are for ranks in processes of their own: see `open_rank`."""
    config.check()
    calibrated = read_quant_config(config)
    config = calibrated.config
    seconds: dict[str, float] = {}
    check_present(config)
    with _timed(seconds, "resolve"):
        asked = (config.trust_remote_code, config.num_shard or 1, config.expert_parallel)

        def look_at(folder: Path) -> None:
            judge(folder, *asked)
            check_described(config, folder)

        source = find_model(config, progress, judge=look_at)
        if (config.num_shard or 1) > 1:  # before there are processes: nobody has asked that of local models
            judge(source.path, *asked)
        model_config = read_config(source.path)
        stored = read_quantization(model_config)
    with _timed(seconds, "device"):
        rank = open_rank(calibrated, source, progress, folder, last_resort)
    try:
        with _timed(seconds, "load"):
            facts = rank.load(model_config, stored)
        return _bring_up(config, source, rank, facts, seconds)
    except BaseException:
        rank.abandon()
        raise


def _bring_up(
    config: ServerConfig, source: ModelFolder, rank: Rank | Ranks, facts: RankFacts, seconds: dict[str, float]
) -> Engine:
    grammars = GrammarCompiler(lambda: Tokenizer.load(source.path), facts.vocab_size)
    with _timed(seconds, "measure"):
        memory = rank.measure()
    spare_bytes = 0  # that the cache leaves because graphs or the largest step did not fit beside it
    while True:
        with _timed(seconds, "cache"):
            resolved = resolve(config, facts.size, facts.limits, max(0, memory.cache_bytes - spare_bytes))
            pictures = _decide_pictures(facts, resolved, memory)
            if pictures is not None:
                feature_bytes = pictures.max_features * facts.feature_bytes
                free_bytes = max(0, memory.cache_bytes - spare_bytes - feature_bytes)
                resolved = resolve(config, facts.size, facts.limits, free_bytes)
                pictures = _decide_pictures(facts, resolved, memory)
            about = (facts.quantized, facts.is_capturable, facts.pictures is not None, facts.picture_sizes)
            plan = plan_shapes(config, facts.limits, limits_from(resolved), *about)
            rank.allocate(resolved, plan, grammars)
        with _timed(seconds, "prepare"):
            graphs = rank.warm()
            if spare_bytes >= MOST_SPARE_BYTES or rank.fits():
                break
        spare_bytes += SPARE_BYTES
        memory = rank.release()
    policy = BatchPolicy(
        max_batch_prefill_tokens=resolved.max_batch_prefill_tokens,
        max_batch_size=resolved.max_batch_size,
        max_total_tokens=resolved.max_total_tokens,
        max_step_ms=config.max_step_ms,
    )
    beside = None
    if resolved.partial_window is not None:
        beside = WindowBlocks(resolved.num_window_blocks, resolved.block_size, resolved.partial_window)
    in_place = reads_in_place(config, facts.limits)
    about = (config.prefix_caching, resolved.window, beside, in_place)
    pool = BlockPool(resolved.num_blocks, resolved.block_size, *about)
    notes = [note for note in (source.note, *facts.notes) if note]
    if spare_bytes:
        notes.append(f"{gigabytes(spare_bytes)} less for the KV cache: graphs or the largest step did not fit")
    notes += [f"{name}: {reason}" for name, reason in resolved.explain()]
    notes += describe_plan(config, plan, graphs.num_captured, graphs.num_lacking)
    model_facts = ModelFacts(
        model_id=source.model_id,
        dtype=facts.dtype,
        vocab_size=facts.vocab_size,
        max_input_tokens=resolved.max_input_tokens,
        max_total_tokens=resolved.max_total_tokens,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        device=facts.device,
        folder=str(source.path),
        sha=source.sha,
        notes=notes,
        quantization=facts.quantization,
        weight_bytes=facts.weight_bytes,
        pictures=pictures,
    )
    scheduler = Scheduler(
        policy,
        pool,
        shapes=plan if isinstance(plan, BucketPlan) else None,
        queue_threshold_ms=config.queue_threshold_ms,
        pictures=pictures,
    )
    loop = EngineLoop(scheduler, rank, config.overlap, rank.forget, rank.wait_until_computing)
    return Engine(loop, model_facts, source.path, rank, resolved, grammars, seconds, notes, rank.record())


def _decide_pictures(facts: RankFacts, resolved: Resolved, memory: RankMemory) -> PicturePolicy | None:
    if facts.pictures is None:
        return None
    if facts.pictures.cross_rows:
        most = (resolved.num_picture_blocks - 1) * resolved.block_size
        each = most // resolved.max_cached_pictures
        return msgspec.structs.replace(facts.pictures, max_features=most, cross_rows=each)
    most, each = resolved.max_features, memory.picture_tokens or 0
    return msgspec.structs.replace(facts.pictures, max_features=most, max_each=each, batch_pixels=memory.batch_pixels)


class _timed:
    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + time.perf_counter() - self.start
