"""Output tokens per second on this machine's CPU, ours beside llama.cpp's server on the same GGUF files, from one run.

    python bench/cpu_gguf.py --peer-python PYTHON [--models dense windowed] [--rounds 2] [--levels 1 4 16] [--json FILE]
    python bench/cpu_gguf.py --before OTHER/src --rounds 8 --all --out 32 [--processor-time]
    python bench/cpu_gguf.py --peer-python PYTHON --in 512 --out 1 --levels 1

Four small models, one of each kind: the embedded one in Q4_1; and with random weights, written once to `--folder`: a
dense one of Qwen 3's form (Q4_K, values and every other `down` in Q6_K, as files called Q4_K_M are), one with experts
(32, of which a token has 4) of the same types, and one of Gemma 3's form (Q4_0) with a window of 512 and prompts that
are longer. Greedy, EOS ignored, no prefix cache, 2 threads each, at concurrency 1, 4 and 16. Both processes are alive
and take turns, batch by batch, so that a slow moment of the machine hits both; the table shows medians, and ratios
within a turn. PYTHON has `xllamacpp` and `aiohttp` (keep it in an environment of its own). llama.cpp rounds activations
to 8 bits, so answers part after a while; the table says how many first tokens are equal. Ours runs offline, llama.cpp
over HTTP.

`--before` has the engine of another checkout (`git worktree add`) take turns too; `--in` gives prompts of another
length.

On a machine that others use, `--threads 1 --processor-time` counts the processor time of each side in place of the time
that passes: neither waits for a thread that does not run, but nothing is said of how well two threads share the work.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side import Side

THREADS = int(os.environ.get("BENCH_THREADS", "2"))
clock = time.process_time if os.environ.get("BENCH_CLOCK") == "processor" else time.perf_counter
GOALS = {1: 1.2, 4: 1.5, 16: 2.0}
VOCAB = 49152  # that of the embedded model


@dataclass(frozen=True)
class Model:
    """A model with random weights; `sizes` are metadata of its file."""

    arch: str
    sizes: dict[str, Any]
    types: dict[str, str]  # of matrices, by a part of their name; the first is for all others
    num_in: int = 64
    num_out: int = 128
    experts: int = 0


Q4_K_M = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
COMMON = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "context_length": 4096}
MODELS: dict[str, Model | None] = {
    "embedded": None,
    "dense": Model(
        "qwen3",
        {
            "block_count": 16,
            "embedding_length": 1024,
            "feed_forward_length": 3072,
            "attention.head_count": 16,
            "attention.head_count_kv": 8,
            "attention.key_length": 128,
            "attention.value_length": 128,
        },
        Q4_K_M,
    ),
    "experts": Model(
        "qwen3moe",
        {
            "block_count": 12,
            "embedding_length": 1024,
            "feed_forward_length": 3072,
            "expert_feed_forward_length": 512,
            "expert_count": 32,
            "expert_used_count": 4,
            "attention.head_count": 16,
            "attention.head_count_kv": 4,
            "attention.key_length": 64,
            "attention.value_length": 64,
        },
        Q4_K_M,
        experts=32,
    ),
    "windowed": Model(
        "gemma3",
        {
            "block_count": 18,
            "embedding_length": 640,
            "feed_forward_length": 2048,
            "attention.head_count": 4,
            "attention.head_count_kv": 1,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "attention.sliding_window": 512,
        },
        {"": "Q4_0"},
        num_in=576,
        num_out=64,
    ),
}


def work_of(name: str) -> tuple[int, int]:
    """Tokens in and out."""
    model = MODELS[name]
    num_in, num_out = (model.num_in, model.num_out) if model else (64, 128)
    return int(os.environ.get("BENCH_IN", num_in)), num_out


def prompts(name: str, level: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(work_of(name)[0])] for _ in range(level)]


# -- files -----------------------------------------------------------------------------------------------------------


def random_blocks(kind: str, rows: int, columns: int, rng: Any) -> Any:
    """uint8 `[rows, bytes]`: values around 0, about as large as random matrices need."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    spread = 0.8 / math.sqrt(columns) * rng.uniform(0.8, 1.2, blocks.shape[:2])

    def put(place: int, values: Any) -> None:
        blocks[..., place : place + 2] = values.astype("<f2").view(np.uint8).reshape(*values.shape, 2)

    if kind == "Q4_0":
        put(0, spread / 4.6)
    elif kind == "Q4_K":
        put(0, spread / 4.6 / 32)
        put(2, spread / 4.6 / 32 * 7.5)
        blocks[..., 4:12], blocks[..., 12:16] = 32 | 2 << 6, 0  # every scale and minimum is 32
    elif kind == "Q6_K":
        put(208, spread / 18.5 / 32)
        blocks[..., 192:208] = rng.integers(24, 40, blocks[..., 192:208].shape)
    return blocks.reshape(rows, -1)


def tensor_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    sizes = model.sizes
    hidden, inner, dim = sizes["embedding_length"], sizes["feed_forward_length"], sizes["attention.key_length"]
    query, key = sizes["attention.head_count"] * dim, sizes["attention.head_count_kv"] * dim
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "attn_q": (query, hidden), "attn_k": (key, hidden)}
    layer |= {"attn_v": (key, hidden), "attn_output": (hidden, query), "ffn_norm": (hidden,)}
    layer |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
    if model.arch == "gemma3":
        layer |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
    if model.experts:
        inner = sizes["expert_feed_forward_length"]
        layer |= {"ffn_gate_inp": (model.experts, hidden), "ffn_gate_exps": (model.experts, inner, hidden)}
        layer |= {"ffn_up_exps": (model.experts, inner, hidden), "ffn_down_exps": (model.experts, hidden, inner)}
    else:
        layer |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    shapes = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    for number in range(sizes["block_count"]):
        shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def embedded_tokenizer() -> dict[str, Any]:
    from text_generation_inference.weights.embedded import find_embedded
    from text_generation_inference.weights.gguf import GgufFile

    return {key: value for key, value in GgufFile.open(find_embedded()).metadata.items() if "tokenizer." in key}


def nobodys_tokenizer() -> dict[str, Any]:
    """Of words that nobody writes, for files whose text nobody reads."""
    words = ["<unk>", "<s>", "</s>", "a", "b", "ab", *(f"<word{number}>" for number in range(6, VOCAB))]
    names = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": words,
        "token_type": [3] * 3 + [1] * (VOCAB - 3),
        "merges": ["a b"],
    }
    names |= {"bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in names.items()}


def write_file(model: Model, path: Path, tokenizer: dict[str, Any]) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, model.arch)
    sizes = {f"{model.arch}.{key}": value for key, value in {**COMMON, **model.sizes}.items()}
    for key, value in {**sizes, **tokenizer}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        add.get(type(value), writer.add_array)(key, plain)
    rng = np.random.default_rng(0)
    for name, shape in tensor_shapes(model).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        elif "gate_inp" in name:
            writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32) / math.sqrt(shape[-1]))
        else:
            kind = next((kind for part, kind in model.types.items() if part and part in name), model.types[""])
            if "ffn_down" in name and int(name.split(".")[1]) % 2:
                kind = model.types[""]
            rows = random_blocks(kind, math.prod(shape[:-1]), shape[-1], rng)
            writer.add_tensor(name, rows.reshape(*shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def find_file(name: str, folder: Path) -> Path:
    model = MODELS[name]
    if model is None:
        from text_generation_inference.weights.embedded import find_embedded

        return find_embedded()
    path = folder / f"{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        write_file(model, temporary, embedded_tokenizer())
        temporary.rename(path)
    return path


# -- the two sides: processes that wait for `level seed out` and answer with seconds and first tokens ------------------


def answer(seconds: float, first: list[list[int]], first_token_s: float) -> None:
    print(json.dumps({"seconds": seconds, "first": first, "first_token_s": first_token_s}), flush=True)


def run_ours(name: str, path: str) -> None:
    import torch

    from text_generation_inference import LLM, SamplingParams

    torch.set_num_threads(THREADS)
    num_in, num_out = work_of(name)
    llm = LLM(path, progress=False, max_total_tokens=num_in + num_out + 16, prefix_caching=False)
    answer(0, [], 0)
    for line in sys.stdin:
        level, seed, out = map(int, line.split())
        params = SamplingParams(max_new_tokens=out, ignore_eos=True)
        batch = prompts(name, level, seed)
        start = clock()
        answers = llm.generate(batch, params)
        took = clock() - start
        assert all(len(each.token_ids) == out for each in answers)
        answer(took, [each.token_ids[:1] for each in answers], 0)
    llm.close()


def run_llamacpp(name: str, path: str) -> None:
    import aiohttp
    import xllamacpp

    num_in, num_out = work_of(name)
    params = xllamacpp.CommonParams()
    slots = max(GOALS)
    params.model.path, params.n_parallel, params.port = path, slots, 18091
    params.n_ctx = slots * (num_in + num_out + 16)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    server = xllamacpp.Server(params)

    async def one(http: "aiohttp.ClientSession", prompt: list[int], out: int) -> tuple[list[int], float]:
        body = {"prompt": prompt, "n_predict": out, "ignore_eos": True, "stream": True, "temperature": 0}
        body |= {"cache_prompt": False, "return_tokens": True}
        found: list[int] = []
        event: dict[str, Any] = {}
        sent, first = time.perf_counter(), 0.0
        async with http.post(f"{server.listening_address}/completion", json=body) as reply:
            async for line in reply.content:
                if line.startswith(b"data:"):
                    first = first or time.perf_counter() - sent
                    event = json.loads(line[5:])
                    found += event.get("tokens", [])
        assert event["tokens_predicted"] == out, event
        # Tokens that end within a character are not in any event: then nobody knows which is the first.
        return found[:1] if len(found) == out else [], first

    async def run() -> None:
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector) as http:
            answer(0, [], 0)
            for line in sys.stdin:
                level, seed, out = map(int, line.split())
                batch = prompts(name, level, seed)
                start = clock()
                found = await asyncio.gather(*(one(http, prompt, out) for prompt in batch))
                took = clock() - start
                answer(took, [each[0] for each in found], statistics.mean(each[1] for each in found))

    asyncio.run(run())
    sys.stdout.flush()
    os._exit(0)  # the server thread has no end of its own


def measure(name: str, path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each level."""
    out = options.out or work_of(name)[1]
    about = ["--models", name, "--file", str(path)]
    sides = {"ours": Side("ours", [sys.executable, __file__, "--run", "ours", *about], options.threads)}
    if options.before:
        sides["before"] = Side(
            "before", [sys.executable, __file__, "--run", "ours", *about], options.threads, options.before
        )
    if options.peer_python:
        command = [options.peer_python, __file__, "--run", "llamacpp", *about]
        sides["llama.cpp"] = Side("llama.cpp", command, options.threads)
    for side in sides.values():
        side.run(1, 1, 4)
    rows = {level: [] for level in options.levels}
    for turn in range(options.rounds):
        for level in options.levels:
            if turn * level >= options.rounds and not options.all:  # long batches are their own average
                continue
            seed = 1000 * turn + level
            order = list(sides.items())[:: -1 if turn % 2 else 1]
            rows[level].append({key: side.run(level, seed, out) for key, side in order})
            seconds = {key: round(found["seconds"], 2) for key, found in rows[level][-1].items()}
            print(f"{name} x{level}: {seconds} s", file=sys.stderr)
    for side in sides.values():
        side.stop()
    return [summarise(name, level, out, turns) for level, turns in rows.items()]


def summarise(name: str, level: int, out: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "level": level, "work": f"{work_of(name)[0]}/{out}"}
    for side in turns[0]:
        row[side] = statistics.median(level * out / turn[side]["seconds"] for turn in turns)
    if "before" in turns[0]:
        assert all(turn["before"]["first"] == turn["ours"]["first"] for turn in turns), "other tokens than before"
        row["before_ratios"] = [turn["before"]["seconds"] / turn["ours"]["seconds"] for turn in turns]
    if "llama.cpp" in turns[0]:
        row["ratios"] = [turn["llama.cpp"]["seconds"] / turn["ours"]["seconds"] for turn in turns]
        pairs = [pair for turn in turns for pair in zip(turn["ours"]["first"], turn["llama.cpp"]["first"], strict=True)]
        row["equal"] = sum(mine == other for mine, other in pairs), sum(bool(other) for _, other in pairs)
    return row


def spread_of(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x" + (f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else "")


def show(rows: list[dict[str, Any]]) -> None:
    heads = ["model", "in/out", "concurrency", "ours, tok/s"]
    heads += ["before, tok/s", "ours / before"] if "before" in rows[0] else []
    heads += ["llama.cpp, tok/s", "ours / llama.cpp", "goal", "first tokens equal"] if "llama.cpp" in rows[0] else []
    print("\n| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for row in rows:
        cells = [row["model"], row["work"], str(row["level"]), f"{row['ours']:.0f}"]
        if "before" in row:
            cells += [f"{row['before']:.0f}", spread_of(row["before_ratios"])]
        if "llama.cpp" in row:
            cells += [f"{row['llama.cpp']:.0f}", spread_of(row["ratios"]), f"{GOALS[row['level']]}x"]
            cells.append("{} of {}".format(*row["equal"]))
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python with xllamacpp and aiohttp")
    parser.add_argument("--before", help="the `src` of another checkout, whose engine takes turns too")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--levels", nargs="+", type=int, choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--rounds", type=int, default=2, help="turns at concurrency 1, fewer above")
    parser.add_argument("--all", action="store_true", help="as many turns above")
    parser.add_argument(
        "--in", dest="num_in", type=int, help="tokens of each prompt, if not as many as each model's work says"
    )
    parser.add_argument("--out", type=int, help="tokens of each answer, likewise")
    parser.add_argument("--threads", type=int, default=THREADS, help="of each side")
    parser.add_argument("--processor-time", action="store_true", help="tokens per second of processor time")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tgi-bench-gguf")
    parser.add_argument("--json", help="also write everything measured to this file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        {"ours": run_ours, "llamacpp": run_llamacpp}[options.run](options.models[0], options.file)
        return
    os.environ["BENCH_THREADS"] = str(options.threads)  # which both sides read when they start
    if options.num_in:
        os.environ["BENCH_IN"] = str(options.num_in)
    os.environ["BENCH_CLOCK"] = "processor" if options.processor_time else "wall"
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure(name, find_file(name, options.folder), options)
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
