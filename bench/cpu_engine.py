"""Output tokens per second on this machine's CPU, ours beside what a user would pick instead, from one run.

    python bench/cpu_engine.py [--rounds 3] [--peer-python PYTHON] [--json FILE]

Work: the embedded model, 64 random tokens in, 128 out, greedy, EOS ignored, at concurrency 1, 4 and 16. Each contestant
runs in its own process, in turn, `--rounds` times; the table shows medians, and ratios taken within each round.
`transformers` runs float32 from the same converted folder. llama.cpp's server runs the same Q4_1 file when PYTHON has
`xllamacpp` and `aiohttp` installed (keep it in an environment of its own).

The floor of a row: prefill operations at the measured multiply-add rate, then 128 steps of whichever takes longer,
reading the quantised weights once at the measured bandwidth or the operations of all rows.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time

NUM_IN, NUM_OUT, LEVELS = 64, 128, (1, 4, 16)


def prompts(level: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(NUM_IN)] for _ in range(level)]


def tell(level: int, seconds: float, **more: float) -> None:
    print(json.dumps({"concurrency": level, "tokens_per_s": round(level * NUM_OUT / seconds, 1), **more}), flush=True)


def run_ours(seed: int) -> None:
    from text_generation_inference import LLM, SamplingParams

    llm = LLM(progress=False, max_total_tokens=512, prefix_caching=False)
    params = SamplingParams(max_new_tokens=NUM_OUT, ignore_eos=True)
    llm.generate(prompts(1, seed), params)
    for level in LEVELS:
        batch = prompts(level, seed + level)
        start = time.perf_counter()
        answers = llm.generate(batch, params)
        took = time.perf_counter() - start
        assert all(len(answer.token_ids) == NUM_OUT for answer in answers)
        tell(level, took)
    llm.close()


def run_transformers(seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from text_generation_inference.config import ServerConfig, cache_folder
    from text_generation_inference.weights.source import resolve_model

    torch.set_grad_enabled(False)
    folder = resolve_model("embedded", cache_folder(ServerConfig())).path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for level in LEVELS:
        ids = torch.tensor(prompts(level, seed + level))
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
        model.generate(ids, max_new_tokens=2, min_new_tokens=2, **options)
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=NUM_OUT, min_new_tokens=NUM_OUT, **options)
        tell(level, time.perf_counter() - start)


def run_llamacpp(seed: int, gguf: str) -> None:
    import aiohttp
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx, params.port = gguf, max(LEVELS), max(LEVELS) * 512, 18091
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    server = xllamacpp.Server(params)

    async def one(http: "aiohttp.ClientSession", prompt: list[int]) -> float:
        body = {"prompt": prompt, "n_predict": NUM_OUT, "ignore_eos": True, "stream": True, "temperature": 0}
        sent, first = time.perf_counter(), 0.0
        async with http.post(f"{server.listening_address}/completion", json=body | {"cache_prompt": False}) as reply:
            async for line in reply.content:
                if line.startswith(b"data:") and not first:
                    first = time.perf_counter() - sent
        return first

    async def run() -> None:
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector) as http:
            await one(http, prompts(1, seed)[0])
            for level in LEVELS:
                batch = prompts(level, seed + level)
                start = time.perf_counter()
                await asyncio.gather(*(one(http, prompt) for prompt in batch))
                tell(level, time.perf_counter() - start)

    asyncio.run(run())
    sys.stdout.flush()
    os._exit(0)  # the server thread has no end of its own


def child(python: str, *arguments: str) -> dict[int, float]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, __file__, *arguments], capture_output=True, text=True, env=environment, timeout=900, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"concurrency"')]
    if len(rows) != len(LEVELS):
        sys.exit(f"{arguments[0]} failed:\n{done.stderr[-2000:]}")
    return {row["concurrency"]: row["tokens_per_s"] for row in rows}


def floors() -> tuple[dict[int, float], str]:
    """Tokens per second that the machine could reach at each level, and the ceilings behind that."""
    import torch

    from text_generation_inference.config import ServerConfig, cache_folder
    from text_generation_inference.kernels.cpu.ops import load_ops
    from text_generation_inference.weights.source import resolve_model

    native = load_ops(cache_folder(ServerConfig()))
    if isinstance(native, str):
        return {}, f"no floor: {native}"
    folder = resolve_model("embedded", cache_folder(ServerConfig())).path
    weight_bytes = (folder / "ggml.safetensors").stat().st_size
    rate = max(native.probe_fma(2) for _ in range(5))
    memory = torch.ones(weight_bytes // 4 * 4 // 4)
    bandwidth = max(native.probe_read(memory, 2) for _ in range(5))
    body, head = 2 * 106.2e6, 2 * 28.3e6  # operations per token in the layers, and in the output head
    result = {}
    for level in LEVELS:
        step = max(weight_bytes / bandwidth, level * (body + head) / rate)
        result[level] = level * NUM_OUT / (level * NUM_IN * body / rate + NUM_OUT * step)
    return result, f"{rate / 1e9:.0f} GFLOP/s float32, {bandwidth / 1e9:.0f} GB/s over {weight_bytes / 1e6:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", help="a Python with xllamacpp and aiohttp")
    parser.add_argument("--json", help="also write everything measured to this file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--gguf", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        runs = {"ours": run_ours, "transformers": run_transformers}
        run_llamacpp(options.seed, options.gguf) if options.run == "llamacpp" else runs[options.run](options.seed)
        return
    from text_generation_inference.weights.embedded import find_embedded

    contestants = ["ours", "transformers"] + (["llamacpp"] if options.peer_python else [])
    rounds: list[dict[str, dict[int, float]]] = []
    for number in range(options.rounds):
        row = {}
        for name in contestants:
            python = options.peer_python if name == "llamacpp" else sys.executable
            row[name] = child(python, "--run", name, "--seed", str(1000 * number), "--gguf", str(find_embedded()))
            print(f"round {number + 1}: {name} {row[name]}", file=sys.stderr)
        rounds.append(row)
    floor, ceilings = floors()
    print(f"\nCeilings measured: {ceilings}\n")
    peers = contestants[1:]
    print("| concurrency | ours, tok/s |" + "".join(f" {p}, tok/s | ours / {p} |" for p in peers) + " of the floor |")
    print("|---|---|" + "---|---|" * len(peers) + "---|")
    for level in LEVELS:
        ours = statistics.median(r["ours"][level] for r in rounds)
        cells = [str(level), f"{ours:.0f}"]
        for peer in peers:
            ratios = [r["ours"][level] / r[peer][level] for r in rounds]
            cells.append(f"{statistics.median(r[peer][level] for r in rounds):.0f}")
            cells.append(f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
        cells.append(f"{ours / floor[level]:.0%} of {floor[level]:.0f}" if floor else "-")
        print("| " + " | ".join(cells) + " |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rounds": rounds, "floor": floor, "ceilings": ceilings}, file, indent=1)


if __name__ == "__main__":
    main()
