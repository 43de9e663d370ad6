"""How long the device takes, learnt from each step: for answers, for prompts, for pictures."""

from __future__ import annotations

from dataclasses import dataclass

STRETCH = 0.4  # a step with prompts in it may take so much longer than one of answers alone; the encoder adds to it
LEAST_TOKENS = 8  # of prompts in a step, however slow: they must get on
FIRST = 3  # measurements: shapes are compiled when they are first seen
MEMORY = 20  # measurements that an estimate remembers
LEAST_S = 1e-6  # a token
OUTLIER = 3.0  # times the estimate: more counts as so much


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
    """Seconds a piece, by the sums over the last so many pieces: many at once say more than a few."""

    memory: float
    pieces: float = 0.0
    seconds: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.seconds / self.pieces if self.pieces else 0.0

    def see(self, pieces: int, seconds: float) -> None:
        self.count += 1
        if self.count <= FIRST:
            if self.count == 1 or seconds < pieces * self.value:
                self.pieces, self.seconds = pieces, seconds
            return
        fade = self.memory / (self.memory + pieces)
        self.seconds = fade * self.seconds + min(seconds, OUTLIER * pieces * self.value)
        self.pieces = fade * self.pieces + pieces


class Pace:
    """Seconds for an answering step, a prompt token, a picture's tile; 0 where nothing was measured yet."""

    def __init__(self) -> None:
        self._answers: dict[int, Estimate] = {}  # by how many answers have a token each
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
        elif is_alone or num_answers not in self._answers:
            self._answers.setdefault(num_answers, Estimate()).see(seconds)

    def saw_tiles(self, num_tiles: int, seconds: float) -> None:
        self._tile.see(num_tiles, seconds)

    # ── what is to be expected ─────────────────────────────────────────────────────────────────────────────────

    def answers_s(self, num_answers: int) -> float:
        """A step of so many answers and no prompt: measured, or as long as that of the nearest number."""
        if not num_answers or not self._answers:
            return 0.0
        known = self._answers.get(num_answers)
        if known is None:
            known = self._answers[min(self._answers, key=lambda number: abs(number - num_answers))]
        return known.value

    @property
    def prompt_token_s(self) -> float:
        return self._prompt_token.value

    @property
    def tile_s(self) -> float:
        return self._tile.value

    def prompt_tokens(self, num_answers: int) -> int | None:
        """How many a step may have beside so many answers, so that these are not held up; None: any number.

        A power of two: OpenVINO compiles each shape when it first sees it, so there should be few.
        """
        answers_s = self.answers_s(num_answers)
        if not answers_s or not self.prompt_token_s:
            return None
        most = max(LEAST_TOKENS, int(STRETCH * answers_s / self.prompt_token_s))
        return 1 << (most.bit_length() - 1)
