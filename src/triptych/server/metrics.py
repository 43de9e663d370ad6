"""What `/metrics` tells Prometheus: vLLM's names where the meaning is the same, ours beside them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from triptych.engine.loop import EngineStats
from triptych.session import Session, TextDelta

FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the whole body received to the first token.", FIRST_S),
    "inter_token_latency_seconds": ("Between one piece of an answer and the next.", BETWEEN_S),
    "e2e_request_latency_seconds": ("From the whole body received to the last token.", WHOLE_S),
    "request_queue_time_seconds": ("Waiting for the engine.", WHOLE_S),
    "request_prefill_time_seconds": ("From the first step of a prompt to the first token.", WHOLE_S),
    "request_decode_time_seconds": ("From the first token to the last.", WHOLE_S),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", TOKENS),
}


class Metrics:
    """Counts what the endpoints see, and asks the engine for the rest when it is scraped."""

    def __init__(self, session: Session, model_name: str) -> None:
        self.registry = CollectorRegistry()
        labels, names = {"model_name": model_name}, ["model_name"]
        self._histograms = {
            name: Histogram(f"vllm:{name}", help, names, buckets=buckets, registry=self.registry).labels(**labels)
            for name, (help, buckets) in HISTOGRAMS.items()
        }
        self._prepare = Histogram(
            "triptych:prepare_seconds",
            "Fetching, decoding and tokenising a prompt, waiting for a thread included.",
            [*names, "modality"],
            buckets=FIRST_S,
            registry=self.registry,
        )
        self._images = Counter(
            "triptych:images", "Pictures in prompts that were prepared.", names, registry=self.registry
        ).labels(**labels)
        self._refused = Counter(
            "triptych:refused_requests", "Requests refused.", [*names, "status", "code"], registry=self.registry
        )
        self._finished = Counter(
            "vllm:request_success",
            "Answers that ended, by reason.",
            [*names, "finished_reason"],
            registry=self.registry,
        )
        self._model_name = model_name
        for reason in ("stop", "length", "abort", "error"):
            self.finished(reason, 0)
        self.registry.register(_Engine(session, model_name))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def finished(self, reason: str, number: int = 1) -> None:
        self._finished.labels(self._model_name, reason).inc(number)

    def refused(self, status: int, code: str | None) -> None:
        self._refused.labels(self._model_name, str(status), code or "").inc()

    @contextlib.contextmanager
    def preparing(self, num_images: int) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        modality = "image" if num_images else "text"
        self._prepare.labels(self._model_name, modality).observe(time.perf_counter() - started_s)
        self._images.inc(num_images)


class Watch:
    """Times one answer from its deltas."""

    def __init__(self, metrics: Metrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._last_s: float | None = None

    def see(self, delta: TextDelta) -> None:
        now_s = time.perf_counter()
        if delta.token_ids:
            if self._last_s is None:
                self._metrics.observe("time_to_first_token_seconds", now_s - self._arrived_s)
            else:
                self._metrics.observe("inter_token_latency_seconds", now_s - self._last_s)
            self._last_s = now_s
        if delta.finish is not None:
            self._finish(delta, now_s)

    def _finish(self, delta: TextDelta, now_s: float) -> None:
        assert delta.finish is not None
        self._metrics.finished(delta.finish.value)
        self._metrics.observe("e2e_request_latency_seconds", now_s - self._arrived_s)
        if delta.usage is not None:
            self._metrics.observe("request_prompt_tokens", delta.usage.prompt_tokens)
            self._metrics.observe("request_generation_tokens", delta.usage.completion_tokens)
        if delta.timing is not None:
            self._metrics.observe("request_queue_time_seconds", delta.timing.queue_s)
            self._metrics.observe("request_prefill_time_seconds", delta.timing.prefill_s)
            self._metrics.observe("request_decode_time_seconds", delta.timing.decode_s)


class _Engine(Collector):
    """The engine's own counts, read at the moment of the scrape."""

    def __init__(self, session: Session, model_name: str) -> None:
        self._session = session
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        return ()  # or registering would ask the engine

    def collect(self) -> Iterator[Metric]:
        stats = self._session.stats()
        gauges = (
            ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests that wait for the engine.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1.", stats.kv_usage),
            ("triptych:encoder_cache_bytes", "Bytes of encoder outputs held.", stats.encoder_bytes),
            ("triptych:since_progress_seconds", "Since the engine last moved with work to do.", stats.since_progress_s),
            ("triptych:engine_alive", "1 while the engine's thread lives.", int(stats.is_alive)),
        )
        counters = (
            ("vllm:num_preemptions", "Requests put back to be computed again.", stats.preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("vllm:mm_cache_queries", "Media items looked up in the encoder cache.", stats.encoder_queries),
            ("vllm:mm_cache_hits", "Media items found in the encoder cache.", stats.encoder_hits),
            ("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens answered.", stats.generation_tokens),
            ("triptych:evicted_tokens", "Cached tokens forgotten, as a mean over layers.", stats.evicted_tokens),
            ("triptych:kv_compactions", "Times that a sequence forgot and gave blocks back.", stats.compactions),
            ("vllm:corrupted_requests", "Requests whose logits held NaN.", stats.corrupted),
            ("triptych:engine_steps", "Steps of the engine.", stats.steps),
        )
        for name, help, value in gauges:
            yield self._one(GaugeMetricFamily(name, help, labels=["model_name"]), value)
        for name, help, value in counters:
            yield self._one(CounterMetricFamily(name, help, labels=["model_name"]), value)
        yield self._stages(stats)
        yield self._places()

    def _one(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._model_name], value)
        return family

    def _stages(self, stats: EngineStats) -> Metric:
        family = SummaryMetricFamily(
            "triptych:stage_seconds", "Time in each stage.", labels=["model_name", "stage", "modality"]
        )
        for (stage, modality), seconds in stats.stage_seconds.items():
            calls = stats.stage_calls.get((stage, modality), 0)  # counted a moment after the seconds
            family.add_metric([self._model_name, stage, modality], count_value=calls, sum_value=seconds)
        return family

    def _places(self) -> Metric:
        family = GaugeMetricFamily(
            "triptych:part_info", "Where each part runs; always 1.", labels=["model_name", "part", "place"]
        )
        for part, place in self._session.placements().items():
            family.add_metric([self._model_name, part, place], 1)
        return family
