"""Requests through many replicas, simulated: queues and batches."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.spec import Fact
from triptych.core.traffic import Served
from triptych.core.workload import Workload
from triptych.errors import ConfigError
from triptych.plan.choose import Shown, asks_of
from triptych.plan.extra import extra
from triptych.plan.points import Spread, saturation, spread
from triptych.plan.timeline import Ask, Costs, Rules, most_beside
from triptych.plan.work import Chunk, Step

ASSUMPTIONS = (
    "replicas are alike, never fail, and share nothing: no cached prefix, no picture encoded before",
    "answers of one replica advance together, a token a step; a step costs what was fitted, or what the roofline says",
    "prompts are computed one after another, beside answers in the chunks that the engine allows; steps flow",
    "pictures are encoded one request at a time, and take the encoder's share of the machine meanwhile",
    "requests reach at once the replica that has the fewest",
    "answers have the lengths that the workload says; nobody leaves early",
)
TINY = 1e-6  # of a token, a tick or a second: what is left of it is done
STILL = 0.95  # of all seats taken, beyond which a queue's length is a matter of how long one looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas alike; `rules.max_sequences` answers at once, of one."""

    replicas: int
    costs: Costs
    rules: Rules


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
    batch: float  # mean seats taken of a replica that answers any
    saturated: str | None
    assumptions: tuple[str, ...] = ASSUMPTIONS


@dataclass(slots=True)
class _Request:
    ask: Ask
    alone_s: float  # that its prompt takes with nobody beside it
    encode_s: float  # left
    tokens: float  # left of its prompt
    first_s: float = 0.0
    done_s: float = 0.0

    @property
    def cached(self) -> int:
        """Tokens, in the middle of its answer."""
        return self.ask.prompt_tokens + self.ask.answer_tokens // 2


@dataclass(frozen=True, slots=True)
class _Pace:
    """By answers at once, 0 to all seats: a step's seconds, what a cached token adds, and a chunk of prompts beside."""

    step_s: tuple[float, ...]
    token_s: tuple[float, ...]
    chunk: tuple[float, ...]  # tokens
    chunk_s: tuple[float, ...]  # that it adds


@dataclass(slots=True)
class _Replica:
    """Encodes, computes prompts and answers, each at a rate that holds until something begins or ends."""

    env: Any
    fleet: Fleet
    pace: _Pace
    loads: NDArray[np.int64]  # requests under way, of every replica
    index: int
    encoding: deque[_Request] = field(default_factory=deque)
    waiting: deque[_Request] = field(default_factory=deque)
    prompts: deque[_Request] = field(default_factory=deque)  # seated
    running: list[tuple[float, int, _Request]] = field(default_factory=list)  # a heap by last tick
    ticks: float = 0.0  # tokens that an answer would have had that began at the start
    since_s: float = 0.0  # when all this was true
    cached: int = 0  # tokens of all answers
    turn: int = 0  # of what was scheduled last: earlier alarms are void
    busy_s: float = 0.0
    seats_s: float = 0.0  # sum over time of seats taken

    def arrive(self, asked: _Request) -> None:
        self._go_on()
        self.loads[self.index] += 1
        (self.encoding if asked.ask.tiles else self.waiting).append(asked)
        self._go_on()

    def _rates(self) -> tuple[float, float, float]:
        """Seconds of encoding, tokens of prompts and ticks of answers, a second."""
        answers, pace = len(self.running), self.pace
        if answers:
            step_s = pace.step_s[answers] + self.cached * pace.token_s[answers]
            step_s += pace.chunk_s[answers] if self.prompts else 0.0
            tokens, ticks = pace.chunk[answers] / step_s, 1 / step_s
        elif self.prompts:
            tokens, ticks = self.prompts[0].ask.prompt_tokens / self.prompts[0].alone_s, 0.0
        else:
            return 1.0, 0.0, 0.0
        share = self.fleet.rules.encoder_share if self.encoding else 0.0
        return share, tokens * (1 - share), ticks * (1 - share)

    def _go_on(self) -> None:
        """Let time pass, move on what is done, and come back when the next is."""
        self._pass()
        while self.encoding and self.encoding[0].encode_s <= TINY:
            self.waiting.append(self.encoding.popleft())
        while self.prompts and self.prompts[0].tokens <= TINY:
            self._begin(self.prompts.popleft())
        while self.running and self.running[0][0] <= self.ticks + TINY:
            done = heapq.heappop(self.running)[2]
            self.loads[self.index] -= 1
            self.cached -= done.cached
            done.done_s = self.env.now
        while self.waiting and len(self.running) + len(self.prompts) < self.fleet.rules.max_sequences:
            self.prompts.append(self.waiting.popleft())
        self._sleep()

    def _pass(self) -> None:
        seconds, (encode, tokens, ticks) = self.env.now - self.since_s, self._rates()
        self.since_s = self.env.now
        if self.encoding:
            self.encoding[0].encode_s -= seconds * encode
        if self.prompts:
            self.prompts[0].tokens -= seconds * tokens
        self.ticks += seconds * ticks
        seats = len(self.running) + len(self.prompts)
        self.busy_s += seconds * bool(seats)
        self.seats_s += seconds * seats

    def _begin(self, asked: _Request) -> None:
        """Its prompt's last chunk gave its first token."""
        asked.first_s = self.env.now
        self.cached += asked.cached
        heapq.heappush(self.running, (self.ticks + asked.ask.answer_tokens - 1, id(asked), asked))

    def _sleep(self) -> None:
        encode, tokens, ticks = self._rates()
        until = [self.encoding[0].encode_s / encode] if self.encoding else []
        until += [self.prompts[0].tokens / tokens] if self.prompts else []
        until += [(self.running[0][0] - self.ticks) / ticks] if self.running else []
        self.turn += 1
        turn = self.turn
        if until:
            alarm = self.env.timeout(max(min(until), 0.0))
            alarm.callbacks.append(lambda event: self._go_on() if turn == self.turn else None)


def arrivals(workload: Workload, shown: Shown) -> list[Ask]:
    """The requests of an open workload, when they are due. Raises ConfigError for a closed one."""
    if workload.arrivals != "poisson" or not workload.rate_per_s:
        raise ConfigError(f"{workload.name}: a simulation needs Poisson arrivals and a rate", hint="rate_per_s: 2.0")
    asks = asks_of(workload, shown, workload.num_requests)
    due = np.cumsum(np.random.default_rng(workload.seed).exponential(1 / workload.rate_per_s, len(asks)))
    return [replace(ask, at_s=at_s) for ask, at_s in zip(asks, due.tolist(), strict=True)]


def simulate(asks: Sequence[Ask], fleet: Fleet) -> Simulated:
    """All requests, drawn or seen, in the order in which they are due. Raises ConfigError for steps without a cost."""
    env = extra("simpy").Environment()
    alone, loads = cache(lambda tokens: _alone_s(fleet, tokens)), np.zeros(fleet.replicas, np.int64)
    asked = [
        _Request(
            ask=ask,
            alone_s=alone(ask.prompt_tokens),
            encode_s=fleet.costs.tiles_s(ask.tiles) if ask.tiles else 0.0,
            tokens=ask.prompt_tokens,
        )
        for ask in asks
    ]
    pace = _pace(fleet, math.ceil(np.mean([one.cached for one in asked])))
    replicas = [_Replica(env, fleet, pace, loads, index) for index in range(fleet.replicas)]

    def arrive() -> Any:
        for one in asked:
            yield env.timeout(max(one.ask.at_s - env.now, 0.0))
            replicas[int(loads.argmin())].arrive(one)

    env.process(arrive())
    env.run()
    return _summary(fleet, replicas, asked)


def _pace(fleet: Fleet, context: int) -> _Pace:
    """Costs with `context` cached tokens of each answer, and the line from there to none."""
    rows = [(0.0, 0.0, 0.0, 0.0)]
    for answers in range(1, fleet.rules.max_sequences + 1):
        cached = answers * context
        empty, full = (fleet.costs.step_s(Step(answers=answers, cached=size)) for size in (0, cached))
        chunk = most_beside(fleet.costs, fleet.rules, answers, cached)
        beside = Step(answers=answers, cached=cached, chunks=(Chunk(num_tokens=chunk, is_last=False),))
        rows.append((empty, (full - empty) / cached, float(chunk), fleet.costs.step_s(beside) - full))
    return _Pace(*zip(*rows, strict=True))


def _alone_s(fleet: Fleet, tokens: int) -> float:
    """Of a prompt in the longest steps there are, with nobody beside it."""
    most = fleet.rules.max_step_tokens
    begins = range(0, tokens, most)
    steps = [Step(chunks=(Chunk(num_tokens=min(most, tokens - begin), earlier=begin),)) for begin in begins]
    return sum(fleet.costs.step_s(step) for step in steps)


def _summary(fleet: Fleet, replicas: Sequence[_Replica], asked: Sequence[_Request]) -> Simulated:
    served = tuple(
        Served(
            kind="", asked_s=one.ask.at_s, first_s=one.first_s, done_s=one.done_s, answer_tokens=one.ask.answer_tokens
        )
        for one in asked
    )
    last_s, ended_s = served[-1].asked_s, max(one.done_s for one in served)
    busy_s, seats_s = (sum(getattr(one, name) for one in replicas) for name in ("busy_s", "seats_s"))
    full = seats_s / (last_s or ended_s) / (fleet.replicas * fleet.rules.max_sequences)
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
