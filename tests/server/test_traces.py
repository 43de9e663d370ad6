"""Traces: a span for each request, its stages below it, in the caller's own trace where it names one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from asking import png, see
from triptych.core.stages import Spent
from triptych.errors import ConfigError
from triptych.server.app import create_app
from triptych.server.config import ServerConfig
from triptych.server.run import background
from triptych.testing import tiny_session

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from triptych.server.traces import Traces, open_traces

CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@contextmanager
def traced(config: ServerConfig | None = None) -> Iterator[tuple[str, list[ReadableSpan]]]:
    """A server's URL, and its spans once the block has ended."""
    spans: list[ReadableSpan] = []
    exporter = InMemorySpanExporter()
    with tiny_session() as session:
        traces = Traces(exporter)
        with background(create_app(session, config, traces)) as url:
            yield url, spans
        traces._provider.force_flush()
        spans += exporter.get_finished_spans()
        traces.close()


def chat(url: str, **headers: str) -> httpx.Response:
    body = {"messages": see("What is it?", png(80)), "max_tokens": 3}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_a_request_is_one_span_with_its_stages_below_it_in_order():
    with traced() as (url, spans):
        assert chat(url).status_code == 200
    whole = next(span for span in spans if span.parent is None)
    stages = sorted((span for span in spans if span.parent is not None), key=lambda span: span.start_time)

    assert whole.name == "POST /v1/chat/completions"
    assert [span.name for span in stages][:4] == ["fetch", "tokenize", "unpack", "preprocess"]
    assert {span.name for span in stages} == {
        *("fetch", "tokenize", "unpack", "preprocess", "queue", "encode", "prefill", "decode")
    }
    for span in stages:
        assert span.parent.span_id == whole.context.span_id
        assert whole.start_time - 1e6 <= span.start_time <= span.end_time <= whole.end_time + 5e6
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    assert whole.attributes["gen_ai.usage.input_tokens"] > 0
    assert whole.attributes["triptych.images"] == 1
    assert {span.attributes["triptych.modality"] for span in stages} == {"image", "text"}


def test_a_callers_trace_is_continued_and_a_broken_one_is_not():
    with traced() as (url, spans):
        chat(url, traceparent=CALLER)
        chat(url, traceparent="00-zz-1-01")
    first, second = (span for span in spans if span.name.startswith("POST"))

    assert f"{first.context.trace_id:032x}" == "0123456789abcdef0123456789abcdef"
    assert f"{first.parent.span_id:016x}" == "0123456789abcdef"
    assert second.parent is None


def test_what_is_refused_is_a_span_that_failed_and_probes_are_none():
    with traced(ServerConfig(api_keys=("sesame",))) as (url, spans):
        assert chat(url).status_code == 401
        refused = httpx.post(f"{url}/v1/chat/completions", json={}, headers={"authorization": "Bearer sesame"})
        assert refused.status_code == 400
        httpx.get(f"{url}/my-secret-path", headers={"authorization": "Bearer sesame"})
        httpx.get(f"{url}/health")
        httpx.get(f"{url}/page/app.js")

    assert [span.attributes["http.response.status_code"] for span in spans] == [401, 400, 404]
    assert [span.name for span in spans] == ["turned away", "POST /v1/chat/completions", "turned away"]
    assert spans[1].attributes["error.type"] == "invalid_value"
    assert spans[1].status.status_code is StatusCode.ERROR


def test_no_span_holds_what_a_caller_wrote():
    with traced() as (url, spans):
        body = {"messages": see("my secret words", png(3)), "max_tokens": 2, "user": "my secret name"}
        httpx.post(f"{url}/v1/chat/completions?key=secret", json=body, timeout=60)

    assert len(spans) > 5
    assert not [span for span in spans if "secret" in span.to_json() or "base64" in span.to_json()]


def test_the_log_names_the_trace(caplog):
    with caplog.at_level("INFO", "triptych.server"), traced() as (url, _):
        chat(url, traceparent=CALLER)
    facts = next(record.facts for record in caplog.records if record.getMessage() == "request")

    assert facts["trace"] == "0123456789abcdef0123456789abcdef"


def test_spans_are_sent_by_otlp_over_http(monkeypatch):
    taken: list[tuple[str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, len(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    with closing_server(HTTPServer(("127.0.0.1", 0), Collector)) as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        for endpoint in (None, f"http://127.0.0.1:{port}/other"):
            with closing(open_traces(endpoint)) as traces:
                traces.end(traces.begin("POST", "/v1/x", None), 200, {}, ())

    assert [path for path, _ in taken] == ["/v1/traces", "/other"]
    assert all(size > 100 for _, size in taken)


@contextmanager
def closing_server(server: HTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_without_opentelemetry_the_operator_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="not installed") as told:
        open_traces("http://127.0.0.1:1/v1/traces")

    assert told.value.hint == "pip install '.[otel]' in Triptych's folder"


def test_facts_of_any_kind_become_attributes():
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    stages: tuple[Spent, ...] = ()
    traces.end(traces.begin("GET", "/", None), 503, {"finish": "stop", "odd": {"a": 1}, "flag": True}, stages)
    traces.close()
    (span,) = exporter.get_finished_spans()

    assert json.loads(span.to_json())["attributes"]["triptych.odd"] == "{'a': 1}"
    assert span.attributes["triptych.flag"] is True
    assert span.status.status_code is StatusCode.ERROR
