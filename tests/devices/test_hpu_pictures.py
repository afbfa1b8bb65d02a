"""Models that see on Gaudi, or on the CPU in its role: towers run in passes of few sizes, which warming up meets."""

from pathlib import Path
from typing import Any

import pytest
from driving import run
from gaudi import run_with_stand_in
from hpu_pieces import gathered
from served_pictures import NUM_NEW, PROMPTS, Served, check, serve
from torch._dynamo.utils import counters
from vision_oracle import Prompt, draw

from text_generation_inference.runner.warm.warm_up import WarmUp

LIMITS = {"max_batch_size": 2, "max_batch_total_tokens": 2048, "prefix_caching": False}


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "mllama"])
def test_graphs_of_prompts_with_pictures_read_all_that_they_are_given(hpu: Any, family: str, tmp_path: Path) -> None:
    """Positions in three dimensions, tokens that see behind them, rows of pictures: nothing else comes from the host
    while they are captured."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("the stand-in counts")
    from habana_frameworks.torch._emulation import books

    before = books.unread_inputs
    served = serve(family, tmp_path)
    sizes = {"max_total_tokens": 384, "max_images_per_request": 2, "vllm_prompt_seq_bucket_limit": 2}
    engine = served.start(device="hpu", limit_hpu_graph=False, **{**LIMITS, "max_batch_size": 1, **sizes})
    try:
        check(served, run(engine, [served.request(1, PROMPTS[1])]), [1])
        assert engine.rank.bucket_stats.num_captured > len(engine.rank.runner.steps.plan.decode)
        assert books.unread_inputs == before
    finally:
        engine.close()


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


def test_no_graphs_are_none(hpu: Any, tmp_path: Path) -> None:
    """Of towers neither: no metric and no note counts any."""
    served = serve("llava_next", tmp_path)
    engine = served.start(device="hpu", enable_hpu_graph=False, max_total_tokens=512, **LIMITS)
    try:
        check(served, run(engine, [served.request(1, PROMPTS[1])]), [1])
        assert engine.rank.bucket_stats.num_captured == 0
        assert any("for pictures" in note and ", 0 graphs" in note for note in engine.notes), engine.notes
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "mistral3", "idefics2"])
def test_without_lazy_mode(hpu: Any, family: str, tmp_path: Path) -> None:
    if not hpu.bridge.emulated:
        pytest.skip("this process has the card already: run these tests with PT_HPU_LAZY_MODE=0")
    program = f"import test_hpu_pictures; test_hpu_pictures.serve_pictures({family!r}, {str(tmp_path)!r})"
    run_with_stand_in(program, PT_HPU_LAZY_MODE="0", PYTHONWARNINGS="error:Dynamo detected a call")


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


def read_across(served: Served, **chosen: object) -> None:
    """Llama 3.2 Vision: the tokens of `transformers`, twice, the second time behind what the first has left in the cache;
    pictures that stand side by side, and several requests with the same ones. All in shapes and graphs of the plan."""
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    lengths = {"max_input_tokens": longest, "max_total_tokens": longest + NUM_NEW, "max_images_per_request": 5}
    chosen = {**LIMITS, "bucket_strategy": "linear", "limit_hpu_graph": False, **chosen}
    engine = served.start(device="hpu", **lengths, **chosen)
    bridge, plan = engine.rank.device.bridge, engine.rank.runner.steps.plan
    warm = bridge.count_compilations()
    try:
        for first in (0, 10):
            requests = [served.request(first + number, prompt) for number, prompt in enumerate(PROMPTS)]
            check(served, run(engine, requests, arrivals=[0, 0, 2, 3, 5]))
        together = [served.request(20 + number, PROMPTS[3]) for number in range(3)]
        check(served, run(engine, together), [3, 3, 3])
        assert bridge.count_compilations() == warm
        stats = engine.rank.bucket_stats
        assert stats.num_unplanned == 0, engine.rank.take_news()
        decode = [bucket for bucket in plan.shapes if bucket.phase == "decode"]
        assert {bucket.pictures for bucket in decode} == {0, 2, 5}
        assert {bucket.pictures for bucket in plan.shapes if bucket.phase == "prefill"} == {0, 1, 4, 5}
        assert len(plan.pictures) == 1
        assert stats.num_captured == len(plan.shapes)
        assert stats.num_bypassed == 0
        more = len(decode) - len(plan.decode)
        told = f"{len(plan.reading) - more} and {more} more with pictures to read, 1 for pictures, {len(plan.shapes)} graphs"
        assert any(told in note for note in engine.notes)
        scored = served.request(30, PROMPTS[2], decoder_input_details=True)
        check(served, run(engine, [scored]), [2])
        assert stats.num_unplanned == engine.rank.bucket_stats.num_unplanned
        engine.rank.runner.pictures.check()
    finally:
        engine.close()


def read_across_in(folder: str, prefix_caching: bool) -> None:
    """In a process of its own."""
    read_across(serve("mllama", Path(folder)), prefix_caching=prefix_caching)
    breaks = dict(counters["graph_break"])
    assert not breaks, breaks


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_layers_of_cross_attention(hpu: object, prefix_caching: bool, tmp_path: Path) -> None:
    read_across(serve("mllama", tmp_path), prefix_caching=prefix_caching)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_layers_of_cross_attention_without_lazy_mode(hpu: Any, prefix_caching: bool, tmp_path: Path) -> None:
    if not hpu.bridge.emulated:
        pytest.skip("this process has the card already")
    program = f"import test_hpu_pictures as tests; tests.read_across_in({str(tmp_path)!r}, {prefix_caching})"
    run_with_stand_in(program, PT_HPU_LAZY_MODE="0")


def read_on_two(folder: str) -> None:
    """Two cards; in a process of its own."""
    served = serve("mllama", Path(folder))
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    lengths = {"max_input_tokens": longest, "max_total_tokens": longest + NUM_NEW, "max_images_per_request": 5}
    engine = served.start(device="hpu", num_shard=2, **lengths, **LIMITS, bucket_strategy="linear")
    requests = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    check(served, run(engine, requests, arrivals=[0, 0, 2, 3, 5]))
    assert engine.rank.bucket_stats.num_unplanned == 0, engine.rank.take_news()
    assert not engine.rank.take_news()
    engine.close()


def test_layers_of_cross_attention_on_two_ranks(hpu: Any, tmp_path: Path) -> None:
    if not hpu.bridge.emulated:
        pytest.skip("there may be one card alone")
    program = f"import test_hpu_pictures as tests; tests.read_on_two({str(tmp_path)!r})"
    run_with_stand_in(program, PT_HPU_LAZY_MODE="1")


@pytest.mark.parametrize("family", ["llava_next", "gemma3", "mllama"])
def test_nothing_new_is_gathered_after_warm_up(
    hpu: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures that are computed and kept, and whoever reads them: what meets in one piece outside graphs is known."""
    if not hpu.bridge.emulated or not hpu.bridge.lazy:
        pytest.skip("a card counts by itself; in eager mode nothing is gathered")
    served = serve(family, tmp_path)
    longest = max(len(served.oracle.ids(prompt)) for prompt in PROMPTS)
    lengths = {"max_input_tokens": longest, "max_total_tokens": longest + NUM_NEW, "max_images_per_request": 5}
    engine = served.start(device="hpu", **lengths, **LIMITS, warmup_enabled=False)  # but below, where all is seen
    submit = engine.rank.device.submit
    with gathered(submit, monkeypatch) as pieces:
        WarmUp(engine.rank.runner.steps).run()
        warm = set(pieces.met)
        asked = [served.request(number, prompt) for number, prompt in enumerate(PROMPTS)]
        asked += [served.request(10 + n, PROMPTS[n], decoder_input_details=True) for n in range(4)]
        run(engine, asked, arrivals=[0, 0, 2, 3, 5, 5, 6, 6, 7])
        submit(pieces.close).result()
    engine.close()
    assert pieces.met == warm, [[op for op, *_ in piece] for piece in pieces.met - warm]
