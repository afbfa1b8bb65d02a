"""A Gaudi card that lacks memory: its stand-in fails the allocation of a given number, and tells it late. Lazy mode."""

import gc
from collections.abc import Iterator

import pytest
import torch
from driving import Output, Tiny, make_request, make_tiny, random_prompts, run, start
from gaudi import use_stand_in

from text_generation_inference.engine.build import Engine
from text_generation_inference.errors import ResourceError

# Prompts are computed in parts, of which only the last one chooses a token.
LIMITS = {"max_batch_size": 2, "max_total_tokens": 64, "max_batch_prefill_tokens": 16, "max_batch_total_tokens": 1024}
WAYS = [{}, {"decoder_input_details": True, "do_sample": True, "repetition_penalty": 1.2}, {"top_n_tokens": 2}]
AMONG = 61  # of so many allocations of a run one is tried: a prime, so that all kinds come
SETTINGS = {  # each tries others
    "as it comes": {},
    "prompts in graphs, blocks in place": {"limit_hpu_graph": False, "vllm_contiguous_pa": True},
    "no graphs": {"enable_hpu_graph": False},
    "FP8": {"dtype": None, "quantize": "fp8", "kv_cache_dtype": "fp8_e4m3fn"},
}


@pytest.fixture(scope="module")
def card(device_name: str):
    if device_name != "cpu":
        pytest.skip("an allocation of the stand-in can be made to fail")
    use_stand_in()
    import habana_frameworks.torch  # noqa: F401
    from habana_frameworks.torch._card import card

    return card


@pytest.fixture(scope="module")
def tiny(card, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Llama", {"num_hidden_layers": 2}, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Iterator[Engine]:
    engine = start(tiny.folder, device="hpu", **LIMITS)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _never_again(card) -> Iterator[None]:
    yield
    card.set("fails_at", 0)


def ask(engine: Engine) -> list[Output]:
    prompts = random_prompts(320, [5, 40, 17], seed=3)
    requests = [make_request(n, prompts[n], 4, seed=7 + n, **WAYS[n]) for n in range(3)]
    return run(engine, requests, arrivals=[0, 0, 2])


def in_use(card) -> int:
    gc.collect()
    torch.hpu.synchronize()
    return card.get("in_use")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_whose_allocation_fails_is_done_again(card, tiny: Tiny, name: str) -> None:
    """Whichever it is: the same tokens, nobody ends with an error, and no memory is held that was not held before."""
    engine = start(tiny.folder, device="hpu", **LIMITS, **SETTINGS[name])
    try:
        fail_one_after_another(card, engine, 1 + list(SETTINGS).index(name) * AMONG // len(SETTINGS))
    finally:
        card.set("fails_at", 0)
        engine.close()


def fail_one_after_another(card, engine: Engine, first: int) -> None:
    ask(engine)  # what is met for the first time is kept
    before = card.get("allocations")
    expected = [output.token_ids for output in ask(engine)]
    count, stats, held = card.get("allocations") - before, engine.loop.scheduler.stats, in_use(card)
    assert count > 6 * AMONG
    for number in range(first, count, AMONG):
        rollbacks = stats.num_rollbacks
        card.set("fails_at", number)
        outputs = ask(engine)
        assert [output.token_ids for output in outputs] == expected, number
        assert not any(output.error for output in outputs), number
        assert stats.num_rollbacks == rollbacks + 1, number
        assert in_use(card) == held, number
        assert engine.loop.scheduler.pool.num_free == engine.loop.scheduler.pool.num_usable
    assert [output.token_ids for output in ask(engine)] == expected


def test_a_lack_of_memory_is_told_by_the_step_that_had_it(card, engine: Engine) -> None:
    """A part of a prompt reads nothing from the card. What it lacks is not told to whoever comes next."""
    request = make_request(1, random_prompts(320, [40], seed=4)[0], 4)
    engine.loop.add(request)
    plan = engine.loop.scheduler.plan()
    assert plan is not None and not any(chunk.samples for chunk in plan.chunks)
    card.set("fails_at", 1)
    future = engine.rank.launch(plan)
    with pytest.raises(torch.OutOfMemoryError, match="PT_DEVMEM"):
        future.result()
    torch.hpu.synchronize()
    engine.rank.forget()
    engine.loop.scheduler.rollback("")
    engine.loop.abort(1)
    while engine.loop.has_work:
        engine.loop.step()


def test_a_start_whose_allocation_fails_ends_or_answers(card, tiny: Tiny, engine: Engine) -> None:
    """While loading, making the cache and warming up: a graph less, or an error that says what to do; nothing is left."""
    expected, held = [output.token_ids for output in ask(engine)], in_use(card)
    before = card.get("allocations")
    start(tiny.folder, device="hpu", **LIMITS).close()
    count, ends = card.get("allocations") - before, []
    for number in (1, 22, 28, 60, count // 2, count - 9):
        card.set("fails_at", number)
        try:
            other = start(tiny.folder, device="hpu", **LIMITS)
        except ResourceError as error:
            ends.append(str(error).split(":")[0].split(" before")[0].split(" on hpu")[0])
        else:
            ends.append("answers")
            assert [output.token_ids for output in ask(other)] == expected
            other.close()
            del other
        assert in_use(card) == held, number
    lacking = "Not enough memory"
    assert ends == [lacking, lacking, f"{lacking} for 2 requests of 64 tokens", "answers", *["Warm-up stopped"] * 2]
