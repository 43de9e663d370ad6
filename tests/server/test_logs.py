"""Log lines, as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys

from hypothesis import given
from hypothesis import strategies as st

from triptych.server.logs import FactsFormatter, JsonFormatter

FACTS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.booleans(), st.none()),
    max_size=5,
)


def record(message: str, facts: dict[str, object], exc_info: object = None) -> logging.LogRecord:
    made = logging.LogRecord("triptych.server", logging.INFO, "", 0, message, (), exc_info)  # type: ignore[arg-type]
    made.facts = facts
    return made


@given(st.text(), FACTS)
def test_a_json_line_is_one_object_with_every_fact(message, facts):
    line = JsonFormatter().format(record(message, facts))
    read = json.loads(line)

    assert "\n" not in line
    assert read["level"] == "INFO"
    assert read["logger"] == "triptych.server"
    assert read["message"] == message
    for name, value in facts.items():
        assert name in ("time", "level", "logger", "message") or read[name] == value


@given(st.text(), FACTS)
def test_a_text_line_is_one_line(message, facts):
    line = FactsFormatter().format(record(message, facts))

    assert len(line.split("\n")) == 1
    for name in facts:
        assert f" {name}=" in line


def test_an_exception_is_a_field_of_its_own():
    try:
        raise ValueError("no")
    except ValueError:
        line = JsonFormatter().format(record("failed", {"request": "7"}, sys.exc_info()))

    assert json.loads(line)["exception"].endswith("ValueError: no")
    assert json.loads(line)["request"] == "7"
