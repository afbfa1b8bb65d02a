"""Which shapes follow from the settings: one plan, whatever the device."""

from collections.abc import Sequence
from typing import Protocol

from text_generation_inference.config import (
    LONGEST_PADDED,
    Resolved,
    ServerConfig,
    choose_strategy,
    reads_in_place,
    uses_buckets,
)
from text_generation_inference.errors import StartError
from text_generation_inference.runner.shapes.buckets import (
    Axis,
    Bucket,
    BucketPlan,
    BucketSettings,
    PlanLimits,
    plan_buckets,
)
from text_generation_inference.runner.shapes.captured import CapturedShapes, most_captured_tokens, plan_captured
from text_generation_inference.types import Limits

_AXES = ("prompt_bs", "prompt_seq", "decode_bs", "decode_block", "prompt_ctx")


class ShapePlan(Protocol):
    """Which shapes there are, and which one a pass takes.

    Exact: none (`CapturedShapes` without sizes). Captured: steps are padded where there is a size for them
    (`CapturedShapes`). Padded: every pass has a shape of the plan (`BucketPlan`).
    """

    @property
    def pads(self) -> bool:
        """Whether every pass has a shape, and prompts are passes of their own."""
        ...

    @property
    def cuts(self) -> bool:
        """Whether padded prompts can be so long that they are computed in parts."""
        ...

    @property
    def shapes(self) -> tuple[Bucket, ...]:
        """To prepare before the first request, in this order."""
        ...

    def find(self, phase: str, rows: int, length: int, context: int = 0, pictures: int = 0) -> Bucket | None:
        """The smallest shape of a phase that holds so much (see `Bucket`); None: there is none."""
        ...


def plan_shapes(
    config: ServerConfig,
    device: Limits,
    limits: PlanLimits,
    quantized: bool,
    capturable: bool = True,
    sees: bool = False,
    picture_sizes: Sequence[int] = (),
) -> ShapePlan:
    """`quantized`: the model's matrices; `capturable`: whether its passes are; `sees`: pictures; `picture_sizes`: of
    its tower's passes, where these are padded."""
    if uses_buckets(config, device):
        return plan_padded(config, limits, sees, reads_in_place(config, device), picture_sizes)
    if not device.captures_steps:
        return CapturedShapes()
    rows, prefill = limits.max_batch_size, limits.max_batch_prefill_tokens
    most = most_captured_tokens(rows, limits.max_total_tokens, prefill, quantized)
    return plan_captured(rows, min(most, device.max_captured_tokens), config.cuda_graphs if capturable else [])


def guess_limits(config: ServerConfig, max_positions: int, device: Limits, crosses: bool = False) -> PlanLimits:
    """The limits of a plan before it is known how much memory there is for the KV cache; `crosses`: layers of
    cross-attention read pictures."""
    padded = uses_buckets(config, device)
    total = config.max_total_tokens or (min(max_positions, LONGEST_PADDED) if padded else max_positions)
    longest = config.max_input_tokens or total - 1
    prefill = config.max_batch_prefill_tokens or max(device.max_batch_prefill_tokens, longest if padded else 0)
    rows = config.max_batch_size or device.max_batch_size
    if padded and not config.max_batch_size:
        rows = (config.max_batch_total_tokens or 0) // total or rows
    cached_pictures = max(rows, config.max_images_per_request) if crosses else 0
    return PlanLimits(longest, total, rows, prefill, device.block_size, cached_pictures=cached_pictures)


def limits_from(resolved: Resolved) -> PlanLimits:
    return PlanLimits(
        resolved.max_input_tokens,
        resolved.max_total_tokens,
        resolved.max_batch_size,
        resolved.max_batch_prefill_tokens,
        resolved.block_size,
        resolved.num_blocks - 1,
        resolved.max_cached_pictures,
    )


# -- buckets -------------------------------------------------------------------------------------------------------


def choose_settings(config: ServerConfig, sees: bool = False, contiguous: bool = False) -> BucketSettings:
    axes = [
        Axis(*(getattr(config, f"vllm_{name}_bucket_{part}") for part in ("min", "step", "max", "limit")))
        for name in _AXES
    ]
    default = BucketSettings()
    length_step = config.pad_sequence_to_multiple_of
    return BucketSettings(
        choose_strategy(config),
        config.batch_bucket_size or default.batch_step,
        config.prefill_batch_bucket_size or default.prefill_batch_step,
        default.length_step if length_step is None else length_step,
        *axes,
        reuse=config.prefix_caching,
        base_length=config.base_image_tokens if sees else None,
        contiguous=contiguous,
        pictures=config.max_images_per_request,
    )


def plan_padded(
    config: ServerConfig,
    limits: PlanLimits,
    sees: bool = False,
    contiguous: bool = False,
    picture_sizes: Sequence[int] = (),
) -> BucketPlan:
    try:
        return plan_buckets(limits, choose_settings(config, sees, contiguous), picture_sizes)
    except ValueError as error:
        raise StartError(
            f"The bucket plan is not usable: {error}. Use larger steps (`batch_bucket_size`,"
            " `prefill_batch_bucket_size`, `pad_sequence_to_multiple_of`, `vllm_..._bucket_step`) or lower limits."
        ) from None


def limits_graphs(config: ServerConfig, device: Limits) -> bool:
    """Whether prompts run without graphs, where every pass is padded."""
    if device.compiles_prompts:
        return False
    if config.limit_hpu_graph is not None:
        return config.limit_hpu_graph
    return not device.prompt_graphs


def warms_up(config: ServerConfig) -> bool:
    """Else the shapes of a bucket plan are met when they are first needed."""
    return config.warmup_enabled and not config.vllm_skip_warmup


def describe_plan(config: ServerConfig, plan: ShapePlan, num_captured: int, num_lacking: int = 0) -> list[str]:
    """Notes for the log; `num_lacking`: shapes for whose graphs there was no memory."""
    notes: list[str] = []
    if isinstance(plan, BucketPlan):
        after = sum(1 for bucket in plan.prefill if bucket.context)
        which = f" ({after} of them after cached tokens)" if after else ""
        in_place = sum(1 for bucket in plan.decode if bucket.contiguous)
        how = f" ({in_place} of them over blocks in place)" if in_place else ""
        shapes = f"{len(plan.prefill)} shapes for prompts{which}, {len(plan.decode)} for decoding{how}"
        if plan.reading:
            prompts = sum(1 for bucket in plan.reading if bucket.phase == "prefill")
            shapes += f", {prompts} and {len(plan.reading) - prompts} more with pictures to read"
        if plan.pictures:
            least, most = plan.pictures[0].batch, plan.pictures[-1].batch
            sizes = f" ({least} to {most} tiles or patches)" if least < most else ""
            shapes += f", {len(plan.pictures)} for pictures{sizes}"
        ready = f"{num_captured} graphs" if warms_up(config) else "not warmed up: each is met when it is first needed"
        notes.append(f"bucket plan, {choose_strategy(config)}: {shapes}, {ready}")
    if num_lacking:
        notes.append(f"{num_lacking} of {len(plan.shapes)} shapes have no graph: there was not enough memory for them")
    return notes
