"""What goes between host and card in a step on Gaudi, and what decode attention moves of the KV cache: counted by the
stand-in of `tests/hpu_emulated`, beside what vllm-gaudi's path needs by arithmetic. Nothing is timed.

    .venv/bin/python bench/gaudi_traffic.py [--rows 32] [--length 512] [--layers 4] [--setting NAME=VALUE ...]

The published command line of Llama 3.1 8B on one card: 32 requests at a time, 1024 tokens in, 2048 in all. Weights are
tiny and random; heads of keys and values are as many and as wide as there (8 of 128), layers fewer, which figures by
layer do not depend on. Requests have prompts of `--length` tokens and decode together; a step is one in the middle.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("models", "devices")]

from driving import make_request, make_tiny, random_prompts, start  # noqa: E402
from gaudi import use_stand_in  # noqa: E402

MODEL = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
BLOCK, KV_HEADS, HEAD_DIM, WIDTH = 128, 8, 128, 2  # WIDTH: bytes of a bfloat16
VLLM_SENDS = "8 (ids, positions, logits indices, block list, usage, groups, number of tokens, slots)"


def yaml_like(text: str) -> object:
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)


def count_steps(options: argparse.Namespace, folder: Path, **sampling: Any) -> list[tuple[str, Any, Any]]:
    """Of each step: what it did, its counts, its bucket of decoding."""
    from habana_frameworks.torch._traffic import Traffic  # once the stand-in is found

    settings = dict(setting.split("=", 1) for setting in options.setting)
    chosen = {name: yaml_like(value) for name, value in settings.items()}
    limits = {"max_input_tokens": 1024, "max_total_tokens": 2048, "max_batch_size": options.rows}
    prompts = {"max_batch_prefill_tokens": 2048, "max_batch_total_tokens": options.rows * 2048}
    engine = start(folder, device="hpu", dtype="bfloat16", warmup_enabled=False, **limits, **prompts, **chosen)
    runner, device = engine.rank.runner, engine.rank.device
    traffic = Traffic(device.torch_device, [tensor for layer in runner.kv_cache for tensor in layer])
    device.submit(traffic.start).result()
    queue, found, buckets, passes = runner._queue, [], [], runner.steps.passes

    def counted(plan: Any, previous: Any) -> Any:
        traffic.take()
        buckets.clear()
        finish = queue(plan, previous)  # which reads what came to the host
        phase = "prompts" if plan.chunks else "decoding" if plan.decode else "nothing"
        both = f"{phase} beside decoding" if plan.chunks and plan.decode else phase
        found.append((both, traffic.take(), buckets[-1] if buckets else None))
        return finish

    def noted(find: Any) -> Any:
        return lambda *about: buckets.append(find(*about)) or buckets[-1]

    runner._queue = counted
    passes.find_decode, passes.find_prefill = noted(passes.find_decode), noted(passes.find_prefill)
    lengths = [options.length] * options.rows
    for number, prompt in enumerate(random_prompts(320, lengths, seed=1)):
        engine.loop.add(make_request(number, prompt, options.new, **sampling))
    while engine.loop.has_work:
        engine.loop.step()
    device.submit(traffic.stop).result()
    engine.close()
    return found


def show(name: str, counts: Any, layers: int) -> None:
    print(f"{name}: {counts.sends} copies to the card ({counts.bytes_sent:,} bytes),", end=" ")
    print(f"{counts.reads} to the host ({counts.bytes_fetched:,} bytes), {counts.waits} waited for,", end=" ")
    print(f"{counts.list_ops} ops on lists alone")
    if counts.cache_read:
        each = tuple(number // layers for number in (counts.cache_read, counts.cache_copied, counts.cache_written))
        print(f"  cache, by layer: {each[0]:,} bytes read, {each[1]:,} copied, {each[2]:,} new ones written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--new", type=int, default=24, help="tokens that each request is given")
    parser.add_argument("--setting", action="append", default=[], help="of the server, NAME=VALUE")
    options = parser.parse_args()
    use_stand_in()
    with tempfile.TemporaryDirectory() as folder:
        made = {**MODEL, "num_hidden_layers": options.layers, "max_position_embeddings": 2048}
        model = make_tiny("Llama", made, Path(folder)).folder
        ways = {"greedy": {}, "sampled": {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}}
        for way, sampling in ways.items():
            steps = count_steps(options, model, **sampling)
            decoding = [step for step in steps if step[0] == "decoding" and step[2].batch >= options.rows]
            prompts = [step for step in steps if step[0] == "prompts"]
            *_, counts, bucket = decoding[len(decoding) // 2]
            show(f"{way}, decode step of {bucket}", counts, options.layers)
            show(f"{way}, prompt step of {prompts[-1][2]}", prompts[-1][1], options.layers)
    used = options.rows * -(-(options.length + options.new // 2) // BLOCK)
    cache = 2 * bucket.length * BLOCK * KV_HEADS * HEAD_DIM * WIDTH
    print(f"vllm-gaudi, by arithmetic: {VLLM_SENDS} and 1 read of tokens a decode step;")
    print(f"  cache, by layer, for {used} blocks padded to {bucket.length}: {cache:,} bytes read where blocks are")
    print(f"  contiguous (VLLM_CONTIGUOUS_PA), {2 * cache:,} read and {cache:,} copied where they are gathered")


if __name__ == "__main__":
    main()
