"""What whole engines on a device are asked for, and how their answers are compared with those of plain torch."""

from pathlib import Path

import pytest
import torch
from driving import Output, make_request, random_prompts, run, start

from text_generation_inference.types import GenerationRequest

PARAMS = [
    {"do_sample": True},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95},
    {"typical_p": 0.6},
    {"min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 1.5, "frequency_penalty": 1.1, "presence_penalty": 0.7},
    {"watermark": True, "temperature": 0.7},
    {"logit_bias": {7: 4.0, 9: -100.0}, "do_sample": True},
    {"repetition_penalty": 1.8, "top_n_tokens": 3},
    {"decoder_input_details": True},
    {},
    {"top_n_sigma": 1.2, "temperature": 1.3, "presence_penalty": 0.5},  # a filter that no kernel knows
]


MIN_TOKENS = [  # most ids end the request
    {"min_tokens": 6, "stop_token_ids": list(range(300))},
    {},
    {"min_tokens": 9, "stop_token_ids": list(range(310)), "do_sample": True},
    {"min_tokens": 4, "stop_token_ids": list(range(250)), "top_n_tokens": 2, "repetition_penalty": 1.2},
    {"stop_token_ids": list(range(300))},
]


LENGTHS = [1, 2, 5, 17, 40, 90, 33, 16]


NEW = 18


def requests(params: list[dict], lengths: list[int] = LENGTHS) -> list[GenerationRequest]:
    prompts = random_prompts(320, lengths, seed=3)
    return [
        make_request(n, prompt, NEW, **{"seed": 1000 + n, **params[n % len(params)]})
        for n, prompt in enumerate(prompts)
    ]


def on_cpu(folder: Path, asked: list[GenerationRequest]) -> list[Output]:
    engine = start(folder, device="cpu", custom_kernels=False)
    outputs = run(engine, asked)
    engine.close()
    return outputs


def same(ours: list[Output], expected: list[Output], tolerance: float = 2e-4) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.reason == theirs.reason
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)
        assert mine.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=tolerance)
        assert [list(top) for top in mine.top_tokens] == [list(top) for top in theirs.top_tokens]
        assert sorted(mine.prompt_tops) == sorted(theirs.prompt_tops)
        for place, tops in mine.prompt_tops.items():
            assert list(tops) == list(theirs.prompt_tops[place])
            assert list(tops.values()) == pytest.approx(list(theirs.prompt_tops[place].values()), abs=tolerance)


def wait_for_device(device_name: str) -> None:
    """The engine's queue does not wait for what a test does to its weights."""
    if device_name == "cuda":
        torch.cuda.synchronize()


def ends_in_time(asked: list[GenerationRequest], outputs: list[Output]) -> None:
    for request, output in zip(asked, outputs, strict=True):
        held = request.sampling.min_tokens
        assert len(output.token_ids) > held
        assert not set(output.token_ids[:held]) & set(request.stop_token_ids)
    assert {output.reason for output in outputs} == {"length", "eos_token"}
