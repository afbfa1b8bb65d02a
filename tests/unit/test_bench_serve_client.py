"""The client of `tgi bench serve` over real sockets: whatever way the bytes of an answer are cut, and known answers
from a double with exact delays. The double says when it sent each token, so the figures are held against that."""

import json
import math
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from streaming_double import StreamingDouble
from text_generation_inference.bench.serve.apis import ApiCall
from text_generation_inference.bench.serve.channel import Channel
from text_generation_inference.bench.serve.client import Client, Exchange
from text_generation_inference.bench.serve.client_pool import ClientPool, LoadPlan
from text_generation_inference.bench.serve.command import main
from text_generation_inference.bench.serve.messages import (
    EncodedRequest,
    FromClient,
    Need,
    Outcome,
    Outcomes,
    Settings,
    ToClient,
)
from text_generation_inference.bench.serve.target import find_target
from text_generation_inference.bench.serve.vocabulary import load_tokenizer
from text_generation_inference.errors import StartError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data:{"index":1,"token":{"id":1,"text":"x"},"generated_text":null,"details":null}\n\n'
LAST = b'data:{"index":2,"token":{"id":1,"text":"x"},"generated_text":"xx","details":{"generated_tokens":3}}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def serving(*answers: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads a request and lets the next of `answers` reply, one connection at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = list(answers)

        def run() -> None:
            while left:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    while left and (data := sock.recv(1 << 16)):
                        if b"\r\n\r\n" in data:
                            left.pop(0)(sock)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def exchange(url: str, count: int = 1, timeout_s: float = 20.0) -> list[Exchange]:
    """`count` requests, one after the other, on one client."""
    ended: list[Exchange] = []
    host, port = url.removeprefix("http://").split(":")
    address = find_address(host, int(port))
    call = ApiCall(api="generate", model=None)
    client = Client(address, call.read_event(), timeout_s, ended.append)
    head = b"POST /generate_stream HTTP/1.1\r\nhost: x\r\n"
    body = call.body("Hi", 2)
    try:
        for number in range(count):
            client.send(Exchange(number, head + b"content-length: %d\r\n\r\n" % len(body) + body, time.monotonic()))
            while len(ended) <= number:
                client.poll(0.05)
        return ended
    finally:
        client.close()


def find_address(host: str, port: int) -> Any:
    from text_generation_inference.bench.serve.client import Address

    return Address(family=socket.AF_INET, place=(host, port))


def in_pieces(data: bytes, cuts: list[int]) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in pairwise([0, *cuts, len(data)]):
            sock.sendall(data[start:end])
            time.sleep(0.0005)

    return answer


def test_an_answer_cut_anywhere() -> None:
    """Chunks that end in the middle of events, comments, the other kind of line ends, events of several lines."""
    stream = b": hello\n\n" + TOKEN + TOKEN.replace(b"\n\n", b"\r\n\r\n")
    stream += b'event: token\nid: 5\ndata: {"token":{"id":2},\ndata: "generated_text":null}\n\n' + LAST
    rng = random.Random(4)
    answers = []
    for _ in range(12):
        borders = sorted(rng.sample(range(1, len(stream)), rng.randrange(6)))
        parts = [stream[start:end] for start, end in pairwise([0, *borders, len(stream)])]
        data = HEAD + b"".join(map(chunk, parts)) + b"0\r\n\r\n"
        answers.append(in_pieces(data, sorted(rng.sample(range(1, len(data)), rng.randrange(40)))))
    with serving(*answers) as url:
        ended = exchange(url, len(answers))
    for one in ended:
        assert one.error is None and one.answer.is_finished
        assert len(one.answer.times) == 4 and one.answer.num_generated == 3
        assert one.sent <= one.answer.times[0] <= one.answer.times[-1] <= (one.end or 0)


def test_every_single_cut() -> None:
    data = HEAD + chunk(TOKEN) + chunk(LAST) + b"0\r\n\r\n"
    places = range(1, len(data), 7)
    with serving(*(in_pieces(data, [place]) for place in places)) as url:
        ended = exchange(url, len(places))
    assert [(one.error, len(one.answer.times)) for one in ended] == [(None, 2)] * len(places)


def closing(data: bytes) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_RDWR)

    return answer


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + TOKEN + LAST, None),  # until it closes
        (HEAD + chunk(TOKEN) + chunk(LAST), None),  # all there, though the stream has no end
        (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(LAST) + LAST, None),
        (HEAD + chunk(TOKEN), "connection closed in the middle of the answer"),
        (HEAD + chunk(TOKEN[:30]), "connection closed in the middle of the answer"),
        (HEAD + chunk(TOKEN) + b"0\r\n\r\n", "the stream ended before the answer did"),
        (HEAD + b"0\r\n\r\n", "the answer is no stream of events"),
        (b"", "connection closed without an answer"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is not HTTP: "),
        (HEAD + b"zz\r\n", "the answer is not HTTP: "),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "HTTP 404"),
        (b'HTTP/1.1 429 X\r\ncontent-length: 15\r\n\r\n{"error":"busy"', 'HTTP 429: {"error":"busy"'),
        (b'HTTP/1.1 400 X\r\ncontent-length: 16\r\n\r\n{"error":"nope"}', "HTTP 400: nope"),
        (b"HTTP/1.1 307 X\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", "HTTP 307"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"a": 5}\n', "the answer is no stream of events"),
    ],
)
def test_endings(data: bytes, error: str | None) -> None:
    with serving(closing(data)) as url:
        (one,) = exchange(url)
    if error is None:
        assert one.error is None
    else:
        assert one.error is not None and one.error.startswith(error)


def test_connections_are_kept_and_replaced() -> None:
    """A connection that the server closed while it was idle is no failure; a second loss is."""
    good = HEAD + chunk(TOKEN) + chunk(LAST) + b"0\r\n\r\n"
    places: list[Any] = []

    def stay(sock: socket.socket) -> None:
        places.append(sock.getpeername())
        sock.sendall(good)

    def hang_up(sock: socket.socket) -> None:
        sock.shutdown(socket.SHUT_RDWR)  # the request came, and there is no answer

    with serving(stay, stay, hang_up, stay, hang_up, hang_up) as url:
        ended = exchange(url, 4)
    assert [one.error for one in ended[:3]] == [None] * 3
    assert places[0] == places[1] != places[2]
    assert ended[3].error is not None and ended[3].error.endswith("without an answer")


def test_a_server_that_never_ends_is_not_waited_for() -> None:
    def drip(sock: socket.socket) -> None:
        sock.sendall(HEAD)
        try:
            while True:
                sock.sendall(chunk(TOKEN))
                time.sleep(0.01)
        except OSError:
            return

    with serving(drip) as url:
        (one,) = exchange(url, timeout_s=0.3)
    assert one.error == "no end within 0.3 s" and len(one.answer.times) > 1


def test_messages_pass_whole_and_nobody_waits(tmp_path: Path) -> None:
    """Megabytes are sent before anybody is there to take them."""
    endpoint = f"ipc://{tmp_path}/socket"
    sender = Channel(endpoint, ToClient, bind=False)
    big = [Outcomes([Outcome(number, 0.0, 0.0, 1.0, bytes(200_000), 5, 6, None)], number) for number in range(99)]
    for message in [*big, Need(3)]:
        sender.send(message)
    receiver = Channel(endpoint, FromClient, bind=True)
    received: list[Any] = []
    until = time.monotonic() + 20
    while len(received) < 100 and time.monotonic() < until:
        select.select([receiver], [], [], 0.01)
        received += receiver.receive()
    assert received == [*big, Need(3)] and receiver.receive() == []
    sender.close()
    receiver.close()


def test_client_processes_end_with_the_command_and_their_end_is_told() -> None:
    settings = Settings(address=find_address("127.0.0.1", 9), api="generate", timeout_s=1.0)
    program = (
        "import sys, time; from text_generation_inference.bench.serve.client_pool import ClientPool;"
        "from text_generation_inference.bench.serve.client import Address;"
        "from text_generation_inference.bench.serve.messages import Settings;"
        "settings = Settings(address=Address(family=2, place=('127.0.0.1', 9)), api='generate', timeout_s=1.0);"
        "pool = ClientPool(settings, 1); print(pool.pids[0], flush=True); time.sleep(60)"
    )
    command = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    worker = int(command.stdout.readline())
    command.kill()  # without a word to its processes
    command.wait()
    until = time.monotonic() + 20
    while Path(f"/proc/{worker}/stat").exists() and Path(f"/proc/{worker}/stat").read_text().split(") ")[1][0] != "Z":
        assert time.monotonic() < until, "the client process lives on"
        time.sleep(0.05)
    with ClientPool(settings, 1) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(StartError, match="ended unexpectedly .SIGKILL."):
            pool.run(
                LoadPlan(users=1, seconds=1.0), lambda: EncodedRequest(0, b""), lambda progress: None, lambda: False
            )


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://a:b@x", "http://x/?a=1", "http://x:99999", "http://[::1"]
)
def test_urls_that_make_no_sense(url: str) -> None:
    with pytest.raises(StartError, match="--url"):
        find_target(url, None)


# -- known answers -------------------------------------------------------------------------------------------------

LENGTHS = ["--prompt-tokens", "20", "--max-new-tokens", "16", "--warmup", "0", "--quiet"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer of short words, which is there at once."""
    folder = tmp_path_factory.mktemp("words")
    known = ["?", *(a + b + c for a in "bcdfgklm" for b in "aeiou" for c in "lmnrs")]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(words: str, tmp_path: Path) -> Bench:
    """Runs the command against a double; its report."""

    def run(double: StreamingDouble, *arguments: str) -> dict[str, Any]:
        file = tmp_path / "report.json"
        common = ["--url", double.url, "--tokenizer", words, "--json", str(file), "--details", "--seed", "1"]
        assert main([*common, *LENGTHS, *arguments]) == 0
        return json.loads(file.read_text())

    return run


@pytest.mark.parametrize("api", ["generate", "chat"])
def test_known_delays_errors_and_stalls(api: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """TTFT 50 ms, ITL 10 ms, of ten requests one stops with an error, one breaks off and two stall for 0.4 s.

    Within 2 ms of what the double did, in one of a few tries.
    """
    script = ["ok", "stall", "ok", "stream-error", "ok", "ok", "break", "ok", "stall", "ok"]
    load = ["--mode", "rate", "--rates", "40", "--num-requests", "40", "--limit", "itl=300", "--client-processes", "2"]
    worst: dict[str, float] = {}
    for _ in range(6):  # the machine may be busy with something else
        with StreamingDouble("--tgi", script=script, ttft=0.05, itl=0.01, stall=0.4) as double:
            (phase,) = bench(double, *load, "--api", api)["phases"]
            records = double.records()
        assert phase["num_sent"] == 40 and phase["error_rate"] == 0.2 and phase["num_failed"] == 8
        broken = [error for error in phase["errors"] if "in the middle" in error]
        assert phase["errors"] == {"error in the stream: the model stumbled": 4, broken[0]: 4}
        assert phase["goodput"]["num_requests"] == 24 and phase["goodput"]["share"] == 0.6
        assert (phase["prompt_tokens"], phase["decoded_tokens"]) == (20, 16)
        assert phase["ttft"]["p50"] >= 50 and phase["itl"]["highest"] >= 399
        good = [record for record in records if record["behaviour"] in ("ok", "stall")]
        gaps = [1e3 * (later - sooner) for record in good for sooner, later in pairwise(record["sent"])]
        expected = {
            "ttft": statistics.median(1e3 * (record["sent"][0] - record["arrived"]) for record in good),
            "itl": statistics.median(gaps),
            "tpot": statistics.median(1e3 * (record["sent"][-1] - record["sent"][0]) / 15 for record in good),
            "e2e": statistics.median(1e3 * (record["sent"][-1] - record["arrived"]) for record in good),
        }
        worst = {name: abs(phase[name]["p50"] - value) for name, value in expected.items()}
        worst["itl average"] = abs(phase["itl"]["average"] - statistics.mean(gaps))
        if max(worst.values()) < 2:
            break
    assert max(worst.values()) < 2, worst
    assert "| constant@40.00req/s |" in capsys.readouterr().out


def test_planned_times_and_prompts(bench: Bench, words: str) -> None:
    """Requests leave when they are due, whatever the server does; each says exactly what was planned."""
    load = ["--mode", "rate", "--rates", "100", "--arrivals", "poisson", "--num-requests", "60", "--ignore-eos"]
    lateness = [math.inf]
    for _ in range(4):  # the machine may be busy with something else
        with StreamingDouble(script=["ok", "stall"], ttft=0.2, itl=0.001, stall=0.3) as double:
            report = bench(double, *load)
            records = double.records()
        (phase,) = report["phases"]
        lateness = [request["sent"] - request["planned"] for request in phase["requests"]]
        if statistics.median(lateness) < 0.01:
            break
    assert report["api"] == "completions" and report["model"] == "embedded" and phase["mode"] == "poisson"
    assert all(record["body"]["ignore_eos"] is True for record in records)
    planned = [request["planned"] for request in phase["requests"]]
    assert len(set(planned)) == 60 and planned[0] == 0
    assert min(lateness) >= 0 and statistics.median(lateness) < 0.01
    tokenizer = load_tokenizer(words)
    assert {len(tokenizer.encode(record["prompt"])) for record in records} == {20}
    assert len({record["prompt"].split()[0] for record in records}) == 60


def test_users_keep_one_request_each(bench: Bench) -> None:
    with StreamingDouble("--tgi", ttft=0.02, itl=0.002) as double:
        (phase,) = bench(double, "--mode", "throughput", "--max-vus", "6", "--duration", "0.8s")["phases"]
        records = double.records()
    moments = [(record["arrived"], 1) for record in records]
    moments += [(record["sent"][-1], -1) for record in records if len(record["sent"]) == 16]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    assert most == 6
    assert phase["num_sent"] == phase["num_successful"] + phase["num_unfinished"] == len(records)
    assert phase["num_unfinished"] <= 6
    assert phase["qps"] * phase["decoded_tokens"] == pytest.approx(phase["output_tokens_per_s"], rel=0.01)


def test_a_given_number_of_requests(bench: Bench) -> None:
    with StreamingDouble("--tgi", ttft=0.01, itl=0.001) as double:
        load = ["--mode", "throughput", "--max-vus", "4", "--num-requests", "25", "--client-processes", "3"]
        (phase,) = bench(double, *load)["phases"]
        assert len(double.records()) == 25
    assert phase["num_successful"] == 25 and phase["num_unfinished"] == 0


def test_a_server_with_chat_alone(bench: Bench) -> None:
    with StreamingDouble("--only-chat", "--key=secret", ttft=0.01, itl=0.001) as double:
        load = ["--mode", "rate", "--rates", "50", "--num-requests", "5", "--api-key", "secret"]
        report = bench(double, *load)
    assert report["api"] == "chat" and report["phases"][0]["num_successful"] == 5
    assert "secret" not in json.dumps(report)


def test_prompts_of_a_file_need_no_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(["one two three", {"prompt": "four five", "max_new_tokens": 3}]))
    with StreamingDouble("--tgi", ttft=0.01, itl=0.001) as double:
        out = tmp_path / "report.json"
        arguments = ["--url", double.url, "--prompts", str(file), "--mode", "rate", "--rates", "50", "--json", str(out)]
        assert main([*arguments, "--num-requests", "4", "--warmup", "0", "--max-new-tokens", "5", "--quiet"]) == 0
        prompts = [record["prompt"] for record in double.records()]
    assert sorted(prompts) == ["four five"] * 2 + ["one two three"] * 2
    (phase,) = json.loads(out.read_text())["phases"]
    assert (phase["prompt_tokens"], phase["decoded_tokens"]) == (2.5, 4)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_https(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tmp_path / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=double"]
    command += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(tmp_path / "key"),
        "-out",
        str(tmp_path / "crt"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    both.write_text((tmp_path / "key").read_text() + (tmp_path / "crt").read_text())
    with StreamingDouble("--tgi", tls=both, ttft=0.01, itl=0.001) as double:
        assert main(["--url", double.url, *LENGTHS]) == 1
        assert "certificate refused: self-signed certificate" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "crt"))
        (phase,) = bench(double, "--mode", "rate", "--rates", "50", "--num-requests", "10")["phases"]
    assert phase["num_successful"] == 10 and phase["decoded_tokens"] == 16


# -- what can go wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "arguments", "text"),
    [
        (["401"], [], "refuses the key (HTTP 401)"),
        (["404"], ["--api", "generate"], "there is no /generate_stream"),
        (["ok"], ["--url", "{url}/wrong/path"], "there is no /wrong/path/"),
        (["503"], [], "a first request to /generate_stream failed: HTTP 503: no model"),
        (["429"], [], "no request succeeded (HTTP 429: Model is overloaded)"),
        (["mute"], ["--timeout", "0.2"], "no request succeeded (no end within 0.2 s)"),
        (["endless"], ["--timeout", "0.3"], "no request succeeded (no end within 0.3 s)"),
        (["silent-end"], [], "no request succeeded (the stream ended before the answer did)"),
        (["ok"], ["--prompt-tokens", "9000"], "max_total_tokens"),
        (["ok"], ["--tokenizer", "/nowhere"], "no tokenizer '/nowhere'"),
        (["ok"], ["--json", "/nowhere/report.json"], "cannot write to /nowhere"),
        (["ok"], ["--prompts", "/nowhere.json"], "cannot be read"),
    ],
)
def test_failures_are_one_line(
    script: list[str], arguments: list[str], text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with StreamingDouble("--tgi", script=script, ttft=0.01, itl=0.01) as double:
        given = [argument.replace("{url}", double.url) for argument in arguments]
        url = [] if "--url" in given else ["--url", double.url]
        load = ["--mode", "rate", "--rates", "20", "--num-requests", "4"]
        assert main([*url, "--tokenizer", words, *LENGTHS, *load, *given]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and text in told


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_no_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url, *LENGTHS]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and ("cannot reach" in told or "no host" in told)


def test_a_refusing_server_is_not_flooded(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with StreamingDouble("--tgi", script=["429"]) as double:
        arguments = ["--mode", "sweep", "--max-vus", "4", "--duration", "0.5s", "--url", double.url]
        assert main([*LENGTHS, *arguments, "--tokenizer", words]) == 1
        assert len(double.records()) <= 4 * 6
    assert "no rates to sweep (HTTP 429: Model is overloaded)" in capsys.readouterr().err


def test_ctrl_c_shows_what_was_measured(words: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with StreamingDouble("--tgi", ttft=0.01, itl=0.001) as double:
        program = (
            "from text_generation_inference.bench.serve.command import main; import sys; sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", program, "--url", double.url, "--tokenizer", words, "--json", str(file)]
        command += ["--prompt-tokens", "9", "--max-new-tokens", "8", "--mode", "rate", "--rates", "30,31"]
        process = subprocess.Popen(
            [*command, "--duration", "0.3s", "--warmup", "100s"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        while len(double.records()) < 3:
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, told = process.communicate(timeout=30)
    assert process.returncode == 130, told
    assert "| warmup" in out and "constant" not in out
    assert "interrupted: 1 of 3 phases" in told and "Traceback" not in told
    report = json.loads(file.read_text())
    assert not report["complete"] and report["phases"][0]["num_successful"] >= 2
