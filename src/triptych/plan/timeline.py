"""Play the engine's schedule step by step with predicted times: when each request gets its tokens.

Answers go first, a token each; prompts get what is left of a step, first come first served, and beside answers no
more than these are held up by; pictures are encoded one after another beside the steps, which they hardly slow down
(`core/filling`, `engine/scheduler`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from triptych.core.curve import seconds_at, step_s
from triptych.core.device import StepCost
from triptych.core.filling import ENCODER_SHARE, LEAST_TOKENS, STRETCH, size_of
from triptych.plan.work import Chunk, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. prompt_tokens: visual ones among them."""

    prompt_tokens: int
    answer_tokens: int
    tiles: int = 0
    at_s: float = 0.0  # of open arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of a step, and of one request's tiles."""

    step_s: Callable[[Step], float]
    tiles_s: Callable[[int], float] = lambda tiles: 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The engine's limits. stretch: of an answering step, by which prompts may lengthen it."""

    max_step_tokens: int = 512
    max_sequences: int = 32
    stretch: float = STRETCH
    encoder_share: float = ENCODER_SHARE  # of the machine, while steps are computed beside it


@dataclass(slots=True, kw_only=True)
class Told:
    """When it was asked, first answered and done; a request on its way."""

    ask: Ask
    asked_s: float
    first_s: float = inf
    done_s: float = inf
    num_computed: int = 0
    num_answered: int = 0

    @property
    def is_answering(self) -> bool:
        return self.num_computed >= self.ask.prompt_tokens

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        return (self.done_s - self.first_s) / max(1, self.ask.answer_tokens - 1)


def most_beside(costs: Costs, rules: Rules, num_answers: int, cached: int) -> int:
    """Prompt tokens that lengthen a step of answers by no more than they may."""
    limit_s = (1 + rules.stretch) * costs.step_s(Step(answers=num_answers, cached=cached))

    def seconds(total: int) -> float:
        chunks = (Chunk(num_tokens=total - num_answers, is_last=False),) if total > num_answers else ()
        return costs.step_s(Step(answers=num_answers, cached=cached, chunks=chunks))

    sizes = _sizes(rules.max_step_tokens)
    beyond = bisect_right(sizes, limit_s, key=seconds)
    return max(LEAST_TOKENS, sizes[max(0, beyond - 1)] - num_answers)


@cache
def _sizes(most: int) -> tuple[int, ...]:
    return tuple(sorted({size_of(tokens, up=False) for tokens in range(1, most + 1)}))


def remembered(step_s: Callable[[Step], float]) -> Callable[[Step], float]:
    """The same, asked once for steps whose caches differ by less than 2 %: a play asks for thousands."""
    known: dict[Step, float] = {}

    def seconds(step: Step) -> float:
        unit = max(16, 1 << max(0, step.cached.bit_length() - 6))
        near = replace(step, cached=step.cached // unit * unit)
        if near not in known:
            known[near] = step_s(near)
        return known[near]

    return seconds


def play(asks: Sequence[Ask], costs: Costs, rules: Rules, callers: int | None = None) -> list[Told]:
    """All requests as they would go; `callers` that each ask when they were answered, or None: at their own times."""
    play = Play(costs=costs, rules=rules, asks=deque(asks), callers=callers)
    while play.turn():
        pass
    return play.told


@dataclass(slots=True, kw_only=True)
class Play:
    """One engine."""

    costs: Costs
    rules: Rules
    asks: deque[Ask] = field(default_factory=deque)  # that have not come yet
    callers: int | None = None
    now_s: float = 0.0
    busy_s: float = 0.0  # in steps
    seats_s: float = 0.0  # sum over time of seats taken
    told: list[Told] = field(default_factory=list)
    encoding: deque[tuple[float, Told]] = field(default_factory=deque)  # seconds left, of the first alone less than all
    waiting: deque[Told] = field(default_factory=deque)
    running: list[Told] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Requests that are not done."""
        return len(self.asks) + len(self.encoding) + len(self.waiting) + len(self.running)

    def turn(self, until_s: float = inf) -> bool:
        """One step, or the wait until there is something to do, or until `until_s`. False at the end."""
        self._arrive()
        room = self.rules.max_sequences - len(self.running)
        self.running += [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        if self.running:
            self._step()
            return True
        until = self.asks[0].at_s if self.asks and self.callers is None else inf
        if self.encoding:
            until = min(until, self.now_s + self.encoding[0][0])
        until = min(until, until_s)
        if until == inf:
            return False
        self._encode(until - self.now_s)
        self.now_s = until
        return True

    def _arrive(self) -> None:
        while self.asks:
            if self.callers is None:
                if self.asks[0].at_s > self.now_s:
                    return
                at_s = self.asks[0].at_s
            else:
                at_s = self.now_s
                if len(self.told) - sum(one.done_s <= self.now_s for one in self.told) >= self.callers:
                    return
            one = Told(ask=self.asks.popleft(), asked_s=at_s)
            self.told.append(one)
            if one.ask.tiles:
                self.encoding.append((self.costs.tiles_s(one.ask.tiles), one))
            else:
                self.waiting.append(one)

    def _encode(self, seconds: float) -> None:
        """The encoder has had so long for itself."""
        while self.encoding:
            left, one = self.encoding.popleft()
            if left > seconds + 1e-12:
                self.encoding.appendleft((left - seconds, one))
                return
            seconds -= left
            self.waiting.append(one)

    def _step(self) -> None:
        answering = [one for one in self.running if one.is_answering]
        cached = sum(one.ask.prompt_tokens + one.num_answered for one in answering)
        work = self._chunks(len(answering), cached)
        chunks = tuple(
            Chunk(num_tokens=n, earlier=one.num_computed, is_last=one.num_computed + n == one.ask.prompt_tokens)
            for one, n in work
        )
        seconds = self.costs.step_s(Step(answers=len(answering), cached=cached, chunks=chunks))
        if self.encoding:
            seconds = self._beside(seconds)
        self.now_s += seconds
        self.busy_s += seconds
        self.seats_s += seconds * len(self.running)
        for one, n in work:
            one.num_computed += n
        for one in [*answering, *(one for one, _ in work if one.is_answering)]:
            self._answer(one)

    def _chunks(self, num_answers: int, cached: int) -> list[tuple[Told, int]]:
        left = self.rules.max_step_tokens - num_answers
        prompts = [one for one in self.running if not one.is_answering]
        if num_answers and prompts:
            left = min(left, most_beside(self.costs, self.rules, num_answers, cached))
        found = []
        for one in prompts:
            if left > 1:
                n = min(left, one.ask.prompt_tokens - one.num_computed)
                found.append((one, n))
                left -= n
        return found

    def _beside(self, seconds: float) -> float:
        """What a step takes while the encoder has its share; past the encoder's end it goes at full speed."""
        share = self.rules.encoder_share
        encoder_s = sum(left for left, _ in self.encoding) / share  # until all are encoded, at its share
        slow_s = seconds / (1 - share)
        if slow_s > encoder_s:
            slow_s = encoder_s + seconds - encoder_s * (1 - share)
        self._encode(min(slow_s, encoder_s) * share + 1e-12)
        return slow_s

    def _answer(self, one: Told) -> None:
        one.num_answered += 1
        if one.num_answered == 1:
            one.first_s = self.now_s
        if one.num_answered >= one.ask.answer_tokens:
            one.done_s = self.now_s
            self.running.remove(one)


def from_costs(cost: StepCost) -> Costs:
    """Of a bundle that was fitted on this machine. Steps beyond what was measured raise ConfigError."""

    def rows_s(rows: int) -> float:
        """What so many rows add to one: as answers, or as a prompt, which has its own share in the engine besides."""
        found = [seconds_at(cost.decode, rows) - cost.decode[0].seconds] if rows <= cost.decode[-1].size else []
        first = cost.prefill[0]
        prompt_s = first.seconds * rows / first.size if rows < first.size else seconds_at(cost.prefill, rows)
        return min(*found, prompt_s) if found else prompt_s

    def seconds(step: Step) -> float:
        sizes = [chunk.num_tokens for chunk in step.chunks]
        earlier = sum(chunk.earlier * chunk.num_tokens for chunk in step.chunks)
        fewer = (sum(sizes) ** 2 - sum(size**2 for size in sizes)) / 2  # than if all were one prompt's
        pairs_s = (earlier - fewer) * cost.pair_s
        if not step.chunks or not step.answers:
            return step_s(cost, step.answers, step.cached, step.rows if step.chunks else 0) + pairs_s
        rows = max(step.prompt_tokens, min(step.rows, int(cost.prefill[-1].size)))
        beside_s = max(0.0, rows_s(rows) - rows_s(step.answers)) + pairs_s
        return step_s(cost, step.answers, step.cached) + beside_s

    return Costs(step_s=seconds, tiles_s=lambda tiles: seconds_at(cost.tiles, tiles))
