"""Models that see on Gaudi, or on the CPU in its role: towers run in passes of few sizes, which warming up meets."""

from pathlib import Path
from typing import Any

import pytest
from driving import run
from gaudi import run_with_stand_in
from served_pictures import NUM_NEW, PROMPTS, check, serve
from vision_oracle import Prompt, draw

LIMITS = {"max_batch_size": 2, "max_batch_total_tokens": 2048, "prefix_caching": False}


LARGER: dict[str, dict[str, int]] = {  # sides that pictures keep, so that their passes have several sizes
    "pixtral": {"longest_edge": 168},
    "mistral3": {"longest_edge": 168},
    "idefics2": {"shortest_edge": 21, "longest_edge": 168},
}
LARGE = [draw(*size, seed=seed) for seed, size in enumerate([(166, 171), (151, 140), (230, 61), (113, 160), (29, 30)])]
LARGE_PROMPTS: list[Prompt] = [
    ["nothing to see here"],
    ["what is ", LARGE[0], " in it?"],
    [LARGE[1], "and", LARGE[2], "differ by"],
    ["three: ", *LARGE[2:], " are not many pictures"],
    ["what is ", LARGE[3], " in it?"],  # the text of another
]


@pytest.mark.parametrize("family", ["llava_next", "idefics3", "qwen2_5_vl", "gemma3", *LARGER])
def test_nothing_is_compiled_late(hpu: object, family: str, tmp_path: Path) -> None:
    """Tiles, windows of patches, a mask beside the features, patches that are merged or that a few latents read: the
    tokens of `transformers`."""
    serve_pictures(family, tmp_path)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "mistral3", "idefics2"])
def test_without_lazy_mode(hpu: Any, family: str, tmp_path: Path) -> None:
    if not hpu.bridge.emulated:
        pytest.skip("this process has the card already: run these tests with PT_HPU_LAZY_MODE=0")
    program = f"import test_hpu_pictures; test_hpu_pictures.serve_pictures({family!r}, {str(tmp_path)!r})"
    run_with_stand_in(program, PT_HPU_LAZY_MODE="0")


def serve_pictures(family: str, folder: Path | str) -> None:
    prompts, settings = (LARGE_PROMPTS, {"size": LARGER[family]}) if family in LARGER else (PROMPTS, None)
    served = serve(family, Path(folder), prompts, settings)
    longest = max(len(served.oracle.ids(prompt)) for prompt in prompts)
    lengths = {"max_input_tokens": longest, "max_total_tokens": longest + NUM_NEW}
    chosen = {"bucket_strategy": "linear", "pad_sequence_to_multiple_of": 256, "prefill_batch_bucket_size": 2}
    engine = served.start(device="hpu", **lengths, **LIMITS, **chosen)
    bridge = engine.rank.device.bridge
    warm = bridge.count_compilations()
    try:
        requests = [served.request(number, prompt) for number, prompt in enumerate(prompts)]
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
