"""Ours, a peer's (vLLM or SGLang) and the floor of the card side by side, from one run on one machine.

    python bench/cuda_peers.py --peer-path ~/site [--peer sglang] [--only ours|peer] [--rows 1,3,7-10] [--json FILE]
    python bench/cuda_peers.py --merge ours.json peer.json

Each engine runs in a process of its own, one after the other, once per model, the peer first. The folder of --peer-path
is seen by the peer's process alone. What a process had measured when its time was up is kept. `--startup` also starts
ours twice on the 8B shape: with empty kernel caches, then with warm ones.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from text_generation_inference.bench.shapes import write_shape
from text_generation_inference.bench.tables import markdown

ROOT = Path(__file__).resolve().parents[1]

# (number, shape, precision, row, the goal: 90% of the floor measured when this was planned)
ROWS = [
    (1, "llama-3.1-8b", "bf16", "200/800/1", 225),
    (2, "llama-3.1-8b", "bf16", "200/800/64", 9_900),
    (3, "llama-3.1-8b", "bf16", "200/800/256", 18_800),
    (4, "llama-3.1-8b", "bf16", "200/800/512", 20_300),
    (5, "llama-3.1-8b", "bf16", "128/128/1024", 19_800),
    (6, "llama-2-7b", "fp8", "128/256/1", 385),
    (7, "llama-2-7b", "fp8", "128/128/1230", 27_900),
    (8, "llama-2-7b", "fp8", "128/2048/163", 10_000),
    (9, "llama-2-7b", "fp8", "2048/128/94", 2_700),
    (10, "llama-2-7b", "fp8", "2048/2048/81", 3_900),
]
MODELS = [("llama-3.1-8b", "bf16"), ("llama-2-7b", "fp8")]
LEAST = {"bf16": 1.08, "fp8": 1.3}  # of the peer, on rows with more than one request


def run_child(command: list[str], environment: dict[str, str], file: Path, limit: float) -> dict | None:
    """What the child left in `file`, whole or not. A child that takes too long is interrupted, then killed."""
    print(f"\n$ {' '.join(command[1:])}", file=sys.stderr, flush=True)
    started = time.monotonic()
    child = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=sys.stderr, start_new_session=True
    )
    try:
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGINT)
            status = child.wait(15)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        status = "killed"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # workers of its own too: they hold the card's memory
        child.wait()
    took = time.monotonic() - started
    print(f"exit status {status} after {took:.0f} s", file=sys.stderr, flush=True)
    found = json.loads(file.read_text()) if file.is_file() else None
    if found is not None:
        found |= {"exit_status": status, "process_seconds": round(took, 1)}
    return found


def run_ours(shape: str, precision: str, rows: list[str], options: argparse.Namespace, folder: Path) -> dict | None:
    file = folder / f"ours-{shape}.json"
    fp8 = ["--quantize", "fp8", "--kv-cache-dtype", "fp8_e4m3fn"] if precision == "fp8" else ["--dtype", "bfloat16"]
    command = [
        options.python,
        "-m",
        "text_generation_inference.cli",
        "bench",
        "offline",
        "--shape",
        shape,
        "--device",
        options.device,
        *fp8,
    ]
    command += ["--json", str(file), *options.ours_args, *rows]
    if options.floor:
        command.append("--floor")
    if options.profile and shape == MODELS[0][0]:
        command += ["--profile", options.profile]
    return run_child(command, our_environment(), file, options.limit)


def our_environment(**more: str) -> dict[str, str]:
    path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part), **more}


def run_peer(shape: str, precision: str, rows: list[str], options: argparse.Namespace, folder: Path) -> dict | None:
    file = folder / f"peer-{shape}.json"
    model = write_shape(shape, folder / shape)
    script = ROOT / f"bench/peers/{options.peer}_offline.py"
    command = [options.peer_python, str(script), str(model), precision, str(file), *rows]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    if options.peer_path:
        environment["PYTHONPATH"] = str(Path(options.peer_path).expanduser().resolve())
    return run_child(command, environment, file, options.limit)


def time_startup(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds from starting the command to a warmed-up engine, with empty kernel caches and again with those."""
    found = {}
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TGI_CACHE_DIR": str(folder / "tgi")}
    for name in ("cold", "warm"):
        file = folder / f"startup-{name}.json"
        command = [
            options.python,
            "-m",
            "text_generation_inference.cli",
            "bench",
            "offline",
            "--shape",
            MODELS[0][0],
            "--dtype",
            "bfloat16",
        ]
        command += ["--device", options.device, "--warmup", "0", "--max-batch-size", "256", "--json", str(file)]
        report = run_child([*command, "200/2/1"], our_environment(**caches), file, options.limit)
        if report is not None and report.get("ready_seconds"):
            found[name] = report["ready_seconds"]
            found[f"{name}_stages"] = report["stages"]
    return found


def find_row(results: dict, side: str, shape: str, row: str) -> dict:
    wanted = dict(zip(("inputs", "outputs", "requests"), map(int, row.split("/")), strict=True))
    rows = (results.get(side, {}).get(shape) or {}).get("rows", [])
    return next((found for found in rows if all(found[name] == value for name, value in wanted.items())), {})


def show(results: dict) -> None:
    heads = ["row", "model", "in/out x requests", "ours tok/s", "peer tok/s", "ours/peer", "floor tok/s", "ours/floor"]
    heads += ["peer/floor", "step ms", "floor step", "host ms", "TTFT ms", "goal", "of goal"]
    lines = []
    for number, shape, precision, row, goal in ROWS:
        ours, peer = (find_row(results, side, shape, row) for side in ("ours", "peer"))
        if not ours and not peer:
            continue
        rate, peer_rate = ours.get("output_tokens_per_s"), peer.get("output_tokens_per_s")
        floor = ours.get("floor_tokens_per_s")
        inputs, outputs, count = row.split("/")
        ratio = share(rate, peer_rate, 2, "x")
        if rate and peer_rate and count != "1" and rate / peer_rate < LEAST[precision]:
            ratio += f" < {LEAST[precision]}"
        line = [str(number), f"{shape} {precision}", f"{inputs}/{outputs} x{count}", number_of(rate)]
        line += [number_of(peer_rate), ratio, number_of(floor), share(rate, floor), share(peer_rate, floor)]
        line += [number_of(ours.get(name), 3) for name in ("step_ms", "floor_step_ms", "host_ms")]
        lines.append([*line, number_of(ours.get("first_token_ms")), f"{goal:,}", share(rate, goal)])
    if lines:
        print(markdown(heads, lines))
    for side in ("ours", "peer"):
        for shape, report in results.get(side, {}).items():
            if report:
                stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.get("stages", {}).items())
                print(
                    f"{report.get('peer', 'ours')}, {shape}: ready after {report.get('ready_seconds')} s"
                    f"{f' ({stages})' if stages else ''}; exit status {report.get('exit_status')} after"
                    f" {report.get('process_seconds')} s"
                )
            else:
                print(f"{side}, {shape}: nothing measured")
    if results.get("startup"):
        print("start to ready, ours, llama-3.1-8b:", results["startup"])
    for report in results.get("ours", {}).values():
        profile = (report or {}).get("profile")
        if profile:
            parts = ", ".join(f"{kind} {ms:.3f}" for kind, ms in profile["by_kind"].items())
            print(
                f"step of {profile['rows']} rows at {profile['context']} tokens: {profile['wall_ms']:.3f} ms; {parts},"
                f" gaps {profile['gap_ms']:.3f}"
            )
            for kernel in profile["kernels"][:14]:
                print(f"  {kernel['ms']:8.4f} ms {kernel['calls']:6g} calls  {kernel['kind']:9} {kernel['name'][:90]}")


def number_of(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:,.{(0 if value >= 1000 else 1) if digits is None else digits}f}"


def share(value: float | None, of: float | None, digits: int = 1, unit: str = "%") -> str:
    if not value or not of:
        return "-"
    return f"{value / of:.{digits}f}x" if unit == "x" else f"{100 * value / of:.{digits}f}%"


def merge(files: list[str]) -> dict:
    """Later files add to earlier ones and replace the same row of the same side."""
    merged: dict = {}
    for file in files:
        found = json.loads(Path(file).read_text())
        merged.setdefault("startup", {}).update(found.get("startup") or {})
        for side in ("ours", "peer"):
            for shape, report in found.get(side, {}).items():
                before = merged.setdefault(side, {}).get(shape)
                if report and before:
                    key = ("inputs", "outputs", "requests")
                    new = {tuple(row[k] for k in key) for row in report["rows"]}
                    kept = [row for row in before["rows"] if tuple(row[k] for k in key) not in new]
                    report = {**before, **report, "rows": kept + report["rows"]}
                    report["profile"] = report.get("profile") or before.get("profile")
                merged[side][shape] = report or before
    return merged


def parse_numbers(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--peer-path", help="folder of the peer's packages")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--python", default=sys.executable, help="for ours")
    parser.add_argument("--only", choices=("ours", "peer"))
    parser.add_argument("--rows", type=parse_numbers, default={row[0] for row in ROWS}, help="such as 1,3,7-10")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each process")
    parser.add_argument("--json", help="keep everything there; written after each process")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="run nothing; show what these files hold together")
    parser.add_argument("--no-floor", dest="floor", action="store_false")
    parser.add_argument("--profile", metavar="ROWS/CONTEXT", help="of ours on the first model, such as 256/600")
    parser.add_argument("--startup", action="store_true", help="also time starting, cold and warm")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--ours-args", default="", type=str.split, metavar="'ARGS'", help="more for tgi bench offline")
    options = parser.parse_args()
    if options.merge:
        results = merge(options.merge)
        show(results)
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1))
        return
    results = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)

        def keep() -> None:
            if options.json:
                Path(options.json).write_text(json.dumps(results, indent=1))

        for side, run in (("peer", run_peer), ("ours", run_ours)):
            for shape, precision in MODELS:
                rows = [row for number, s, _, row, _ in ROWS if s == shape and number in options.rows]
                if rows and options.only in (None, side):
                    results.setdefault(side, {})[shape] = run(shape, precision, rows, options, folder)
                    keep()
        if options.startup and options.only != "peer":
            results["startup"] = time_startup(options, folder)
            keep()
    show(results)


if __name__ == "__main__":
    main()
