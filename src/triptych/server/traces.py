"""OpenTelemetry: a span for each request, its stages below it, sent by OTLP where that is asked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from triptych.core.stages import Spent
from triptych.errors import ConfigError, install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

NAME = "triptych"

# Our facts of a request, in the words of OpenTelemetry's conventions for generative models.
ATTRIBUTES = {
    "id": "gen_ai.response.id",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "error": "error.type",
}


class Traces:
    """Makes spans and hands them to an exporter, which sends them from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource({SERVICE_NAME: NAME}).merge(Resource.create())  # OTEL_SERVICE_NAME goes first
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(NAME)
        self._propagator = TraceContextTextMapPropagator()
        self._wall_ns = time.time_ns() - time.perf_counter_ns()

    def begin(self, method: str, path: str, traceparent: str | None) -> Span:
        """A request's span; it goes on with the caller's trace where it names one (W3C's `traceparent`)."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract({} if traceparent is None else {"traceparent": traceparent})
        method = method[:20]
        attributes = {"http.request.method": method, "url.path": path}
        return self._tracer.start_span(f"{method} {path}", context, kind=SpanKind.SERVER, attributes=attributes)

    def end(self, span: Span, status: int, facts: Mapping[str, object], stages: Iterable[Spent]) -> None:
        """Close it, with what became of the request, and with its stages below it."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        context = set_span_in_context(span)
        for stage in stages:
            began_ns = self._wall_ns + int(stage.began_s * 1e9)
            attributes = {"triptych.modality": stage.modality.name.lower()}
            child = self._tracer.start_span(stage.stage, context, start_time=began_ns, attributes=attributes)
            child.end(began_ns + int(stage.seconds * 1e9))
        span.set_attribute("http.response.status_code", status)
        for name, value in facts.items():
            if name == "trace":
                continue
            span.set_attribute(ATTRIBUTES.get(name, f"triptych.{name}"), _attribute(value))
        if status in (401, 403, 404, 405):  # names are few, for collectors group by them: these callers choose theirs
            span.update_name("turned away")
        if status >= 500 or "error" in facts:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def open_traces(endpoint: str | None) -> Traces:
    """endpoint: where OTLP over HTTP is taken; None: as OpenTelemetry's own environment says. Raises ConfigError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError("traces were asked for, and OpenTelemetry is not installed", hint=install("otel")) from None
    return Traces(OTLPSpanExporter(endpoint=endpoint))


def trace_id_of(span: Span) -> str:
    return f"{span.get_span_context().trace_id:032x}"


def _attribute(value: object) -> Any:
    return value if isinstance(value, bool | int | float) else str(value)
