"""One rank: a device with its part of the model, from loading to steps.

What the engine decides once for all ranks goes in as numbers (`Resolved`, a plan of shapes), and what it decides by
comes out as numbers (`RankFacts`, `RankMemory`): the engine knows neither the model nor the runner.
"""

import gc
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from text_generation_inference.config import (
    ModelSize,
    Resolved,
    ServerConfig,
    cache_folder,
    keeps_window,
    uses_buckets,
)
from text_generation_inference.devices.device import Device, choose_device
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.engine.calibrate import Calibrated, choose_cache, make_recorder
from text_generation_inference.engine.machines import find_interface
from text_generation_inference.engine.memory import (
    check_precision,
    check_weights_fit,
    explain_loading,
    hold_wide_copies,
)
from text_generation_inference.engine.picture_memory import (
    BATCH_PIXELS,
    PictureMemory,
    example_shape,
    measure_pictures,
    plan_picture_sizes,
)
from text_generation_inference.engine.rank_channel import ProfileAnswer, ProfileAsked
from text_generation_inference.errors import EngineError, ResourceError, StartError
from text_generation_inference.layers.cache import (
    bytes_per_picture_row,
    bytes_per_token,
    common_window,
    partial_window,
    window_bytes_per_token,
)
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.registry import build
from text_generation_inference.models.vision.sight import Sight
from text_generation_inference.parallel import SINGLE, Parallel
from text_generation_inference.parallel.agreement import Agreement
from text_generation_inference.parallel.collectives import close_collectives, open_collectives
from text_generation_inference.parallel.counted import CountedCollectives
from text_generation_inference.pictures.rule import PictureRule
from text_generation_inference.pictures.rules import find_rule
from text_generation_inference.quant.choose import (
    assign_methods,
    choose_quantization,
    describe_widened,
    is_quantized,
    name_quantization,
)
from text_generation_inference.quant.inc.measure import Recorder
from text_generation_inference.quant.low_bit import wide_copy_bytes
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.runner import kv_cache
from text_generation_inference.runner.runner import Runner
from text_generation_inference.runner.shapes import PlanLimits, ShapePlan, guess_limits, limits_graphs, plan_shapes
from text_generation_inference.runner.tower_graphs import captures_towers
from text_generation_inference.runner.warm import (
    SHORTEST,
    StepBytes,
    attend_long_prompt,
    largest_step_fits,
    measure_steps,
    warm_up,
)
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.types import (
    ALONE,
    BucketStats,
    Grammar,
    Limits,
    PicturePolicy,
    PictureSpan,
    Place,
    StepPlan,
    StepResult,
)
from text_generation_inference.units import gigabytes
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.load import load_checkpoint, load_dummy, weight_bytes
from text_generation_inference.weights.progress import Progress, silent
from text_generation_inference.weights.scratch import Scratch
from text_generation_inference.weights.source import ModelFolder
from text_generation_inference.weights.upload import Upload

# Where collectives listen: on no other address than this machine's own, or the one that the machines meet at, unless
# the user says so.
_INTERFACES, _LOOPBACK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"), "lo"


_PICTURE_TIMEOUT_S = 600.0  # many tiles on a CPU take a minute


class RankFacts(msgspec.Struct, frozen=True):
    """What the engine must know of a loaded model and its device."""

    device: str
    limits: Limits
    dtype: str
    vocab_size: int
    size: ModelSize
    quantized: bool  # its matrices
    is_capturable: bool
    notes: list[str]  # for the log
    quantization: str | None = None  # method and bits, for people
    weight_bytes: int = 0  # on this rank
    pictures: PicturePolicy | None = None  # of a model that sees; how many features are kept is decided later
    feature_bytes: int = 0  # of one token's place
    picture_sizes: list[int] = []  # of the tower's passes, where these are padded


class RankMemory(msgspec.Struct, frozen=True):
    """Before there is a cache."""

    free_bytes: int
    step_bytes: int  # that steps take beside weights and cache, at most; 0 where that is not measured
    picture_tokens: int | None = None  # of a picture that is small enough for the memory; None: any
    batch_pixels: int = BATCH_PIXELS  # of pictures that are computed together

    @property
    def cache_bytes(self) -> int:
        """Left for the cache. All ranks get as much as the one that has least."""
        return max(0, self.free_bytes - self.step_bytes)


class RankGraphs(msgspec.Struct, frozen=True):
    """What warming up has captured."""

    num_captured: int
    num_lacking: int  # shapes for whose graphs there was no memory


class Rank:
    """In this order: `load`, `measure`, `allocate`, `warm`, then steps. After `release` it is as before `allocate`.

    One of several `join`s the others first.
    """

    runner: Runner  # from `allocate` on

    def __init__(
        self, calibrated: Calibrated, source: ModelFolder, place: Place = ALONE, progress: Progress = silent
    ) -> None:
        self._calibrated, self._config = calibrated, calibrated.config
        self._source, self._place, self._progress = source, place, progress
        self._parallel, self._collectives = SINGLE, None
        self._minimum: Callable[[int], int] = int  # over ranks
        self.device = _open_device(calibrated, place)
        self._steps, self._pictures = StepBytes(), PictureMemory()
        self.sees = False  # the model, once it is loaded
        self._rule: PictureRule | None = None
        self._picture_sizes: list[int] = []

    _collectives: CountedCollectives | None

    def join(self, address: str) -> None:
        """Meet the other ranks, who are on their way: `address` is one of `open_collectives`."""
        own = address.startswith("file:")  # all are on this machine
        interface = _LOOPBACK if own else find_interface(self._config.master_addr)
        for name in _INTERFACES if interface else ():
            os.environ.setdefault(name, interface or "")
        device, place = self.device, self._place
        opened = open_collectives(device, place.rank, place.world, address, device.limits.step_timeout_s)
        self._collectives = CountedCollectives(opened)
        self._minimum = Agreement(place.rank, place.world).minimum
        by_expert = self._config.expert_parallel
        self._parallel = Parallel(place.rank, place.world, self._collectives.face, by_expert)

    @property
    def sums(self) -> str:
        """How ranks sum, for the log."""
        return self._parallel.collectives.description

    @property
    def num_collectives(self) -> int:
        """Begun so far."""
        return self._collectives.num_begun if self._collectives is not None else 0

    @property
    def step_timeout_s(self) -> float:
        """After which a step never ends, unless the user says otherwise. Computing a picture is part of one."""
        return max(self.device.limits.step_timeout_s, _PICTURE_TIMEOUT_S if self.sees else 0.0)

    # -- before the first request ----------------------------------------------------------------------------------

    def load(self, model_config: Config, stored: Quantization | None) -> RankFacts:
        """The weights; `stored`: how the checkpoint has them.

        Raises `StartError` for what the device cannot compute, `ResourceError` if they are too large.
        """
        config, device = self._config, self.device
        stored = self._calibrated.quantize(stored, device)
        dtype = choose_dtype(config, device)
        quantization = choose_quantization(config.quantize, stored)
        check_precision(config, quantization, device)
        about = (config, self._source, model_config, quantization, device, dtype, self._parallel, self._progress)
        with explain_loading(device):
            model = load_model(*about)
        if not model.is_capturable and uses_buckets(config, device.limits) and device.limits.graphs:
            raise StartError(f"this model runs op by op, which {device.name} does not: {', '.join(model.notes)}")
        cache_setting = choose_cache(config, quantization, model)
        if model.sight is not None:
            rule = find_rule(self._source.path, model_config.fields)
            blind = "its folder does not say how they are prepared" if rule is None else None
            if blind is not None and model.sight.whole_prompts:  # then its texts would be answered wrongly, too
                raise StartError(f"{model_config.source}: the model cannot be served without pictures, and {blind}")
            if blind is not None:
                model.sight = None
                model.notes = (*model.notes, f"it sees no pictures: {blind}")
            elif rule is not None:
                model.look_through(rule.normalisation, example_shape(rule))
                self._rule = rule
                self._picture_sizes = self._plan_picture_sizes(model, rule)
                if self._picture_sizes:  # a padded pass is not left before its end
                    model.sight = replace(model.sight, num_parts=1)
        self._model, self.sees = model, model.sight is not None
        self._caches = model.caches(kv_cache.choose_dtype(cache_setting, dtype))
        precision = [
            *_describe_precision(quantization, cache_setting, wide_copy_bytes(model, dtype)),
            *describe_widened(model, dtype),
            *model.describe_type(dtype),
            *self._calibrated.describe(quantization, model, device.ops),
        ]
        return RankFacts(
            device=device.name,
            limits=device.limits,
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=model.vocab_size,
            size=ModelSize(
                max_positions=model.max_positions,
                may_be_longer=model.may_be_longer,
                kv_bytes_per_token=bytes_per_token(self._caches),
                window=common_window(self._caches),
                partial_window=partial_window(self._caches),
                window_bytes_per_token=window_bytes_per_token(self._caches),
                rows_per_picture=model.sight.cross_rows if model.sight is not None else 0,
                bytes_per_row=bytes_per_picture_row(self._caches),
            ),
            quantized=is_quantized(model),
            is_capturable=model.is_capturable,
            notes=[*model.notes, device.ops.description, *precision],
            quantization=name_quantization(model_config.fields, config.quantize),
            weight_bytes=weight_bytes(model, dtype),
            pictures=_describe_sight(model.sight),
            feature_bytes=_feature_bytes(model.sight, dtype),
            picture_sizes=self._picture_sizes,
        )

    def measure(self) -> RankMemory:
        """Compiles kernels too, where steps are measured at all."""
        if self.device.limits.measures_steps:
            self._progress("compile kernels", 0, 0)
            self._steps = self._measure_steps()
            self._pictures = self._measure_pictures()
        return self._memory()

    def _memory(self) -> RankMemory:
        taken = self._steps.total + self._pictures.num_bytes
        return RankMemory(self.device.free_bytes(), taken, self._pictures.max_tokens, self._pictures.batch_pixels)

    def allocate(self, resolved: Resolved, plan: ShapePlan, grammars: GrammarCompiler | None) -> None:
        """Cache and slots."""
        self._resolved = resolved
        rows, length = resolved.max_batch_size, resolved.max_total_tokens
        if self.device.limits.measures_steps and not plan.pads:
            length = max(SHORTEST, length)  # tables as wide as those that kernels were compiled for
        counts = (resolved.num_blocks, resolved.num_picture_blocks, resolved.num_window_blocks)
        with self._explain_lack():
            cache = kv_cache.allocate(self.device, self._caches, *counts)
            if self.device.settle is not None:
                self.device.settle()  # a lack of memory is told now
            about = (resolved.window is not None, resolved.partial_window is not None, resolved.max_features)
            self.runner = self._make_runner(self._model, cache, rows, length, grammars, plan, *about)

    def warm(self) -> RankGraphs:
        """Meet the shapes of the plan."""
        with self._explain_lack():
            self._num_lacking = warm_up(
                self._config,
                self._resolved,
                self.device,
                self.runner.steps,
                self._source.model_id,
                cache_folder(self._config),
                self._progress,
                self._steps.without_graph,
                self._minimum,
            )
        return RankGraphs(self.runner.steps.num_captured, self._num_lacking)

    def fits(self) -> bool:
        """Whether graphs and the largest permitted step fit beside the cache, where they were measured without one."""
        if self.runner.steps.plan.pads or not self.device.limits.measures_steps:
            return True
        return not self._num_lacking and largest_step_fits(self.runner, self._resolved)

    def release(self) -> RankMemory:
        """Cache, slots and captured steps."""
        del self.runner
        self._model.unbind()
        gc.collect()  # captured steps refer to what refers to them
        self.device.forget_captures()
        return self._memory()

    def record(self) -> Recorder | None:
        """From now on measures every pass, if that was asked for."""
        return make_recorder(self._calibrated, self._model, self._resolved.block_size)

    def compile(self, grammar: Grammar) -> None:
        """A request with this grammar will come: other ranks compile it beside their steps."""

    def profile(self, asked: ProfileAsked | None) -> list[ProfileAnswer]:
        """What other ranks say of a profile that begins, or ends now: rank 0's is taken by whoever runs the loop."""
        return []

    def _measure_steps(self) -> StepBytes:
        config, device, model = self._config, self.device, self._model.shallow()
        cache = kv_cache.allocate(device, self._caches, num_blocks=1)
        limits, plan = self._guess_plan()
        length = config.max_total_tokens or model.max_positions
        window, partial = (
            keeps_window(config, find(self._caches), device.limits, length) for find in (common_window, partial_window)
        )

        def make_runner(rows: int, length: int) -> Runner:
            return self._make_runner(model, cache, rows, length, None, plan, window is not None, partial is not None)

        return measure_steps(device, plan, limits, length, make_runner)

    def _guess_plan(self) -> tuple[PlanLimits, ShapePlan]:
        """Before it is known how much memory there is for the cache."""
        model = self._model
        crosses = model.sight is not None and model.sight.cross_rows > 0
        limits = guess_limits(self._config, model.max_positions, self.device.limits, crosses)
        about = (is_quantized(model), model.is_capturable, model.sight is not None, self._picture_sizes)
        return limits, plan_shapes(self._config, self.device.limits, limits, *about)

    def _plan_picture_sizes(self, model: Model, rule: PictureRule) -> list[int]:
        config, tower = self._config, model.padded_tower
        if tower is None or not uses_buckets(config, self.device.limits):
            return []
        limits = guess_limits(config, model.max_positions, self.device.limits)
        return plan_picture_sizes(tower, rule, limits.max_input_tokens, config.max_image_pixels)

    def _measure_pictures(self) -> PictureMemory:
        if self._rule is None:
            return PictureMemory()
        limits, plan = self._guess_plan()
        most = max(limits.max_input_tokens, limits.max_batch_prefill_tokens)
        about = (most, self._config.max_image_pixels, captures_towers(self.device, plan))
        try:
            return measure_pictures(self.device, self._model, self._rule, *about)
        except torch.OutOfMemoryError:
            raise ResourceError("Not enough memory for computing a picture once the weights are loaded") from None

    def _make_runner(
        self,
        model: Model,
        cache: list[tuple[Tensor, ...]],
        num_slots: int,
        max_total_tokens: int,
        grammars: GrammarCompiler | None,
        plan: ShapePlan,
        own_pages: bool,
        has_beside: bool,
        max_features: int = 1,
    ) -> Runner:
        config = self._config
        watermark = (config.watermark_gamma, config.watermark_delta)
        folder = Path(config.picture_folder) if config.picture_folder is not None else None
        limited = limits_graphs(config, self.device.limits)
        about = (grammars, plan, limited, own_pages, folder, config.max_images_per_request, has_beside, max_features)
        return Runner(self.device, model, cache, num_slots, max_total_tokens, watermark, *about)

    @contextmanager
    def _explain_lack(self) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise EngineError(f"the device cannot compute: {error}") from error
            rows, length = self._resolved.max_batch_size, self._resolved.max_total_tokens
            raise ResourceError(
                f"Not enough memory for {rows} requests of {length} tokens:"
                f" lower `max_batch_size` or `max_total_tokens` ({error})"
            ) from None

    # -- steps -----------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        return self.runner.launch(plan)

    def wait_until_computing(self, step: "Future[StepResult]", seconds: float | None = None) -> None:
        self.device.wait_until_computing(step, seconds)

    def read_pixels(self, span: PictureSpan) -> bytes:
        """For all ranks; none if they are not there any more."""
        return self.runner.pictures.read(span) if self.runner.pictures is not None else b""

    def show(self, digest: str, pixels: bytes) -> None:
        """What is to be taken for a picture's pixels, which the next step begins to compute."""
        if self.runner.pictures is not None:
            self.runner.pictures.show(digest, pixels)

    def forget(self) -> None:
        """Every request; nothing may be in flight."""
        self.runner.forget()

    @property
    def bucket_stats(self) -> BucketStats | None:
        """Where every pass has a shape of a bucket plan."""
        return self.runner.steps.stats

    def take_news(self) -> list[str]:
        """What whoever runs the server should know, once each: shapes that were not warmed up, captures that failed."""
        return self.runner.steps.take_news()

    def check(self) -> None:
        """It can fail in no other place than in its steps."""

    def abandon(self) -> None:
        """The start has failed."""
        if self._collectives is not None:
            close_collectives()

    def close(self) -> None:
        self.device.close()
        if self._collectives is not None:
            close_collectives()


def _open_device(calibrated: Calibrated, place: Place) -> Device:
    config, cache_dir = calibrated.config, cache_folder(calibrated.config)
    about = (config.num_threads, config.cuda_memory_fraction, config, place)
    device = choose_device(config.device, cache_dir, config.custom_kernels, *about)
    if calibrated.measures and device.ops.block_kinds:  # its kernels keep matrices in forms of their own
        device.close()
        return choose_device(config.device, cache_dir, False, *about)
    return device


def _describe_sight(sight: Sight | None) -> PicturePolicy | None:
    if sight is None:
        return None
    return PicturePolicy(
        whole_runs=sight.whole_runs,
        whole_prompts=sight.whole_prompts,
        cross_rows=sight.cross_rows,
        num_more_ids=sight.num_more_ids,
        num_parts=sight.num_parts,
        has_times=bool(sight.rope_axes),
    )


def _feature_bytes(sight: Sight | None, dtype: torch.dtype) -> int:
    """Of one that is kept beside the caches."""
    return 0 if sight is None or sight.cross_rows else sight.width * dtype.itemsize


def choose_dtype(config: ServerConfig, device: Device) -> torch.dtype:
    """As asked, else the device's preference."""
    name = config.dtype or device.limits.dtypes[0]
    if name not in device.limits.dtypes:
        raise StartError(f"`dtype` {name} does not run on {device.name}: choose {', '.join(device.limits.dtypes)}")
    return getattr(torch, name)


def _describe_precision(quantization: Quantization | None, cache_setting: str | None, wide_bytes: int) -> list[str]:
    """What is computed or kept otherwise than in the model's type."""
    notes = [quantization.description] if quantization is not None and quantization.description else []
    if wide_bytes:
        notes.append(f"their values beside them, for many rows ({gigabytes(wide_bytes)})")
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
    step = 1 if quantization is None else quantization.width_step
    context = Context(device.ops, parallel, device.torch_device, dtype, config.trust_remote_code, step)
    model = build(model_config, context)
    size = device.limits.block_size
    device.begin_compiling(lambda: attend_long_prompt(model, dtype, device.torch_device, size))
    if config.load_format == "dummy":
        if quantization is not None and quantization.rounds_head:
            model.split_head()
        assign_methods(model, quantization)
        hold_wide_copies(model, dtype, device)
        check_weights_fit(config, model, dtype, device)
        with device.loading() as pool:
            scratch = Scratch(pool, device.settle)
            load_dummy(model, dtype, device.torch_device, config.seed, scratch, device.ops.fp8_on_host)
        return model
    checkpoint = Checkpoint.open(source.weights_path)
    model.adapt(checkpoint.names(), checkpoint.are_equal)
    headers = checkpoint.headers
    if quantization is not None:
        quantization = quantization.named_as_in(headers.shapes)
        if quantization.rounds_head:
            model.split_head()
    computed = device.ops.block_kinds if dtype is torch.float32 else ()  # products of blocks are in float32
    assign_methods(model, quantization, checkpoint.block_types, computed, headers.is_plain)
    hold_wide_copies(model, dtype, device)
    check_weights_fit(config, model, dtype, device)
    ignored = (*model.ignored, *(quantization.may_leave if quantization is not None else ()))
    copies_by_itself = device.limits.runs_ahead and device.torch_device.type != "cpu"
    uploading = Upload(device.torch_device) if copies_by_itself else nullcontext()
    with device.loading() as pool, uploading as checkpoint.upload:
        about = (ignored, progress, Scratch(pool, device.settle), device.ops.fp8_on_host)
        load_checkpoint(model, checkpoint, dtype, device.torch_device, *about)
    return model
