"""Requests through many replicas, simulated: queues, batches and routing at the level of whole requests."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from triptych.core.spec import Fact
from triptych.core.traffic import Served
from triptych.core.workload import Workload
from triptych.errors import ConfigError
from triptych.plan.choose import Shown, asks_of
from triptych.plan.points import Spread, saturation, spread
from triptych.plan.timeline import Ask, Costs
from triptych.plan.work import Chunk, Step

ASSUMPTIONS = (
    "replicas are alike, never fail, and share nothing: no cached prefix, no picture encoded before",
    "answers of one replica advance together, a token a step; a step costs what was fitted, or what the roofline says",
    "a prompt is computed when a seat is free, in the longest steps there are; other answers get a token of each",
    "pictures are encoded one request at a time beside the answers, and slow them by nothing",
    "requests reach a replica at once, and the router knows how many each has",
    "answers have the lengths that the workload says; nobody leaves early",
)
STILL = 0.95  # of all seats taken, beyond which a queue's length is a matter of how long one looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas alike. batch: answers at once, of one."""

    replicas: int
    batch: int
    costs: Costs
    max_step_tokens: int = 512
    routing: Literal["least busy", "round robin", "random", "best of two"] = "least busy"


class Simulated(Fact, frozen=True, kw_only=True):
    """What came of it. saturated: why it cannot go on like this, in words; its percentiles then mean nothing."""

    replicas: int
    requests_per_s: float
    tokens_per_s: float
    ttft: Spread
    tpot: Spread
    latency: Spread
    mean_latency_s: float
    busy: float  # share of the replicas' time, 0 to 1
    batch: float  # mean answers at once of a replica that answers any
    saturated: str | None
    assumptions: tuple[str, ...] = ASSUMPTIONS


@dataclass(slots=True)
class _Request:
    ask: Ask
    prefill_s: float  # beyond what its steps cost anyway
    steps: int  # that its prompt is cut into
    first_s: float = 0.0
    done_s: float = 0.0

    @property
    def cached(self) -> int:
        """Tokens, in the middle of its answer."""
        return self.ask.prompt_tokens + self.ask.answer_tokens // 2


@dataclass(frozen=True, slots=True)
class _Pace:
    """Of a step: seconds by answers at once, and what a cached token of theirs adds."""

    step_s: NDArray[np.float64]  # (batch + 1,)
    token_s: NDArray[np.float64]

    def of(self, answers: int, cached: int) -> float:
        return float(self.step_s[answers] + cached * self.token_s[answers])


@dataclass(slots=True)
class _Replica:
    """Answers that advance together: each is done at a tick, and ticks pass at the pace of the step's cost."""

    env: Any
    fleet: Fleet
    pace: _Pace
    loads: NDArray[np.int64]  # requests under way, of every replica
    index: int
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[tuple[float, int, _Request]] = field(default_factory=list)  # a heap by last tick
    ticks: float = 0.0
    since_s: float = 0.0  # when `ticks` was true; in the future while a prompt is computed
    encoder_s: float = 0.0  # busy until
    cached: int = 0  # tokens of all answers
    turn: int = 0  # of what was scheduled last: earlier alarms are void
    busy_s: float = 0.0
    answered_s: float = 0.0  # sum over time of answers at once

    @property
    def pace_s(self) -> float:
        return self.pace.of(len(self.running), self.cached)

    def arrive(self, asked: _Request) -> None:
        """Now; pictures are encoded first."""
        self.loads[self.index] += 1
        if not asked.ask.tiles:
            return self._queue(asked)
        self.encoder_s = max(self.encoder_s, self.env.now) + self.fleet.costs.tiles_s(asked.ask.tiles)
        self._at(self.encoder_s - self.env.now, lambda: self._queue(asked))
        return None

    def _queue(self, asked: _Request) -> None:
        self.waiting.append(asked)
        self._go_on()

    def _go_on(self) -> None:
        """Let time pass, end what is done, seat who waits, and come back when the next is done."""
        now = self.env.now
        if self.running and now > self.since_s:
            self.ticks += (now - self.since_s) / self.pace_s
            self.busy_s += now - self.since_s
            self.answered_s += (now - self.since_s) * len(self.running)
        self.since_s = max(self.since_s, now)
        while self.since_s <= now and self.running and self.running[0][0] <= self.ticks + 1e-6:
            done = heapq.heappop(self.running)[2]
            self.loads[self.index] -= 1
            done.done_s = now
            self.cached -= done.cached
        while self.waiting and len(self.running) < self.fleet.batch:
            self._seat(self.waiting.popleft())
        self.turn += 1
        if self.running:
            turn = self.turn
            rest = max(self.running[0][0] - self.ticks, 0.0) * self.pace_s
            self._at(self.since_s + rest - now, lambda: self._go_on() if turn == self.turn else None)

    def _seat(self, asked: _Request) -> None:
        """Its prompt's computation brings its first token; the others wait for it, and get a token of each step."""
        first_s = asked.prefill_s + asked.steps * self.pace.of(len(self.running) + 1, self.cached)
        self.busy_s += first_s
        self.answered_s += first_s * (len(self.running) + 1)
        self.since_s += first_s
        asked.first_s = self.since_s
        self.ticks += asked.steps
        self.cached += asked.cached
        heapq.heappush(self.running, (self.ticks + asked.ask.answer_tokens - 1, id(asked), asked))

    def _at(self, delay_s: float, act: Any) -> None:
        self.env.timeout(max(delay_s, 0.0)).callbacks.append(lambda event: act())


def arrivals(workload: Workload, shown: Shown) -> list[Ask]:
    """The requests of an open workload, when they are due. Raises ConfigError for a closed one."""
    if workload.arrivals != "poisson" or not workload.rate_per_s:
        raise ConfigError(f"{workload.name}: a simulation needs Poisson arrivals and a rate", hint="rate_per_s: 2.0")
    asks = asks_of(workload, shown, workload.num_requests)
    due = np.cumsum(np.random.default_rng(workload.seed).exponential(1 / workload.rate_per_s, len(asks)))
    return [replace(ask, at_s=at_s) for ask, at_s in zip(asks, due.tolist(), strict=True)]


def simulate(asks: Sequence[Ask], fleet: Fleet, seed: int = 0) -> Simulated:
    """All requests, drawn or seen, in the order in which they are due. Raises ConfigError for steps without a cost."""
    env = _simpy().Environment()
    prefill, loads = cache(lambda tokens: _prefill(fleet, tokens)), np.zeros(fleet.replicas, np.int64)
    asked = [_Request(ask, *prefill(ask.prompt_tokens)) for ask in asks]
    pace = _pace(fleet, math.ceil(np.mean([one.cached for one in asked])))
    replicas = [_Replica(env, fleet, pace, loads, index) for index in range(fleet.replicas)]
    rng = np.random.default_rng(seed)

    def arrive() -> Any:
        for index, one in enumerate(asked):
            yield env.timeout(max(one.ask.at_s - env.now, 0.0))
            replicas[_route(loads, fleet.routing, index, rng)].arrive(one)

    env.process(arrive())
    env.run()
    return _summary(fleet, replicas, asked)


def _pace(fleet: Fleet, context: int) -> _Pace:
    """A line through the cost without cached tokens and that with `context` tokens of each answer."""

    def seconds(each: int) -> NDArray[np.float64]:
        sizes = range(1, fleet.batch + 1)
        return np.array([0.0, *(fleet.costs.step_s(Step(answers=n, cached=n * each)) for n in sizes)])

    empty, full = seconds(0), seconds(context)
    return _Pace(empty, (full - empty) / (context * np.maximum(np.arange(fleet.batch + 1), 1)))


def _prefill(fleet: Fleet, tokens: int) -> tuple[float, int]:
    """Seconds of a prompt beyond what its steps cost one answer anyway, and how many steps they are."""
    most, plain = fleet.max_step_tokens, fleet.costs.step_s(Step(answers=1))
    begins = range(0, tokens, most)
    steps = [Step(chunks=(Chunk(num_tokens=min(most, tokens - begin), earlier=begin),)) for begin in begins]
    return sum(max(fleet.costs.step_s(step) - plain, 0.0) for step in steps), len(steps)


def _route(loads: NDArray[np.int64], routing: str, index: int, rng: np.random.Generator) -> int:
    if routing == "round robin":
        return index % len(loads)
    if routing == "random":
        return int(rng.integers(len(loads)))
    if routing == "best of two":
        return min((int(at) for at in rng.integers(len(loads), size=2)), key=loads.__getitem__)
    return int(loads.argmin())


def _summary(fleet: Fleet, replicas: Sequence[_Replica], asked: Sequence[_Request]) -> Simulated:
    served = tuple(
        Served(
            kind="", asked_s=one.ask.at_s, first_s=one.first_s, done_s=one.done_s, answer_tokens=one.ask.answer_tokens
        )
        for one in asked
    )
    last_s, ended_s = served[-1].asked_s, max(one.done_s for one in served)
    busy_s, seats_s = (sum(getattr(one, name) for one in replicas) for name in ("busy_s", "answered_s"))
    full = seats_s / (last_s or ended_s) / (fleet.replicas * fleet.batch)
    return Simulated(
        replicas=fleet.replicas,
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


def fewest_replicas(asks: Sequence[Ask], fleet: Fleet, ttft_s: float, tpot_s: float) -> Simulated:
    """Of up to `fleet.replicas` the fewest that keep both at the 95th percentile. Raises ConfigError where none do."""

    def keeps(replicas: int) -> Simulated | None:
        found = simulate(asks, replace(fleet, replicas=replicas))
        return found if not found.saturated and found.ttft.p95 <= ttft_s and found.tpot.p95 <= tpot_s else None

    best, low, high = keeps(fleet.replicas), 0, fleet.replicas
    if best is None:
        raise ConfigError(f"{high} replicas do not keep TTFT {ttft_s:g} s and TPOT {tpot_s:g} s")
    while high - low > 1:
        middle = (low + high) // 2
        found = keeps(middle)
        low, high, best = (low, middle, found) if found is not None else (middle, high, best)
    return best


def _simpy() -> Any:
    try:
        import simpy
    except ImportError as error:
        raise ConfigError("simulating needs simpy", hint="pip install 'triptych[plan]'") from error
    return simpy
