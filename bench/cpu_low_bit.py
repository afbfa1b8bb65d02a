"""Output tokens per second on this machine's CPU of one model in several formats of few bits, from one run.

    python bench/cpu_low_bit.py [--rounds 3] [--levels 1 4 16] [--forms ...] [--threads 2] [--json FILE]

The embedded model as it is (GGUF: layers in Q4_1, the head in Q8_0), and its values written once to `--folder` as
GPTQ files (4 bits, groups of 128, symmetric; the head in 16 bits as such files have it, or in 4 bits too), and plainly,
put into 8 bits (EETQ, rows) or into NF4 on loading, or left as they are. 64 random tokens in, 128 out, greedy, EOS
ignored, no prefix cache. All processes are alive and take turns, batch by batch, so that a slow moment of the machine
hits all; the table shows medians, and ratios to the first form within a turn, of time and of processor time.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from side import Side

NUM_IN, NUM_OUT, GROUP = 64, 128, 128
FORMS = {  # the folder, and settings
    "GGUF Q4_1": ("embedded", {}),
    "GPTQ int4 g128": ("gptq", {}),
    "GPTQ int4 g128, head too": ("gptq-head", {}),
    "int8 rows (EETQ)": ("plain", {"quantize": "eetq"}),
    "NF4": ("plain", {"quantize": "bitsandbytes-nf4"}),
    "bfloat16": ("plain", {}),
}


def prompts(level: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(NUM_IN)] for _ in range(level)]


# -- files -------------------------------------------------------------------------------------------------------------


def write_gptq(weight: Any) -> dict[str, Any]:
    """The tensors of a matrix `[out, in]`, by the ends of their names."""
    import torch

    from text_generation_inference.kernels import low_bit

    made = low_bit.quantize(weight, 4, GROUP)
    codes = low_bit.unpack_codes(made.codes, 4).t().long()  # [in, out]
    places = 4 * torch.arange(8)
    words = (codes.view(-1, 8, codes.shape[1]) << places[:, None]).sum(1)
    zeros = (torch.full((made.scale.shape[1], codes.shape[1] // 8, 8), 7) << places).sum(-1)  # less one
    return {
        "qweight": words.to(torch.uint32).view(torch.int32).contiguous(),
        "qzeros": zeros.to(torch.uint32).view(torch.int32),
        "scales": made.scale.t().half().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def write_folder(name: str, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from text_generation_inference.config import ServerConfig, cache_folder
    from text_generation_inference.weights.source import resolve_model

    source = resolve_model("embedded", cache_folder(ServerConfig())).path
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "complete.json", "config.json"))
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    tensors: dict[str, Any] = {}
    for key, value in load_file(source / "model.safetensors").items():
        if name == "plain" or not key.endswith("_proj.weight"):
            tensors[key] = value.bfloat16()
        else:
            tensors |= {f"{key[:-6]}{end}": tensor for end, tensor in write_gptq(value).items()}
        if name == "gptq-head" and "embed_tokens" in key:
            tensors |= {f"lm_head.{end}": tensor for end, tensor in write_gptq(value).items()}
    if name != "plain":
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
        config["quantization_config"] |= {"desc_act": False, "lm_head": name == "gptq-head"}
    config["tie_word_embeddings"] = name != "gptq-head"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    assert all(tensor.dtype is not torch.float32 for tensor in tensors.values())


def find_folder(name: str, folder: Path) -> str:
    if name == "embedded":
        return name
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{name}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        write_folder(name, temporary)
        temporary.rename(path)
    return str(path)


# -- sides -------------------------------------------------------------------------------------------------------------


def answer(seconds: float, processor_s: float) -> None:
    print(json.dumps({"seconds": seconds, "processor_s": processor_s}), flush=True)


def run(form: str, model: str, threads: int) -> None:
    """Waits for `level seed out` and answers with seconds."""
    import torch

    from text_generation_inference import LLM, SamplingParams

    torch.set_num_threads(threads)
    sizes = {"max_total_tokens": NUM_IN + NUM_OUT + 16, "prefix_caching": False}
    llm = LLM(model, progress=False, **sizes, **FORMS[form][1])
    answer(0, 0)
    for line in sys.stdin:
        level, seed, out = map(int, line.split())
        params = SamplingParams(max_new_tokens=out, ignore_eos=True)
        start, processor = time.perf_counter(), time.process_time()
        answers = llm.generate(prompts(level, seed), params)
        answer(time.perf_counter() - start, time.process_time() - processor)
        assert all(len(each.token_ids) == out for each in answers)
    llm.close()


def start(form: str, options: argparse.Namespace) -> Side:
    model = find_folder(FORMS[form][0], options.folder)
    about = ["--model", model, "--threads", str(options.threads)]
    return Side(form, [sys.executable, __file__, "--run", form, *about], options.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=int, default=NUM_OUT, help="tokens of each answer")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tgi-bench-low-bit")
    parser.add_argument("--json", help="also write everything measured to this file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run, options.model, options.threads)
        return
    sides = {form: start(form, options) for form in options.forms}
    for side in sides.values():
        side.run(1, 0, options.out)
    turns: dict[int, list[dict[str, dict[str, float]]]] = {level: [] for level in options.levels}
    for turn in range(options.rounds):
        for level in options.levels:
            found = {form: side.run(level, 1000 * turn + level, options.out) for form, side in sides.items()}
            turns[level].append(found)
            print(
                f"x{level}: " + str({form: round(each["seconds"], 2) for form, each in found.items()}), file=sys.stderr
            )
    for side in sides.values():
        side.stop()
    first = options.forms[0]
    print(f"\n| form | concurrency | tok/s | of {first} | in processor time |\n|---|---|---|---|---|")
    for form in options.forms:
        for level, rows in turns.items():
            rate = statistics.median(level * options.out / row[form]["seconds"] for row in rows)
            ratios = [row[first]["seconds"] / row[form]["seconds"] for row in rows]
            spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
            processor = statistics.median(row[first]["processor_s"] / row[form]["processor_s"] for row in rows)
            print(f"| {form} | {level} | {rate:.0f} | {spread} | {processor:.2f}x |")
    if options.json:
        Path(options.json).write_text(json.dumps(turns, indent=1))


if __name__ == "__main__":
    main()
