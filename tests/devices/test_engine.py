"""The engine on a device that runs ahead gives the tokens of the CPU: on the GPU, or on the CPU in that role."""

import gc
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from driving import Output, Tiny, make_request, make_tiny, random_prompts, run, spoil_free_blocks, start
from engine_cases import MIN_TOKENS, NEW, PARAMS, ends_in_time, on_cpu, requests, same, wait_for_device
from queue_on_cpu import QueueOnCpu

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.runner.shapes import Bucket, PlanLimits, plan_shapes
from text_generation_inference.runner.shapes.captured import most_captured_tokens
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import GenerationRequest, Grammar, Limits, ThinkingBudget

VARIANTS: dict[str, tuple[str, dict]] = {
    "grouped-heads": ("Llama", {}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "wide-heads": ("Llama", {"head_dim": 24}),
    "windows": ("Mistral", {}),
    "experts": ("Mixtral", {}),
    "shared-expert": ("Qwen2Moe", {}),
}

Start = Callable[..., Engine]


@pytest.fixture
def start_here(device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines on the device of the suite."""
    engines: list[Engine] = []

    def start_engine(folder: Path, ops: Ops | None = None, **settings: object) -> Engine:
        if device_name == "cpu":
            monkeypatch.setattr(
                "text_generation_inference.engine.rank.choose_device", lambda *_: QueueOnCpu(tmp_path, ops)
            )
            engine = start(folder, **{"max_batch_size": 11, "max_total_tokens": 160, **settings})
            monkeypatch.undo()
        else:
            engine = start(folder, device=device_name, **{"max_batch_size": 11, "max_total_tokens": 160, **settings})
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module", params=list(VARIANTS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, overrides = VARIANTS[request.param]
    return make_tiny(family, overrides, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Llama", {}, tmp_path_factory.mktemp("llama"))


def test_greedy(tiny: Tiny, start_here: Start) -> None:
    asked = requests([{}])
    expected = on_cpu(tiny.folder, asked)
    engine = start_here(tiny.folder, max_batch_prefill_tokens=33)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=[0, 1, 3, 3, 10, 12, 12, 30]), expected)
    if isinstance(engine.rank.device, QueueOnCpu):
        assert engine.rank.device.num_replays > 0


@pytest.mark.parametrize("family", ["GptOss", "Llama4", "DeepseekV2", "DeepseekV3"])
def test_sinks_chunks_and_latents(family: str, start_here: Start, device_name: str, tmp_path: Path) -> None:
    """One row, and several with and without prefixes: the kernels of a device beside plain torch."""
    if device_name == "cpu":
        pytest.skip("tests/models/test_registry_parity.py compares there")
    tiny = make_tiny(family, {}, tmp_path)
    asked = requests([{}])
    expected = on_cpu(tiny.folder, asked)
    engine = start_here(tiny.folder, max_batch_prefill_tokens=33)
    same(run(engine, asked), expected)
    same(run(engine, asked[3:4]), expected[3:4])


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "GptOss"])
def test_long_requests_cost_their_window(
    family: str, tmp_path_factory: pytest.TempPathFactory, start_here: Start
) -> None:
    """With every option, in a cache that holds none of the longer ones as a whole, or not in layers that read a window:
    captured steps read stale tables."""
    folder = make_tiny(family, {}, tmp_path_factory.mktemp("window")).folder
    asked = requests(PARAMS, [90, 1, 40, 70, 33, 16, 5, 17, 64, 2, 80])
    expected = on_cpu(folder, asked)
    sizes = (
        {"max_batch_total_tokens": 80} if family == "Mistral" else {"max_batch_total_tokens": 800, "max_batch_size": 4}
    )
    engine = start_here(folder, max_total_tokens=None, max_batch_prefill_tokens=33, **sizes)
    resolved = engine.resolved
    assert (resolved.window or resolved.partial_window) == 24 and engine.facts.max_total_tokens >= 108
    assert (resolved.window is None) == (family != "Mistral")
    spoil_free_blocks(engine)
    same(run(engine, asked, arrivals=[0, 0, 1, 1, 2, 3, 5, 8, 13, 21, 34]), expected)


def test_prompts_of_every_captured_size(tiny: Tiny, start_here: Start) -> None:
    """Alone, several at a time, beside requests that decode, and after tokens that are cached."""
    prompts = random_prompts(320, [1, 31, 32, 33, 64, 65, 97, 128, 129, 260, 390, 420], seed=5)
    prompts += [prompts[6] + prompts[1], prompts[9] + prompts[3], prompts[11] + prompts[5]]
    asked = [make_request(n, prompt, 6) for n, prompt in enumerate(prompts)]
    settings = {"max_total_tokens": 500, "max_batch_total_tokens": 20_000}
    outputs = []
    for graphs in ({"cuda_graphs": [0]}, {}):
        engine = start_here(tiny.folder, **settings, **graphs)
        outputs.append(run(engine, asked, arrivals=[9 * n for n in range(len(asked))]))
        outputs.append(run(engine, asked, arrivals=[n // 3 for n in range(len(asked))]))
        assert engine.loop.scheduler.stats.num_cached_prompt_tokens > 0
    for other in outputs[1:]:
        same(other, outputs[0])


@pytest.mark.parametrize(("length", "captured"), [(1, True), (40, True), (117, True), (129, False)])
def test_a_step_with_few_prompt_tokens_is_replayed(
    tiny_llama: Tiny, start_here: Start, device_name: str, length: int, captured: bool
) -> None:
    if device_name != "cpu":
        pytest.skip("replays are counted by a device double")
    for settings, expected in (({}, captured), ({"cuda_graphs": [0]}, False)):
        engine = start_here(tiny_llama.folder, **settings)
        assert isinstance(engine.rank.device, QueueOnCpu)
        run(engine, [make_request(0, [7] * length, 1)])
        assert engine.rank.device.num_replays == int(expected)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"max_batch_size": 1, "max_total_tokens": 100}, 99),
        ({"max_batch_size": 3, "max_total_tokens": 33}, 96),
        ({"max_batch_prefill_tokens": 50}, 50),
    ],
)
def test_no_captured_step_is_larger_than_one_that_may_be(
    tiny_llama: Tiny, start_here: Start, settings: dict, most: int
) -> None:
    shapes = start_here(tiny_llama.folder, **settings).rank.runner.steps.plan.shapes
    mixed = [bucket.num_tokens for bucket in shapes if bucket.phase == "mixed"]
    assert mixed and max(mixed) <= most


@pytest.mark.parametrize(
    ("quantized", "rows", "length", "prefill", "most"),
    [
        (False, 256, 4096, 8192, 1024),
        (True, 256, 4096, 8192, 2048),
        (True, 256, 4096, 1500, 1500),
        (True, 3, 101, 8192, 300),
        (False, 256, 4096, 50, 50),
    ],
)
def test_how_many_prompt_tokens_are_captured(quantized: bool, rows: int, length: int, prefill: int, most: int) -> None:
    assert most_captured_tokens(rows, length, prefill, quantized) == most
    device = Limits(
        block_size=16, dtypes=["float32"], max_batch_size=9, max_batch_prefill_tokens=9, memory_share=1.0,
        captures_steps=True, max_captured_tokens=10_000,
    )  # fmt: skip
    limits = PlanLimits(length - 1, length, rows, prefill, 16)
    largest = plan_shapes(ServerConfig(), device, limits, quantized).shapes[0]
    assert largest.phase == "mixed" and 0.8 * most - 32 <= largest.num_tokens <= most
    device = msgspec.structs.replace(device, max_captured_tokens=0)
    assert plan_shapes(ServerConfig(), device, limits, quantized).shapes[0] == Bucket("decode", rows, 0)
    device = msgspec.structs.replace(device, captures_steps=False)
    assert plan_shapes(ServerConfig(), device, limits, quantized).shapes == ()


def test_every_way_to_choose(tiny_llama: Tiny, start_here: Start) -> None:
    asked = requests(PARAMS, [3 + n % 29 for n in range(30)])
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_here(tiny_llama.folder)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=[n // 2 for n in range(30)]), expected)


DRAWS = [{"do_sample": True}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95}, {"typical_p": 0.6}, {"min_p": 0.05}]


def count_draws(engine: Engine) -> list[int]:
    """The sizes of the captured draws that are replayed."""
    captured, replayed = engine.rank.runner.sampling.captured_draws, []

    def counted(size: int, replay: Callable[[], None]) -> Callable[[], None]:
        def replay_and_count() -> None:
            replayed.append(size)
            replay()

        return replay_and_count

    captured |= {size: counted(size, replay) for size, replay in captured.items()}
    return replayed


@pytest.mark.parametrize(
    ("params", "largest"),
    [
        ([{}], 0),
        (DRAWS, 11),
        ([*DRAWS, {}], 11),
        ([{"top_n_tokens": 2}, {}], 0),
        ([{"do_sample": True}, {}], 8),  # more are drawn faster by the two kernels alone
        ([{"repetition_penalty": 1.3}, {"top_k": 9}], 1),  # of the one that is left at the end
        ([{"repetition_penalty": 1.3}], 0),
        ([{"watermark": True}, {}], 0),
        (PARAMS, 2),
    ],
)
def test_captured_draws(tiny_llama: Tiny, start_here: Start, params: list[dict], largest: int) -> None:
    """They are used where nobody in the batch asks for more; batches differ from step to step."""
    prompts = random_prompts(320, [3 + n % 29 for n in range(20)], seed=6)
    new_tokens = [2 + 5 * (n % 7) for n in range(19)] + [60]  # at the end the last one is alone
    asked = [
        make_request(n, prompt, count, seed=n, **params[n % len(params)])
        for n, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
    ]
    expected = on_cpu(tiny_llama.folder, asked)
    for settings, sizes in (({}, [1, 2, 4, 8, 11]), ({"cuda_graphs": [1, 3, 5]}, [1, 3, 5])):
        engine = start_here(tiny_llama.folder, **settings)
        replayed = count_draws(engine)
        same(run(engine, asked, arrivals=[3 * n for n in range(20)]), expected)
        same(run(engine, asked), expected)
        assert max(replayed, default=0) == max((size for size in sizes if size <= largest), default=0)


def test_captured_steps_hold_the_choice_of_the_best_token(tiny_llama: Tiny, start_here: Start) -> None:
    asked = requests([{}], [1, 2, 5, 17, 40, 33, 16, 60])
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_here(tiny_llama.folder)
    ops = engine.rank.device.ops
    greedy_into = ops.greedy_into

    def only_in_a_replay(*arguments: object) -> None:
        assert getattr(engine.rank.device, "is_replaying", False)  # on a GPU nothing of a replay is seen here
        greedy_into(*arguments)

    ops.greedy_into, ops.choose_into = only_in_a_replay, None
    same(run(engine, asked, arrivals=[4 * n for n in range(len(asked))]), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graphs": [0]},
        {"cuda_graphs": [2, 3]},
        {"max_batch_total_tokens": 176},
        {"prefix_caching": False},
        {"overlap": False},
        {"max_batch_prefill_tokens": 7},
        {"max_batch_size": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_change_nothing(tiny_llama: Tiny, start_here: Start, settings: dict) -> None:
    shared = random_prompts(320, [40], seed=1)[0]
    tails = random_prompts(320, [3, 9, 1, 20, 5, 30], seed=2)
    asked = [make_request(n, shared + tail, NEW, seed=n, do_sample=n % 2 == 1) for n, tail in enumerate(tails)]
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_here(tiny_llama.folder, **settings)
    same(run(engine, asked), expected)
    same(run(engine, asked), expected)
    stats = engine.loop.scheduler.stats
    assert (stats.num_preemptions > 0) == ("max_batch_total_tokens" in settings)
    assert (stats.num_cached_prompt_tokens > 0) == settings.get("prefix_caching", True)


PENALISED = [
    {"repetition_penalty": 1.6},
    {"frequency_penalty": 1.5, "frequency_by_length": False},
    {"presence_penalty": 1.2, "temperature": 1.3},
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 2.0, "top_n_tokens": 2},
    {"decoder_input_details": True, "repetition_penalty": 1.6},
]


@pytest.fixture(scope="module")
def penalised(tiny_llama: Tiny) -> tuple[list[GenerationRequest], list[Output]]:
    """Requests that share tokens, and their answers in plain torch, each alone."""
    shared = random_prompts(320, [40], seed=1)[0]
    tails = random_prompts(320, [3, 9, 1, 20, 5, 30], seed=2)
    asked = [make_request(n, shared + tail, 24, seed=n, **PENALISED[n]) for n, tail in enumerate(tails)]
    engine = start(tiny_llama.folder, device="cpu", custom_kernels=False, prefix_caching=False)
    expected = [run(engine, [request])[0] for request in asked]
    free = [run(engine, [make_request(n, request.token_ids, 24)])[0] for n, request in enumerate(asked)]
    engine.close()
    assert [ours.token_ids == other.token_ids for ours, other in zip(expected, free, strict=True)].count(False) == 5
    return asked, expected


@pytest.mark.parametrize("settings", [{}, {"max_batch_total_tokens": 176}, {"max_batch_prefill_tokens": 7}], ids=str)
def test_penalties_see_all_that_a_request_knows(
    tiny_llama: Tiny, start_here: Start, settings: dict, penalised: tuple[list[GenerationRequest], list[Output]]
) -> None:
    """Beside others, behind tokens that are cached, after a preemption, in chunks."""
    asked, expected = penalised
    engine = start_here(tiny_llama.folder, **settings)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=[0, 2, 3, 9, 9, 30]), expected)
    stats = engine.loop.scheduler.stats
    assert stats.num_cached_prompt_tokens > 0
    assert (stats.num_preemptions > 0) == ("max_batch_total_tokens" in settings)


def test_aborts_leave_nothing(tiny_llama: Tiny, start_here: Start) -> None:
    engine = start_here(tiny_llama.folder)
    asked = requests([{}, {"do_sample": True}])
    expected = on_cpu(tiny_llama.folder, asked)
    for round_number in range(6):
        for request in asked:
            engine.loop.add(request)
        for _ in range(round_number):
            engine.loop.step()
        for request in asked:
            engine.loop.abort(request.id)
    while engine.loop.has_work:
        engine.loop.step()
    same(run(engine, asked), expected)


def test_a_broken_model_fails_its_requests(tiny_llama: Tiny, start_here: Start, device_name: str) -> None:
    engine = start_here(tiny_llama.folder)
    runner = engine.rank.runner
    norm = runner.model.model.norm.weight
    before = norm.clone()
    norm.fill_(math.nan)
    wait_for_device(device_name)
    output = run(engine, requests([{}], [5]))[0]
    assert output.reason == "error"
    assert "not finite" in (output.error or "")
    norm.copy_(before)
    wait_for_device(device_name)
    same(run(engine, requests([{}])), on_cpu(tiny_llama.folder, requests([{}])))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_ops_under_the_runner(tiny_llama: Tiny, start_here: Start, device_name: str) -> None:
    """On the GPU every other test does this; here the interpreter runs a short one."""
    if device_name != "cpu":
        pytest.skip("done by the other tests")
    from text_generation_inference.kernels.triton.ops import load_ops

    loaded = load_ops(4, "Triton through its interpreter")
    assert isinstance(loaded, Ops)
    asked = [
        make_request(n, prompt, 3, seed=n, do_sample=n > 0) for n, prompt in enumerate(random_prompts(320, [3, 19], 5))
    ]
    engine = start_here(tiny_llama.folder, loaded, max_batch_size=2)
    same(run(engine, asked), on_cpu(tiny_llama.folder, asked))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_ops_and_windows_of_some_layers(tmp_path: Path, start_here: Start, device_name: str) -> None:
    """Likewise: a prompt of three windows, in chunks, and a row that decodes."""
    if device_name != "cpu":
        pytest.skip("done by the other tests")
    from text_generation_inference.kernels.triton.ops import load_ops

    loaded = load_ops(4, "Triton through its interpreter")
    assert isinstance(loaded, Ops)
    folder = make_tiny("GptOss", {"sliding_window": 16}, tmp_path / "tiny").folder
    asked = [make_request(0, random_prompts(320, [49], 5)[0], 2)]
    sizes = {"max_batch_size": 1, "max_total_tokens": 80, "max_batch_prefill_tokens": 32}
    engine = start_here(folder, loaded, cuda_graphs=[0], **sizes)  # the interpreter would take long to capture
    assert engine.resolved.partial_window == 16
    spoil_free_blocks(engine)
    same(run(engine, asked), on_cpu(folder, asked))


def test_grammars_and_budgets_of_thoughts(start_here: Start) -> None:
    """Masks of one step depend on the tokens of the one before, which the host must have seen."""
    engine = start_here(Path("embedded"), max_total_tokens=160, max_batch_total_tokens=2048)
    tokenizer = Tokenizer.load(engine.folder)
    pattern = "[0-9]{3}-[a-c]{1,4}x"  # and an end: ten tokens at most
    grammar = Grammar("regex", pattern)
    asked = [make_request(n, [10 + n, 20, 30], 12, seed=n, do_sample=n % 2 == 1) for n in range(5)]
    ends = [0, 2]
    asked = [
        msgspec.structs.replace(request, grammar=grammar if request.id != 2 else None, stop_token_ids=ends)
        for request in asked
    ]
    closing, sizes = tokenizer.encode("</think>", False), [0, 1, 5]
    for number, size in enumerate(sizes, 5):
        budget = ThinkingBudget(size, ["<think>"], ["</think>"], closing, opened=True)
        asked.append(make_request(number, [10, 20, 30], 12, seed=1, do_sample=number % 2 == 1, thinking=budget))
    outputs = run(engine, asked, arrivals=[0, 0, 1, 4, 4, 0, 1, 1])
    assert [output.error for output in outputs] == [None] * len(asked)
    for n, output in enumerate(outputs[:5]):
        if n != 2:
            text = tokenizer.decode([token for token in output.token_ids if token not in ends], False)
            assert output.reason == "eos_token"
            assert re.fullmatch(pattern, text), text
    for size, output in zip(sizes, outputs[5:], strict=True):
        assert output.token_ids[size : size + len(closing)] == closing
        assert tokenizer.decode(output.token_ids, False).count("</think>") == 1


def test_best_ids_in_the_places_of_a_prompt(tiny_llama: Tiny, start_here: Start) -> None:
    asked = requests([{"decoder_input_details": True, "prompt_top_n_tokens": 3}, {"decoder_input_details": True}])
    expected = on_cpu(tiny_llama.folder, asked)
    engine = start_here(tiny_llama.folder, max_batch_prefill_tokens=33)
    for request, mine, theirs in zip(asked, run(engine, asked), expected, strict=True):
        places = range(1, len(request.token_ids)) if request.sampling.prompt_top_n_tokens else ()
        assert sorted(mine.prompt_tops) == sorted(theirs.prompt_tops) == list(places)
        for place in places:
            tops = mine.prompt_tops[place]
            assert list(tops) == list(theirs.prompt_tops[place])
            assert list(tops.values()) == pytest.approx(list(theirs.prompt_tops[place].values()), abs=2e-4)
            assert list(tops.values()) == sorted(tops.values(), reverse=True)
            found = mine.prompt_logprobs[place]
            assert tops.get(request.token_ids[place], found) == found <= max(tops.values())


def test_no_end_before_its_time(tiny_llama: Tiny, start_here: Start) -> None:
    asked = requests(MIN_TOKENS)
    expected = on_cpu(tiny_llama.folder, asked)
    ends_in_time(asked, expected)
    engine = start_here(tiny_llama.folder, max_batch_prefill_tokens=33)
    same(run(engine, asked), expected)
    same(run(engine, asked, arrivals=[0, 1, 3, 3, 10, 12, 12, 30]), expected)
    same(run(engine, requests([{}])), on_cpu(tiny_llama.folder, requests([{}])))  # nothing is left behind


def test_nothing_is_collected_while_a_step_is_captured(tiny_llama: Tiny, start_here: Start, device_name: str) -> None:
    """Pinned memory that were freed then would break the next allocation of such memory."""
    if device_name != "cuda":
        pytest.skip("only CUDA has such memory")
    device = start_here(tiny_llama.folder).rank.device
    with device.stream():
        there = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        cycle = [device.pinned_int32(1 << 16)]
        cycle[0].copy_(there, non_blocking=True)
    cycle.append(cycle)
    del cycle

    def work() -> torch.Tensor:
        for _ in range(10):
            kept = [[] for _ in range(10_000)]  # enough of them for a collection
            del kept
        return there + 1

    replay, result = device.capture(work)
    gc.collect()
    for size in range(12, 22):
        device.pinned_int32(1 << size)
    with device.stream():
        there.fill_(6)
        replay()
    torch.cuda.synchronize()
    assert (result == 7).all()  # what was captured works, and reads its input anew
