"""What `/metrics` tells Prometheus: vLLM's names where the meaning is the same, ours beside them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.core.request import Timing
from triptych.core.spec import Modality
from triptych.core.stages import BOUNDS_S, Key, Spent, StageClock
from triptych.engine.stats import EngineStats
from triptych.server.recent import Recent
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

# What the dashboard shows percentiles of, and the histogram that counts the same.
RECENT = {
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "whole": "e2e_request_latency_seconds",
}


class Metrics:
    """Counts what the endpoints see, and asks the engine for the rest when it is scraped."""

    def __init__(self, session: Session, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.recent = {name: Recent() for name in RECENT}
        self.clock = StageClock()  # of the stages outside the engine
        self.num_images = 0
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
        self._tokens = Counter(
            "triptych:prompt_tokens", "Tokens of answered prompts.", [*names, "modality"], registry=self.registry
        )
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
        self.registry.register(_Engine(session, self, model_name))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def measure(self, name: str, seconds: float) -> None:
        """One of `RECENT`."""
        self.recent[name].add(seconds)
        self.observe(RECENT[name], seconds)

    def finished(self, reason: str, number: int = 1) -> None:
        self._finished.labels(self._model_name, reason).inc(number)

    def refused(self, status: int, code: str | None) -> None:
        self._refused.labels(self._model_name, str(status), code or "").inc()

    def num_finished(self) -> dict[str, int]:
        """Answers by the reason of their end."""
        return _by_label(self._finished, "finished_reason")

    def num_refused(self) -> dict[str, int]:
        """Requests by the code of their refusal."""
        return _by_label(self._refused, "code")

    @contextlib.contextmanager
    def preparing(self, num_images: int) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        modality = "image" if num_images else "text"
        self._prepare.labels(self._model_name, modality).observe(time.perf_counter() - started_s)
        self._images.inc(num_images)
        self.num_images += num_images

    def spent(self, stages: Iterable[Spent]) -> None:
        """Stages outside the engine."""
        for one in stages:
            self.clock.add(one.stage, one.modality, one.seconds)

    def answered(self, prompt_tokens: int, image_tokens: int) -> None:
        self._tokens.labels(self._model_name, "text").inc(prompt_tokens - image_tokens)
        self._tokens.labels(self._model_name, "image").inc(image_tokens)

    def stages(self, stats: EngineStats) -> Iterator[tuple[Key, float, tuple[int, ...]]]:
        """Every stage of requests: its key, its seconds, and its calls in each bucket of `BOUNDS_S`."""
        seconds = {**stats.stage_seconds, **self.clock.seconds}
        for key, buckets in {**stats.stage_buckets, **self.clock.buckets()}.items():
            yield key, seconds[key], buckets


def _by_label(counter: Counter, name: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total") and sample.value:
                label = sample.labels[name]
                found[label] = found.get(label, 0) + int(sample.value)
    return found


class Watch:
    """Times one answer from its deltas."""

    def __init__(self, metrics: Metrics, stages: list[Spent], arrived_s: float) -> None:
        """stages: where its own are added, for the request's trace."""
        self._metrics = metrics
        self._stages = stages
        self._arrived_s = arrived_s
        self._started_s = time.perf_counter()
        self._last_s: float | None = None

    def see(self, delta: TextDelta) -> None:
        now_s = time.perf_counter()
        if delta.token_ids:
            if self._last_s is None:
                self._metrics.measure("first_token", now_s - self._arrived_s)
            else:
                self._metrics.measure("between_tokens", now_s - self._last_s)
            self._last_s = now_s
        if delta.finish is not None:
            self._finish(delta, now_s)

    def _finish(self, delta: TextDelta, now_s: float) -> None:
        assert delta.finish is not None
        metrics, modality = self._metrics, Modality.TEXT
        metrics.finished(delta.finish.value)
        metrics.measure("whole", now_s - self._arrived_s)
        if delta.usage is not None:
            modality = Modality.IMAGE if delta.usage.image_tokens else Modality.TEXT
            metrics.observe("request_prompt_tokens", delta.usage.prompt_tokens)
            metrics.observe("request_generation_tokens", delta.usage.completion_tokens)
            metrics.answered(delta.usage.prompt_tokens, delta.usage.image_tokens)
        if delta.timing is not None:
            metrics.observe("request_queue_time_seconds", delta.timing.queue_s)
            metrics.observe("request_prefill_time_seconds", delta.timing.prefill_s)
            metrics.observe("request_decode_time_seconds", delta.timing.decode_s)
            queue, *others = _stages(delta.timing, modality, self._started_s)
            metrics.spent([queue])  # the others are counted by the step, in the engine
            self._stages += [queue, *others]
        metrics.clock.add("detokenize", modality, delta.detokenize_s)


def _stages(timing: Timing, modality: Modality, began_s: float) -> Iterator[Spent]:
    """What an answer's timing says. A prompt waits outside while its pictures are encoded: that is no queueing."""
    queue_s = max(0.0, timing.queue_s - timing.encode_s)
    prefill_s = began_s + timing.queue_s
    yield Spent(stage="queue", modality=modality, began_s=began_s, seconds=queue_s)
    if timing.encode_s:
        yield Spent(stage="encode", modality=Modality.IMAGE, began_s=began_s + queue_s, seconds=timing.encode_s)
    yield Spent(stage="prefill", modality=modality, began_s=prefill_s, seconds=timing.prefill_s)
    yield Spent(stage="decode", modality=modality, began_s=prefill_s + timing.prefill_s, seconds=timing.decode_s)


class _Engine(Collector):
    """The engine's own counts, read at the moment of the scrape."""

    def __init__(self, session: Session, metrics: Metrics, model_name: str) -> None:
        self._session = session
        self._metrics = metrics
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
            ("triptych:held_pictures", "Pictures held by requests that are unfinished.", stats.held_features),
            ("triptych:backlog_seconds", "Work that is unfinished, as predicted.", stats.backlog_s),
            ("triptych:since_progress_seconds", "Since the engine last moved with work to do.", stats.since_progress_s),
            ("triptych:engine_alive", "1 while the engine's thread lives.", int(stats.is_alive)),
        )
        counters = (
            ("vllm:num_preemptions", "Requests put back to be computed again.", stats.preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("vllm:mm_cache_queries", "Media items looked up in the encoder cache.", stats.encoder_queries),
            ("vllm:mm_cache_hits", "Media items found in the encoder cache.", stats.encoder_hits),
            ("vllm:spec_decode_num_drafts", "Guesses of an answer's next tokens that were computed.", stats.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens of these guesses.", stats.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Of these tokens, those that came.", stats.accepted_tokens),
            ("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens answered.", stats.generation_tokens),
            ("triptych:evicted_tokens", "Cached tokens forgotten, as a mean over layers.", stats.evicted_tokens),
            ("triptych:kv_compactions", "Times that a sequence forgot and gave blocks back.", stats.compactions),
            ("vllm:corrupted_requests", "Requests whose logits held NaN.", stats.corrupted),
            ("triptych:recomputed_pictures", "Pictures that overflowed and were encoded in f32.", stats.recomputed),
            ("triptych:late_requests", "Requests not answered by their deadline.", stats.late),
            ("triptych:engine_restarts", "Restarts of the engine after a fault of its own.", stats.restarts),
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
        family = HistogramMetricFamily(
            "triptych:stage_seconds", "Time in each stage of a request.", labels=["model_name", "stage", "modality"]
        )
        ends = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
        for key, seconds, buckets in self._metrics.stages(stats):
            counts = list(zip(ends, itertools.accumulate(buckets), strict=True))
            family.add_metric([self._model_name, *key], counts, seconds)
        return family

    def _places(self) -> Metric:
        family = GaugeMetricFamily(
            "triptych:part_info", "Where each part runs; always 1.", labels=["model_name", "part", "place"]
        )
        for part, place in self._session.placements().items():
            family.add_metric([self._model_name, part, place], 1)
        return family
