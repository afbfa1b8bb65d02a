"""Settings that exclude each other, or must fit together.

Called by `ServerConfig.check` once each value makes sense in itself.
"""

from typing import TYPE_CHECKING

import msgspec

from text_generation_inference.errors import StartError

if TYPE_CHECKING:
    from text_generation_inference.config.settings import ServerConfig


def check_combinations(config: "ServerConfig") -> None:
    """What TGI checks of settings given together, in its words."""
    max_input, max_total, batch_total = (
        config.max_input_tokens,
        config.max_total_tokens,
        config.max_batch_total_tokens,
    )
    if max_input is not None and config.max_input_length is not None:
        raise StartError(
            f"Both `max_input_tokens` ({max_input}) and `max_input_length` ({config.max_input_length}) are set. Please"
            " define only `max_input_tokens` as `max_input_length is deprecated for naming consistency."
        )
    if max_input is not None and max_total is not None and max_input >= max_total:
        raise StartError(f"`max_input_tokens`({max_input}) must be < `max_total_tokens`({max_total})")
    for name, value in (
        ("max_total_tokens", max_total),
        ("max_batch_prefill_tokens", config.max_batch_prefill_tokens),
    ):
        if value is not None and batch_total is not None and value > batch_total:
            raise StartError(f"`{name}` must be <= `max_batch_total_tokens`. Given: {value} and {batch_total}")
    _check_ranks(config)
    if config.dtype and config.quantize and not config.quantize.startswith("bitsandbytes"):
        raise StartError(
            "Only 1 can be set between `dtype` and `quantize`, as they both decide how goes the final model."
        )
    if config.quant_config and config.quantize:
        raise StartError(
            "`quant_config` and `quantize` both say how matrices are stored: leave one out"
            " (QUANT_CONFIG quantises with measured scales, --quantize fp8 with those of the weights)"
        )
    strategy = {None: None, True: "exponential", False: "linear"}[config.vllm_exponential_bucketing]
    if config.bucket_strategy and strategy and config.bucket_strategy != strategy:
        raise StartError(
            f"`bucket_strategy` is {config.bucket_strategy}, but VLLM_EXPONENTIAL_BUCKETING says {strategy}:"
            " leave one out"
        )
    for axis in ("prompt_bs", "prompt_seq", "prompt_ctx", "decode_bs", "decode_block"):
        least, most = (getattr(config, f"vllm_{axis}_bucket_{bound}") for bound in ("min", "max"))
        if least is not None and most is not None and least > most:
            raise StartError(f"`vllm_{axis}_bucket_min` must be <= `vllm_{axis}_bucket_max`. Given: {least} and {most}")
    if config.ngrok:
        for name in ("authtoken", "edge"):
            if not getattr(config, f"ngrok_{name}"):
                raise StartError(f"`ngrok-{name}` must be set when using ngrok tunneling")
    if config.lora_adapters is not None:
        parse_lora_adapters(config.lora_adapters)


def _check_ranks(config: "ServerConfig") -> None:
    num_shard, nnodes = config.num_shard, config.nnodes
    if num_shard is not None and num_shard < 1:
        raise StartError("`num_shard` cannot be < 1")
    if config.sharded and num_shard is not None and num_shard <= 1:
        raise StartError("`sharded` is true but `num_shard` <= 1")
    if config.quantize == "exl2" and (num_shard or 1) > 1:
        raise StartError("Sharding is currently not supported with `exl2` quantization")
    if config.node_rank >= nnodes:
        raise StartError(f"`node_rank` must be < `nnodes`. Given: {config.node_rank} and {nnodes}")
    if nnodes == 1:
        return
    if config.num_replicas > 1:
        raise StartError(
            "`num_replicas` must be 1 where `nnodes` is above 1: replicas are on one machine. Given:"
            f" {config.num_replicas}"
        )
    if num_shard is not None and num_shard % nnodes:
        raise StartError(
            f"`num_shard` must be a multiple of `nnodes`, for each machine has as many ranks. Given: {num_shard} and"
            f" {nnodes}"
        )
    if config.master_addr == "localhost":
        raise StartError("`master_addr` must be the address of machine 0 where `nnodes` is above 1")
    if config.rank_token is None:
        raise StartError(
            "`rank_token` must be set where `nnodes` is above 1: any secret text, the same on every machine"
            " (RANK_TOKEN=...), so that nobody else can join"
        )


class LoraAdapter(msgspec.Struct, frozen=True):
    """One item of `lora_adapters`."""

    id: str  # what requests name it
    path: str | None = None  # a local folder; None: `id` is on the hub
    revision: str | None = None


def parse_lora_adapters(text: str) -> list[LoraAdapter]:
    """Items between commas: `repo/id`, `repo/id@revision`, `name=/local/path` or `name=/local/path@revision`."""
    adapters: list[LoraAdapter] = []
    for item in (part.strip() for part in text.split(",")):
        if not item:
            continue
        place, _, revision = item.partition("@")
        name, _, path = place.partition("=")
        if item.count("=") > 1 or item.count("@") > 1 or not name or ("=" in item and not path):
            raise StartError(f"Invalid LoRA adapter format: {item}")
        adapters.append(LoraAdapter(name, path or None, revision or None))
    return adapters
