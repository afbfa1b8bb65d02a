"""Reports as the benchmarks write them, with made-up figures that behave like real ones."""

import math
import random
from typing import Any

from text_generation_inference.bench.results import (
    Kernel,
    OfflineReport,
    Published,
    Row,
    RowResult,
    SkippedRow,
    Spread,
    StepProfile,
)
from text_generation_inference.bench.serve.results import Goodput, LatencyHistogram, Phase, ServeReport
from text_generation_inference.bench.static.results import BatchResult, StaticReport

# A model folder without weights needs no more: --load-format dummy.
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

COMMON: dict[str, Any] = {
    "complete": True,
    "started_at": "2026-11-15T11:40:12+00:00",
    "versions": {"tgi": "0.1.0", "python": "3.12.3", "torch": "2.11.0"},
    "hardware": {"device": "cuda", "cpus": 16, "machine": "x86_64", "gpu": "NVIDIA H200", "gpu_gb": 150.1},
    "commit": "571d9b644fdc",
}


def spread_of(values: list[float]) -> Spread:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Spread(sum(ordered) / len(ordered), ordered[0], ordered[-1], at(0.5), at(0.9), at(0.99))


def histogram_of(values: list[float], factor: float = 1.12) -> LatencyHistogram:
    low, high = min(values), max(values) * 1.0001
    num = max(1, math.ceil(math.log(high / low) / math.log(factor)))
    edges = [low * (high / low) ** (number / num) for number in range(num + 1)]
    counts = [0] * num
    for value in values:
        counts[min(num - 1, int(math.log(value / low) / math.log(high / low) * num))] += 1
    return LatencyHistogram(edges, counts)


def make_phase(name: str, rng: random.Random, load: float, speed: float, **fields: Any) -> Phase:
    """`load` is the share of what the server can do."""
    wait = 1 / max(0.04, 1 - load)
    ttft = [max(8.0, rng.lognormvariate(math.log(40 / speed), 0.25) * wait) for _ in range(200)]
    itl = [rng.lognormvariate(math.log(9 / speed * (1 + 2 * load)), 0.12) for _ in range(4000)]
    tpot = [rng.lognormvariate(math.log(9 / speed * (1 + 2 * load)), 0.03) for _ in range(200)]
    e2e = [first + 799 * each for first, each in zip(ttft, tpot, strict=True)]
    qps = 4.3 * speed * min(load, 1.0)
    failed = 6 if load > 1 else 0
    good = sum(value < 400 for value in ttft)
    return Phase(
        **{
            "name": name,
            "mode": "constant",
            "rate": 4.3 * speed * load,
            "seconds": 60.0,
            "num_sent": 200 + failed,
            "num_successful": 200,
            "num_failed": failed,
            "errors": {"HTTP 429: Model is overloaded": failed} if failed else {},
            "error_rate": failed / (200 + failed),
            "qps": qps,
            "output_tokens_per_s": qps * 800,
            "prompt_tokens": 200.0,
            "decoded_tokens": 800.0,
            "ttft": spread_of(ttft),
            "itl": spread_of(itl),
            "tpot": spread_of(tpot),
            "e2e": spread_of(e2e),
            "ttft_histogram": histogram_of(ttft),
            "itl_histogram": histogram_of(itl, 1.04),
            "goodput": Goodput({"ttft": 400.0, "itl": 30.0}, good, good / (200 + failed), good / 60),
            "lag": Spread(0.08, 0.01, 2.1, 0.06, 0.11, 0.7),
            "client_cpu": 0.1 + 0.3 * load,
            "client_limited": load > 1,
        }
        | fields
    )


def serve_report(speed: float = 1.0, seed: int = 1, **fields: Any) -> ServeReport:
    rng = random.Random(seed)
    phases = [
        make_phase("warmup", rng, 0.03, speed, mode="throughput", users=1, rate=None),
        make_phase("throughput", rng, 0.97, speed, mode="throughput", users=128, rate=None),
    ]
    for load in (0.12, 0.25, 0.37, 0.5, 0.62, 0.75, 0.87, 1.02):
        phases.append(make_phase(f"constant@{4.3 * speed * load:.2f}req/s", rng, load, speed))
    settings = {
        "benchmark": "serve",
        "model": "meta-llama/Llama-3.1-8B",
        "configuration": {"mode": "sweep", "duration": 60, "users": 128, "num_rates": 8},
        "url": "http://localhost:8080",
        "api": "generate",
        "tokenizer": "meta-llama/Llama-3.1-8B",
        "profile": "fixed-length",
        "server": {"model_id": "llama", "version": "0.1.0", "max_total_tokens": 4096},
        "phases": phases,
    }
    return ServeReport(**{**COMMON, **settings, **fields})


def users_report(**fields: Any) -> ServeReport:
    """Closed loops of more and more users."""
    rng = random.Random(5)
    phases = [
        make_phase(f"throughput@{users}", rng, users / 600, 1.0, mode="throughput", users=users, rate=None)
        for users in (1, 4, 16, 64, 256, 512)
    ]
    return serve_report(phases=phases, **fields)


def offline_report(speed: float = 1.0, floor: bool = True, published: bool = True, **fields: Any) -> OfflineReport:
    figures = [
        (128, 128, 1230, 24800.63, 34.2339, 31000.0, 27.4, 13163),
        (128, 2048, 163, 10190.29, 15.8556, 11100.0, 14.6, 4777),
        (2048, 128, 94, 2582.03, 15.462, 3000.0, 14.7, 1291),
        (2048, 2048, 81, 4122.01, 18.5597, 4330.0, 17.8, 1943),
    ]
    rows = [
        RowResult(
            inputs=row.inputs,
            outputs=row.outputs,
            requests=row.requests,
            iterations=5,
            seconds=round(5 * row.requests * row.outputs / rate / speed, 4),
            output_tokens_per_s=round(rate * speed, 2),
            total_tokens_per_s=round(rate * speed * row.length / row.outputs, 2),
            step_ms=step / speed,
            step_rows=row.requests,
            host_ms=1.1,
            first_token_ms=1180.0 / speed,
            first_token_max_ms=2309.7 / speed,
            num_steps=5 * (row.outputs + 20),
            num_prefill_steps=100,
            num_preemptions=0,
            peak_memory_gb=148.329,
            floor_tokens_per_s=floor_rate if floor else None,
            floor_step_ms=floor_step if floor else None,
            of_floor=round(rate * speed / floor_rate, 4) if floor else None,
            published=Published("Llama-2-7B FP8", "Gaudi 2", 1, theirs) if published else None,
        )
        for row, rate, step, floor_rate, floor_step, theirs in ((Row(*each[:3]), *each[3:]) for each in figures)
    ]
    kernels = [
        Kernel("decode_by_group", "attention", 5.39039, 32.0),
        Kernel("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products", 2.95282, 32.0),
        Kernel(
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(float const*)",
            "products",
            0.14323,
            32.0,
        ),
    ]
    profile = StepProfile(
        rows=256,
        context=600,
        wall_ms=13.1646,
        traced_ms=12.0587,
        kernel_ms=12.0724,
        busy_ms=11.903,
        gap_ms=0.1598,
        by_kind={"products": 6.1471, "attention": 5.3904, "other": 0.5322, "copies": 0.0027},
        kernels=kernels,
    )
    settings = {
        "benchmark": "offline",
        "model": "llama-2-7b",
        "configuration": {
            "quantize": "fp8",
            "kv_cache_dtype": "fp8_e4m3fn",
            "max_batch_size": 1230,
            "cuda_graphs": [1, 2],
        },
        "preset": "gaudi2-llama-2-7b",
        "ready_seconds": 13.709,
        "stages": {"device": 0.915, "load": 0.364, "dry_run": 5.695},
        "notes": ["Triton kernels on NVIDIA H200", "KV cache in fp8_e4m3fn"],
        "rows": rows,
        "skipped": [SkippedRow(128, 2048, 750, "needs a KV cache of 1,632,000 tokens, 396,000 fit into the memory")],
        "profiles": [profile],
    }
    return OfflineReport(**{**COMMON, **settings, **fields})


def static_report(speed: float = 1.0, seed: int = 3, **fields: Any) -> StaticReport:
    rng = random.Random(seed)
    batches = []
    for size in (1, 2, 4, 8, 16, 32):
        batch = BatchResult(batch_size=size)
        for _ in range(10):
            prefill = (0.009 + 0.0022 * size) / speed * rng.uniform(0.97, 1.12)
            decode = 7 * (0.0068 + 0.0007 * size) / speed * rng.uniform(0.98, 1.06)
            batch.add_run((10, 8), prefill, decode)
        batches.append(batch)
    settings = {
        "benchmark": "static",
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "configuration": {"device": "cpu"},
        "sequence_length": 10,
        "decode_length": 8,
        "runs": 10,
        "warmups": 1,
        "batches": batches,
    }
    return StaticReport(**{**COMMON, **settings, **fields})
