"""Log lines that people and machines read: time, level, message, then key=value facts."""

from __future__ import annotations

import json
import logging
import sys
import time


class FactsFormatter(logging.Formatter):
    """`2026-11-30T05:16:00.123Z INFO request path=/v1/models status=200`; facts come in `extra={"facts": {…}}`."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts = getattr(record, "facts", None) or {}
        words = [f"{at}.{int(record.msecs):03d}Z", record.levelname, record.getMessage().replace("\n", "\\n")]
        words += [f"{name}={_value(value)}" for name, value in facts.items()]
        line = " ".join(words)
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


def set_up(level: int = logging.INFO) -> None:
    """Send our log lines to stderr. For programs: the package itself never calls it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FactsFormatter())
    for name, lowest in (("triptych", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(lowest)
        logger.propagate = False


def _value(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=') else json.dumps(text)
