"""Models that see on a GPU: answers first, then requests/s and seconds to the first token beside texts of equal length.

    python bench/cuda_pictures.py [--shapes llava-next-7b,qwen2.5-vl-7b] [--requests 1,32,128] [--peer-path ~/site]
    python bench/cuda_pictures.py --only ours|peer --rounds 0  one side, or without decode steps, where time is short
    python bench/cuda_pictures.py --tiny --device cpu          the script itself, tried out

Random weights, no network. One picture of 672x672 and 64 tokens of text in, 128 tokens out, greedy, EOS ignored, no
prefix reuse. Rows: each request with a picture of its own; all with the same one; texts of as many tokens. The engine
without its front end: pictures are resized before the clock starts. `first`: all requests, one token each. `step`: the
median of steps in which all of at most 32 requests decode; a picture in the prompt should not slow it by 2%.
With --peer-path vLLM is run on the same pictures in a process of its own, which alone sees that folder.
"""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.pictures.rule import PictureRule
from text_generation_inference.pictures.rules import find_rule
from text_generation_inference.types import GenerationRequest, PictureSpan, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
from picture_shapes import vocab_size, write_seeing  # noqa: E402

PICTURES, EQUAL, TEXTS = "pictures", "equal pictures", "texts"
MOST_AT_ONCE, ROUNDS = 32, 3  # requests whose steps are timed, and how often
MOST_SLOWER = 1.02  # of a decode step, beside texts


class Bench:
    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self.folder, self.given = folder, given
        self.pixels = folder / "pixels"
        self.pixels.mkdir(exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        rule = find_rule(folder, config)
        assert rule is not None
        self.rule: PictureRule = rule
        self.image_id = config.get("image_token_index", config.get("image_token_id"))
        self.top = min(30000, vocab_size(str(folder)))
        self.numbers = itertools.count(1)
        self.rng = np.random.default_rng(0)
        self.num_features = rule.layout(given.size, given.size).num_features
        self.longest_new = 3 * given.new

    def start(self) -> Engine:
        given = self.given
        length = self.num_features + given.text + self.longest_new + 64
        return start_engine(
            ServerConfig(
                model_id=str(self.folder),
                device=given.device,
                dtype=given.dtype,
                load_format="dummy",
                max_total_tokens=length,
                max_input_tokens=length - self.longest_new,
                max_batch_size=max(given.requests),
                prefix_caching=False,
                picture_folder=str(self.pixels),
                cache_dir=str(self.folder / "cache"),
            )
        )

    def span(self, seed: int) -> PictureSpan:
        side = self.given.size
        picture = Image.effect_noise((side, side), 20 + seed % 200).convert("RGB")
        picture.putpixel((0, 0), (seed % 256, seed // 256 % 256, 7))
        layout = self.rule.layout(side, side)
        pixels = self.rule.pixels(picture, layout).tobytes()
        digest = hashlib.sha256(pixels + str(seed).encode()).hexdigest()
        (self.pixels / digest).write_bytes(pixels)
        return PictureSpan(digest, [(1, layout.num_features)], list(layout.grid), list(layout.shape))

    def requests(self, what: str, count: int, new: int) -> list[GenerationRequest]:
        found: list[GenerationRequest] = []
        span: PictureSpan | None = None
        for _ in range(count):
            number = next(self.numbers)
            if what != TEXTS and (what == PICTURES or span is None):
                span = self.span(number)
            inside = [self.image_id] * self.num_features
            if what == TEXTS:
                inside = self.rng.integers(300, self.top, self.num_features).tolist()
            ids = [1, *inside, *self.rng.integers(300, self.top, self.given.text).tolist()]
            found.append(
                GenerationRequest(
                    id=number,
                    token_ids=ids,
                    sampling=SamplingParams(ignore_eos=True),
                    max_new_tokens=new,
                    stop_token_ids=[],
                    seed=0,
                    pictures=[span] if span is not None else [],
                )
            )
        return found

    def run(self, engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[float, float, list[list[int]]]:
        """Seconds in all, milliseconds of a step in which all decode, and the tokens of each."""
        tokens: dict[int, list[int]] = {request.id: [] for request in requests}
        steps: list[float] = []
        started = last = time.perf_counter()
        for request in requests:
            engine.loop.add(request)
        while engine.loop.has_work:
            out = engine.loop.step()
            if out is None or not out.token_ids:
                continue
            now = time.perf_counter()
            for request_id, token in zip(out.request_ids, out.token_ids, strict=True):
                tokens[request_id].append(token)
            if len(out.token_ids) == len(requests) and all(len(each) > 1 for each in tokens.values()):
                steps.append(now - last)
            last = now
        wanted = requests[0].max_new_tokens
        assert all(len(each) == wanted for each in tokens.values()), {len(each) for each in tokens.values()}
        step = 1000 * statistics.median(steps) if steps else float("nan")
        return time.perf_counter() - started, step, list(tokens.values())

    def check(self, engine: Engine) -> None:
        """Answers come, pictures change them, and what computing them takes is known."""
        new = min(8, self.given.new)
        _, _, (one,) = self.run(engine, self.requests(PICTURES, 1, new))
        _, _, (other,) = self.run(engine, self.requests(PICTURES, 1, new))
        _, _, both = self.run(engine, self.requests(EQUAL, 2, new))
        work = engine.loop.scheduler.picture_work
        assert work is not None and work.num_encoded == 3 and work.encode_seconds > 0, work
        policy = engine.facts.pictures
        assert policy is not None
        each = f"at most {policy.max_each} tokens of a picture" if policy.max_each else "pictures of any size"
        print(
            f"answers: {one[:6]} {other[:6]} {both[0][:6]}; a picture of {self.num_features} tokens took"
            f" {1000 * work.encode_seconds / 3:.1f} ms; {each}, {policy.batch_pixels} pixels together;"
            f" {policy.max_features} features kept",
            flush=True,
        )


def run_ours(folder: Path, given: argparse.Namespace) -> list[dict]:
    bench = Bench(folder, given)
    started = time.perf_counter()
    engine = bench.start()
    print(f"ready after {time.perf_counter() - started:.1f} s; {engine.facts.device}", flush=True)
    rows: list[dict] = []
    try:
        bench.check(engine)
        for count in given.requests:
            # Longer, and of fewer: so that all decode at a time, before the first has ended. In turns.
            steps: dict[str, list[float]] = {what: [] for what in (TEXTS, PICTURES, EQUAL)}
            for _, what in itertools.product(range(given.rounds), steps):
                asked = bench.requests(what, min(count, MOST_AT_ONCE), bench.longest_new)
                steps[what].append(bench.run(engine, asked)[1])
            for what, of_rounds in steps.items():
                if what == TEXTS and not given.rounds:
                    continue
                first = bench.run(engine, bench.requests(what, count, 1))[0]
                seconds = bench.run(engine, bench.requests(what, count, given.new))[0]
                row = {"what": what, "requests": count, "first": first, "seconds": seconds}
                rows.append({**row, "step": statistics.median(of_rounds)} if of_rounds else row)
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        engine.close()
    return rows


def run_peer(folder: Path, given: argparse.Namespace) -> list[dict]:
    file = folder / "peer.json"
    script = ROOT / "bench" / "peers" / "vllm_pictures.py"
    about = [str(given.text), str(given.new), str(given.size), *map(str, given.requests)]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(Path(given.peer_path).expanduser().resolve())
    subprocess.run([given.peer_python, str(script), str(folder), str(file), *about], env=environment, check=False)
    return json.loads(file.read_text())["rows"] if file.is_file() else []


def show(shape: str, ours: list[dict], peer: list[dict]) -> None:
    theirs = {(row["what"], row["requests"]): row for row in peer}
    texts = {row["requests"]: row for row in ours if row["what"] == TEXTS}
    heads = [
        "what",
        "requests",
        "requests/s",
        "first, s",
        "step, ms",
        "step / texts'",
        "rate / peer's",
        "first / peer's",
    ]
    print(f"\n{shape}\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in ours:
        count, other = row["requests"], theirs.get((row["what"], row["requests"]))
        step = ["", ""]
        if count in texts:
            slower = row["step"] / texts[count]["step"]
            mark = "" if row["what"] == TEXTS or slower <= MOST_SLOWER else " (!)"
            step = [f"{row['step']:.2f}", f"{slower:.3f}{mark}"]
        beside = ["", ""]
        if other is not None:
            beside = [f"{other['seconds'] / row['seconds']:.2f}", f"{row['first'] / other['first']:.2f}"]
        cells = [row["what"], str(count), f"{count / row['seconds']:.2f}", f"{row['first']:.3f}"]
        print("| " + " | ".join([*cells, *step, *beside]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llava-next-7b,qwen2.5-vl-7b")
    parser.add_argument("--requests", default="1,32,128")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--size", type=int, default=672)
    parser.add_argument("--text", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--tiny", action="store_true", help="few and small layers, few requests")
    parser.add_argument("--peer-path", default=None, help="folder of vLLM's packages")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--only", choices=["ours", "peer"], default=None)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of timed steps; 0: neither steps nor texts")
    parser.add_argument("--json", default=None)
    given = parser.parse_args()
    given.requests = [int(count) for count in ("1,3" if given.tiny else given.requests).split(",")]
    given.dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    if given.tiny:
        given.new, given.text = min(given.new, 12), min(given.text, 16)
    results: dict[str, dict[str, list[dict]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {shape: write_seeing(shape, Path(name) / shape, given.tiny) for shape in given.shapes.split(",")}
        # The peer first: our process keeps some of the device's memory between one shape and the next.
        runs_peer = given.peer_path and given.only != "ours"
        peers = {shape: run_peer(folder, given) if runs_peer else [] for shape, folder in folders.items()}
        for shape, folder in folders.items():
            ours = run_ours(folder, given) if given.only != "peer" else []
            results[shape] = {"ours": ours, "peer": peers[shape]}
            show(shape, **results[shape])
            if (error := folder / "peer.json.error").is_file():
                print(f"the peer did not start:\n{error.read_text()}", flush=True)
            if given.json:
                Path(given.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
