"""Every architecture equals `transformers`, token for token in float32, however requests are batched or chunked."""

import math
from pathlib import Path

import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, reference, run, start
from ranks import PROMPT, logits_of_ranks, logits_of_threads

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [1, 2, 5, 17, 40, 90]
NEW = 24


def check(outputs: list, expected: list) -> None:
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        assert output.token_ids == tokens
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(output.logprobs, logprobs, strict=True))


@pytest.fixture(scope="session")
def expected(tiny: Tiny) -> list[tuple[list[int], list[float]]]:
    return [reference(tiny.model, prompt, NEW) for prompt in random_prompts(320, LENGTHS)]


@pytest.mark.parametrize("custom_kernels", [False, True], ids=["reference", "native"])
def test_greedy_equals_transformers(tiny: Tiny, expected: list, custom_kernels: bool) -> None:
    engine = start(tiny.folder, max_batch_prefill_tokens=33, custom_kernels=custom_kernels)
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(random_prompts(320, LENGTHS))]
    check(run(engine, requests), expected)
    check(run(engine, requests, arrivals=[0, 1, 3, 3, 10, 12]), expected)
    check([run(engine, [request])[0] for request in requests], expected)
    engine.close()


def test_preemption_and_cache_change_nothing(tiny_llama: Tiny) -> None:
    shared = random_prompts(320, [40], seed=1)[0]
    prompts = [shared + tail for tail in random_prompts(320, [3, 9, 1, 20, 5, 30], seed=2)]
    expected = [reference(tiny_llama.model, prompt, NEW) for prompt in prompts]
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(prompts)]
    for settings in (
        {"max_batch_total_tokens": 128, "max_total_tokens": 112},
        {"prefix_caching": False},
        {"overlap": False},
        {"max_batch_prefill_tokens": 7},
        {"max_batch_size": 2},
    ):
        engine = start(tiny_llama.folder, **settings)
        check(run(engine, requests), expected)
        check(run(engine, requests), expected)
        if "max_total_tokens" in settings:
            assert engine.loop.scheduler.stats.num_preemptions > 0
        if settings.get("prefix_caching", True):
            assert engine.loop.scheduler.stats.num_cached_prompt_tokens > 0
        engine.close()


def test_prompt_logprobs(tiny_llama: Tiny) -> None:
    prompts = random_prompts(320, [1, 2, 30, 61])
    engine = start(tiny_llama.folder, max_batch_prefill_tokens=16)
    requests = [make_request(n, prompt, 2, decoder_input_details=True) for n, prompt in enumerate(prompts)]
    for output, prompt in zip(run(engine, requests), prompts, strict=True):
        with torch.no_grad():
            scores = tiny_llama.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = {i: scores[i - 1, prompt[i]].item() for i in range(1, len(prompt))}
        assert output.prompt_logprobs == pytest.approx(expected, abs=1e-4)
    engine.close()


def test_ranks_that_share_heads_equal_transformers(tiny_llama: Tiny) -> None:
    """With 4 ranks and 2 key/value heads, pairs of ranks share a head. In processes of their own, as a server's are."""
    with torch.no_grad():
        expected = tiny_llama.model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of_ranks(tiny_llama.folder, 4), expected, atol=1e-4, rtol=1e-4)


def test_ranks_with_biases_equal_transformers(tmp_path: Path) -> None:
    tiny = make_tiny("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, tmp_path)
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of_threads(tiny.folder, 2), expected, atol=1e-4, rtol=1e-4)


def test_prompt_logprobs_beside_other_requests(tiny_llama: Tiny) -> None:
    """5 + 2 tokens and 2 + 5 rows of logits: equal in number, not in order."""
    prompts = random_prompts(320, [5, 2], seed=1)
    expected = [reference(tiny_llama.model, prompt, 6) for prompt in prompts]
    engine = start(tiny_llama.folder, prefix_caching=False)
    asked = [make_request(n, prompt, 6, decoder_input_details=n == 0) for n, prompt in enumerate(prompts)]
    outputs = run(engine, asked)
    check(outputs, expected)
    with torch.no_grad():
        scores = tiny_llama.model(torch.tensor([prompts[0]])).logits[0].log_softmax(-1)
    wanted = {i: scores[i - 1, prompts[0][i]].item() for i in range(1, 5)}
    assert outputs[0].prompt_logprobs == pytest.approx(wanted, abs=1e-4)
    engine.close()
