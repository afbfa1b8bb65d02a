"""Log lines as a collector reads them."""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_inference.api.log_queue import QueuedHandler
from text_generation_inference.api.logs import configure_logging, duration_text, fields, log_success, parse_level
from text_generation_inference.api.metrics import Timings

log = logging.getLogger("text_generation_inference.test")
TIMINGS = Timings(total_s=1.25, validation_s=0.0005, queue_s=0.0123, inference_s=1.2, generated_tokens=100)


@pytest.fixture
def configure():
    """Configure logging into a buffer; the state before is restored."""
    root, ours = logging.getLogger(), logging.getLogger("text_generation_inference")
    before = root.handlers[:], root.level, ours.level

    def start(level: str = "info", json_output: bool = True, **options) -> io.StringIO:
        stream = io.StringIO()
        configure_logging(level, json_output, stream=stream, **options)
        return stream

    yield start
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])


def only_line(stream: io.StringIO) -> str:
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_json_line_of_a_finished_generation(configure):
    stream = configure()
    log_success(TIMINGS, 7, "abc-1", "generate_stream")
    line = json.loads(only_line(stream))
    span = {
        "name": "generate_stream",
        "total_time": "1.25s",
        "validation_time": "500µs",
        "queue_time": "12.3ms",
        "inference_time": "1.2s",
        "time_per_token": "12ms",
        "seed": "Some(7)",
    }
    assert line.pop("span") == span
    assert line.pop("spans") == [span]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("timestamp"))
    assert line.pop("filename") == "logs.py" and isinstance(line.pop("line_number"), int)
    assert line == {
        "level": "INFO",
        "message": "Success",
        "target": "text_generation_inference.api.logs",
        "request_id": "abc-1",
    }


def test_text_line_of_a_finished_generation(configure):
    stream = configure(json_output=False)
    log_success(TIMINGS, None, "abc-1")
    assert re.fullmatch(
        r"\S+Z  INFO generate: Success total_time=1.25s validation_time=500µs queue_time=12.3ms inference_time=1.2s "
        r"time_per_token=12ms seed=None request_id=abc-1",
        only_line(stream),
    )


def test_fields_are_flattened_and_nested(configure):
    stream = configure()
    log.warning("Port taken", extra=fields(port=8080, share=0.5, missing=None, bad=float("nan")))
    line = json.loads(only_line(stream))
    assert line["level"] == "WARN" and line["message"] == "Port taken"
    assert (line["port"], line["share"], line["missing"], line["bad"]) == (8080, 0.5, None, "nan")
    stream = configure(nested=True)
    log.error("Port taken", extra=fields(port=8080))
    line = json.loads(only_line(stream))
    del line["timestamp"]
    assert line == {
        "level": "ERROR",
        "fields": {"port": 8080, "message": "Port taken"},
        "target": "text_generation_inference.test",
    }


def test_a_field_never_hides_the_message(configure):
    stream = configure()
    log.info("real", extra=fields(message="fake", level="fake", timestamp="fake"))
    line = json.loads(only_line(stream))
    assert line["message"] == "real" and line["level"] == "INFO" and line["timestamp"] != "fake"


@given(message=st.text(alphabet=st.characters(codec=None, exclude_categories=())), value=st.text())
def test_every_message_is_one_valid_json_line(message, value):
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging("info", True, stream=stream)
        log.info(message, extra=fields(value=value))
    finally:
        root.handlers[:], root.level = before
    output = stream.getvalue()
    assert output.endswith("\n") and "\n" not in output[:-1]
    output.encode()
    line = json.loads(output)
    if message.isprintable():
        assert line["message"] == message


def test_text_lines_cannot_be_forged(configure):
    stream = configure(json_output=False)
    log.info("a\nFAKE\x1b[31m\u2028b", extra=fields(request_id="x\r\nFAKE line", empty=""))
    line = only_line(stream)
    assert r"a\nFAKE\x1b[31m\u2028b" in line
    assert r'request_id="x\r\nFAKE line" empty=""' in line


def test_wrong_format_arguments_do_not_lose_the_line(configure):
    stream = configure()
    log.info("%d items of %s", "three")
    assert json.loads(only_line(stream))["message"] == "%d items of %s"


def test_exceptions(configure):
    def fail(**options) -> io.StringIO:
        stream = configure(secrets=["s3cret-key"], **options)
        try:
            raise RuntimeError("with s3cret-key inside")
        except RuntimeError:
            log.exception("Engine failed")
        return stream

    line = json.loads(only_line(fail()))
    assert line["message"] == "Engine failed" and "RuntimeError: with *** inside" in line["exception"]
    text = fail(json_output=False).getvalue().splitlines()
    assert (
        text[0].endswith("text_generation_inference.test: Engine failed")
        and text[-1] == "RuntimeError: with *** inside"
    )


@pytest.mark.parametrize("json_output", [True, False])
def test_secrets_are_blanked(configure, json_output):
    stream = configure(json_output=json_output, secrets=['key"with\\quote', "abc123", "abc", None, ""])
    log.info("key %s, %s", 'key"with\\quote', "abc123", extra=fields(token="abc123", header="Bearer xyz.uvw"))
    log.info("downloading with hf_abcdefghijklmnop and authorization: bearer tok-tok")
    output = stream.getvalue()
    for secret in ("with", "quote", "abc123", "hf_abcd", "xyz", "tok-tok"):
        assert secret not in output.replace("downloading with", "")
    assert output.count("***") == 6


def test_levels(configure):
    stream = configure("warn")
    log.info("quiet")
    log_success(TIMINGS, None, "1")
    log.warning("loud")
    assert json.loads(only_line(stream))["message"] == "loud"
    stream = configure("debug")
    log.debug("detail")
    logging.getLogger("some.library").info("GET /")  # others: warnings alone
    logging.getLogger("some.library").error("broken")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [("DEBUG", "detail"), ("ERROR", "broken")]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("info", logging.INFO),
        ("DEBUG", logging.DEBUG),
        ("trace", logging.DEBUG),
        (" warn ", logging.WARNING),
        ("error", logging.ERROR),
        ("", logging.INFO),
        ("text_generation_router=debug,text_generation_launcher=info", logging.DEBUG),
        ("error,text_generation_router=warn", logging.WARNING),
        ("debug,text_generation_router=error", logging.ERROR),
        ("text_generation_router_v3::server=debug", logging.DEBUG),
        ("text_generation_router[generate]=debug", logging.DEBUG),
        ("tgi=debug,hyper=error", logging.DEBUG),
        ("hyper=debug", logging.INFO),
        ("warn,hyper=debug", logging.WARNING),
        ("text_generation_launcher", logging.DEBUG),
        ("loud", None),
        ("text_generation_router=loud", None),
    ],
)
def test_filter_strings(text, level):
    assert parse_level(text) == level


def test_off_is_silent(configure):
    stream = configure("off")
    log.critical("anything")
    assert stream.getvalue() == ""


def test_a_level_that_is_none_is_said(configure):
    stream = configure("loud")
    line = json.loads(only_line(stream))
    assert line["level"] == "WARN" and line["given"] == "loud" and "LOG_LEVEL" in line["message"]


def test_configuring_again_replaces(configure):
    first = configure()
    second = configure()
    log.info("once")
    assert first.getvalue() == "" and json.loads(only_line(second))["message"] == "once"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ns"),
        (80e-9, "80ns"),
        (7.5e-6, "7.5µs"),
        (0.0456, "45.6ms"),
        (0.001, "1ms"),
        (1.23, "1.23s"),
        (61.0, "61s"),
        (1.000000001, "1.000000001s"),
        (-0.1, "0ns"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


SCRIPT = "from text_generation_inference.api.logs import configure_logging, log; configure_logging('info', False); log.warning('hello')"


def test_colours_on_a_terminal_only():
    piped = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    assert b"hello" in piped.stderr and b"\x1b" not in piped.stderr and piped.stdout == b""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs) as process:
        assert process.wait() == 0
        shown = os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    assert b"\x1b[33m WARN\x1b[0m text_generation_inference.api.logs: hello" in shown


# -- lines that nobody reads ---------------------------------------------------------------------------------------


def logger_into(descriptor: int, max_bytes: int = 20_000) -> tuple[logging.Logger, QueuedHandler]:
    handler = QueuedHandler(descriptor, max_bytes)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.Logger("unread")
    logger.addHandler(handler)
    return logger, handler


def test_a_pipe_that_nobody_reads_drops_lines_and_tells():
    theirs, ours = os.pipe()
    logger, handler = logger_into(ours)
    for number in range(5_000):  # far more than a pipe and the queue hold; a handler that waits never gets past it
        logger.warning("%05d %s", number, "x" * 90)
    assert 3_000 < handler.num_dropped < 5_000
    with ThreadPoolExecutor(1) as pool, os.fdopen(theirs) as pipe:
        reading = pool.submit(pipe.read)
        handler.flush()  # somebody reads now
        logger.warning("flows again")
        handler.close()
        os.close(ours)
        *lines, last = reading.result(30).splitlines()
    assert last == "flows again"
    told = [line for line in lines if line == "Nobody read the log: lines were dropped"]
    numbers = [int(line[:5]) for line in lines if line not in told]
    assert told and numbers == sorted(numbers)  # in order, none in part
    assert len(numbers) + handler.num_dropped == 5_000


def test_the_end_waits_for_nobody():
    theirs, ours = os.pipe()
    logger, handler = logger_into(ours)
    for _ in range(2_000):
        logger.warning("x" * 90)
    begin = time.monotonic()
    handler.close()
    assert time.monotonic() - begin < 10
    os.close(theirs)
    os.close(ours)


def test_last_words_are_not_lost():
    script = (
        "import logging; from text_generation_inference.api.logs import configure_logging, log; configure_logging('info', False)\n"
        "for number in range(3000): log.warning('line %d', number)\n"
        "raise RuntimeError('the end')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    lines = [line.rsplit(b" ", 1)[1] for line in done.stderr.splitlines() if b": line " in line]
    assert lines == [b"%d" % number for number in range(3000)]
    assert b"RuntimeError: the end" in done.stderr
