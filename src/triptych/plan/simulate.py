"""Requests through many replicas, simulated: each an engine that is played step by step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from triptych.core.spec import Fact
from triptych.core.traffic import Served
from triptych.core.workload import Workload
from triptych.errors import ConfigError
from triptych.plan.choose import Shown, asks_of
from triptych.plan.points import Spread, saturation, spread
from triptych.plan.timeline import Ask, Costs, Play, Rules

ASSUMPTIONS = (
    "replicas are alike, never fail, and share nothing: no cached prefix, no picture encoded before",
    "answers of one replica advance together, a token a step; a step costs what was fitted, or what the roofline says",
    "prompts are computed one after another, beside answers in the chunks that the engine allows",
    "pictures are encoded one request at a time, and take the encoder's share of the machine meanwhile",
    "requests reach at once the replica that has the fewest",
    "answers have the lengths that the workload says; nobody leaves early",
)
STILL = 0.95  # of all seats taken, beyond which a queue's length is a matter of how long one looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas alike; `rules.max_sequences` answers at once, of one."""

    replicas: int
    costs: Costs
    rules: Rules


class Simulated(Fact, frozen=True, kw_only=True):
    """What came of it. saturated: why it cannot go on like this, in words; its percentiles then mean nothing."""

    requests_per_s: float
    tokens_per_s: float
    ttft: Spread
    tpot: Spread
    latency: Spread
    mean_latency_s: float
    busy: float  # share of the replicas' time, 0 to 1
    batch: float  # mean seats taken of a replica that answers any
    saturated: str | None


def arrivals(workload: Workload, shown: Shown) -> list[Ask]:
    """The requests of an open workload, when they are due. Raises ConfigError for a closed one."""
    if workload.arrivals != "poisson" or not workload.rate_per_s:
        raise ConfigError(f"{workload.name}: a simulation needs Poisson arrivals and a rate", hint="rate_per_s: 2.0")
    asks = asks_of(workload, shown, workload.num_requests)
    due = np.cumsum(np.random.default_rng(workload.seed).exponential(1 / workload.rate_per_s, len(asks)))
    return [replace(ask, at_s=at_s) for ask, at_s in zip(asks, due.tolist(), strict=True)]


def simulate(asks: Sequence[Ask], fleet: Fleet) -> Simulated:
    """All requests, drawn or seen, in the order in which they are due. Raises ConfigError for steps without a cost."""
    plays = [Play(costs=fleet.costs, rules=fleet.rules) for _ in range(fleet.replicas)]
    loads = np.zeros(fleet.replicas, np.int64)  # requests under way, of every replica
    due: list[tuple[float, int]] = []  # a heap: when each replica that has any goes on

    def go_on(until_s: float) -> None:
        while due and due[0][0] < until_s:
            _, index = heapq.heappop(due)
            plays[index].turn(until_s)
            loads[index] = plays[index].num_left
            if loads[index]:
                heapq.heappush(due, (plays[index].now_s, index))

    for ask in asks:
        go_on(ask.at_s)
        index = int(loads.argmin())
        plays[index].asks.append(ask)
        if not loads[index]:
            heapq.heappush(due, (ask.at_s, index))
        loads[index] += 1
    go_on(inf)
    return _summary(fleet, plays)


def _summary(fleet: Fleet, plays: Sequence[Play]) -> Simulated:
    told = sorted((one for play in plays for one in play.told), key=lambda one: one.asked_s)
    served = tuple(
        Served(
            kind="", asked_s=one.asked_s, first_s=one.first_s, done_s=one.done_s, answer_tokens=one.ask.answer_tokens
        )
        for one in told
    )
    last_s, ended_s = served[-1].asked_s, max(one.done_s for one in served)
    busy_s, seats_s = sum(play.busy_s for play in plays), sum(play.seats_s for play in plays)
    full = seats_s / (last_s or ended_s) / (fleet.replicas * fleet.rules.max_sequences)
    return Simulated(
        requests_per_s=len(served) / ended_s,
        tokens_per_s=sum(one.answer_tokens for one in served) / ended_s,
        ttft=spread([one.ttft_s for one in served]),
        tpot=spread([one.tpot_s for one in served]),
        latency=spread([one.latency_s for one in served]),
        mean_latency_s=float(np.mean([one.latency_s for one in served])),
        busy=busy_s / ended_s / fleet.replicas,
        batch=seats_s / max(busy_s, 1e-12),
        saturated=saturation(served) or (f"{full:.0%} of all seats are taken" if full > STILL else None),
    )
