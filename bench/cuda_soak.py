"""Minutes at the admission limit with every option on: does anything fail, does memory grow?

    python bench/cuda_soak.py [--seconds 180] [--shape llama-3.1-8b] [--kv-cache-dtype fp8_e4m3fn] [--quantize fp8]

Requests of all kinds (sampling, penalties, grammars, top tokens, prompt log-probabilities, shared beginnings, aborts)
keep the queue full, so that slots or blocks are short all the time and running requests are preempted. Without --shape
the embedded model with a small KV cache; with it random weights and all memory that the device has. Prints a line every
few seconds; exits with 1 if a request failed, the engine failed, or memory grew after the first quarter. (On the CPU
the process grows with every page of the KV cache that is used for the first time.)
"""

import argparse
import gc
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cuda_served import write_tokenizer

from text_generation_inference.bench.shapes import SHAPES, write_shape
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.errors import TgiError
from text_generation_inference.types import GenerationRequest, Grammar, SamplingParams

KINDS: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"typical_p": 0.8, "repetition_penalty": 1.2},
    {"min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"top_n_tokens": 5, "do_sample": True},
    {"decoder_input_details": True},
    {"watermark": True, "temperature": 0.9},
    {"logit_bias": {7: 3.0, 11: -50.0}, "top_n_tokens": 2},
]
GRAMMARS = [
    Grammar("regex", "[0-9]{4}-[a-z]{3,40}"),
    Grammar("json", '{"type": "array", "items": {"type": "integer"}}'),
]
GROWTH_BYTES = {"device": 8 << 20, "host": 96 << 20}
GROWTH_BYTES_ON_CPU = {"host": 1 << 30}


class Soak:
    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        self.rng = random.Random(options.seed)
        vocab = engine.facts.vocab_size
        self.shared = [self.rng.choices(range(vocab), k=length) for length in (64, 256, 500)]
        self.next_id = 1
        self.alive: set[int] = set()
        self.errors: list[str] = []
        self.num_tokens = self.num_finished = self.num_aborted = 0

    def make(self) -> GenerationRequest:
        rng, room = self.rng, self.engine.facts.max_total_tokens
        number, self.next_id = self.next_id, self.next_id + 1
        prompt = rng.choices(range(self.engine.facts.vocab_size), k=rng.choice((1, 20, 100, 300, 700)))
        if rng.random() < 0.3:
            prompt = rng.choice(self.shared) + prompt
        prompt = prompt[: room - 16]
        new = min(room - len(prompt), rng.choice((1, 16, 100, 200, 400)))
        grammar = rng.choice(GRAMMARS) if rng.random() < self.options.grammars else None
        sampling = SamplingParams(**KINDS[number % len(KINDS)])
        return GenerationRequest(
            id=number,
            token_ids=prompt,
            sampling=sampling,
            max_new_tokens=new,
            stop_token_ids=[0] if grammar else [],
            seed=number,
            grammar=grammar,
        )

    def step(self) -> None:
        loop = self.engine.loop
        while loop.scheduler.num_waiting < self.options.waiting:
            request = self.make()
            self.alive.add(request.id)
            loop.add(request)
        if self.rng.random() < 0.05:
            number = self.rng.choice(tuple(self.alive))
            self.num_aborted += loop.abort(number)
            self.alive.discard(number)
        self.take()

    def take(self) -> None:
        out = self.engine.loop.step()
        if out is None:
            return
        self.num_tokens += len(out.token_ids)
        for finish in out.finished:
            self.alive.discard(finish.request_id)
            self.num_finished += 1
            if finish.error is not None:
                self.errors.append(f"request {finish.request_id}: {finish.error}")

    def drain(self) -> None:
        for number in self.alive:
            self.engine.loop.abort(number)
        while self.engine.loop.has_work:
            self.take()
        self.engine.loop.scheduler.check()


def memory() -> dict[str, int]:
    """Bytes: on the device as torch counts them, and of this process."""
    with open("/proc/self/statm") as fields:
        host = int(fields.read().split()[1]) * resource.getpagesize()
    if not torch.cuda.is_initialized():
        return {"device": 0, "reserved": 0, "host": host}
    return {"device": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "host": host}


def start(options: argparse.Namespace, folder: Path) -> Engine:
    settings: dict[str, Any] = {
        "device": options.device,
        "dtype": None if options.quantize else options.dtype,
        "quantize": options.quantize,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_batch_size": options.slots,
        "max_total_tokens": options.length,
        "max_batch_total_tokens": options.tokens,
    }
    if options.shape:
        write_shape(options.shape, folder)
        write_tokenizer(folder / "tokenizer.json", SHAPES[options.shape]["vocab_size"])
        settings |= {"model_id": str(folder), "load_format": "dummy"}
    elif options.tokens is None:
        settings["max_batch_total_tokens"] = max(options.length, options.slots * min(300, options.length // 3))
    return start_engine(ServerConfig(**settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--dtype")
    parser.add_argument("--quantize")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--slots", type=int, default=512, help="requests running at a time")
    parser.add_argument("--waiting", type=int, default=32, help="requests that wait at any time")
    parser.add_argument("--length", type=int, default=2048, help="longest request")
    parser.add_argument("--tokens", type=int, help="in the KV cache (default: few, or all memory with --shape)")
    parser.add_argument("--grammars", type=float, default=0.1, help="share of requests with one")
    parser.add_argument("--every", type=float, default=10, help="seconds between lines")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        engine = start(options, Path(name))
        warm_up(engine)
        for grammar in GRAMMARS if options.grammars else []:
            engine.grammars.compile(grammar)
        soak = Soak(engine, options)
        passed = run(soak, options)
    engine.close()
    sys.exit(0 if passed else 1)


def run(soak: Soak, options: argparse.Namespace) -> bool:
    scheduler, stats = soak.engine.loop.scheduler, soak.engine.loop.scheduler.stats
    started = last = time.monotonic()
    settled: dict[str, int] | None = None
    tokens_before = 0
    print("seconds | tok/s | running | free blocks | preempted | finished | device GB | reserved GB | host GB | errors")
    try:
        while (now := time.monotonic()) - started < options.seconds:
            soak.step()
            if settled is None and now - started > options.seconds / 4:
                gc.collect()
                settled = memory()
            if now - last >= options.every:
                used = memory()
                rate = (soak.num_tokens - tokens_before) / (now - last)
                line = [f"{now - started:7.0f}", f"{rate:,.0f}", scheduler.num_running, scheduler.pool.num_free]
                line += [stats.num_preemptions, soak.num_finished, *(f"{used[key] / 1e9:.3f}" for key in used)]
                print(" | ".join(str(cell) for cell in [*line, len(soak.errors)]), flush=True)
                last, tokens_before = now, soak.num_tokens
                scheduler.check()
        soak.drain()
    except TgiError as error:
        print(f"the engine failed: {error}")
        return False
    gc.collect()
    used = memory()
    limits = GROWTH_BYTES if soak.engine.rank.device.torch_device.type == "cuda" else GROWTH_BYTES_ON_CPU
    grown = {key: used[key] - settled[key] for key in limits} if settled else {}
    free = scheduler.pool.num_free == scheduler.pool.num_usable
    print(f"{soak.num_tokens:,} tokens, {soak.num_finished} finished, {soak.num_aborted} aborted,", end=" ")
    print(f"{stats.num_preemptions} preempted, {len(soak.errors)} errors, all blocks free: {free}")
    print("grown since the first quarter, MB:", {key: round(value / 1e6, 1) for key, value in grown.items()})
    for error in soak.errors[:5]:
        print(error)
    return not soak.errors and free and all(value <= limits[key] for key, value in grown.items())


if __name__ == "__main__":
    main()
