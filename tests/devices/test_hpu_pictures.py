"""Models that see on Gaudi, or on the CPU in its role: towers run in passes of few sizes, which warming up meets."""

from pathlib import Path

import pytest
from driving import run
from served_pictures import NUM_NEW, PROMPTS, check, serve

LIMITS = {"max_batch_size": 2, "max_batch_total_tokens": 2048, "prefix_caching": False}


@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl", "gemma3"])
def test_nothing_is_compiled_late(hpu: object, family: str, tmp_path: Path) -> None:
    """Tiles, windows of patches, and a mask beside the features: the tokens of `transformers`."""
    served = serve(family, tmp_path)
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    lengths = {"max_input_tokens": longest, "max_total_tokens": longest + NUM_NEW}
    chosen = {"bucket_strategy": "linear", "pad_sequence_to_multiple_of": 256, "prefill_batch_bucket_size": 2}
    engine = served.start(device="hpu", **lengths, **LIMITS, **chosen)
    bridge = engine.rank.device.bridge
    warm = bridge.count_compilations()
    try:
        requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
        check(served, run(engine, requests, arrivals=[0, 0, 2, 3, 5]))
        assert bridge.count_compilations() == warm
        stats, plan = engine.rank.bucket_stats, engine.rank.runner.steps.plan
        assert stats.num_unplanned == 0, engine.rank.take_news()
        assert len(plan.pictures) > 3
        if bridge.lazy:
            assert stats.num_captured == len(plan.decode) + len(plan.pictures)
        assert any(f"{len(plan.pictures)} for pictures" in note for note in engine.notes)
    finally:
        engine.close()


def test_layers_of_cross_attention(hpu: object, tmp_path: Path) -> None:
    """Llama 3.2 Vision: the tokens of `transformers`. What prompts with pictures read has shapes of its own, met when they
    come."""
    served = serve("mllama", tmp_path)
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    lengths = {"max_input_tokens": longest, "max_total_tokens": longest + NUM_NEW}
    engine = served.start(device="hpu", **lengths, **LIMITS, bucket_strategy="linear", pad_sequence_to_multiple_of=256)
    try:
        requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
        check(served, run(engine, requests, arrivals=[0, 0, 2, 3, 5]))
    finally:
        engine.close()
