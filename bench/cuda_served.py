"""Served over HTTP against offline, from one run: many streams of `/generate_stream`, then the same work in-process.

    python bench/cuda_served.py [--shape llama-3.1-8b | --embedded] [--streams 256] [--work 200/800] [--json FILE]

The server is the launcher as a user starts it. Weights are random and no token ends a text, so every stream has the
asked length; the tokenizer is byte-level with exactly the model's vocabulary, made here. Client processes count events
and read nothing else; how much of a core each process took is printed, so that one can see who was busy.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from text_generation_inference.bench.shapes import SHAPES, config_of

EVENT = b"data:"


def make_folder(options: argparse.Namespace, folder: Path) -> Path:
    """A model folder in which nothing names an end-of-text token."""
    folder.mkdir()
    if options.embedded:
        from text_generation_inference.config import ServerConfig
        from text_generation_inference.weights.source import find_model

        source = find_model(ServerConfig()).path
        for file in source.iterdir():
            if file.name not in ("config.json", "generation_config.json", "tokenizer_config.json"):
                (folder / file.name).symlink_to(file)
        config = json.loads((source / "config.json").read_text())
        (folder / "tokenizer_config.json").write_text("{}")
    else:
        config = config_of(options.shape)
        write_tokenizer(folder / "tokenizer.json", config["vocab_size"])
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "eos_token_id"}))
    return folder


def write_tokenizer(file: Path, vocab_size: int) -> None:
    """Single bytes, then made-up words: a prompt takes a token per letter, a random token decodes to a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (
        "".join(word)
        for length in itertools.count(2)
        for word in itertools.linear_unscaled(string.ascii_lowercase, repeat=length)
    )
    spaced = (prefix + word for word in words for prefix in ("", "Ġ"))
    tokens = [*letters, *itertools.islice(spaced, vocab_size - len(letters))]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    assert backend.get_vocab_size() == vocab_size
    backend.save(str(file))


# -- the server ----------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, folder: Path, options: argparse.Namespace, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "text_generation_inference.launch.command",
            "--model-id",
            str(folder),
            "--port",
            str(self.port),
        ]
        command += ["--hostname", "127.0.0.1", "--max-concurrent-requests", str(2 * options.streams)]
        command += ["--max-queued-tokens", str(2 * options.streams * options.inputs)]
        command += engine_flags(options)
        started = time.monotonic()
        self.log = log
        self.process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() - started > options.start_limit:
                self.stop()
                sys.exit(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        self.ready_seconds = time.monotonic() - started

    def healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
            return reply.status == 200
        return False

    def cpu_seconds(self) -> dict[str, float]:
        """Used so far, by process."""
        found: dict[str, float] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.process.pid:
                    words = (path / "cmdline").read_text().split("\0")
                    name = next((word for word in words if word.startswith("tgi.")), words[0])
                    found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def engine_flags(options: argparse.Namespace) -> list[str]:
    """The same for the server and for the offline run."""
    flags = ["--device", options.device, "--max-batch-size", str(options.streams)]
    flags += ["--max-total-tokens", str(options.inputs + options.outputs)]
    if not options.embedded:
        flags += ["--load-format", "dummy"]
    return [*flags, *options.engine_args]


# -- the clients ---------------------------------------------------------------------------------------------------


class Stream:
    """When events of one stream came: (time, how many at once)."""

    def __init__(self) -> None:
        self.sent = 0.0
        self.times: list[tuple[float, int]] = []
        self.error = ""

    @property
    def num_events(self) -> int:
        return sum(count for _, count in self.times)


async def read_stream(port: int, body: bytes) -> Stream:
    stream = Stream()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        head = "POST /generate_stream HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        stream.sent = time.monotonic()
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            stream.error = (status + await reader.read())[-300:].decode(errors="replace")
        tail = b""
        while data := await reader.read(1 << 16):
            data = tail + data
            count = data.count(EVENT)
            if count:
                stream.times.append((time.monotonic(), count))
            tail = data[data.rfind(b"\n") + 1 :] if EVENT not in data[data.rfind(b"\n") + 1 :] else b""
        writer.close()
    except OSError as error:
        stream.error = repr(error)
    return stream


def run_client(port: int, bodies: list[bytes], start_at: float) -> tuple[list[Stream], float]:
    """One process: its streams, and the share of a core that it took."""

    async def run() -> list[Stream]:
        await asyncio.sleep(max(0.0, start_at - time.monotonic()))
        return await asyncio.gather(*(read_stream(port, body) for body in bodies))

    with suppress(ImportError):
        import uvloop

        uvloop.install()
    streams = asyncio.run(run())
    return streams, time.process_time() / max(time.monotonic() - start_at, 1e-9)


def drive(server: Server, options: argparse.Namespace, outputs: int, seed: int) -> dict:
    """All streams at once; what the clients saw."""
    rng = random.Random(seed)
    bodies = []
    for _ in range(options.streams):
        text = " ".join("".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(options.inputs))
        parameters = {"max_new_tokens": outputs, "truncate": options.inputs}
        bodies.append(json.dumps({"inputs": text, "parameters": parameters}).encode())
    parts = [bodies[number :: options.clients] for number in range(options.clients)]
    start_at = time.monotonic() + 0.5
    before = server.cpu_seconds()
    with multiprocessing.get_context("fork").Pool(options.clients) as pool:
        done = pool.starmap(run_client, [(server.port, part, start_at) for part in parts if part])
    after = server.cpu_seconds()
    streams = [stream for found, _ in done for stream in found]
    failed = [s for s in streams if s.error or s.num_events != outputs]
    good = [s for s in streams if s.times]
    if not good:
        sys.exit(f"no stream gave a token: {streams[0].error}\n{server.log.read_text()[-2000:]}")
    began = min(s.sent for s in good)
    seconds = max(s.times[-1][0] for s in good) - began
    gaps = [gap for s in good for gap in gaps_of(s)]
    num_tokens = sum(s.num_events for s in good)
    return {
        "streams": len(streams),
        "failed": len(failed),
        "first_error": (failed[0].error or f"{failed[0].num_events} events") if failed else "",
        "seconds": round(seconds, 3),
        "tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / seconds, 1),
        "ttft_ms": percentiles([s.times[0][0] - s.sent for s in good]),
        "itl_ms": percentiles(gaps),
        "events_per_read": round(num_tokens / sum(len(s.times) for s in good), 2),
        "cpu_share": {name: round((after[name] - before.get(name, 0)) / seconds, 2) for name in after},
        "client_cpu_share_max": round(max(share for _, share in done), 2),
    }


def gaps_of(stream: Stream) -> list[float]:
    """Between events; those that came together have nothing between them."""
    gaps: list[float] = [0.0] * (stream.times[0][1] - 1)
    for (before, _), (now, count) in itertools.pairwise(stream.times):
        gaps += [now - before, *[0.0] * (count - 1)]
    return gaps


def percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {"p50": round(1e3 * sum(seconds), 2), "p99": round(1e3 * sum(seconds), 2)}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": round(1e3 * cuts[49], 2), "p99": round(1e3 * cuts[98], 2)}


# -- both ----------------------------------------------------------------------------------------------------------


def run_offline(folder: Path, options: argparse.Namespace, file: Path) -> dict | None:
    row = f"{options.inputs}/{options.outputs}/{options.streams}"
    command = [
        sys.executable,
        "-m",
        "text_generation_inference.cli",
        "bench",
        "offline",
        "--model-id",
        str(folder),
        *engine_flags(options),
    ]
    subprocess.run([*command, "--json", str(file), row], stdout=subprocess.DEVNULL, check=False, timeout=options.limit)
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    return rows[0] if rows else None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--embedded", action="store_true", help="the embedded model with its own weights")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--work", default="200/800", help="tokens in and out of each stream")
    parser.add_argument("--clients", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="processes")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--engine-args", default="", type=str.split, metavar="'ARGS'", help="flags for both, such as '--quantize fp8'"
    )
    parser.add_argument("--only", choices=("served", "offline"))
    parser.add_argument("--start-limit", type=float, default=180, help="seconds for the server to start")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the offline run")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.inputs, options.outputs = (int(part) for part in options.work.split("/"))
    return options


def main() -> None:
    options = parse_options()
    results: dict = {"work": f"{options.work} x{options.streams}", "served": []}
    with tempfile.TemporaryDirectory(prefix="served-") as name:
        folder = make_folder(options, Path(name, "model"))
        if options.only != "served":
            results["offline"] = run_offline(folder, options, Path(name, "offline.json"))
        if options.only != "offline":
            server = Server(folder, options, Path(name, "server.log"))
            try:
                results["ready_seconds"] = round(server.ready_seconds, 2)
                print(f"server ready after {server.ready_seconds:.1f} s", flush=True)
                drive(server, options, min(8, options.outputs), seed=99)
                for number in range(options.rounds):
                    results["served"].append(drive(server, options, options.outputs, seed=number))
                    print(json.dumps(results["served"][-1]), flush=True)
            finally:
                server.stop()
    show(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


def show(results: dict) -> None:
    offline = results.get("offline")
    if offline:
        print(f"offline {offline['output_tokens_per_s']:,.0f} tokens/s, {offline['step_ms']} ms per step")
    for served in results["served"]:
        rate = served["output_tokens_per_s"]
        ratio = f", {rate / offline['output_tokens_per_s']:.3f} of offline (goal 0.93)" if offline else ""
        ttft, itl = served["ttft_ms"], served["itl_ms"]
        print(f"served  {rate:,.0f} tokens/s{ratio}; TTFT p50 {ttft['p50']} p99 {ttft['p99']} ms,", end=" ")
        print(f"ITL p50 {itl['p50']} p99 {itl['p99']} ms; failed {served['failed']} of {served['streams']}", end=" ")
        print(f"{served['first_error']}\n        cores: {served['cpu_share']}, busiest client", end=" ")
        print(f"{served['client_cpu_share_max']}; {served['events_per_read']} events per read")


if __name__ == "__main__":
    main()
