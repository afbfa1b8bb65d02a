"""Everything about models in few bits that only a GPU can tell, in one run: first what is right, then how fast it is.

    python bench/cuda_quantized.py --out FOLDER [--only tests,rates ...] [--peer-path FOLDER_OF_VLLM] [--limit 600]

| Part | What it runs |
|---|---|
| `tests` | the device tests of products in few bits, of latents and experts, and of whole quantised models |
| `product` | one row times 8192 x 8192, and the other matrices of an 8B model, in us (`cuda_low_bit.py`) |
| `rates` | Llama-3.1-8B in GPTQ and AWQ (int4, groups of 128): ours, and vLLM's with `--peer-path` |
| `large` | Llama-2-70B in GPTQ, for 1 and 64 requests |
| `whole` | the other forms: bits made on loading, int8 times int8, GPT-OSS-20B, a GGUF file in Q4_K and Q6_K |
| `load` | seconds to load Llama-3.1-8B in GPTQ and bfloat16 with cold and warm pages, and in fewer bits made of it |
| `quantize` | a checkpoint of the embedded model, made on the GPU, and rows of it served |
| `perplexity` | every method of `perplexity.py`, made and scored on the GPU |

Parts run one after the other, each program in a process with a limit of time; what one had measured by then is kept.
Logs and JSON files are in FOLDER, a summary is printed at the end. Without a GPU all but `tests` and `product` can be
tried with `--device cpu`, a small `--shape` and `--large-shape`, and short rows.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpu_gguf import Q4_K_M, Model, nobodys_tokenizer, write_file
from cuda_peers import ROOT, number_of, our_environment, run_child, share

from text_generation_inference.bench.shapes import SHAPES, write_shape
from text_generation_inference.bench.tables import markdown

TESTS = ("triton_low_bit", "triton_latent", "triton_experts", "quantized_engine")
METHODS: dict[str, dict[str, Any]] = {  # as config.json says it
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {**_INT8, "strategy": "channel"},
        "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
# Of the size of Qwen3-8B: a file called Q4_K_M.
GGUF = Model(
    "qwen3",
    {
        "block_count": 36, "embedding_length": 4096, "feed_forward_length": 12288, "attention.head_count": 32,
        "attention.head_count_kv": 8, "attention.key_length": 128, "attention.value_length": 128,
    },
    Q4_K_M,
)  # fmt: skip
SMALL_GGUF = replace(GGUF, sizes={**GGUF.sizes, "block_count": 2, "embedding_length": 256, "feed_forward_length": 512})
MADE = ("eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8")  # of plain weights, on loading


class Session:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.summary: list[str] = []

    def run(self, name: str, *command: object, limit: float | None = None) -> bool:
        """A program of ours, whose output goes into a file. Whether it went well."""
        began = time.monotonic()
        log = self.out / f"{name}.log"
        print(f"$ {' '.join(map(str, command))}", file=sys.stderr, flush=True)
        with log.open("wb") as file:
            try:
                status: int | str = subprocess.run(
                    list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=our_environment(),
                    timeout=limit or self.options.limit, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = "out of time"
        self.say(f"{name}: {'done' if status == 0 else f'exit status {status}'} in {time.monotonic() - began:.0f} s")
        if status != 0:
            self.say("  " + "\n  ".join(log.read_text(errors="replace").splitlines()[-8:]))
        return status == 0

    def say(self, text: str) -> None:
        self.summary.append(text)
        print(text, flush=True)

    def python(self, name: str, script: str, *arguments: object) -> bool:
        return self.run(name, self.options.python, *script.split(), *arguments)

    def ours(self, name: str, *arguments: object) -> dict[str, Any]:
        """`tgi bench offline`; what it measured, all or some."""
        file = self.out / f"{name}.json"
        file.unlink(missing_ok=True)  # of another run
        self.python(
            name, "-m text_generation_inference.cli bench offline", "--device", self.options.device,
            "--json", file, "--quiet", *arguments,
        )  # fmt: skip
        return json.loads(file.read_text()) if file.is_file() else {}


# -- what is right -----------------------------------------------------------------------------------------------------


def tests(session: Session) -> None:
    files = [f"tests/devices/test_{name}.py" for name in TESTS]
    session.python("tests", "-m pytest -q", "--device", session.options.device, *files)
    log = (session.out / "tests.log").read_text(errors="replace").splitlines()
    session.say("  " + next((line for line in reversed(log) if "passed" in line or "failed" in line), "no result"))


# -- how fast it is ----------------------------------------------------------------------------------------------------


def product(session: Session) -> None:
    for name, more in {"product": (), "product-zero-points": ("--asymmetric",)}.items():
        if session.python(name, "bench/cuda_low_bit.py", "--rows", "1,16,64", *more):
            session.say((session.out / f"{name}.log").read_text())


def rates(session: Session) -> None:
    options, lines = session.options, []
    for method in METHODS:
        ours = session.ours(
            f"rates-{method}", "--shape", options.shape, "--quantize", method, *options.ours_args, *options.rows
        )
        peer = run_vllm(session, method) if options.peer_path else {}
        for row in options.rows:
            found = [find(report, row) for report in (ours, peer)]
            own, other = (each.get("output_tokens_per_s") for each in found)
            lines.append([method, row, number_of(own), number_of(found[0].get("step_ms"), 3), number_of(other)])
            lines[-1].append(share(own, other, 2, "x"))
        session.say(f"{method}: ready after {ours.get('ready_seconds')} s, vLLM {peer.get('ready_seconds')} s")
    session.say(markdown(["method", "in/out/requests", "ours tok/s", "step ms", "vLLM tok/s", "ours / vLLM"], lines))


def find(report: dict[str, Any], row: str) -> dict[str, Any]:
    wanted = dict(zip(("inputs", "outputs", "requests"), map(int, row.split("/")), strict=True))
    rows = report.get("rows", [])
    return next((each for each in rows if all(each.get(name) == value for name, value in wanted.items())), {})


def run_vllm(session: Session, method: str) -> dict[str, Any]:
    options, file = session.options, session.out / f"vllm-{method}.json"
    with tempfile.TemporaryDirectory() as name:
        folder = write_shape(options.shape, Path(name))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": METHODS[method]}))
        path = str(Path(options.peer_path).expanduser().resolve())
        command = [options.peer_python, str(ROOT / "bench/peers/vllm_offline.py"), str(folder), method, str(file)]
        environment = {name: text for name, text in our_environment().items() if name != "PYTHONPATH"}
        return run_child([*command, *options.rows], {**environment, "PYTHONPATH": path}, file, options.limit) or {}


def large(session: Session) -> None:
    options = session.options
    found = session.ours(
        "large", "--shape", options.large_shape, "--quantize", "gptq", *options.ours_args, *options.large_rows
    )
    for row in options.large_rows:
        rate = find(found, row).get("output_tokens_per_s")
        session.say(f"  {options.large_shape} GPTQ {row}: {number_of(rate)} tokens/s")


def whole(session: Session) -> None:
    options, lines = session.options, []
    kinds: dict[str, list[object]] = {name: ["--shape", options.shape, "--quantize", name] for name in MADE}
    with tempfile.TemporaryDirectory() as name:
        for kind, shape, quantization in (
            ("w8a8", options.shape, W8A8), ("gpt-oss", options.oss_shape, {"quant_method": "mxfp4"})
        ):  # fmt: skip
            folder = write_shape(shape, Path(name) / kind)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
            kinds[kind] = ["--model-id", folder, "--load-format", "dummy"]
        write_file(GGUF if options.device == "cuda" else SMALL_GGUF, Path(name) / "q4_k.gguf", nobodys_tokenizer())
        kinds["GGUF"] = ["--model-id", Path(name) / "q4_k.gguf"]
        for kind, about in kinds.items():
            found = session.ours(f"whole-{kind}", *about, *options.ours_args, *options.whole_rows)
            rates = (number_of(find(found, row).get("output_tokens_per_s")) for row in options.whole_rows)
            lines.append([kind, *rates, number_of(found.get("ready_seconds"))])
    session.say(markdown(["", *(f"{row}, tok/s" for row in options.whole_rows), "ready, s"], lines))


def load(session: Session) -> None:
    options, lines = session.options, []
    for kind in ("gptq", "bfloat16"):
        file = session.out / f"load-{kind}.json"
        more = ["--quantize", "gptq"] if kind == "gptq" else ["--also", ",".join(MADE)]
        session.python(
            f"load-{kind}", "bench/cuda_load.py", "--shape", options.shape, "--layers", options.layers,
            "--device", options.device, "--json", file, *more,
        )  # fmt: skip
        found = json.loads(file.read_text()) if file.is_file() else {}
        names = ("gigabytes", "cold_load_s", "warm_load_s")
        lines.append([kind, *(number_of(found.get(name), 2) for name in names)])
        made = {name: found.get(f"warm_load_s {name}") for name in MADE}
        lines += [[name, "", "", number_of(seconds, 2)] for name, seconds in made.items() if seconds is not None]
    session.say(markdown(["", "GB", "cold, s", "warm, s"], lines))


def quantize(session: Session) -> None:
    options, folder = session.options, session.out / "made"
    shutil.rmtree(folder, ignore_errors=True)
    made = session.python(
        "quantize", "-m text_generation_inference.launch.server_command quantize embedded", folder,
        "--device", options.device, "--num-samples", options.samples, "--sequence-length", 256, "--act-order",
    )  # fmt: skip
    if made:
        found = session.ours("quantize-served", "--model-id", folder, "--dtype", options.dtype, *options.rows[:1])
        rate = find(found, options.rows[0]).get("output_tokens_per_s")
        session.say(f"  the made model, {options.rows[0]}: {number_of(rate)} tokens/s")
    shutil.rmtree(folder, ignore_errors=True)


def perplexity(session: Session) -> None:
    more = ["--only", *options.methods] if (options := session.options).methods else []
    file = session.out / "perplexity.json"
    if session.python("perplexity", "bench/perplexity.py", "--device", options.device, "--json", file, *more):
        session.say((session.out / "perplexity.log").read_text())


PARTS: dict[str, Callable[[Session], None]] = {
    part.__name__: part for part in (tests, product, rates, large, whole, load, quantize, perplexity)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a folder for logs and figures")
    add("--only", default=",".join(PARTS), help="parts, separated by commas (default: all, in this order)")
    add("--device", default="cuda")
    add("--limit", type=float, default=600, metavar="SECONDS", help="of one program (default: 600)")
    add("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    add("--rows", default="200/800/1,200/800/16,200/800/64,200/800/256")
    add("--large-shape", choices=list(SHAPES), default="llama-2-70b")
    add("--large-rows", default="128/128/1,128/128/64")
    add("--oss-shape", choices=list(SHAPES), default="gpt-oss-20b", help="of the model in MXFP4")
    add("--whole-rows", default="200/200/1,200/200/64")
    add("--layers", type=int, default=32, help="of the checkpoints that are loaded")
    add("--samples", type=int, default=16, help="windows that `quantize` fits to")
    add("--methods", nargs="*", default=[], help="rows of `perplexity`, by the beginnings of their names")
    add("--dtype", default="bfloat16", help="of the model that `quantize` made")
    add("--ours-args", default="--max-batch-prefill-tokens 16384", help="of `tgi bench offline`")
    add("--peer-path", help="a folder with vLLM's packages, which its process alone sees")
    add("--peer-python", default=sys.executable)
    add("--python", default=sys.executable)
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only has no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.rows, options.large_rows = options.rows.split(","), options.large_rows.split(",")
    options.whole_rows, options.ours_args = options.whole_rows.split(","), options.ours_args.split()
    options.out.mkdir(parents=True, exist_ok=True)
    session = Session(options)
    try:
        for part in parts:
            session.say(f"-- {part}")
            PARTS[part](session)
    finally:
        (options.out / "summary.txt").write_text("\n".join(session.summary) + "\n")


if __name__ == "__main__":
    main()
