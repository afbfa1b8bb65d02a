"""Which bucket plan follows from the settings."""

import msgspec

from text_generation_inference.config import LONGEST_PADDED, Resolved, ServerConfig, choose_strategy
from text_generation_inference.devices.buckets import Axis, BucketPlan, BucketSettings, PlanLimits, plan_buckets
from text_generation_inference.devices.device import Device
from text_generation_inference.errors import StartError
from text_generation_inference.types import BucketStats

_AXES = ("prompt_bs", "prompt_seq", "decode_bs", "decode_block")


def choose_settings(config: ServerConfig) -> BucketSettings:
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
    )


def guess_limits(config: ServerConfig, max_positions: int, device: Device) -> PlanLimits:
    """The limits of a plan before it is known how much memory there is for the KV cache."""
    total = config.max_total_tokens or min(max_positions, LONGEST_PADDED)
    longest = config.max_input_tokens or total - 1
    prefill = config.max_batch_prefill_tokens or device.limits.max_batch_prefill_tokens
    rows = config.max_batch_size or (config.max_batch_total_tokens or 0) // total or device.limits.max_batch_size
    return PlanLimits(longest, total, rows, max(prefill, longest), device.limits.block_size)


def fit_prompts(config: ServerConfig, resolved: Resolved) -> Resolved:
    """Prompts are not computed in chunks: the longest must fit a step."""
    longest, given = resolved.max_input_tokens, config.max_batch_prefill_tokens
    if given is not None and given < longest:
        raise StartError(
            "`max_batch_prefill_tokens` must be >= `max_input_tokens` with `bucketing`, where a prompt is computed in"
            f" one step. Given: {given} and {longest}. Raise the first or lower the second."
        )
    if resolved.max_batch_prefill_tokens >= longest:
        return resolved
    reasons = {**resolved.reasons, "max_batch_prefill_tokens": "max_input_tokens: a prompt is computed in one step"}
    return msgspec.structs.replace(resolved, max_batch_prefill_tokens=longest, reasons=reasons)


def make_plan(config: ServerConfig, resolved: Resolved) -> BucketPlan:
    limits = PlanLimits(
        resolved.max_input_tokens,
        resolved.max_total_tokens,
        resolved.max_batch_size,
        resolved.max_batch_prefill_tokens,
        resolved.block_size,
        resolved.num_blocks - 1,
    )
    return plan_from(limits, config)


def plan_from(limits: PlanLimits, config: ServerConfig) -> BucketPlan:
    try:
        return plan_buckets(limits, choose_settings(config))
    except ValueError as error:
        raise StartError(
            f"The bucket plan is not usable: {error}. Use larger steps (`batch_bucket_size`,"
            " `prefill_batch_bucket_size`, `pad_sequence_to_multiple_of`, `vllm_..._bucket_step`) or lower limits."
        ) from None


def limits_graphs(config: ServerConfig, device: Device) -> bool:
    """Whether prompts run without graphs."""
    if config.limit_hpu_graph is not None:
        return config.limit_hpu_graph
    return not device.limits.prompt_graphs


def warms_up(config: ServerConfig) -> bool:
    return config.warmup_enabled and not config.vllm_skip_warmup


def describe_plan(config: ServerConfig, plan: BucketPlan, stats: BucketStats) -> list[str]:
    shapes = f"{len(plan.prefill)} shapes for prompts, {len(plan.decode)} for decoding"
    ready = f"{stats.num_captured} graphs" if warms_up(config) else "not warmed up: each is met when it is first needed"
    return [f"bucket plan, {choose_strategy(config)}: {shapes}, {ready}"]
