"""Sampling through the whole engine: seeds, batches, preemption, penalties, log-probabilities."""

import math

import msgspec
import numpy as np
import pytest
import torch
from driving import Output, Tiny, make_request, random_prompts, run, start

from text_generation_inference.types import GenerationRequest

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 20
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
PARAMS = [
    {"do_sample": True},
    SAMPLED,
    {"typical_p": 0.6},
    {"min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 1.5, "frequency_penalty": 1.1, "presence_penalty": 0.7},
    {"do_sample": True, "frequency_penalty": 1.1, "frequency_by_length": False},
    {"watermark": True, "temperature": 0.7},
    {"logit_bias": {7: 4.0, 9: -100.0}, "do_sample": True},
    {"repetition_penalty": 1.8},
    {},
    {"top_n_sigma": 1.0, "temperature": 1.5},
]


def requests(count: int = 64) -> list[GenerationRequest]:
    prompts = random_prompts(320, [3 + n % 29 for n in range(count)], seed=3)
    return [make_request(n, prompt, NEW, seed=1000 + n, **PARAMS[n % len(PARAMS)]) for n, prompt in enumerate(prompts)]


def ids(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def batch_of_64(tiny_llama: Tiny) -> list[list[int]]:
    engine = start(tiny_llama.folder)
    result = ids(run(engine, requests()))
    engine.close()
    return result


def test_same_seed_same_tokens_alone_or_in_a_batch(tiny_llama: Tiny, batch_of_64: list[list[int]]) -> None:
    engine = start(tiny_llama.folder, prefix_caching=False)
    assert [ids(run(engine, [request]))[0] for request in requests()[:20]] == batch_of_64[:20]
    engine.close()


def test_same_seed_same_tokens_after_preemption(tiny_llama: Tiny, batch_of_64: list[list[int]]) -> None:
    engine = start(tiny_llama.folder, max_batch_total_tokens=160, max_total_tokens=64)
    assert ids(run(engine, requests())) == batch_of_64
    assert engine.loop.scheduler.stats.num_preemptions > 0
    engine.close()


def test_other_seed_other_tokens(tiny_llama: Tiny) -> None:
    engine = start(tiny_llama.folder)
    one, two = (run(engine, [make_request(n, [1, 2, 3], NEW, seed=n, do_sample=True)])[0] for n in (1, 2))
    assert one.token_ids != two.token_ids
    engine.close()


def raw_scores(tiny: Tiny, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return tiny.model(torch.tensor([tokens])).logits[0].double().numpy()


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


def penalised(scores: np.ndarray, prompt: list[int], output: list[int], p: dict) -> np.ndarray:
    """The documented order and formulas, one id at a time."""
    scores = scores.copy()
    known = prompt + output
    if p.get("watermark"):
        generator = torch.Generator().manual_seed(15485863 * known[-1])
        scores[torch.randperm(len(scores), generator=generator)[: len(scores) // 2].numpy()] += 2.0
    for i in set(known):
        r = p.get("repetition_penalty", 1.0)
        scores[i] = scores[i] * r if scores[i] < 0 else scores[i] / r
    for i in set(known):
        share = known.count(i) / len(known) if p.get("frequency_by_length", True) else output.count(i)
        scores[i] -= p.get("frequency_penalty", 0.0) * share
    for i in set(output):
        scores[i] -= p.get("presence_penalty", 0.0)
    for i, bias in p.get("logit_bias", {}).items():
        scores[i] += bias
    return scores / p.get("temperature", 1.0)


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: "+".join(p) or "greedy")
def test_logprobs_are_of_the_processed_distribution_before_filtering(tiny_llama: Tiny, params: dict) -> None:
    prompts = random_prompts(320, [4, 25, 11], seed=8)
    engine = start(tiny_llama.folder)
    asked = [make_request(n, prompt, NEW, seed=n, top_n_tokens=3, **params) for n, prompt in enumerate(prompts)]
    for output, prompt in zip(run(engine, asked), prompts, strict=True):
        raw = raw_scores(tiny_llama, prompt + output.token_ids)
        for step, token in enumerate(output.token_ids):
            before = output.token_ids[:step]
            scores = penalised(raw[len(prompt) - 1 + step], prompt, before, params)
            logprobs = log_softmax(scores)
            assert math.isclose(output.logprobs[step], logprobs[token], abs_tol=2e-4)
            best = np.argsort(-logprobs)[:3].tolist()
            assert list(output.top_tokens[step]) == best
            assert list(output.top_tokens[step].values()) == pytest.approx(logprobs[best].tolist(), abs=2e-4)
            if not asked[0].sampling.samples:
                assert token == best[0]
    engine.close()


def kept_ids(logits: np.ndarray, p: dict) -> set[int]:
    """What the filters leave, one after the other, stated plainly, with a little slack at their borders."""
    scores = logits / p.get("temperature", 1.0)
    everything = set(range(len(logits)))

    def drop(kept: set[int]) -> None:
        scores[list(everything - kept)] = -1e30

    def mass_before(order: np.ndarray) -> list[tuple[int, float]]:
        probabilities = np.exp(log_softmax(scores))[order]
        return list(zip(order.tolist(), np.cumsum(probabilities) - probabilities, strict=True))

    if p.get("top_n_sigma"):
        drop({i for i in everything if scores[i] >= scores.max() - p["top_n_sigma"] * scores.std() - 1e-4})
    if p.get("top_k"):
        drop(set(np.argsort(-scores)[: p["top_k"]].tolist()))
    if "top_p" in p:
        drop({i for i, mass in mass_before(np.argsort(-scores)) if mass < p["top_p"] + 1e-5})
    if "typical_p" in p:
        logprobs = log_softmax(scores)
        surprise = np.abs(-logprobs + (np.exp(logprobs) * logprobs).sum())
        drop({i for i, mass in mass_before(np.argsort(surprise)) if mass < p["typical_p"] + 1e-5})
    if "min_p" in p:
        drop({i for i in everything if scores[i] >= scores.max() + math.log(p["min_p"]) - 1e-4})
    return {i for i in everything if scores[i] > -1e29}


def drawn_ranks(tiny: Tiny, prompts: list[list[int]], params: dict) -> set[int]:
    """The ranks of all tokens drawn for the prompts, each checked to be one the filters keep."""
    engine = start(tiny.folder)
    asked = [make_request(n, prompt, NEW, seed=n, **params) for n, prompt in enumerate(prompts)]
    ranks = set()
    for output, prompt in zip(run(engine, asked), prompts, strict=True):
        raw = raw_scores(tiny, prompt + output.token_ids)
        for step, token in enumerate(output.token_ids):
            logits = raw[len(prompt) - 1 + step]
            assert token in kept_ids(logits, params)
            ranks.add(np.argsort(-logits).tolist().index(token))
    engine.close()
    return ranks


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3, "temperature": 2.0},
        {"top_p": 0.3},
        {"top_k": 300, "top_p": 0.5},
        {"typical_p": 0.3},
        {"typical_p": 0.5, "top_p": 0.6},
        {"min_p": 0.3, "temperature": 1.5},
        {"min_p": 0.2, "top_k": 30},
        {"top_n_sigma": 1.2, "temperature": 2.0},
    ],
    ids=lambda p: "+".join(p),
)
def test_filters_confine_the_choice(tiny_llama: Tiny, params: dict) -> None:
    ranks = drawn_ranks(tiny_llama, random_prompts(320, [9] * 12, seed=4), params)
    assert len(ranks) > 1, "the choice is not always the best"


def test_rows_that_come_and_go_keep_their_own_parameters(tiny_llama: Tiny, batch_of_64: list[list[int]]) -> None:
    """Two slots, so that the rows change at almost every step while their number stays."""
    engine = start(tiny_llama.folder, max_batch_size=2, prefix_caching=False)
    asked = requests(30)
    lengths = [1 + (7 * n) % NEW for n in range(30)]
    shorter = [msgspec.structs.replace(r, max_new_tokens=new) for r, new in zip(asked, lengths, strict=True)]
    assert ids(run(engine, shorter)) == [tokens[:new] for tokens, new in zip(batch_of_64, lengths, strict=False)]
    engine.close()


def test_penalties_of_the_output_survive_preemption(tiny_llama: Tiny) -> None:
    params = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "frequency_by_length": False}
    asked = [make_request(n, p, 40, **params) for n, p in enumerate(random_prompts(320, [8] * 6, seed=5))]
    large, small = start(tiny_llama.folder), start(tiny_llama.folder, max_batch_total_tokens=96, max_total_tokens=64)
    assert ids(run(small, asked)) == ids(run(large, asked))
    assert small.loop.scheduler.stats.num_preemptions > 0
    large.close()
    small.close()


def test_tokens_before_a_preemption_count_among_min_tokens(tiny_llama: Tiny) -> None:
    params = {"min_tokens": 30, "stop_token_ids": list(range(316))}
    asked = [make_request(n, p, 40, **params) for n, p in enumerate(random_prompts(320, [8] * 6, seed=5))]
    small = start(tiny_llama.folder, max_batch_total_tokens=96, max_total_tokens=64)
    for output in run(small, asked):
        assert not set(output.token_ids[:30]) & set(range(316))
        assert 31 <= len(output.token_ids) < 40  # most ids end it then
    assert small.loop.scheduler.stats.num_preemptions > 0
    small.close()


def test_seeds_over_the_whole_range_differ(tiny_llama: Tiny) -> None:
    engine = start(tiny_llama.folder)
    seeds = [0, 1, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1]
    asked = [make_request(n, [1, 2, 3], NEW, seed=seed, do_sample=True) for n, seed in enumerate(seeds)]
    assert len({tuple(tokens) for tokens in ids(run(engine, asked))}) == len(seeds)
    engine.close()


def test_a_slot_does_not_inherit_owed_prompt_logprobs(tiny_llama: Tiny) -> None:
    engine = start(tiny_llama.folder, max_batch_size=1, max_batch_prefill_tokens=4)
    engine.loop.add(make_request(1, list(range(40)), 5, decoder_input_details=True))
    for _ in range(3):
        engine.loop.step()
    engine.loop.abort(1)
    assert run(engine, [make_request(2, list(range(40)), 5)])[0].prompt_logprobs == {}
    engine.close()


def test_stop_tokens_and_lengths(tiny_llama: Tiny) -> None:
    engine = start(tiny_llama.folder)
    free = run(engine, [make_request(0, [1, 2, 3], NEW)])[0].token_ids
    stop = free[7]
    output = run(engine, [make_request(0, [1, 2, 3], NEW, stop_token_ids=[stop])])[0]
    assert output.token_ids == free[: free.index(stop) + 1]
    assert output.reason == "eos_token"
    first = run(engine, [make_request(0, [1, 2, 3], free.index(stop) + 1, stop_token_ids=[stop])])[0]
    assert first.reason == "length"
    assert run(engine, [make_request(0, [1, 2, 3], 1)])[0].token_ids == free[:1]
    engine.close()


@pytest.mark.parametrize("custom_kernels", [False, True], ids=["reference", "native"])
def test_scores_that_are_not_finite_end_one_request_alone(tiny_llama: Tiny, custom_kernels: bool) -> None:
    """A poisoned embedding row makes every request that holds its token fail, and no other, now or later."""
    from safetensors.torch import load_file, save_file

    poisoned = tiny_llama.folder.parent / f"poisoned-{custom_kernels}"
    poisoned.mkdir()
    (poisoned / "config.json").write_text((tiny_llama.folder / "config.json").read_text())
    tensors = load_file(tiny_llama.folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][13] = math.nan
    save_file(tensors, poisoned / "model.safetensors", {"format": "pt"})
    prompts = random_prompts(12, [5, 9, 20, 33], seed=6)  # ids below 12
    clean = start(tiny_llama.folder)
    expected = ids(
        run(clean, [make_request(n, prompt, NEW, logit_bias={13: -1e9}) for n, prompt in enumerate(prompts)])
    )
    clean.close()
    engine = start(poisoned, max_batch_total_tokens=512, max_total_tokens=64, custom_kernels=custom_kernels)
    for _ in range(3):
        bad = [make_request(100 + n, [13, *prompt], NEW) for n, prompt in enumerate(prompts)]
        good = [make_request(n, prompt, NEW, logit_bias={13: -1e9}) for n, prompt in enumerate(prompts)]
        mixed = [request for pair in zip(bad, good, strict=True) for request in pair]
        outputs = run(engine, mixed)
        assert [o.reason for o in outputs[::2]] == ["error"] * 4
        assert all("not finite" in (o.error or "") for o in outputs[::2])
        assert ids(outputs[1::2]) == expected
    engine.close()


def test_a_nucleus_wider_than_the_short_way(tiny_llama: Tiny) -> None:
    """Almost flat scores: top-p keeps more than the 256 best, and ids beyond those are drawn too."""
    prompts = random_prompts(320, [9] * 30, seed=12)
    assert max(drawn_ranks(tiny_llama, prompts, {"top_p": 0.98, "temperature": 8.0})) >= 256
