"""Log lines of the launcher and the api process: compact text, or one JSON object per line.

On the standard `logging`: any module logs with `logging.getLogger(__name__)`, and adds fields with
`extra=fields(port=8080)`. A line never holds prompt or generated text: callers log counts and times. Secrets given to
`configure_logging`, and what looks like a token, are blanked here whatever the caller does.
"""

import json
import logging
import math
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TextIO

from text_generation_inference.api.log_queue import QueuedHandler
from text_generation_inference.api.metrics import Timings

log = logging.getLogger(__name__)

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_COLOURS = {"DEBUG": "34", "INFO": "32", "WARN": "33", "ERROR": "31"}
_OURS = re.compile(r"(text_generation|tgi\b)")  # TGI's crates in a filter, and our package
_TOKENS = re.compile(r"\bhf_[A-Za-z0-9]{8,}|(?<=bearer )\S+|\bsk-[A-Za-z0-9_-]{16,}", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_BLANK = "***"
_MIN_SECRET = 4  # blanking every "a" would leave no log


def configure_logging(
    level: str,
    json_output: bool,
    *,
    nested: bool = False,
    secrets: Iterable[str | None] = (),
    colours: bool | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send what is logged here at `level`, and warnings of everything else, to stderr, without waiting for a reader.

    `nested` puts message and fields under `fields`, as TGI's launcher does; its router has them at the top.
    `colours` of None means: on a terminal.
    """
    output: TextIO = sys.stderr if stream is None else stream
    hidden = sorted({secret for secret in secrets if secret and len(secret) >= _MIN_SECRET}, key=len, reverse=True)
    handler = _make_handler(output) if stream is None else logging.StreamHandler(output)
    if json_output:
        handler.setFormatter(JsonLines(hidden, nested))
    else:
        handler.setFormatter(TextLines(hidden, output.isatty() if colours is None else colours))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        if isinstance(old, QueuedHandler):
            old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    parsed = parse_level(level)
    logging.getLogger("text_generation_inference").setLevel(logging.INFO if parsed is None else parsed)
    if parsed is None:
        log.warning(
            "LOG_LEVEL is no filter: use error, warn, info or debug. Logging at info", extra=fields(given=level)
        )


def _make_handler(output: TextIO) -> logging.Handler:
    try:
        return QueuedHandler(output.fileno())
    except (OSError, ValueError):  # no descriptor behind it
        return logging.StreamHandler(output)


def num_dropped_lines() -> int:
    """Lines of this process that nobody read in time."""
    return sum(handler.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, QueuedHandler))


def parse_level(text: str) -> int | None:
    """The level for us in a `LOG_LEVEL` such as `debug` or `error,text_generation_router=debug,hyper=off`.

    The most verbose directive that names us wins, then one without a target, then info. None: not a filter.
    """
    named: list[int] = []
    general: list[int] = []
    for directive in filter(None, (part.strip() for part in text.lower().split(","))):
        target, equals, level = (part.strip() for part in directive.rpartition("="))
        if not equals and level in _LEVELS:
            general.append(_LEVELS[level])
        elif equals and level not in _LEVELS:
            return None
        elif _OURS.match(target if equals else level):
            named.append(_LEVELS[level] if equals else logging.DEBUG)
        elif not equals:
            return None
    return min(named or general or [logging.INFO])


def fields(**values: object) -> dict[str, Any]:
    """The `extra` of a log call: values printed as key=value, or as members of the JSON object."""
    return {"fields": values}


# -- one finished generation ---------------------------------------------------------------------------------------


def span_fields(timings: Timings, seed: int | None) -> dict[str, str]:
    """What TGI says of a finished generation, in its log line and in its trace span."""
    return {
        "total_time": duration_text(timings.total_s),
        "validation_time": duration_text(timings.validation_s),
        "queue_time": duration_text(timings.queue_s),
        "inference_time": duration_text(timings.inference_s),
        "time_per_token": duration_text(timings.per_token_s),
        "seed": "None" if seed is None else f"Some({seed})",
    }


def log_success(timings: Timings, seed: int | None, request_id: str, span: str = "generate") -> None:
    """One line per finished generation. `span` is the operation: `generate`, `chat_completions` ..."""
    if log.isEnabledFor(logging.INFO):
        values = {"name": span, **span_fields(timings, seed)}
        log.info("Success", extra={"span": values, "fields": {"request_id": request_id}})


def duration_text(seconds: float) -> str:
    """`1.234s`, `45.6ms`, `7.5µs`, `80ns`: the largest unit that leaves at least 1, without trailing zeros."""
    nanoseconds = max(round(seconds * 1e9), 0)
    for unit, size, digits in (("s", 10**9, 9), ("ms", 10**6, 6), ("µs", 10**3, 3)):
        if nanoseconds >= size:
            whole, rest = divmod(nanoseconds, size)
            fraction = f"{rest:0{digits}}".rstrip("0")
            return f"{whole}.{fraction}{unit}" if fraction else f"{whole}{unit}"
    return f"{nanoseconds}ns"


# -- lines ---------------------------------------------------------------------------------------------------------


class _LineFormatter(logging.Formatter):
    """What both forms share."""

    def __init__(self, secrets: list[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def _safe(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _BLANK)
        return _TOKENS.sub(_BLANK, text)

    def _message(self, record: logging.LogRecord) -> str:
        try:
            return self._safe(record.getMessage())
        except Exception:  # arguments that do not fit the format: the line still says where it came from
            return self._safe(str(record.msg))

    def _traceback(self, record: logging.LogRecord) -> str:
        return self._safe(self.formatException(record.exc_info)) if record.exc_info else ""


class TextLines(_LineFormatter):
    """`2026-01-31T12:00:00.000000Z  INFO text_generation_inference.api.app: Listening port=8080`."""

    def __init__(self, secrets: list[str], colours: bool) -> None:
        super().__init__(secrets)
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        level = _level_name(record)
        padded = f"{level:>5}"
        if self._colours:
            padded = f"\x1b[{_COLOURS[level]}m{padded}\x1b[0m"
        span: dict[str, Any] = dict(getattr(record, "span", {}))
        name = span.pop("name", None)
        where = f"{record.name}: " if name is None else f"{name}: "
        values = {**span, **getattr(record, "fields", {})}
        pairs = "".join(f" {key}={_quoted(self._safe(str(value)))}" for key, value in values.items())
        line = f"{_timestamp(record)} {padded} {where}{_one_line(self._message(record))}{pairs}"
        trace = self._traceback(record)
        return f"{line}\n{trace}" if trace else line


class JsonLines(_LineFormatter):
    """One JSON object per line, with the keys of TGI's own."""

    def __init__(self, secrets: list[str], nested: bool) -> None:
        super().__init__(secrets)
        self._nested = nested

    def format(self, record: logging.LogRecord) -> str:
        event = {key: self._value(value) for key, value in getattr(record, "fields", {}).items()}
        if trace := self._traceback(record):
            event["exception"] = trace
        head: dict[str, Any] = {"timestamp": _timestamp(record), "level": _level_name(record)}
        message = {"message": self._message(record)}
        where = {"target": record.name, "filename": record.filename, "line_number": record.lineno}
        if self._nested:
            line = {**head, "fields": {**event, **message}, "target": record.name}
        else:
            line = {**event, **head, **message, **where}
        if values := getattr(record, "span", None):
            span = {key: self._value(value) for key, value in values.items()}
            line |= {"span": span, "spans": [span]}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8", "replace").decode()  # a lone surrogate is no JSON text

    def _value(self, value: object) -> str | int | float | None:
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        return self._safe(str(value))


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _level_name(record: logging.LogRecord) -> str:
    if record.levelno >= logging.ERROR:
        return "ERROR"
    if record.levelno >= logging.WARNING:
        return "WARN"
    return "INFO" if record.levelno >= logging.INFO else "DEBUG"


def _one_line(text: str) -> str:
    """Control characters escaped, so that nobody can forge a line or colour a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _quoted(text: str) -> str:
    plain = text != "" and re.search(r'[\s"=]', text) is None
    return _one_line(text if plain else json.dumps(text, ensure_ascii=False))
