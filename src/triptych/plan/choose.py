"""Which device, how many, how many answers at once: every way played, the best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from triptych.core.device import DeviceSpec
from triptych.core.plan import Choice, Prediction, Target
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError
from triptych.plan.timeline import Ask, Costs, Rules, Told, play

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
BUSY = 0.8  # of what a device can do at most, that it is planned for: beyond it queues grow without bound
LEAST_ASKS, MOST_ASKS = 24, 96  # requests that a way is played with
PROCESS_BYTES = 430_000_000  # besides weights and cache: 300 (135 M, texts) to 570 MB (the demo, pictures, 16 at once)

ASSUMPTIONS = (
    "requests are the workload's own sizes, quantile by quantile; nothing is taken from a prefix cache",
    f"a device is planned to be busy for {BUSY:.0%} of its time at most, by its answers to callers that never pause",
    "replicas are alike and share the requests evenly",
    "an interval reaches as far as nine of ten steps lay from the fit, or 75 % where a data sheet is all there is",
)

Shown = Callable[[RequestKind], tuple[int, int]]  # visual tokens and tiles of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model on a device, or on `degree` of them together. error: of its costs, that nine of ten keep within."""

    device: DeviceSpec
    costs: Costs
    resident_bytes: float  # of weights, on each device
    token_bytes: float  # of keys and values, on each
    error: float
    rules: Rules
    degree: int = 1


def asks_of(workload: Workload, shown: Shown, count: int) -> list[Ask]:
    """`count` requests: kinds by their shares, sizes by their quantiles, in an order that is always the same."""
    rng = np.random.default_rng(workload.seed)
    total = sum(kind.share for kind in workload.kinds)
    made: list[Ask] = []
    for kind in workload.kinds:
        number = max(1, round(count * kind.share / total)) if kind.share else 0
        tokens, tiles = shown(kind)
        lengths = zip(quantiles(kind.prompt, number, rng), quantiles(kind.answer, number, rng), strict=True)
        for prompt, answer in lengths:
            made.append(Ask(prompt_tokens=prompt + tokens, answer_tokens=answer, tiles=tiles))
    return [made[index] for index in rng.permutation(len(made))]


def choices(candidates: Sequence[Candidate], workload: Workload, shown: Shown, target: Target) -> tuple[Choice, ...]:
    """Every way that can be predicted, best first. Raises the first's ConfigError when none can."""
    found: list[Choice] = []
    refused: list[ConfigError] = []
    for candidate in candidates:
        if target.num_devices is not None and candidate.degree > target.num_devices:
            continue
        alone = (choice for choice in found if choice.device == candidate.device.name and choice.tensor_parallel == 1)
        if candidate.degree == 1 or not any(choice.fits for choice in alone):  # together where one does not do
            found += _ways(candidate, workload, (shown, target), refused)
    if not found:
        raise refused[0]

    def rank(choice: Choice) -> tuple[bool, int, float]:
        values = {one.name: one.value for one in choice.predictions}
        answer_tokens = values["tokens_per_s"] / values["requests_per_s"]
        return not choice.fits, choice.num_devices, values["ttft_p95"] + answer_tokens * values["tpot_p95"]

    return tuple(sorted(found, key=rank))


def _ways(
    of: Candidate, workload: Workload, wanted: tuple[Shown, Target], refused: list[ConfigError]
) -> Iterator[Choice]:
    """Larger and larger batches, up to what was measured."""
    shown, target = wanted
    for batch in BATCHES:
        try:
            asks = asks_of(workload, shown, min(MOST_ASKS, max(LEAST_ASKS, 3 * batch)))
            yield _way(of, workload, asks, target, batch)
        except ConfigError as error:
            refused.append(error)
            return


def _way(of: Candidate, workload: Workload, asks: list[Ask], target: Target, batch: int) -> Choice:
    rules = replace(of.rules, max_sequences=batch)
    most = len(asks) / max(one.done_s for one in play(asks, of.costs, rules, callers=batch))
    wanted = target.rate(workload)
    replicas = 1 if wanted is None else math.ceil(wanted / (BUSY * most))
    if target.num_devices is not None:
        replicas = target.num_devices // of.degree
    told = _at(wanted, replicas, asks, of, rules)
    longest = max(ask.prompt_tokens + ask.answer_tokens for ask in asks)
    need = of.resident_bytes + batch * longest * of.token_bytes + PROCESS_BYTES
    predictions = _predictions(told, most * replicas, of.error, need)
    reason = _against(predictions, target, wanted, of.device.memory_bytes)
    return Choice(
        device=of.device.name,
        num_devices=replicas * of.degree,
        tensor_parallel=of.degree,
        replicas=replicas,
        batch=batch,
        predictions=predictions,
        fits=reason is None,
        reason=reason or ("as fast as it goes" if wanted is None else f"busy for {wanted / most / replicas:.1%}"),
    )


def _at(rate: float | None, replicas: int, asks: list[Ask], of: Candidate, rules: Rules) -> list[Told]:
    """The traffic as one replica sees it: at its share of the rate, or from as many callers as it has seats."""
    if rate is None:
        return play(asks, of.costs, rules, callers=rules.max_sequences)
    gaps = np.random.default_rng(0).exponential(replicas / rate, len(asks))
    due = [replace(ask, at_s=float(at)) for ask, at in zip(asks, np.cumsum(gaps), strict=True)]
    return play(due, of.costs, rules)


def _predictions(told: Sequence[Told], most: float, error: float, need: float) -> tuple[Prediction, ...]:
    answers = sum(one.ask.answer_tokens for one in told) / len(told)
    times = {"ttft": [each.ttft_s for each in told], "tpot": [each.tpot_s for each in told]}
    shares = {"p50": 0.5, "p95": 0.95}
    found = [
        Prediction.within(error, f"{name}_{label}", "s", float(np.quantile(seconds, share)))
        for name, seconds in times.items()
        for label, share in shares.items()
    ]
    return (
        *found,
        Prediction.within(error, "requests_per_s", "requests/s", most),
        Prediction.within(error, "tokens_per_s", "tokens/s", most * answers),
        Prediction.within(0.25, "memory_bytes", "B", need),
    )


def _against(found: Sequence[Prediction], target: Target, wanted: float | None, memory_bytes: int) -> str | None:
    """What speaks against it, in words; None where nothing does. A queue that grows comes before the times in it."""
    values = {one.name: one.value for one in found}
    if values["memory_bytes"] > memory_bytes:
        return f"{values['memory_bytes'] / 1e9:,.1f} GB are needed, it has {memory_bytes / 1e9:,.1f} GB of memory"
    if wanted is not None and wanted > BUSY * values["requests_per_s"]:
        return f"{wanted:,.2f} requests/s are more than {BUSY:.0%} of {values['requests_per_s']:,.2f}"
    return late(target, values["ttft_p95"], values["tpot_p95"])


def late(target: Target, ttft_s: float, tpot_s: float) -> str | None:
    """Which target a 95th percentile misses, in words; None where it misses none."""
    for name, found_s, most_s in (("TTFT", ttft_s, target.ttft_s), ("TPOT", tpot_s, target.tpot_s)):
        if most_s is not None and found_s > most_s:
            return f"{name} p95 is {found_s:.3g} s, {most_s:.3g} s are the target"
    return None


def quantiles(sizes: Sizes, count: int, rng: np.random.Generator) -> list[int]:
    """`count` sizes, log-uniform, each from its own equal part of the distribution, in random order."""
    low, high = math.log(sizes.least), math.log(sizes.most)
    shares = (rng.permutation(count) + 0.5) / max(count, 1)
    return [round(math.exp(low + (high - low) * share)) for share in shares]
