# ruff: noqa: B023, E501
"""A first look at a GPU: are the kernels right, what does each cost, how near to the floor is the whole engine.

    python bench/cuda_first.py [--only tests,kernels,attention,rows] [--out DIR]

Prints short tables, the most useful last; everything also goes to DIR.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def event_ms(work, repeats: int = 20) -> float:
    """Median of replays of a graph of four calls, per call."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            work()
    graph.replay()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / 4)
    return statistics.median(times)


def run_tests(out: Path) -> bool:
    """The device suite, in parallel: most of its time is compiling kernels."""
    command = [
        sys.executable, "-m", "pytest", "tests/devices/test_triton_kernels.py", "tests/devices/test_engine.py",
        "--device", "cuda", "-n", "12", "-k", "not grammars", "-p", "no:cacheprovider", "--maxfail", "12", "--tb=short",
    ]  # fmt: skip
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    text = done.stdout + done.stderr
    (out / "tests.log").write_text(text)
    shown = text if done.returncode == 0 else text[-6000:]
    print(shown[-6000:] if done.returncode else shown[-600:])
    print(f"tests: rc {done.returncode} in {time.perf_counter() - started:.0f} s", flush=True)
    return done.returncode == 0


def time_kernels() -> list[dict]:
    """The small kernels and the choice of tokens, at the shape of an 8B model."""
    import torch

    from tgi.kernels.batch import ForwardBatch
    from tgi.kernels.resident import SlotState
    from tgi.kernels.triton import choice, small, state

    device, results = torch.device("cuda"), []

    def tell(name: str, rows: int, num_bytes: int, work) -> None:
        ms = event_ms(work)
        results.append({"kernel": name, "rows": rows, "us": 1e3 * ms, "tb_s": num_bytes / ms / 1e9})

    for rows in (1, 64, 256, 1024):
        hidden, width, vocab = 4096, 14336, 128256
        x = torch.randn(rows, hidden, device=device).bfloat16()
        weight = torch.rand(hidden, device=device).bfloat16()
        tell("add_rms_norm", rows, 8 * x.numel(), lambda x=x, w=weight: small.add_rms_norm(x, x, w, 1e-5))
        gate_up = torch.randn(rows, 2 * width, device=device).bfloat16()
        tell("silu_mul", rows, 6 * rows * width, lambda g=gate_up: small.silu_mul(g))
        fused = torch.randn(rows, 48, 128, device=device).bfloat16()
        q, k, v = fused.split((32, 8, 8), 1)
        cache = torch.zeros(2, 4096, 8, 16, 128, device=device, dtype=torch.bfloat16).transpose(2, 3)
        batch = ForwardBatch(
            input_ids=x, positions=torch.arange(rows, device=device), kv_index=torch.arange(rows, device=device) * 16,
            block_tables=x, seq_lens=x, num_decode=rows, chunk_starts_cpu=[], chunk_ends_cpu=[], max_seq_len=0,
            logit_tokens=None,
        )  # fmt: skip
        cos_sin = torch.randn(2048, 128, device=device)
        tell(
            "rotary_and_cache", rows, 4 * fused.numel(),
            lambda q=q, k=k, v=v, b=batch: small.rotary_and_cache(q, k, v, cos_sin, b, cache[0], cache[1]),
        )  # fmt: skip
        logits = torch.randn(rows, vocab, device=device).bfloat16()
        slots = SlotState(rows, 4096, 16, device)
        index = torch.arange(rows, dtype=torch.int32, device=device)
        out = torch.zeros(2, rows, dtype=torch.int32, device=device)
        slots.filters.copy_(torch.tensor([1.0, 0, 1, 1, 0, 0]))
        slots.lengths.fill_(5)
        tell("greedy_into", rows, 2 * logits.numel(), lambda: choice.greedy_into(logits, index, slots, out))
        slots.lengths.fill_(5)
        tell("gather_inputs", rows, 32 * rows, lambda: state.gather_inputs(slots, index, None))
        slots.filters.copy_(torch.tensor([0.8, 50, 0.9, 1, 0, 1]))
        slots.lengths.fill_(5)
        tell("choose_into k50 p.9", rows, 2 * logits.numel(), lambda: choice.choose_into(logits, index, slots, out))
    return results


def time_attention() -> list[dict]:
    """Decode attention of one layer: achieved read bandwidth by block size, memory order and launch shape."""
    import torch

    from tgi.kernels.batch import ForwardBatch
    from tgi.kernels.triton.attention import PagedAttention

    device, results = torch.device("cuda"), []
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    # (rows, context, heads, kv heads), then which variants
    full = [
        (n, w, s)
        for n in (32, 64, 128)
        for w, s in ((2, 3), (4, 2), (4, 3), (4, 4), (8, 3))
        if not (n == 128 and s > 3)
    ]
    few = [(64, 4, 3), (32, 4, 4), (64, 2, 3)]
    for rows, context, heads, kv_heads, variants, sizes in (
        (256, 600, 32, 8, full, (16,)),
        (256, 600, 32, 8, few, (32, 64)),
        (1, 600, 32, 8, few, (16,)),
        (64, 600, 32, 8, few, (16,)),
        (1024, 192, 32, 8, few, (16,)),
        (163, 1152, 32, 32, few, (16,)),
    ):
        for size in sizes:
            for by_head in (True, False) if variants is full else (True,):
                if variants is full and not by_head:
                    variants = few
                per_row = -(-context // size)
                shape = (
                    (rows * per_row + 1, kv_heads, size, 128) if by_head else (rows * per_row + 1, size, kv_heads, 128)
                )
                caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
                k, v = (c.transpose(1, 2) for c in caches) if by_head else caches
                tables = (torch.randperm(rows * per_row, device=device) + 1).to(torch.int32).view(rows, per_row)
                q = torch.randn(rows, heads, 128, device=device, dtype=torch.bfloat16)
                batch = ForwardBatch(
                    input_ids=q, positions=q, kv_index=q, block_tables=tables,
                    seq_lens=torch.full((rows,), context, dtype=torch.int32, device=device), num_decode=rows,
                    chunk_starts_cpu=[], chunk_ends_cpu=[], max_seq_len=context, logit_tokens=None,
                    table_rows=torch.arange(rows, dtype=torch.int32, device=device),
                )  # fmt: skip
                num_bytes = rows * context * 2 * kv_heads * 128 * 2
                for block, warps, stages in variants:
                    op = PagedAttention(processors)
                    op.decode_block, op.decode_warps, op.decode_stages = block, warps, stages
                    name = f"{rows}x{context} {heads}/{kv_heads} block {size} {'head' if by_head else 'token'}"
                    try:
                        ms = event_ms(lambda op=op, k=k, v=v, q=q, b=batch: op(q, k, v, b, 0.088), 10)
                    except Exception as error:
                        print(name, block, warps, stages, str(error)[:100])
                        continue
                    variant = f"n{block} w{warps} s{stages}"
                    results.append({"work": name, "variant": variant, "us": 1e3 * ms, "tb_s": num_bytes / ms / 1e9})
                del caches, k, v
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="tests,kernels,attention,rows")
    parser.add_argument("--out", default="cuda-first")
    parser.add_argument("--rows", default="200/200/1,200/200/64,200/200/256", help="IN/OUT/N of the 8B shape")
    options = parser.parse_args()
    wanted, out = options.only.split(","), Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    import torch

    print(torch.__version__, torch.cuda.get_device_name(0), flush=True)
    if "tests" in wanted:
        run_tests(out)
    if "kernels" in wanted:
        kernels = time_kernels()
        (out / "kernels.json").write_text(json.dumps(kernels, indent=1))
        for r in kernels:
            print(f"{r['kernel']:22s} {r['rows']:5d} rows {r['us']:9.1f} us {r['tb_s']:6.2f} TB/s")
    if "attention" in wanted:
        attention = time_attention()
        (out / "attention.json").write_text(json.dumps(attention, indent=1))
        for r in attention:
            print(f"{r['work']:36s} {r['variant']:12s} {r['us']:9.1f} us {r['tb_s']:6.2f} TB/s")
    sys.stdout.flush()
    if "rows" in wanted:
        command = [
            sys.executable, str(ROOT / "bench/cuda_offline.py"), "--json", str(out / "rows.json"), "--profile", "256/400",
            *options.rows.split(","),
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.STDOUT, timeout=240)


if __name__ == "__main__":
    main()
