"""Runs token lists through an engine and through `transformers`."""

import math
import random
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.models.registry import ARCHITECTURES
from text_generation_inference.types import GenerationRequest, SamplingParams, StepPlan, TokenOut


@dataclass
class Tiny:
    folder: Path
    model: transformers.PreTrainedModel


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    prompt_tops: dict[int, dict[int, float]] = field(default_factory=dict)  # by place
    top_tokens: list[dict[int, float]] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None


def family_of(architecture: str) -> ModuleType:
    return import_module(f"text_generation_inference.models.{ARCHITECTURES[architecture]}")


def make_tiny(family: str, overrides: dict, folder: Path) -> Tiny:
    """A model with weights spread enough that its best token is never a near-tie, and its folder.

    The family is an architecture, with or without what most of them end in.
    """
    architecture = family if family in ARCHITECTURES else f"{family}ForCausalLM"
    made = getattr(transformers, architecture)
    config = made.config_class(**{**tiny_config(architecture), **overrides})
    torch.manual_seed(0)
    model = made(config).eval().float()
    spread_weights(model)
    model.save_pretrained(folder)
    return Tiny(folder, model)


def tiny_config(architecture: str) -> dict:
    family = family_of(architecture)
    return getattr(family, "TINIES", {}).get(architecture, family.TINY)


def spread_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.12)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.uniform_(0.7, 1.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)


def start(folder: Path, **settings: object) -> Engine:
    defaults: dict[str, object] = {"max_batch_total_tokens": 8192, "dtype": "float32"}
    return start_engine(ServerConfig(model_id=str(folder), **{**defaults, **settings}))


def make_request(number: int, tokens: list[int], new: int, **params: object) -> GenerationRequest:
    sampling = SamplingParams(**params)
    return GenerationRequest(
        id=number,
        token_ids=tokens,
        sampling=sampling,
        max_new_tokens=new,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed or 0,
    )


def collect(out: TokenOut | None, outputs: dict[int, Output]) -> None:
    if out is None:
        return
    for row, (number, token, logprob) in enumerate(zip(out.request_ids, out.token_ids, out.logprobs, strict=True)):
        outputs[number].token_ids.append(token)
        outputs[number].logprobs.append(logprob)
        for top in out.top_tokens:
            if top.row == row:
                outputs[number].top_tokens.append(dict(zip(top.token_ids, top.logprobs, strict=True)))
    for prompt in out.prompt_logprobs:
        outputs[prompt.row].prompt_logprobs.update(enumerate(prompt.logprobs, prompt.start))
        tops = [dict(zip(*pair, strict=True)) for pair in zip(prompt.top_ids, prompt.top_logprobs, strict=True)]
        outputs[prompt.row].prompt_tops.update(enumerate(tops, prompt.start))
    for finish in out.finished:
        outputs[finish.request_id].reason = finish.reason
        outputs[finish.request_id].error = finish.error


def run(engine: Engine, requests: list[GenerationRequest], arrivals: list[int] | None = None) -> list[Output]:
    """Feed requests (at the given step numbers) and return their outputs in order."""
    outputs = {request.id: Output() for request in requests}
    queue = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    step = 0
    while queue or engine.loop.has_work:
        while queue and queue[0][0] <= step:
            engine.loop.add(requests[queue.pop(0)[1]])
        collect(engine.loop.step(), outputs)
        engine.loop.scheduler.check()
        step += 1
    pool = engine.loop.scheduler.pool
    assert all(books is None or books.num_free == books.num_usable for books in (pool, pool.beside))
    return [outputs[request.id] for request in requests]


def spoil_free_blocks(engine: Engine) -> None:
    """From now on, before each step, blocks that are free and hold nothing findable are filled with NaN: whoever reads
    one, even to multiply it with 0, has no tokens."""
    runner: Any = engine.rank.runner
    pool: Any = engine.loop.scheduler.pool
    launch, queue = runner.launch, runner._queue
    has_window = [pool.beside is not None and spec.window is not None for spec in runner.model.caches(torch.float32)]
    empty: dict[tuple[int, bool], torch.Tensor] = {}  # by step, and of layers with a window that have their own

    def note_and_launch(plan: StepPlan) -> object:
        for is_beside, books in ((False, pool), (True, pool.beside or pool)):
            empty[plan.step, is_beside] = torch.tensor(books._empty, dtype=torch.int64)
        return launch(plan)

    def spoil_and_queue(plan: StepPlan, previous: object) -> object:  # in the order of steps
        for layer, is_beside in zip(runner.kv_cache, has_window, strict=True):
            for cache in layer:
                cache[empty[plan.step, is_beside].to(cache.device)] = math.nan
        return queue(plan, previous)

    runner.launch, runner._queue = note_and_launch, spoil_and_queue


@torch.no_grad()
def reference(model: transformers.PreTrainedModel, tokens: list[int], new: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, from one full pass per token with no cache of ours."""
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    generated = out.sequences[0, len(tokens) :].tolist()
    scores = torch.cat(out.logits).float().log_softmax(-1)
    return generated, [scores[i, token].item() for i, token in enumerate(generated)]


def random_prompts(vocab_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
