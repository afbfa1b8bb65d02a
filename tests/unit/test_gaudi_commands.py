"""The published command lines for Gaudi are accepted as they are, the model aside; the limits that follow are those the
command asks for."""

import pytest
from gaudi_commands import COMMANDS, FP8, KINDS, SHARDED, launch

from text_generation_inference.config import ModelSize, choose_strategy, resolve
from text_generation_inference.types import Limits

HPU = Limits(
    block_size=128,
    dtypes=["bfloat16", "float32"],
    buckets=True,
    max_batch_size=32,
    max_batch_prefill_tokens=4096,
    memory_share=0.9,
)


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.model])
def test_published_command(name: str) -> None:
    command = COMMANDS[name]
    config = launch(command).config
    assert config.model_id == command.model
    num_shard = 8 if SHARDED in command.arguments else 1
    assert (config.device, config.port, config.num_shard) == ("hpu", 80, num_shard)
    assert (
        config.batch_bucket_size,
        config.prefill_batch_bucket_size,
        config.pad_sequence_to_multiple_of,
    ) == command.sizes
    assert config.quant_config == ("./quantization_config/maxabs_quant.json" if FP8 in command.environment else None)
    assert config.ignore_eos_token == ("IGNORE_EOS" in command.environment)
    assert (config.pt_hpu_lazy_mode is False) == ("LAZY_MODE=0" in command.environment)
    assert choose_strategy(config) == ("linear" if any(command.sizes) else "exponential")


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.model])
def test_limits_that_follow(name: str) -> None:
    command = COMMANDS[name]
    size = ModelSize(max_positions=131072, kv_bytes_per_token=131072)
    found = resolve(launch(command).config, size, HPU, free_bytes=80_000_000_000)
    assert (
        found.max_input_tokens,
        found.max_total_tokens,
        found.max_batch_size,
        found.max_batch_prefill_tokens,
    ) == command.limits
    assert found.max_batch_prefill_tokens >= found.max_input_tokens


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.model])
def test_only_what_is_worth_a_word_is_told(name: str) -> None:
    """Nothing that is published for Gaudi surprises there, but for switches without effect."""
    command = COMMANDS[name]
    expected = []
    if "ATTENTION=paged" in command.environment:
        expected.append("ATTENTION has no effect: the device has one kind of attention")
    if "HF_TRANSFER" in command.environment:
        expected.append("HF_HUB_ENABLE_HF_TRANSFER has no effect: the hub's library chooses the fastest way itself")
    if "USE_INC" in command.environment:
        expected.append("USE_INC has no effect: the forms of both toolkits are read alike")
    assert launch(command).notes == expected


def test_every_published_model_is_there() -> None:
    assert {command.model for command in COMMANDS.values() if command.model} == set(KINDS)
    assert len(COMMANDS) == 92  # one names no model, one a model that is refused
