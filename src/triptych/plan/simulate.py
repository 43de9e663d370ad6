"""Requests through many replicas, simulated: queues, batches and routing at the level of whole requests."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.core.curve import seconds_at
from triptych.core.device import StepCost
from triptych.core.spec import Fact
from triptych.core.traffic import Served, Traffic
from triptych.core.workload import Workload
from triptych.errors import ConfigError
from triptych.plan.points import Spread, saturation, spread

ASSUMPTIONS = (
    "replicas are alike, never fail, and share nothing: no cached prefix, no picture encoded before",
    "answers of one replica advance together, a token a step; a step costs what the bundle's StepCost says",
    "a prompt is computed when a seat is free, in the longest steps measured; other answers get a token of each",
    "pictures are encoded one request at a time beside the answers, and slow them by nothing",
    "requests reach a replica at once, and the router knows how many each has",
    "answers have the lengths that the workload says; nobody leaves early",
)
STILL = 0.95  # of all seats taken, beyond which a queue's length is a matter of how long one looks


class Fleet(Fact, frozen=True, kw_only=True):
    """Replicas alike. What the model makes of one picture: `tiles` for its encoder, `image_tokens` of the prompt."""

    replicas: int
    batch: int  # answers at once, of one
    cost: StepCost
    routing: Literal["least busy", "round robin", "random", "best of two"] = "least busy"
    tiles: int = 1
    image_tokens: int = 0


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


@dataclass(slots=True, kw_only=True)
class _Request:
    kind: str
    due_s: float
    prompt: int  # tokens, visual ones among them
    answer: int
    images: int
    prefill_s: float  # beyond what its steps cost anyway
    steps: int  # that its prompt is cut into
    first_s: float = 0.0
    done_s: float = 0.0


@dataclass(slots=True)
class _Replica:
    """Answers that advance together: each is done at a tick, and ticks pass at the pace of the step's cost."""

    env: Any
    fleet: Fleet
    step_s: NDArray[np.float64]  # by answers at once
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
        return float(self.step_s[len(self.running)]) + self.cached * self.fleet.cost.cached_token_s

    def arrive(self, asked: _Request) -> None:
        """Now; pictures are encoded first."""
        self.loads[self.index] += 1
        if not asked.images:
            return self._queue(asked)
        picture_s = seconds_at(self.fleet.cost.tiles, self.fleet.tiles)
        self.encoder_s = max(self.encoder_s, self.env.now) + picture_s * asked.images
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
            self.cached -= done.prompt + done.answer // 2
        while self.waiting and len(self.running) < self.fleet.batch:
            self._seat(self.waiting.popleft())
        self.turn += 1
        if self.running:
            turn = self.turn
            rest = max(self.running[0][0] - self.ticks, 0.0) * self.pace_s
            self._at(self.since_s + rest - now, lambda: self._go_on() if turn == self.turn else None)

    def _seat(self, asked: _Request) -> None:
        """Its prompt's computation brings its first token; the others wait for it, and get a token of each step."""
        step_s = float(self.step_s[len(self.running) + 1]) + self.cached * self.fleet.cost.cached_token_s
        first_s = asked.prefill_s + asked.steps * step_s
        self.busy_s += first_s
        self.answered_s += first_s * (len(self.running) + 1)
        self.since_s += first_s
        asked.first_s = self.since_s
        self.ticks += asked.steps
        self.cached += asked.prompt + asked.answer // 2
        heapq.heappush(self.running, (self.ticks + asked.answer - 1, id(asked), asked))

    def _at(self, delay_s: float, act: Any) -> None:
        self.env.timeout(max(delay_s, 0.0)).callbacks.append(lambda event: act())


def simulate(workload: Workload, fleet: Fleet, seen: Sequence[Served] = ()) -> Simulated:
    """All of an open workload's requests, or those that were `seen` of it, played again.

    Raises ConfigError for a cost that does not reach so far.
    """
    env = _simpy().Environment()
    step_s = np.array([0.0, *(seconds_at(fleet.cost.decode, size) for size in range(1, fleet.batch + 1))])
    loads = np.zeros(fleet.replicas, np.int64)
    replicas = [_Replica(env, fleet, step_s, loads, index) for index in range(fleet.replicas)]
    asked = _again(seen, fleet) if seen else _requests(workload, fleet)
    rng = np.random.default_rng(workload.seed)

    def arrivals() -> Any:
        for index, one in enumerate(asked):
            yield env.timeout(max(one.due_s - env.now, 0.0))
            replicas[_route(loads, fleet.routing, index, rng)].arrive(one)

    env.process(arrivals())
    env.run()
    return _summary(workload, fleet, replicas, asked)


def _route(loads: NDArray[np.int64], routing: str, index: int, rng: np.random.Generator) -> int:
    if routing == "round robin":
        return index % len(loads)
    if routing == "random":
        return int(rng.integers(len(loads)))
    if routing == "best of two":
        return min((int(at) for at in rng.integers(len(loads), size=2)), key=loads.__getitem__)
    return int(loads.argmin())


def _requests(workload: Workload, fleet: Fleet) -> list[_Request]:
    if workload.arrivals != "poisson" or not workload.rate_per_s:
        raise ConfigError(f"{workload.name}: a simulation needs Poisson arrivals and a rate", hint="rate_per_s: 2.0")
    rng = np.random.default_rng(workload.seed)
    count = workload.num_requests
    due = np.cumsum(rng.exponential(1 / workload.rate_per_s, count))
    shares = np.array([kind.share for kind in workload.kinds])
    made: list[_Request] = []
    for due_s, which in zip(due.tolist(), rng.choice(len(shares), size=count, p=shares / shares.sum()), strict=True):
        kind = workload.kinds[which]
        ranges = ((kind.prompt.least, kind.prompt.most), (kind.answer.least, kind.answer.most))
        text, answer = (round(np.exp(rng.uniform(np.log(least), np.log(most)))) for least, most in ranges)
        prompt = text + kind.images * fleet.image_tokens
        sizes = {"prompt": prompt, "answer": answer, "images": kind.images}
        made.append(_Request(kind=kind.name, due_s=due_s, **sizes, **_prefill(fleet.cost, prompt)))
    return made


def _again(seen: Sequence[Served], fleet: Fleet) -> list[_Request]:
    return [
        _Request(
            kind=one.kind, due_s=one.asked_s, prompt=one.prompt_tokens, answer=one.answer_tokens,
            images=one.tiles // fleet.tiles, **_prefill(fleet.cost, one.prompt_tokens),
        )
        for one in seen
        if one.error is None
    ]  # fmt: skip


def _prefill(cost: StepCost, prompt: int) -> dict[str, Any]:
    """Seconds of a prompt beyond what its steps cost anyway, and these steps, as long as any that were measured."""
    if not cost.prefill:
        return {"prefill_s": 0.0, "steps": 1}
    most = int(cost.prefill[-1].size)
    begins = range(0, prompt, most)
    sizes = [min(most, prompt - begin) for begin in begins]
    pairs = sum(size * begin for size, begin in zip(sizes, begins, strict=True))
    return {
        "prefill_s": sum(seconds_at(cost.prefill, size) for size in sizes) + pairs * cost.pair_s,
        "steps": len(sizes),
    }


def _summary(workload: Workload, fleet: Fleet, replicas: Sequence[_Replica], asked: Sequence[_Request]) -> Simulated:
    served = tuple(
        Served(
            kind=one.kind, asked_s=one.due_s, first_s=one.first_s, done_s=one.done_s, prompt_tokens=one.prompt,
            answer_tokens=one.answer, tiles=one.images * fleet.tiles,
        )
        for one in asked
    )  # fmt: skip
    ended_s = max(one.done_s for one in asked)
    busy_s = sum(replica.busy_s for replica in replicas)
    traffic = Traffic(workload=workload, served=served, wall_s=ended_s, cpu_s=busy_s, peak_bytes=0, mean_bytes=0)
    seats_s = sum(replica.answered_s for replica in replicas)
    full = seats_s / (asked[-1].due_s or ended_s) / (fleet.replicas * fleet.batch)
    return Simulated(
        replicas=fleet.replicas,
        requests_per_s=traffic.requests_per_s,
        tokens_per_s=traffic.tokens_per_s,
        ttft=spread([one.ttft_s for one in served]),
        tpot=spread([one.tpot_s for one in served]),
        latency=spread([one.latency_s for one in served]),
        mean_latency_s=float(np.mean([one.latency_s for one in served])),
        busy=busy_s / ended_s / fleet.replicas,
        batch=seats_s / max(busy_s, 1e-12),
        saturated=saturation(traffic) or (f"{full:.0%} of all seats are taken" if full > STILL else None),
    )


def fewest_replicas(workload: Workload, fleet: Fleet, limit: int, ttft_s: float, tpot_s: float) -> Simulated:
    """Of 1 to `limit` replicas the fewest that keep both at the 95th percentile. Raises ConfigError where none do."""

    def keeps(replicas: int) -> Simulated | None:
        found = simulate(workload, msgspec.structs.replace(fleet, replicas=replicas))
        return found if not found.saturated and found.ttft.p95 <= ttft_s and found.tpot.p95 <= tpot_s else None

    best, low, high = keeps(limit), 0, limit
    if best is None:
        raise ConfigError(
            f"{limit} replicas do not keep TTFT {ttft_s:g} s and TPOT {tpot_s:g} s at {workload.rate_per_s}/s"
        )
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
