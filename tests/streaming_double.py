"""A server with exact delays in place of a model, in a process of its own, that remembers when it sent what.

    with StreamingDouble(script=["ok", "ok", "stream-error"], ttft=0.05, itl=0.01) as double: ... double.url ...

Request number n behaves as `script[n % len(script)]`:

ok            the asked number of tokens
stall         the same, with one pause of `stall` seconds in the middle
stream-error  an error event after half of the tokens, then the end of the stream
break         the connection is closed after half of the tokens
silent-end    the stream ends properly after half of the tokens, without the final event
endless       tokens for ever
mute          no answer at all
401 429 503   that status, at once
404           no such route

Streams are TGI's (`/generate_stream`) or OpenAI's (`/v1/...`), one chunk for each token. The client's first request, of
the text `Hello`, is answered without being counted unless the whole script is a refusal. `/double` tells, for each
request, when it arrived and when each of its tokens left, in seconds of the monotonic clock, which processes share.
"""

import argparse
import heapq
import itertools
import json
import selectors
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from typing import Any, Self

REFUSALS = {
    "401": (401, b""),
    "404": (404, b""),
    "429": (429, b'{"error":"Model is overloaded","error_type":"overloaded"}'),
    "503": (503, b'{"error":"no model"}'),
}


class StreamingDouble:
    """Starts the process; `records` asks it what it did."""

    def __init__(self, *arguments: str, script: list[str] | None = None, **options: object) -> None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, __file__, f"--script={','.join(script or ['ok'])}", *words, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        scheme = "https" if "tls" in options else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"

    def records(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/double", timeout=10) as reply:
            return json.load(reply)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


# -- the process ---------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.script = options.script.split(",")
        self.selector = selectors.DefaultSelector()
        self.timers: list[tuple[float, int, Any]] = []
        self.order = itertools.count()
        self.records: list[dict[str, Any]] = []
        self.tls = None
        if options.tls:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(options.tls)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is not None:
            try:
                sock = self.tls.wrap_socket(sock, server_side=True)
            except OSError:
                return
        Connection(self, sock)

    def at(self, moment: float, action: Any) -> None:
        heapq.heappush(self.timers, (moment, next(self.order), action))

    def run(self) -> None:
        print(self.listener.getsockname()[1], flush=True)
        import select

        while True:
            wait = self.timers[0][0] - time.monotonic() if self.timers else 1.0
            if wait > 0:
                select.select([self.selector.fileno()], [], [], wait)  # finer than epoll's milliseconds
            for key, _ in self.selector.select(0):
                key.data()
            while self.timers and self.timers[0][0] <= time.monotonic():
                heapq.heappop(self.timers)[2]()


class Connection:
    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server, self.sock = server, sock
        self.data = b""
        self.is_closed = False
        server.selector.register(sock, selectors.EVENT_READ, self.readable)

    def readable(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        now = time.monotonic()
        self.data += data
        head, mark, body = self.data.partition(b"\r\n\r\n")
        if not mark:
            return
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        if len(body) < int(headers.get("content-length", "0")):
            return
        self.data = b""
        method, path, _ = lines[0].split(" ")
        self.answer(method, path, headers, body, now)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes, now: float) -> None:
        server, options = self.server, self.server.options
        if path == "/double":
            self.respond(200, json.dumps(server.records).encode())
        elif path == "/info" and options.tgi:
            self.respond(200, b'{"model_id":"embedded","max_total_tokens":4096,"max_input_tokens":4095}')
        elif path == "/v1/models" and not options.tgi:
            self.respond(200, b'{"object":"list","data":[{"id":"embedded"}]}')
        elif method != "POST" or path not in ("/generate_stream", "/v1/completions", "/v1/chat/completions"):
            self.respond(404, b"")
        elif options.key and headers.get("authorization") != f"Bearer {options.key}":
            self.respond(401, b"")
        elif "chat" not in path and options.only_chat:
            self.respond(404, b"")
        else:
            Stream(self, path, json.loads(body), now)

    def respond(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def send(self, data: bytes) -> None:
        if not self.is_closed:
            try:
                self.sock.sendall(data)
            except OSError:
                self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.server.selector.unregister(self.sock)
            self.sock.close()


class Stream:
    """One answer."""

    def __init__(self, connection: Connection, path: str, body: dict[str, Any], now: float) -> None:
        self.connection, self.server = connection, connection.server
        self.kind = "native" if path == "/generate_stream" else "chat" if "chat" in path else "completions"
        script = self.server.script
        if self.kind == "native":
            prompt, self.num_tokens = body["inputs"], body["parameters"]["max_new_tokens"]
        else:
            prompt = body["messages"][-1]["content"] if self.kind == "chat" else body["prompt"]
            self.num_tokens = body["max_tokens"]
        self.num_prompt = len(prompt.split())
        options = self.server.options
        first, gap = options.ttft, options.itl
        is_trial = prompt == "Hello"
        if is_trial:
            self.behaviour, first, gap = ("ok" if len(set(script)) > 1 else script[0]), 0.0, 0.0
            if self.behaviour in ("break", "stream-error", "silent-end", "endless", "mute"):
                self.behaviour = "ok"
        else:
            self.behaviour = script[len(self.server.records) % len(script)]
        self.record: dict[str, Any] = {"behaviour": self.behaviour, "arrived": now, "sent": [], "prompt": prompt}
        self.record["body"] = body
        if not is_trial:
            self.server.records.append(self.record)
        if self.behaviour in REFUSALS:
            connection.respond(*REFUSALS[self.behaviour])
            return
        if self.behaviour == "mute":
            return
        self.gap, self.number = gap, 0
        self.due = now + first
        self.server.at(self.due, self.next)

    def next(self) -> None:
        if self.connection.is_closed:
            return
        if self.number == 0:
            head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            data = head.encode()
            if self.kind == "chat":
                data += self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        else:
            data = b""
        half = self.num_tokens // 2
        if self.number == half and self.behaviour in ("stream-error", "break", "silent-end"):
            self.end_early(data)
            return
        self.number += 1
        is_last = self.number == self.num_tokens and self.behaviour != "endless"
        data += self.token(is_last)
        if is_last:
            data += self.ending()
        self.connection.send(data)
        self.record["sent"].append(time.monotonic())
        if not is_last:
            pause = self.gap
            if self.behaviour == "stall" and self.number == half:
                pause = self.server.options.stall
            self.due += pause
            self.server.at(self.due, self.next)

    def end_early(self, data: bytes) -> None:
        if self.behaviour == "break":
            self.connection.send(data)
            self.connection.close()
            return
        if self.behaviour == "stream-error":
            error: Any = "the model stumbled"
            if self.kind != "native":
                error = {"message": error, "http_status_code": 424}
            data += self.event({"error": error, "error_type": "generation"})
        self.connection.send(data + b"0\r\n\r\n")

    def token(self, is_last: bool) -> bytes:
        text = f" w{self.number}"
        if self.kind == "native":
            details = {"finish_reason": "length", "generated_tokens": self.number, "input_length": self.num_prompt}
            event: dict[str, Any] = {"index": self.number, "token": {"id": 7, "text": text, "logprob": -0.5}}
            event |= {"generated_text": "..." if is_last else None, "details": details if is_last else None}
            return self.event(event)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        choice |= {"delta": {"content": text}} if self.kind == "chat" else {"text": text}
        return self.event({"id": "x", "choices": [choice]})

    def ending(self) -> bytes:
        data = b""
        if self.kind != "native":
            usage = {"prompt_tokens": self.num_prompt, "completion_tokens": self.number}
            data += self.event({"id": "x", "choices": [], "usage": usage})
            data += self.chunk(b"data: [DONE]\n\n")
        return data + b"0\r\n\r\n"

    def event(self, value: dict[str, Any]) -> bytes:
        return self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data: bytes) -> bytes:
        return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", default="ok")
    parser.add_argument("--ttft", type=float, default=0.05)
    parser.add_argument("--itl", type=float, default=0.01)
    parser.add_argument("--stall", type=float, default=0.2)
    parser.add_argument("--key")
    parser.add_argument("--tls", help="file with certificate and key")
    parser.add_argument("--tgi", action="store_true")
    parser.add_argument("--only-chat", action="store_true")
    Server(parser.parse_args()).run()


if __name__ == "__main__":
    main()
