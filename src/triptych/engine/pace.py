"""How long the device takes, learnt from each step: for answers, for prompts, for pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from triptych.core.device import StepCost
from triptych.core.filling import LEAST_TOKENS, STRETCH, size_of

COLD = 1  # measurements that say nothing: shapes are compiled when they are first seen
FIRST = 3  # measurements of which the least counts
MEMORY = 20  # measurements that an estimate remembers
LEAST_S = 1e-6  # a token
OUTLIER = 3.0  # times the estimate: more counts as so much
FAR = 1 << 16  # tokens: longer than any step


@dataclass(slots=True)
class Estimate:
    """The least of the first measurements, which others were slowed by what is done once; then a mean that forgets."""

    value: float = 0.0
    count: int = 0

    def see(self, value: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        if self.count <= FIRST:
            self.value = value if self.count == 1 else min(value, self.value)
        else:
            self.value += (min(value, OUTLIER * self.value) - self.value) / self.count


@dataclass(slots=True)
class Rate:
    """Seconds a piece, by the sums over the last so many pieces: many at once say more than a few. 0: not known."""

    memory: float
    pieces: float = 0.0
    seconds: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.seconds / self.pieces if self.pieces else 0.0

    def see(self, pieces: int, seconds: float) -> None:
        self.count += 1
        if self.count <= COLD:
            return
        if self.count <= FIRST:
            if not self.pieces or seconds < pieces * self.value:
                self.pieces, self.seconds = pieces, seconds
            return
        fade = self.memory / (self.memory + pieces)
        self.seconds = fade * self.seconds + min(seconds, OUTLIER * pieces * self.value)
        self.pieces = fade * self.pieces + pieces

    def assume(self, pieces: float, seconds: float) -> None:
        """As if so much had been measured."""
        self.pieces, self.seconds, self.count = pieces, seconds, FIRST


class Pace:
    """Seconds for a step, a prompt's token, a picture's tile; 0 where nothing was measured yet."""

    def __init__(self, stretch: float = STRETCH) -> None:
        self._stretch = stretch
        self._steps: dict[int, Estimate] = {}  # by tokens, answers' and prompts' alike
        self._prompt_token = Rate(memory=4096)
        self._tile = Rate(memory=64)

    # ── what was seen ──────────────────────────────────────────────────────────────────────────────────────────

    def saw_step(self, num_answers: int, num_prompt_tokens: int, seconds: float, *, is_alone: bool) -> None:
        """is_alone: nothing was being encoded beside it."""
        if seconds <= 0:
            return
        if num_prompt_tokens:
            alone_s = self.answers_s(max(1, num_answers))  # reading the weights once is in every step
            self._prompt_token.see(num_prompt_tokens, max(LEAST_S * num_prompt_tokens, seconds - alone_s))
        size = size_of(num_answers + num_prompt_tokens)
        if size not in self._steps:
            self._steps = self._steps | {size: Estimate()}  # a new one: another thread may be going through the old
        step = self._steps[size]
        if is_alone or step.count <= COLD:
            step.see(seconds)

    def saw_tiles(self, num_tiles: int, seconds: float) -> None:
        self._tile.see(num_tiles, seconds)

    def assume(self, cost: StepCost) -> None:
        """Begin with what was measured here before; it may be a slower day."""
        alone_s = cost.decode[0].seconds
        for point in cost.decode:
            self._steps[size_of(round(point.size))] = Estimate(point.seconds, FIRST)
        for point in cost.prefill:
            self._steps.setdefault(size_of(1 + round(point.size)), Estimate(alone_s + point.seconds, FIRST))
        for rate, points in ((self._prompt_token, cost.prefill), (self._tile, cost.tiles)):
            if points:
                rate.assume(points[-1].size, points[-1].seconds)

    # ── what is to be expected ─────────────────────────────────────────────────────────────────────────────────

    def answers_s(self, num_answers: int) -> float:
        """A step of so many answers and no prompt."""
        sizes, seconds = self._curve()
        return float(np.interp(num_answers, sizes, seconds)) if num_answers and len(sizes) else 0.0

    @property
    def prompt_token_s(self) -> float:
        return self._prompt_token.value

    @property
    def tile_s(self) -> float:
        return self._tile.value

    def prompt_tokens(self, num_answers: int) -> int | None:
        """How many a step may have beside so many answers, so that these are not held up; None: any number.

        With them its tokens are a number of few: OpenVINO compiles each shape when it first sees it.
        """
        sizes, seconds = self._curve()
        if not num_answers or not len(sizes) or self._stretch == math.inf:
            return None
        limit_s = (1 + self._stretch) * float(np.interp(num_answers, sizes, seconds))
        beyond = int(np.searchsorted(seconds, limit_s, side="right"))
        most = FAR if beyond == len(sizes) else _between(limit_s, sizes[beyond - 1 : beyond + 1], seconds[beyond - 1 :])
        return max(LEAST_TOKENS, size_of(max(1, most), up=False) - num_answers)

    def _curve(self) -> tuple[list[float], list[float]]:
        """Seconds by tokens: a step takes no longer than a larger one. Beyond what was seen, by the prompts' rate.

        Before that is known a token more is feared to cost as much as one of those did.
        """
        known = sorted((size, one.value) for size, one in self._steps.items() if one.count > COLD)
        if not known:
            return [], []
        sizes = [0.0, *(float(size) for size, _ in known)]
        least = np.minimum.accumulate([seconds for _, seconds in reversed(known)])[::-1].tolist()
        token_s = self.prompt_token_s or least[-1] / sizes[-1]
        return [*sizes, float(FAR)], [least[0] / 2, *least, least[-1] + (FAR - sizes[-1]) * token_s]


def _between(seconds: float, sizes: list[float], ends_s: list[float]) -> int:
    return int(sizes[0] + (sizes[1] - sizes[0]) * (seconds - ends_s[0]) / (ends_s[1] - ends_s[0]))
