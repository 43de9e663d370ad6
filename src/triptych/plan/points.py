"""One run at one concurrency as figures, and what makes a measurement unfit to plan with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.core.device import DeviceSpec
from triptych.core.device import spread as middle_half
from triptych.core.spec import Fact
from triptych.core.traffic import Served, Traffic
from triptych.errors import MeasurementError
from triptych.plan.extra import extra

LITTLE = 0.10  # what requests/s times latency may differ from the callers by
SCATTER = 0.30  # of repeats: their middle half, by their median; of three runs it is half their range
TREND = 1.5  # times that latency may grow from a run's first third to its last
BANDWIDTH = 1.15  # times that a step may read faster than the machine is said to
LEAST_SHARE = 0.2  # of the machine's bandwidth; a step of one answer that reads slower was not measured on it
ROUNDS = 1.0  # requests of each caller, at least, in the steady part of a run


class Spread(Fact, frozen=True, kw_only=True):
    """Percentiles of the requests of one run, in seconds."""

    p50: float
    p95: float
    p99: float


class Point(Fact, frozen=True, kw_only=True):
    """One run: `concurrency` callers, each asking whenever it was answered. Rates are of the steady part."""

    concurrency: int
    requests_per_s: float
    tokens_per_s: float  # of answers
    latency_s: float  # mean; by Little's law concurrency / requests_per_s
    ttft: Spread
    tpot: Spread
    latency: Spread
    num_requests: int  # of the steady part, which the percentiles are of


def complete(traffic: Traffic) -> Traffic:
    """The same, if every request was answered: half an answer is cheap. Raises MeasurementError."""
    failed = [one.error for one in traffic.served if one.error is not None]
    if failed:
        raise MeasurementError(
            f"{traffic.workload.name}: {len(failed)} of {len(traffic.served)} requests failed, the first: {failed[0]}",
            hint="only traffic that is answered tells anything: lower its rate, or shorten its requests",
        )
    return traffic


def point(traffic: Traffic) -> Point:
    """The steady part of a closed run: from every caller's first token until nobody asks any more.

    Raises MeasurementError for one with failures, or too short to have a steady part.
    """
    served, callers = complete(traffic).served, traffic.workload.concurrency or 0
    name = f"{traffic.workload.name} with {callers} callers"
    if traffic.workload.arrivals != "closed" or not callers:
        raise MeasurementError(f"{traffic.workload.name} is not closed: its concurrency is not known")
    began_s = max((one.first_s or one.done_s for one in served[:callers]), default=0.0)
    ended_s = max((one.asked_s for one in served), default=0.0)
    steady = [one for one in served if began_s <= one.asked_s <= ended_s]
    if ended_s <= began_s or len(steady) < max(ROUNDS * callers, 4):
        raise MeasurementError(
            f"{name}: {len(steady)} of {len(served)} requests were asked while all callers were being answered",
            hint=f"ask {max(4 * callers, 8)} requests or more",
        )
    window = began_s, ended_s
    inside = np.array([_overlap((one.asked_s, one.done_s), window) for one in served])
    ended = inside / np.array([max(one.latency_s, 1e-9) for one in served])  # each request counts by its share inside
    return Point(
        concurrency=callers,
        requests_per_s=float(ended.sum()) / (ended_s - began_s),
        tokens_per_s=sum(_tokens(one, window) for one in served) / (ended_s - began_s),
        latency_s=float(inside.sum() / ended.sum()),
        ttft=spread([one.ttft_s for one in steady]),
        tpot=spread([one.tpot_s for one in steady]),
        latency=spread([one.latency_s for one in steady]),
        num_requests=len(steady),
    )


def spread(seconds: Sequence[float | None]) -> Spread:
    """Percentiles of what is known; zeros of nothing, as TPOT is of answers of one token."""
    known = [one for one in seconds if one is not None] or [0.0]
    p50, p95, p99 = (float(value) for value in np.percentile(known, [50, 95, 99]))
    return Spread(p50=p50, p95=p95, p99=p99)


def _tokens(one: Served, window: tuple[float, float]) -> float:
    """Answer tokens that came within: the first at its time, the others evenly after it."""
    if one.first_s is None:
        return 0.0
    first = float(window[0] <= one.first_s < window[1])
    lasted = one.done_s - one.first_s
    share = _overlap((one.first_s, one.done_s), window) / lasted if lasted > 0 else first
    return first + max(one.answer_tokens - 1, 0) * share


def _overlap(span: tuple[float, float], window: tuple[float, float]) -> float:
    return max(min(span[1], window[1]) - max(span[0], window[0]), 0.0)


# ── what speaks against a measurement ────────────────────────────────────────────────────────────────────────────


def check_little(found: Point) -> None:
    """Callers = requests/s × latency (Little, 1961). Raises MeasurementError where they are not."""
    under_way = found.requests_per_s * found.latency_s
    if abs(under_way / found.concurrency - 1) > LITTLE:
        raise MeasurementError(
            f"{found.concurrency} callers were measured, but {found.requests_per_s:.4g} requests/s of "
            f"{found.latency_s:.4g} s each are {under_way:.3g} at once",
            hint="the callers did not ask at once when they were answered, or rate and latency are of different runs",
        )


def scatter(points: Sequence[Point]) -> float:
    """How far the middle half of repeats lies apart, by their median."""
    return middle_half([found.tokens_per_s for found in points])


def check_scatter(points: Sequence[Point]) -> None:
    """points: repeats at one concurrency. Raises MeasurementError where they do not repeat one another."""
    if scatter(points) > SCATTER:
        rates = [found.tokens_per_s for found in points]
        raise MeasurementError(
            f"{points[0].concurrency} callers: from {min(rates):.4g} to {max(rates):.4g} tokens/s in {len(rates)} runs",
            hint="something else used the machine: measure again when it is quiet",
        )


def check_bandwidth(one_caller: Point, weight_bytes: int, device: DeviceSpec) -> None:
    """A step of one answer reads every weight once, from main memory. Raises MeasurementError where it cannot have.

    weight_bytes: of all that a step reads; less than the last cache holds, they tell nothing.
    """
    *caches, memory = device.tiers
    if caches and weight_bytes <= 2 * caches[-1].num_bytes:
        return
    seconds, told = one_caller.tpot.p50, memory.bytes_per_s
    if seconds <= 0:
        raise MeasurementError("the answers had one token each: the time of a step is not known")
    read = weight_bytes / seconds
    if LEAST_SHARE * told.value <= read <= BANDWIDTH * told.highest:
        return
    more = "faster than it can" if read > told.value else "not a fifth of it"
    raise MeasurementError(
        f"{weight_bytes / 1e9:.3g} GB of weights were read in {seconds * 1e3:.3g} ms, {read / 1e9:.3g} GB/s: "
        f"{device.name} is said to read {told.value / 1e9:.3g} GB/s, {more}",
        hint="the machine's file is of another machine, or was disturbed: `triptych measure` again",
    )


def saturation(every: Sequence[Served]) -> str | None:
    """Why an open run did not keep up with its arrivals, in words; None where it did.

    Later requests waited longer than earlier ones, beyond chance, and answers fell behind arrivals.
    """
    served = [one for one in every if one.error is None]
    lost = len(every) - len(served)
    if lost > 0.01 * len(every):
        return f"{lost} of {len(every)} requests were refused or failed"
    if len(served) < 12:
        return None
    asked = np.array([one.asked_s for one in served])
    latency = np.array([one.latency_s for one in served])
    before = np.arange(len(served)) - np.searchsorted(np.sort(asked + latency), asked, side="right")  # still unanswered
    third = len(served) // 3
    growth = float(np.median(latency[-third:]) / np.median(latency[:third]))
    early, late = (float(np.median(part)) for part in (before[:third], before[-third:]))
    if growth > TREND and late > TREND * max(early, 1.0) and _rises(asked, latency):
        return (
            f"latency grew {growth:.1f} times from first third to last, and requests at once from {early:g} to {late:g}"
        )
    return None


def _rises(asked: NDArray[np.float64], latency: NDArray[np.float64]) -> bool:
    return bool(extra("scipy.stats").kendalltau(asked, latency, alternative="greater").pvalue < 0.01)
