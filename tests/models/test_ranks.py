"""Ranks that share a model: who has which part of it, how many there can be, and that together they equal one."""

import math
from pathlib import Path

import pytest
import torch
from driving import make_tiny, reference, tiny_config
from paths import NEW, PROMPTS, check
from queue_on_cpu import QueueOnCpu
from ranks import logits_of_threads
from thread_ranks import ThreadRanks

from text_generation_inference.config import ServerConfig, cache_folder
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.errors import StartError
from text_generation_inference.models.config import Config
from text_generation_inference.models.model import Model
from text_generation_inference.models.ranks import check_ranks
from text_generation_inference.models.registry import build
from text_generation_inference.parallel import Parallel
from text_generation_inference.weights.source import find_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("queries", [1, 3, 4, 7])
def test_heads_are_split_without_a_rest(kv_heads: int, queries: int) -> None:
    """Every query is with one rank, which has the key/value head that it reads, and reads all that it has equally."""
    for world in range(1, kv_heads * queries + 1):
        parts = [Parallel(rank, world).split_heads(kv_heads * queries, kv_heads) for rank in range(world)]
        assert [head for heads, _ in parts for head in range(*heads)] == list(range(kv_heads * queries))
        for heads, kept in parts:
            count, rest = divmod(heads[1] - heads[0], kept[1] - kept[0])
            assert count > 0 and rest == 0
            read = [kept[0] + place // count for place in range(heads[1] - heads[0])]
            assert read == [head // queries for head in range(*heads)]
        assert max(kept[1] - kept[0] for _, kept in parts) == -(-kv_heads // world)


@pytest.mark.parametrize("width", [5, 37, 192, 1408, 1536, 2880, 11008, 14336])
@pytest.mark.parametrize("step", [1, 16, 32, 128])
def test_widths_are_split_between_blocks(width: int, step: int) -> None:
    for world in range(1, 6):
        parts = [Parallel(rank, world).split_width(width, step) for rank in range(world)]
        assert [each for part in parts for each in range(*part)] == list(range(width))
        assert all(start < end for start, end in parts)
        if width % step == 0 and width // step >= world:
            assert all(start % step == 0 for start, _ in parts)
            largest, unit = max(end - start for start, end in parts), math.lcm(step, 16)
            if width % unit == 0 and width // unit >= world:
                assert all(start % unit == 0 for start, _ in parts)
                assert largest <= max(1.05 * width / world, -(-width // unit // world) * unit)


def describe(architecture: str, **fields: object) -> Model:
    config = {**tiny_config(architecture), **fields, "architectures": [architecture]}
    return build(Config(config, "config.json"))


@pytest.mark.parametrize(
    ("architecture", "fields", "world", "words"),
    [
        ("LlamaForCausalLM", {}, 5, "4 attention heads, .*; any number up to 4 works"),
        ("LlamaForCausalLM", {"intermediate_size": 3}, 4, "a feed-forward 3 wide, .*; any number up to 3 works"),
        ("LlamaForCausalLM", {"vocab_size": 5}, 4, "its vocabulary of 5; any number up to 3 works"),
        ("MixtralForCausalLM", {"intermediate_size": 2}, 4, "experts 2 wide, .* up to 2 works"),
    ],
)
def test_too_many_ranks_are_refused(architecture: str, fields: dict, world: int, words: str) -> None:
    model = describe(architecture, **fields)
    with pytest.raises(StartError, match=words):
        check_ranks(model, world)


def test_as_many_experts_as_ranks() -> None:
    model = describe("MixtralForCausalLM", intermediate_size=2)
    check_ranks(model, 4, expert_parallel=True)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_embedded_model(has_kernels: bool) -> None:
    """9 heads that share 3 keys and values, in blocks of 32: 6 and 3, or 2, 1, 3 and 3."""
    config = ServerConfig()
    source = find_model(config)
    ops = CpuDevice(cache_folder(config), custom_kernels=True).ops if has_kernels else None
    whole = logits_of_threads(source.path, 1, ops=ops)
    for world in (2, 4):
        found = logits_of_threads(source.path, world, ops=ops)
        torch.testing.assert_close(found, whole, atol=1e-3, rtol=1e-4)
        assert torch.equal(found.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Olmo2", {}),  # a norm over the heads of all ranks
        ("GptOss", {"expert_parallel": True}),
        ("Falcon", {"bucketing": True}),
        ("DeepseekV2", {"bucketing": True, "expert_parallel": True}),
    ],
)
def test_captured(family: str, settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed steps, or padded passes of one phase. Two ranks, each with a double of its own."""
    devices: list[QueueOnCpu] = []

    def make_device(*_: object) -> QueueOnCpu:
        devices.append(QueueOnCpu(tmp_path))
        return devices[-1]

    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", make_device)
    monkeypatch.setattr("text_generation_inference.engine.build.open_rank", ThreadRanks)
    tiny = make_tiny(family, {}, tmp_path / "tiny")
    expected = [reference(tiny.model, prompt, NEW) for prompt in PROMPTS]
    shapes = {"custom_kernels": False, "max_batch_prefill_tokens": 64 if settings.get("bucketing") else 33, **settings}
    engine = check(tiny.folder, expected, [0, 0, 2, 3, 9], num_shard=2, **shapes)
    assert len(devices) == 2 and all(device.num_replays > 0 for device in devices)
    assert (engine.rank.bucket_stats is not None) == ("bucketing" in settings)
