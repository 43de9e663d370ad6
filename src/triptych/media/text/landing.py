"""The way to an answer's end: few tokens that complete a form, found greedily."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

# What is written next, the first that may be. Between values what closes comes first, in a string its quote.
OUTSIDE = ("}", "]", '""', "[]", "{}", ', "', ',"', ",", ":", '"', "1", "0", "null", "true")
INSIDE = ('"}', '"]', '"')
NUMBER = tuple(mark.encode() for mark in "0123456789.eE")
LETTER = "a"  # may come next inside a string
# Where the same is allowed as before, one of these may lead on: the @ of an address, the b of an expression a+b.
SINGLE = "@-:./ \"',;_+=#!?&%$()*<>[]\\^`{|}~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Landing:
    """For one vocabulary; may be used from any thread."""

    def __init__(self, vocabulary: Sequence[bytes], *, ends: Iterable[int]) -> None:
        """vocabulary: each token's bytes."""
        self.vocab_size = len(vocabulary)
        self._ends = sorted(end for end in ends if end < len(vocabulary))
        ids = {token: token_id for token_id, token in reversed(list(enumerate(vocabulary)))}
        self._vocabulary = vocabulary
        self._letter, self._quote = ids.get(LETTER.encode()), ids.get(b'"')
        self._outside = [ids[text.encode()] for text in OUTSIDE if text.encode() in ids]
        self._inside = [ids[text.encode()] for text in INSIDE if text.encode() in ids]
        self._single = [ids[text.encode()] for text in SINGLE if text.encode() in ids]
        self._sizes = np.array([len(token) + 1 if token.strip() else 1 for token in vocabulary], np.int32)

    def is_end(self, token_id: int) -> bool:
        return token_id in self._ends

    def find(self, matcher: LLMatcher, *, room: int, seconds: float, exits: dict[bytes, int]) -> list[int] | None:
        """At most `room` tokens, the last of them an end, that may follow; None where they were not found.

        seconds: of this thread's own time, so that what is found does not depend on how busy the machine is.
        exits: what led on where nothing new was allowed; kept from one call for the same form to the next.
        """
        ahead, found, until_s = matcher.deep_copy(), list[int](), time.thread_time() + seconds
        seen = set[bytes]()
        while len(found) < room and time.thread_time() < until_s:
            bits = ahead.compute_bitmask()
            if ahead.is_error():
                return None
            end = next((end for end in self._ends if _is_set(bits, end)), None)
            if end is not None:
                return [*found, end]
            token = self._closing(bits)
            if token is None and bits in seen:
                token = self._exit(ahead, bits, seen, exits)
            seen.add(bits)
            found.append(self._longest(bits) if token is None else token)
            ahead.consume_token(found[-1])
        return None

    def is_shortest(self, matcher: LLMatcher, ending: Sequence[int], *, is_json: bool) -> bool:
        """Whether what was found is known to be: each of its tokens is the only way on, or closes what is JSON."""
        ahead = matcher.deep_copy()
        for token, following in zip(ending, ending[1:], strict=False):
            bits = ahead.compute_bitmask()
            closes = is_json and token == self._closing(bits) and (token != self._quote or self._is_inside(bits))
            closes = closes and not self._goes_on(token, following)
            others = () if closes else np.flatnonzero(self._allowed(bits) * (self._sizes > 1)).tolist()  # no blanks
            if not all(self._vocabulary[token].startswith(self._vocabulary[one]) for one in others):
                return False
            ahead.consume_token(token)
        return True

    def _goes_on(self, token: int, following: int) -> bool:
        """Whether a number is longer than its first digit: another may have been shorter."""
        return self._vocabulary[token].isdigit() and self._vocabulary[following].startswith(NUMBER)

    def _is_inside(self, bits: bytes) -> bool:
        return self._letter is not None and _is_set(bits, self._letter)

    def _closing(self, bits: bytes) -> int | None:
        """What leads to the end soonest, where it may be written."""
        wanted = self._inside if self._is_inside(bits) else self._outside
        return next((token for token in wanted if _is_set(bits, token)), None)

    def _longest(self, bits: bytes) -> int:
        """The longest token that is no blank."""
        return int((self._allowed(bits) * self._sizes).argmax())

    def _allowed(self, bits: bytes) -> NDArray[np.uint8]:
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=self.vocab_size, bitorder="little")

    def _exit(self, matcher: LLMatcher, bits: bytes, seen: set[bytes], exits: dict[bytes, int]) -> int | None:
        """A character behind which something is allowed that was not allowed before; None where there is none."""
        if bits not in exits:
            for token in (single for single in self._single if _is_set(bits, single)):
                ahead = matcher.deep_copy()
                ahead.consume_token(token)
                if ahead.compute_bitmask() not in seen:
                    exits[bits] = token
                    break
        return exits.get(bits)


def _is_set(bits: bytes, index: int) -> bool:
    return bool(bits[index >> 3] >> (index & 7) & 1)
