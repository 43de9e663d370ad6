"""Guess an answer's next tokens from its own text, and compute them at once where that pays."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from triptych.core.policy import Speculation
from triptych.engine.pace import LEAST_S, Pace, Rate
from triptych.engine.sequence import Sequence
from triptych.media.registry import IMAGE_BASE

SIZES = (3, 7, 15)  # tokens of a guess: OpenVINO compiles each shape when it first sees it, so there should be few
MOST_ROWS = 32  # of a step with guesses: beyond it a row costs as much as an answer of its own
UNMEASURED = 1 / 8  # of a step: what a guessed row is taken to cost before any was measured
MEMORY = 512  # guessed rows that their cost is learnt from


def look_up(tokens: NDArray[np.int32], most: int, speculation: Speculation) -> NDArray[np.int32]:
    """What followed where the end of `tokens` stood last: prompt look-up decoding (A. Saxena, 2023).

    tokens: (n,). Of several places it takes the one with most in common, then the latest. Where what followed runs
    into the end itself, it is taken to go round, as in LZ77. Nothing where too little is in common, or media follow.
    """
    places, common = np.flatnonzero(tokens[:-1] == tokens[-1]), 1
    while len(places) and common < speculation.prompt_lookup_max:
        longer = places[(places >= common) & (tokens[places - common] == tokens[-1 - common])]
        if not len(longer):
            break
        places, common = longer, common + 1
    if not len(places) or common < speculation.prompt_lookup_min:
        return tokens[:0]
    begin = places[-1] + 1
    guess: NDArray[np.int32] = tokens[begin + np.arange(most) % (len(tokens) - begin)]
    media = np.flatnonzero(guess >= IMAGE_BASE)
    return guess[: media[0]] if len(media) else guess


class Drafter:
    """Decides how many guessed tokens a step computes, so that it gives most tokens a second."""

    def __init__(self, speculation: Speculation, pace: Pace) -> None:
        most = speculation.num_speculative_tokens
        self._speculation = speculation
        self._sizes = sorted({size for size in SIZES if size < most} | {most})
        self._pace = pace
        self._row = Rate(memory=MEMORY)

    def sizes(self, answering: Many[Sequence], room: int) -> list[int]:
        """How many guessed tokens to compute for each, in a step that computes one more for each of them and no other.

        room: rows that the step may have besides.
        """
        tokens, seconds = float(len(answering)), self._pace.answers_s(len(answering))
        room = min(room, MOST_ROWS - len(answering))
        row_s = self._row.value or UNMEASURED * seconds
        chosen = [0] * len(answering)
        if room <= 0 or not seconds:
            return chosen
        for place, sequence in enumerate(answering):
            most = min(room, self._guess(sequence))
            rates = {
                size: (tokens + sequence.luck.expected(size)) / (seconds + size * row_s)
                for size in (0, *self._sizes)
                if size <= most or not size
            }
            size = self._best(rates)
            tokens += sequence.luck.expected(size)
            seconds += size * row_s
            room -= size
            chosen[place] = size
        return chosen

    def saw(self, num_answers: int, num_drafted: int, seconds: float, *, is_alone: bool) -> None:
        """A step of so many answers and guessed tokens took so long. is_alone: nothing was being encoded beside it."""
        if is_alone:
            self._row.see(num_drafted, max(LEAST_S * num_drafted, seconds - self._pace.answers_s(num_answers)))

    def _guess(self, sequence: Sequence) -> int:
        """Guess, and say how many of the tokens can be of use: after each there is one more, which is not guessed."""
        left = sequence.request.sampling.max_tokens - sequence.num_answer_tokens
        sequence.guess(look_up(sequence.tokens, min(self._sizes[-1], left), self._speculation))
        return min(sequence.num_guessed, left - 1)

    def _best(self, rates: Mapping[int, float]) -> int:
        """rates: tokens a second, by how many are guessed."""
        return max(rates, key=rates.__getitem__)
