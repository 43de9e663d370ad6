"""Log lines for people or machines: time, level, message and facts, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, Literal

Format = Literal["text", "json"]
MESSAGE = 200  # characters of an exception's own words
MAX_CAUSES = 5


class FactsFormatter(logging.Formatter):
    """`2026-11-30T05:16:00.123Z INFO request path=/v1/models status=200`; facts come in `extra={"facts": {…}}`."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_time(record), record.levelname, record.getMessage().replace("\n", "\\n")]
        words += [f"{name}={_value(value)}" for name, value in _facts(record).items()]
        line = " ".join(words)
        return line if not record.exc_info else f"{line}\n{_exception(record)}"


class JsonFormatter(logging.Formatter):
    """The same, an object a line: `time`, `level`, `logger`, `message`, the facts, and the `exception` if any."""

    def format(self, record: logging.LogRecord) -> str:
        known = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            known["exception"] = _exception(record)
        return json.dumps({**known, **_facts(record), **known}, default=str)


def set_up(level: int = logging.INFO, format: Format = "text") -> None:
    """Send our log lines to stderr. For programs: the package itself never calls it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FactsFormatter() if format == "text" else JsonFormatter())
    for name, lowest in (("triptych", level), ("uvicorn", logging.WARNING), ("opentelemetry", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(lowest)
        logger.propagate = False


def _exception(record: logging.LogRecord) -> str:
    """Where it came from and what it is; of its message a line, which may repeat what a caller sent."""
    error = record.exc_info[1] if record.exc_info else None
    told: list[str] = []
    while error is not None and len(told) < MAX_CAUSES:
        frames = "".join(traceback.format_tb(error.__traceback__))
        words = next(iter(str(error)[:MESSAGE].splitlines()), "")
        told.append(f"Traceback (most recent call last):\n{frames}{type(error).__name__}: {words}")
        group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        error = next(iter(group), None) or error.__cause__ or error.__context__
    return "\ncaused by\n".join(told)


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "facts", None) or {}


def _time(record: logging.LogRecord) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{at}.{int(record.msecs):03d}Z"


def _value(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=') else json.dumps(text)
