"""What the client of `tgi bench serve` costs: CPU microseconds per received token, and how many tokens it can take.

    python bench/client_overhead.py [--streams 512] [--seconds 4] [--rates 20000,0] [--processes 1,2]

The server is a double in a process of its own that sends one event per stream and step, as an engine does: a burst of
`streams` writes, `rate / streams` times a second, or (rate 0) one burst after the other as fast as it can. The client
is the one that users run, with its processes, its requests and its own measure of how late it was. Where cores are few
the double and the client share them, so the highest rate is what both together reach.
"""

import argparse
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from text_generation_inference.bench.serve.apis import ApiCall
from text_generation_inference.bench.serve.client_pool import ClientPool, LoadPlan
from text_generation_inference.bench.serve.messages import EncodedRequest, Settings
from text_generation_inference.bench.serve.target import find_target
from text_generation_inference.bench.tables import markdown

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data:{"index":%d,"token":{"id":28120,"text":" word","logprob":-0.98765432,"special":false},"generated_text":'
LAST = b'"a text","details":{"finish_reason":"length","generated_tokens":%d,"seed":null,"input_length":8}}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# -- the double ----------------------------------------------------------------------------------------------------


class Stream:
    __slots__ = ("left", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.left, self.unsent = sock, 0, b""


def serve(rate: float, num_tokens: int, num_streams: int, bundle: int) -> None:
    """Send for ever; the requests themselves are not read, only counted."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    streams: dict[int, Stream] = {}
    token = chunk(EVENT % 123 + b"null}\n\n")
    last = chunk(EVENT % num_tokens + LAST % num_tokens) + b"0\r\n\r\n"
    period = num_streams * bundle / rate if rate else 0.0
    due = time.monotonic()
    while True:
        for key, _ in selector.select(0 if any(s.left for s in streams.values()) else 0.5):
            if key.fileobj is listener:
                for sock in accept_all(listener):
                    streams[sock.fileno()] = Stream(sock)
                    selector.register(sock, selectors.EVENT_READ)
                continue
            stream = streams[key.fd]
            try:
                data = stream.sock.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                selector.unregister(stream.sock)
                del streams[key.fd]
                stream.sock.close()
            elif not stream.left:
                stream.left, stream.unsent = num_tokens, HEAD
        for stream in streams.values():
            if stream.left:
                step(stream, token, last, bundle)
        due = max(due + period, time.monotonic() - period)
        time.sleep(max(0.0, due - time.monotonic()))


def accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    with suppress(BlockingIOError):
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            yield sock


def step(stream: Stream, token: bytes, last: bytes, bundle: int) -> None:
    """Some tokens, unless the client is behind and the socket is full."""
    data = stream.unsent
    if len(data) <= 4096:
        count = min(bundle, stream.left)
        stream.left -= count
        data += token * count if stream.left else token * (count - 1) + last
    try:
        sent = stream.sock.send(data)
    except BlockingIOError:
        sent = 0
    except OSError:
        stream.left, stream.unsent = 0, b""
        return
    stream.unsent = data[sent:]
    if not stream.left and stream.unsent:
        stream.sock.setblocking(True)
        stream.sock.sendall(stream.unsent)
        stream.sock.setblocking(False)
        stream.unsent = b""


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, rate: float, num_processes: int) -> list[str]:
    command = [sys.executable, __file__, "--serve", str(rate), "--streams", str(options.streams)]
    command += ["--tokens", str(options.tokens), "--bundle", str(options.bundle)]
    double = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert double.stdout is not None
    try:
        target = find_target(f"http://127.0.0.1:{int(double.stdout.readline())}", None)
        call = ApiCall(api="generate", model=None)
        data = target.frame("generate", call.body("word " * 8, options.tokens))
        settings = Settings(address=target.address, api="generate", timeout_s=60)
        with ClientPool(settings, num_processes) as pool:
            plan = LoadPlan(users=options.streams, seconds=options.seconds)
            record = pool.run(plan, lambda: EncodedRequest(0, data), lambda _: None, lambda: False)
    finally:
        double.kill()
        double.wait()
    failed = sum(outcome.error is not None for outcome in record.outcomes)
    times = np.concatenate([np.frombuffer(outcome.times) for outcome in record.outcomes])
    seconds = max(done.ended - done.started for done in record.finished)
    cpu = sum(done.cpu_seconds for done in record.finished)
    shares = [done.cpu_seconds / (done.ended - done.started) for done in record.finished]
    reads = sum(len(np.unique(np.frombuffer(outcome.times))) for outcome in record.outcomes)
    lags = 1e3 * np.concatenate([np.frombuffer(done.lags) for done in record.finished])
    return [
        f"{rate:,.0f}" if rate else "as fast as possible",
        str(num_processes),
        f"{len(times) / seconds:,.0f}",
        f"{1e6 * cpu / len(times):.2f}",
        f"{max(shares):.0%}",
        f"{len(times) / max(reads, 1):.2f}",
        f"{np.percentile(lags, 50):.2f}",
        f"{np.percentile(lags, 99):.2f}",
        str(failed),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rates", default="20000,0", help="tokens per second over all streams; 0: as fast as possible")
    parser.add_argument("--processes", default="1,2", help="client processes")
    parser.add_argument("--bundle", type=int, default=1, help="tokens in a write, as of a server that is behind")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.serve is not None:
        serve(options.serve, options.tokens, options.streams, options.bundle)
    heads = ["tokens/s sent", "processes", "tokens/s received", "CPU us per token", "busiest, of a core"]
    heads += ["tokens per read", "lag p50, ms", "p99", "failed"]
    rows = [
        measure(options, float(rate), int(count))
        for rate in options.rates.split(",")
        for count in options.processes.split(",")
    ]
    work = f"{options.streams} streams of {options.tokens} tokens, {options.bundle} in a write"
    print(f"{work}, {options.seconds:g} s each\n")
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()
