"""Engines that a test starts in a process of its own (`gaudi.run_alone`), each a function that prints what it found, and
the requests that are asked.

A card serves one process at a time, and the mode is read once.
"""

import json
from pathlib import Path

from driving import make_request, random_prompts, run, start
from hpu_batches import LIMITS
from torch._dynamo.utils import counters

from text_generation_inference.engine.build import Engine

SAMPLED = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2}
LENGTHS = [1, 2, 5, 17, 40, 90, 128, 16]


def requests(**params):
    prompts = random_prompts(320, LENGTHS, seed=3)
    return [make_request(n, prompt, 9, **params, seed=50 + n) for n, prompt in enumerate(prompts)]


EVERY_WAY = [
    SAMPLED,
    {"do_sample": True, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"typical_p": 0.6, "watermark": True},
    {"min_p": 0.05, "logit_bias": {7: 4.0, 9: -100.0}},
    {"top_p": 0.9, "top_n_tokens": 2},
    {"repetition_penalty": 1.5, "top_n_sigma": 1.0},
    {"min_tokens": 5, "stop_token_ids": list(range(300)), "temperature": 1.3},
    {},
]


def sampled_requests():
    """One of each, twice, so that each meets others."""
    prompts = random_prompts(320, LENGTHS, seed=3)
    return [
        make_request(n, prompts[(n + n // 8) % 8], 9, **EVERY_WAY[n % 8], seed=50 + n) for n in range(2 * len(LENGTHS))
    ]


def run_card() -> None:
    """Which card it is, and how many there are."""
    from text_generation_inference.devices.hpu import HpuDevice

    device = HpuDevice()
    bridge = device.bridge
    print(json.dumps([bridge.emulated, device.supports_fp8, device.fp8_max, bridge.torch_hpu.device_count()]))
    device.close()


def run_eager(folder: str) -> None:
    """Without lazy mode, in a process of its own: graphs of torch.compile, and matrices in FP8."""
    wanted = requests()[:5]
    limits = {**LIMITS, "max_batch_size": 1, "max_total_tokens": 60, "pt_hpu_lazy_mode": False}
    engine = start(Path(folder), device="hpu", limit_hpu_graph=True, **limits)  # which is about captured graphs alone
    count = engine.rank.device.bridge.count_compilations
    warm = count()
    found = [[output.token_ids for output in run(engine, some)] for some in (wanted, sampled_requests()[:5])]
    stats = engine.rank.bucket_stats
    # `warm`: programs of sampling for one row, two that keep its tokens, and for each of the shapes those of layers and of
    # what all layers read. None is in pieces.
    breaks = dict(counters["graph_break"])
    print(json.dumps([found, warm, stats.num_planned, stats.num_captured, count() - warm, breaks]))
    engine.close()
    before = count()
    engine = start(Path(folder), device="hpu", dtype=None, quantize="fp8", enable_hpu_graph=False, **limits)
    outputs = run(engine, wanted)
    assert count() == before and "eager mode, op by op" in engine.rank.device.ops.description
    print(
        json.dumps([[output.error for output in outputs if output.error], [output.logprobs[0] for output in outputs]])
    )
    engine.close()


def scores_of(folder: Path, device: str, **chosen: object) -> tuple[list[list[list[float]]], Engine]:
    """Of each request: the scores of its prompt, its tokens, and their scores; and the engine, which is closed."""
    engine = start(folder, device=device, **{**LIMITS, **chosen})
    count = engine.rank.device.bridge.count_compilations if device == "hpu" else lambda: 0
    before = count()
    prompts = random_prompts(320, LENGTHS, seed=3)
    outputs = run(engine, [make_request(n, p, 6, decoder_input_details=n < 4) for n, p in enumerate(prompts)])
    assert count() == before
    engine.close()
    scores = [list(each.prompt_logprobs.values()) if each.prompt_logprobs else [] for each in outputs]
    return [[of, each.token_ids, each.logprobs] for of, each in zip(scores, outputs, strict=True)], engine


def run_measured(folder: str, quant_config: str, lazy: bool) -> None:
    """In a process of its own, for the mode is read once."""
    scores, engine = scores_of(Path(folder), "hpu", quant_config=quant_config, pt_hpu_lazy_mode=lazy)
    model = engine.rank.runner.model
    print({type(layer.attention.in_fp8).__name__ for layer in model.model.layers}, type(model.head.weight).__name__)
    print(json.dumps(scores))


def run_experts(folder: str, lazy: bool, **chosen: object) -> None:
    """In the card's own type, which is bfloat16."""
    scores, engine = scores_of(Path(folder), "hpu", pt_hpu_lazy_mode=lazy, dtype=None, **chosen)
    print(json.dumps([scores, emulated_ops() if engine.rank.device.bridge.emulated else []]))


def emulated_ops() -> list[str]:
    """The card's own, those that this process has called on the stand-in."""
    from habana_frameworks.torch._emulation import books

    return sorted(books.own_ops)


def run_scored(folder: str, lazy: bool) -> None:
    """In a process of its own: programs of one row that another engine has met are there for the next one."""
    limits = {"max_batch_size": 4, "max_total_tokens": 96, "max_batch_total_tokens": 1024}
    steps = {"bucket_strategy": "linear", "batch_bucket_size": 4, "prefill_batch_bucket_size": 4}
    engine = start(Path(folder), device="hpu", pt_hpu_lazy_mode=lazy, **limits, **steps)
    count, plan = engine.rank.device.bridge.count_compilations, engine.rank.runner.steps.plan
    before, ways = count(), [{}, {"do_sample": True, "top_p": 0.9}, {"repetition_penalty": 1.3}, {"top_n_tokens": 3}]
    for number, way in enumerate(ways):
        run(engine, [make_request(number, list(range(1, 20)), 3, decoder_input_details=True, seed=1, **way)])
    print(min(bucket.batch for bucket in plan.decode), count() - before, engine.rank.bucket_stats.num_unplanned)


def run_split(folder: str, cards: int) -> None:
    """A model over so many cards, prompts in graphs too: its sums are inside of them. Tokens are chosen in every way."""
    engine = start(Path(folder), device="hpu", num_shard=cards, limit_hpu_graph=False, **LIMITS)
    count = engine.rank.device.bridge.count_compilations
    warm = count()
    found = [output.token_ids for output in run(engine, requests(), arrivals=[0, 0, 1, 3, 5, 5, 6, 9])]
    found += [output.token_ids for output in run(engine, sampled_requests())]
    stats = engine.rank.bucket_stats
    print(json.dumps([found, stats.num_captured, stats.num_planned, stats.num_unplanned, count() - warm]))
    engine.close()
