"""Output tokens per second on a GPU with random weights, beside the floor of the same work on the same card.

    python bench/cuda_offline.py [--shape llama-3.1-8b | --config DIR] [--dtype bfloat16] [--profile ROWS] IN/OUT/N ...

Each row: N requests of IN random tokens, OUT tokens each, greedy, all there at the start, no prefix cache. The floor:
prefill operations at 750 TFLOP/s, then OUT - 1 decode steps of the model's own matrix products in a graph plus the
cache's bytes at 4.2 TB/s. `--profile` prints where one captured decode step spends its time.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

SHAPES = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    },
    "llama-2-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "rope_theta": 10000.0, "max_position_embeddings": 4096,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0, "max_position_embeddings": 8192,
    },
}  # fmt: skip
READ_BYTES_PER_S, PREFILL_OPS_PER_S = 4.2e12, 750e12


def write_config(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **SHAPES[name],
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def run_row(engine, inputs: int, outputs: int, count: int, seed: int) -> dict:
    from tgi.types import GenerationRequest, SamplingParams

    rng = random.Random(seed)
    vocab = engine.facts.vocab_size
    loop = engine.loop
    for number in range(count):
        ids = [rng.randrange(5, vocab) for _ in range(inputs)]
        loop.add(
            GenerationRequest(
                id=seed * 100_000 + number, token_ids=ids, sampling=SamplingParams(), max_new_tokens=outputs,
                stop_token_ids=[], seed=0,
            )
        )  # fmt: skip
    start = last = time.perf_counter()
    first, tokens, steps, host = None, 0, [], []
    while loop.has_work:
        before = time.perf_counter()
        due = loop.launch()
        launched = time.perf_counter()
        if not due:
            continue
        loop.wait()
        waited = time.perf_counter()
        out = loop.take()
        now = time.perf_counter()
        tokens += len(out.token_ids)
        first = first or now - start
        if len(out.token_ids) == count and not loop.last.prefill:
            steps.append(now - last)
            host.append((launched - before) + (now - waited))
        last = now
    took = time.perf_counter() - start
    assert tokens == outputs * count, (tokens, outputs * count)
    return {
        "work": f"{inputs}/{outputs} x{count}",
        "tokens_per_s": round(tokens / took, 1),
        "total_tokens_per_s": round((tokens + inputs * count) / took, 1),
        "seconds": round(took, 3),
        "step_ms": round(1e3 * statistics.median(steps), 3) if steps else None,
        "host_ms": round(1e3 * statistics.median(host), 3) if host else None,
        "first_token_ms": round(1e3 * (first or 0), 1),
    }


def graph_ms(work, repeats: int = 10) -> float:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    graph.replay()
    for _ in range(repeats):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def floor_ms(engine, rows: int, context: float) -> tuple[float, float]:
    """(matrix products, cache reads) of one decode step, in ms."""
    import torch
    import torch.nn.functional as F

    model = engine.loop._runner.model
    weights = [
        linear.weight
        for layer in model.model.layers
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    ]
    weights.append((model.head or model.model.embedding).weight)
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], device=w.device, dtype=w.dtype) for w in weights}
    with torch.inference_mode():
        gemm = graph_ms(lambda: [F.linear(inputs[w.shape[1]], w) for w in weights])
    spec = model.spec
    kv = rows * context * spec.kv_bytes_per_token(spec.num_kv_heads, weights[0].element_size())
    return gemm, 1e3 * kv / READ_BYTES_PER_S


def floor_tokens_per_s(engine, inputs: int, outputs: int, count: int) -> tuple[float, float]:
    """(tokens per second, ms of the average decode step)."""
    model = engine.loop._runner.model
    spec = model.spec
    layers = sum(
        w.numel()
        for layer in model.model.layers
        for w in (
            layer.attention.qkv.weight,
            layer.attention.out.weight,
            layer.mlp.gate_up.weight,
            layer.mlp.down.weight,
        )
    )
    attention = (
        2 * inputs * spec.num_heads * spec.head_dim * spec.num_layers
    )  # operations per token: half of the square
    prefill = count * inputs * (2 * layers + attention) / PREFILL_OPS_PER_S
    gemm, kv = floor_ms(engine, count, inputs + outputs / 2)
    return count * outputs / (prefill + (outputs - 1) * (gemm + kv) / 1e3), gemm + kv


def profile(engine, rows: int, context: int) -> list[tuple[str, float, int]]:
    """Kernels of a captured decode step: (name, ms, calls), the longest first."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    from tgi.types import GenerationRequest, SamplingParams

    loop = engine.loop
    rng = random.Random(1)
    for number in range(rows):
        ids = [rng.randrange(5, engine.facts.vocab_size) for _ in range(context)]
        loop.add(
            GenerationRequest(
                id=10**9 + number, token_ids=ids, sampling=SamplingParams(), max_new_tokens=40,
                stop_token_ids=[], seed=0,
            )
        )  # fmt: skip
    decoding = 0
    while decoding < 8:
        out = loop.step()
        decoding += out is not None and len(out.token_ids) == rows and not loop.last.prefill
    num_steps = 5
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(num_steps):
            loop.step()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    totals: dict[str, list[float]] = {}
    for event in events:
        entry = totals.setdefault(event.name, [0.0, 0])
        entry[0] += event.time_range.elapsed_us()
        entry[1] += 1
    while loop.has_work:
        loop.step()
    return sorted(
        ((name, us / num_steps / 1e3, int(calls / num_steps)) for name, (us, calls) in totals.items()),
        key=lambda e: -e[1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="IN/OUT/N")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--config", help="a folder with a config.json, instead of a shape")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, help="tokens per cache block")
    parser.add_argument("--eager", action="store_true", help="capture nothing")
    parser.add_argument("--profile", help="ROWS/CONTEXT of a decode step to take apart")
    parser.add_argument("--json", help="also write everything measured to this file")
    options = parser.parse_args()
    rows = [tuple(int(part) for part in row.split("/")) for row in options.rows]
    import msgspec
    import torch

    from tgi.config import ServerConfig
    from tgi.devices import cuda
    from tgi.engine.build import start_engine

    if options.block_size:
        init = cuda.CudaDevice.__init__

        def with_block_size(self, *arguments) -> None:
            init(self, *arguments)
            self.limits = msgspec.structs.replace(self.limits, block_size=options.block_size)

        cuda.CudaDevice.__init__ = with_block_size
    folder = Path(options.config) if options.config else write_config(options.shape)
    shown = [int(part) for part in options.profile.split("/")] if options.profile else None
    longest = max([i + o for i, o, _ in rows] + ([shown[1] + 64] if shown else []))
    started = time.perf_counter()
    engine = start_engine(
        ServerConfig(
            model_id=str(folder), load_format="dummy", device="cuda", dtype=options.dtype, prefix_caching=False,
            max_total_tokens=longest, max_batch_size=max([n for _, _, n in rows] + ([shown[0]] if shown else [])),
            cuda_graphs=[0] if options.eager else None,
        )
    )  # fmt: skip
    ready = time.perf_counter() - started
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in engine.seconds.items())
    print(
        f"ready in {ready:.1f} s ({stages}); {engine.facts.num_blocks} blocks of {engine.facts.block_size}", flush=True
    )
    run_row(engine, min(64, rows[0][0] if rows else 64), 4, 2, seed=0)
    results = []
    for number, (inputs, outputs, count) in enumerate(rows, 1):
        run_row(engine, inputs, min(8, outputs), min(count, 32), seed=100 + number)
        result = run_row(engine, inputs, outputs, count, seed=number)
        rate, step = floor_tokens_per_s(engine, inputs, outputs, count)
        result |= {"floor_tokens_per_s": round(rate, 1), "floor_step_ms": round(step, 3)}
        result["of_floor"] = round(result["tokens_per_s"] / rate, 3)
        result["peak_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
        results.append(result)
        print(json.dumps(result), flush=True)
    profiled = []
    if shown:
        profiled = profile(engine, shown[0], shown[1])
        total = sum(ms for _, ms, _ in profiled)
        print(f"\nOne decode step of {shown[0]} rows at {shown[1]} tokens: {total:.3f} ms in kernels")
        for name, ms, calls in profiled[:14]:
            print(f"  {ms:8.3f} ms {100 * ms / total:5.1f}% {calls:5d} calls  {name[:90]}")
    engine.close()
    if results:
        print(f"\n| work | tokens/s | of the floor | step ms | floor ms | host ms | first token ms |\n|{'---|' * 7}")
    for r in results:
        cells = (
            r["tokens_per_s"],
            f"{r['of_floor']:.0%} of {r['floor_tokens_per_s']}",
            r["step_ms"],
            r["floor_step_ms"],
        )
        print(f"| {r['work']} | {' | '.join(map(str, cells))} | {r['host_ms']} | {r['first_token_ms']} |")
    if options.json:
        Path(options.json).write_text(json.dumps({"ready_s": ready, "rows": results, "profile": profiled}, indent=1))


if __name__ == "__main__":
    main()
