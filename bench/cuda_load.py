"""Safetensors files to a GPU: what the engine takes, beside what the disk, the page cache and the bus alone would.

    python bench/cuda_load.py [--shape llama-3.1-8b] [--layers 32] [--quantize gptq] [--also fp8,eetq] [--folder DIR]

Writes a checkpoint of that shape with random numbers, then loads it twice, each time in a new process: with cold pages
where this user may drop them (root), and with warm ones. The ceiling is the slower one of reading the files (into a
buffer per thread, with as many threads as the engine has) and copying pinned memory to the device. With warm pages the
upload is also timed alone, without a model: what it takes less than the load is not its fault. With --also the same
files are loaded once more for each method that makes fewer bits of them on the way (`--quantize`), with warm pages.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
from safetensors.torch import save_file

from text_generation_inference.bench.shapes import SHAPES, write_shape
from text_generation_inference.bench.tables import markdown

LAYERS_PER_FILE = 4
PIECE = 16 << 20
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
THREADS = min(16, max(8, os.cpu_count() or 1))
# The stage of a whole start of the engine, in a process that has loaded nothing before.
ENGINE = """
import sys
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import start_engine
engine = start_engine(
    ServerConfig(
        model_id=sys.argv[1], device=sys.argv[2], quantize=(sys.argv[3:] or [None])[0], max_batch_size=1,
        max_total_tokens=64,
    )
)
print("load", engine.seconds["load"])
engine.close()
"""
# Every tensor, announced in the order of the files, and let go.
UPLOAD = """
import sys, time
from pathlib import Path
import torch
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.upload import Upload
device = torch.device(sys.argv[2])
torch.zeros(1, device=device)
began = time.perf_counter()
checkpoint = Checkpoint.open(Path(sys.argv[1]))
names = checkpoint.names()
with Upload(device) as checkpoint.upload:
    checkpoint.announce(Wanted(name) for name in names)
    for name in names:
        checkpoint.read(name)
print("upload", time.perf_counter() - began)
"""


def write_checkpoint(folder: Path, shape: str, num_layers: int, is_gptq: bool = False) -> int:
    """-> bytes."""
    write_shape(shape, folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "num_hidden_layers": num_layers}
    if is_gptq:
        config["quantization_config"] = GPTQ
    path.write_text(json.dumps(config))
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    noise = (torch.randn(1 << 20) * 0.02).bfloat16()

    def tensor(*size: int) -> torch.Tensor:
        count = torch.Size(size).numel()
        return noise.repeat(-(-count // noise.numel()))[:count].view(size)

    def layer(number: int) -> dict[str, torch.Tensor]:
        sizes = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        prefix = f"model.layers.{number}."
        made: dict[str, torch.Tensor] = {}
        for name, size in sizes.items():
            if is_gptq and name.endswith("_proj"):
                made |= {f"{prefix}{name}.{each}": part for each, part in gptq(*size).items()}
            else:
                made[f"{prefix}{name}.weight"] = tensor(*size)
        return made

    def gptq(rows: int, columns: int) -> dict[str, torch.Tensor]:
        """4 bits in groups of 128: any words are codes."""
        groups = -(-columns // GPTQ["group_size"])
        return {
            "qweight": tensor(columns // 8 * 2, rows).view(torch.int32).view(columns // 8, rows),
            "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
            "scales": tensor(groups, rows).abs().half() * 0.1,
            "g_idx": torch.arange(columns, dtype=torch.int32) // GPTQ["group_size"],
        }

    parts = {"model.embed_tokens.weight": tensor(vocab, hidden), "model.norm.weight": tensor(hidden)}
    if not config.get("tie_word_embeddings"):
        parts["lm_head.weight"] = tensor(vocab, hidden)
    save_file(parts, folder / "model-ends.safetensors")
    for first in range(0, num_layers, LAYERS_PER_FILE):
        parts = {}
        for number in range(first, min(first + LAYERS_PER_FILE, num_layers)):
            parts |= layer(number)
        save_file(parts, folder / f"model-{first:03d}.safetensors")
    os.sync()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def drop_pages() -> bool:
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def read_all(folder: Path) -> float:
    """Seconds to read all files on several threads, into buffers that are used again and again."""

    buffers: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(THREADS):
        buffers.put(bytearray(PIECE))

    def read(asked: tuple[Path, int]) -> None:
        file, start = asked
        buffer = buffers.get()
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.preadv(descriptor, [buffer], start)
        finally:
            os.close(descriptor)
            buffers.put(buffer)

    work = [(file, at) for file in folder.glob("*.safetensors") for at in range(0, file.stat().st_size, PIECE)]
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, work))
    return time.perf_counter() - began


def bus_rate(device: str) -> float | None:
    """GB/s of copies from pinned memory."""
    if device != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * source.nbytes / (time.perf_counter() - began) / 1e9


def time_program(program: str, folder: Path, device: str, *more: str) -> float:
    command = [sys.executable, "-c", program, str(folder), device, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=32, help="of the checkpoint; fewer take less room and time")
    parser.add_argument("--quantize", choices=["gptq"], help="matrices of layers in 4 bits, groups of 128")
    parser.add_argument("--also", default="", help="methods of `--quantize`, separated by commas")
    parser.add_argument("--folder", help="where the files go (default: a temporary folder, removed at the end)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="also write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load-", dir=options.folder) as name:
        folder = Path(name)
        num_bytes = write_checkpoint(folder, options.shape, options.layers, options.quantize == "gptq")
        size = num_bytes / 1e9
        print(f"{size:.2f} GB in {len(list(folder.glob('*.safetensors')))} files", flush=True)
        found: dict[str, float | None] = {"gigabytes": size, "bus_gb_s": bus_rate(options.device)}
        lines = []
        for pages in ("cold", "warm"):
            if pages == "cold" and not drop_pages():
                print("pages cannot be dropped by this user: no cold row")
                continue
            reading = read_all(folder)
            if pages == "cold":
                drop_pages()
            loading = time_program(ENGINE, folder, options.device)
            ceiling = min(size / reading, found["bus_gb_s"] or float("inf"))
            alone = time_program(UPLOAD, folder, options.device) if pages == "warm" else None
            found |= {f"{pages}_files_gb_s": size / reading, f"{pages}_load_s": loading, f"{pages}_upload_s": alone}
            bus = found["bus_gb_s"]
            cells = [pages, f"{size / reading:.1f}", "-" if bus is None else f"{bus:.1f}", f"{loading:.2f}"]
            cells += [f"{size / loading:.1f}", f"{size / loading / ceiling:.2f}"]
            lines.append([*cells, "-" if alone is None else f"{alone:.2f}"])
        for method in filter(None, options.also.split(",")):
            found[f"warm_load_s {method}"] = loading = time_program(ENGINE, folder, options.device, method)
            lines.append([f"warm, {method}", "-", "-", f"{loading:.2f}", f"{size / loading:.1f}", "-", "-"])
    titles = ["pages", "files, GB/s", "bus, GB/s", "load, s", "load, GB/s", "of the slower one", "upload alone, s"]
    print(markdown(titles, lines))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
