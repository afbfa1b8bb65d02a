"""`tgi bench serve` as a user has it, against the real server on the embedded model."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import Server

COMMAND = [
    sys.executable,
    "-c",
    "from text_generation_inference.cli import main; import sys; sys.exit(main())",
    "bench",
    "serve",
]
SHORT = ["--prompt-tokens", "24", "--max-new-tokens", "12"]


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def report_of(server: Server, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    file = folder / "report.json"
    done = bench("--url", server.url, "--json", str(file), *arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr
    return json.loads(file.read_text()), done.stdout


def test_a_sweep(server: Server, tmp_path: Path) -> None:
    load = ["--num-rates", "2", "--duration", "1s", "--warmup", "0.5s", "--max-vus", "4", "--limit", "ttft=60s"]
    report, shown = report_of(server, tmp_path, *SHORT, *load)
    assert report["complete"] and report["benchmark"] == "serve" and report["api"] == "generate"
    assert report["model"] == "embedded" == report["tokenizer"] and report["server"]["max_total_tokens"] == 1024
    warmup, maximum, low, high = report["phases"]
    assert [phase["mode"] for phase in report["phases"]] == ["throughput", "throughput", "constant", "constant"]
    assert (warmup["users"], maximum["users"]) == (1, 4)
    assert low["rate"] == pytest.approx(0.6 * maximum["qps"], rel=0.01)
    assert high["rate"] == pytest.approx(1.2 * maximum["qps"], rel=0.01)
    for phase in report["phases"]:
        assert phase["error_rate"] == 0 and phase["num_successful"] > 0, phase["errors"]
        assert phase["prompt_tokens"] == 24 and 1 <= phase["decoded_tokens"] <= 12
        assert 0 < phase["ttft"]["lowest"] <= phase["ttft"]["p99"] <= phase["e2e"]["highest"]
        assert sum(phase["ttft_histogram"]["counts"]) == phase["num_successful"]
        assert phase["goodput"]["share"] == 1 and phase["lag"] is not None
        assert f"| {phase['name']}" in shown
    assert not [note for note in report["notes"] if "may have been the limit" not in note]


def test_client_and_server_agree(server: Server, tmp_path: Path) -> None:
    """Time to the first token within 5%, counts of tokens to the last one. The client's first request asks for 2."""
    load = ["--prompt-tokens", "300", "--max-new-tokens", "9", "--api", "completions", "--ignore-eos"]
    load += ["--mode", "throughput", "--max-vus", "3", "--num-requests", "6", "--warmup", "0"]
    ratio = 0.0
    for _ in range(3):  # the machine may be busy with something else
        before = server.metrics()
        report, _ = report_of(server, tmp_path, *load)
        after = server.metrics()
        (phase,) = report["phases"]

        def grown(name: str, before: dict[str, float] = before, after: dict[str, float] = after) -> float:
            return after[name] - before.get(name, 0.0)

        assert phase["num_successful"] == 6 and phase["decoded_tokens"] == 9 and phase["prompt_tokens"] == 300
        assert grown("tgi_request_generated_tokens_sum") == 6 * 9 + 2
        assert grown("tgi_request_input_length_sum") == 6 * 300 + 1
        assert grown("tgi_request_success") == 7 and grown("tgi_time_to_first_token_duration_count") == 7
        ratio = 6 * phase["ttft"]["average"] / 1e3 / grown("tgi_time_to_first_token_duration_sum")
        if abs(ratio - 1) < 0.05:
            break
    assert ratio == pytest.approx(1, abs=0.05)
    assert not [note for note in report["notes"] if "may have been the limit" not in note]


def test_rates_over_chat_with_random_arrivals(server: Server, tmp_path: Path) -> None:
    load = ["--api", "chat", "--mode", "rate", "--rates", "3,6", "--arrivals", "poisson", "--num-requests", "6"]
    report, shown = report_of(server, tmp_path, *SHORT, *load, "--warmup", "0", "--details", "--seed", "3")
    assert [phase["name"] for phase in report["phases"]] == ["poisson@3.00req/s", "poisson@6.00req/s"]
    for phase in report["phases"]:
        assert phase["num_successful"] == 6 and len(phase["requests"]) == 6
        for request in phase["requests"]:
            assert request["planned"] <= request["sent"] < request["first"] <= request["last"] <= request["end"]
            assert request["decoded_tokens"] <= 12 and len(request["gaps_ms"]) < request["decoded_tokens"]
    assert "TPOT p50" in shown


def test_more_requests_than_the_server_takes(server: Server, tmp_path: Path) -> None:
    """Those beyond its limit are refused within the stream, and counted."""
    load = ["--prompt-tokens", "8", "--max-new-tokens", "4", "--mode", "rate", "--rates", "20000", "--warmup", "0"]
    report, _ = report_of(server, tmp_path, *load, "--num-requests", "190")
    (phase,) = report["phases"]
    assert phase["num_successful"] + phase["num_failed"] == 190 and phase["num_successful"] >= 128
    assert list(phase["errors"]) == ["error in the stream: Model is overloaded"]
    assert phase["error_rate"] == phase["num_failed"] / 190


def test_progress_on_a_terminal(server: Server) -> None:
    """One line that is drawn over, with the time left; tables stay on standard output."""
    controller, terminal = pty.openpty()
    load = ["--mode", "throughput", "--max-vus", "2", "--duration", "1s", "--warmup", "0.5s"]
    process = subprocess.Popen(
        [*COMMAND, "--url", server.url, *SHORT, *load], stdout=subprocess.PIPE, stderr=terminal, text=True
    )
    os.close(terminal)
    out, _ = process.communicate(timeout=60)
    shown = b""
    try:
        while data := os.read(controller, 1 << 16):
            shown += data
    except OSError:  # the terminal is gone when all was read
        pass
    os.close(controller)
    assert process.returncode == 0, shown
    assert b"\r\x1b[Kwarmup (1 of 2)" in shown and b" left, " in shown and b"throughput (2 of 2)" in shown
    assert out.startswith("| Benchmark ") and "\x1b" not in out
