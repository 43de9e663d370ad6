"""The one mutable thing: a request on its way, and what has been computed of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.random import Generator, Philox  # loaded now: numpy does it with the first use, here an answer
from numpy.typing import NDArray

from triptych.core.request import Delta, FinishReason, Patches, Request, Span, Timing, TokenLogprob, Usage
from triptych.core.spec import Modality
from triptych.engine.blocks import blocks_for
from triptych.engine.evict.layout import Layout
from triptych.media.registry import modality_of


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


LUCK_TOKENS = 16  # guesses that luck remembers


@dataclass(slots=True)
class Luck:
    """How often the guess of the next token was right of late; at first, once in four."""

    right: float = 1.0
    tried: float = 4.0

    def see(self, is_right: bool) -> None:
        fade = 1.0 - 1.0 / LUCK_TOKENS
        self.right = fade * self.right + is_right
        self.tried = fade * self.tried + 1.0

    def expected(self, num_guessed: int) -> float:
        """How many of so many guessed tokens in a row will be right, before one that is not."""
        share = self.right / self.tried
        return sum(share**place for place in range(1, num_guessed + 1))


class Sequence:
    """A prompt and the answer growing behind it.

    Its tokens fall in two regions; a step moves the border to the right, a preemption back to zero:

        0 ───────────── num_computed ───────────── num_tokens
        │ keys and values cached     │ to be computed        │
    """

    def __init__(self, request: Request, deliver: Callable[[Delta], None], *, now_s: float) -> None:
        prompt = request.token_ids
        self.request = request
        self.deliver = deliver
        self.status = Status.WAITING
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.block_keys: list[bytes] = []  # of full blocks, in order (`blocks.key_of`)
        self.num_published = 0  # of `blocks`, how many others can find
        self.held: list[str] = []  # digests of the media items that `features` keeps for this sequence
        self.layout: Layout | None = None  # where rows lie once some were forgotten; None: `blocks` in order
        self.queries: NDArray[np.float32] | None = None  # (layers, w, heads, head_dim), of the last w tokens
        self.forget_from = 0  # tokens computed before it can be time to forget
        self._tokens = np.empty(len(prompt) + request.sampling.max_tokens, np.int32)
        self._tokens[: len(prompt)] = prompt
        self.num_guessed = 0  # tokens behind `num_tokens` that are there as guesses
        self.luck = Luck()
        self._prompt_logprobs: dict[int, TokenLogprob] = {}  # by the token's place
        self._cached_tokens: int | None = None  # at first admission; a preemption does not change what is billed
        self._encoder_hits = 0
        self._encoder_misses = 0
        self._arrived_s = now_s
        self._scheduled_s: float | None = None
        self._first_token_s: float | None = None
        self._encode_s = 0.0
        guide = request.sampling.guide
        self.matcher = None if guide is None else guide.start()  # has taken what the answer holds so far
        self.generator = Generator(Philox(request.sampling.seed))

    # ── questions ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and answer so far: (num_tokens,) global ids, a view."""
        return self._tokens[: self.num_tokens]

    def ahead(self, start: int, end: int) -> NDArray[np.int32]:
        """Tokens [start, end), which may be guesses: a view."""
        return self._tokens[start:end]

    @property
    def answer(self) -> NDArray[np.int32]:
        return self._tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_answer_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_scored(self) -> bool:
        """Whether its prompt's tokens are to be given their probabilities: all of them are computed for it."""
        return self.request.sampling.num_prompt_logprobs is not None and self.num_answer_tokens == 0

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """One for each prompt token, None for the first and for media; None where nobody asked."""
        if self.request.sampling.num_prompt_logprobs is None:
            return None
        return tuple(self._prompt_logprobs.get(at) for at in range(self.num_prompt_tokens))

    def scored_in(self, start: int, end: int) -> NDArray[np.int64]:
        """The places in [start, end) whose logits say how likely the prompt's next token was."""
        if not self.is_scored:
            return np.empty(0, np.int64)
        places = np.arange(start, min(end, self.num_prompt_tokens - 1))
        of_text: NDArray[np.int64] = places[modality_of(self.tokens[places + 1]) == Modality.TEXT]
        return of_text

    @property
    def deadline_s(self) -> float | None:
        """When it must have been answered, on the engine's clock."""
        return None if self.request.deadline_s is None else self._arrived_s + self.request.deadline_s

    @property
    def next_position(self) -> int:
        """Of the first token that is not computed, if the prompt is."""
        return self.request.num_positions + self.num_computed - self.num_prompt_tokens

    def finish_of(self, token_id: int, eos_ids: frozenset[int]) -> FinishReason | None:
        """Why the answer ends with this token, its last so far; None: it goes on."""
        settings = self.request.sampling
        if token_id in settings.stop_ids or (token_id in eos_ids and not settings.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_answer_tokens >= settings.max_tokens else None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that it needs in all, once `num_tokens` are computed."""
        return blocks_for(num_tokens) if self.layout is None else self.layout.num_blocks(num_tokens)

    @property
    def is_new(self) -> bool:
        """Whether it was never let in."""
        return self._scheduled_s is None

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def spans_in(self, start: int, end: int) -> list[Span]:
        """The media spans that touch positions [start, end)."""
        return [span for span in self.request.spans if span.start < end and span.end > start]

    def patches_in(self, start: int, end: int) -> list[Patches]:
        """The items those spans show, each once, in order."""
        if not self.request.spans:
            return []
        digests = dict.fromkeys(span.digest for span in self.spans_in(start, end))
        return [self.request.patches[digest] for digest in digests]

    def passed(self) -> list[str]:
        """Held items that no token still to be computed shows."""
        ahead = {span.digest for span in self.spans_in(self.num_computed, self.num_tokens)}
        return [digest for digest in self.held if digest not in ahead]

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, cached_blocks: list[int], *, num_cached: int, now_s: float) -> None:
        """Enter the running set with `num_cached` tokens already in `cached_blocks`."""
        assert self.status is Status.WAITING
        assert not self.blocks
        self.status = Status.RUNNING
        self.blocks = cached_blocks
        self.num_computed = num_cached
        self.num_published = len(cached_blocks)
        if self._cached_tokens is None:
            self._cached_tokens = num_cached
            self._scheduled_s = now_s

    def hold(self, digests: list[str], *, misses: int) -> None:
        """It has asked for these items: `misses` of them are encoded for it, the others are there or under way."""
        self.held += digests
        self._encoder_hits += len(digests) - misses
        self._encoder_misses += misses

    def encoded(self, seconds: float) -> None:
        """An item that it waited for has been encoded."""
        self._encode_s += seconds

    def commit(self, num_tokens: int) -> None:
        """`num_tokens` more have their keys and values in the cache."""
        self.num_computed += num_tokens
        assert self.num_computed <= self.num_tokens

    def grow(self, blocks: list[int], num_tokens: int) -> None:
        """Take more blocks, room for `num_tokens` in all."""
        self.blocks += blocks
        if self.layout is not None:
            self.layout.grow(blocks, num_tokens)

    def forget(self, blocks: list[int], layout: Layout) -> None:
        """Its rows that stay lie in these blocks now; the caller has released the others."""
        self.blocks = blocks
        self.layout = layout

    def scored(self, place: int, logprob: TokenLogprob) -> None:
        """How likely the prompt's token at `place` was after those before it."""
        self._prompt_logprobs[place] = logprob

    def published(self, num_blocks: int) -> None:
        """The first `num_blocks` blocks can be found by others."""
        self.num_published = num_blocks

    def guess(self, tokens: NDArray[np.int32]) -> None:
        """These may come next."""
        self.num_guessed = len(tokens)
        self._tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens

    def append(self, token_id: int, *, now_s: float) -> bool:
        """The sampler chose the next token; whether it had been guessed."""
        assert self.num_computed == self.num_tokens
        is_right = self.num_guessed > 0 and self._tokens[self.num_tokens] == token_id
        if self.num_guessed:
            self.luck.see(bool(is_right))
        self.num_guessed = self.num_guessed - 1 if is_right else 0
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self._first_token_s is None:
            self._first_token_s = now_s
        return bool(is_right)

    def preempt(self) -> list[int]:
        """Give all blocks back and wait again; what was generated stays and is computed anew, and forgotten anew."""
        assert self.status is Status.RUNNING
        self.status = Status.WAITING
        self.num_computed = self.forget_from = self.num_guessed = 0
        self.layout = self.queries = None
        blocks, self.blocks = self.blocks, []
        return blocks

    def finish(self) -> list[int]:
        """End, for whatever reason; the caller frees the blocks returned."""
        assert not self.is_finished
        self.status = Status.FINISHED
        blocks, self.blocks = self.blocks, []
        return blocks

    # ── the account ────────────────────────────────────────────────────────────────────────────────────────────

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self._cached_tokens or 0,
            image_tokens=self.request.image_tokens,
            completion_tokens=self.num_answer_tokens,
            encoder_hits=self._encoder_hits,
            encoder_misses=self._encoder_misses,
        )

    def timing(self, now_s: float) -> Timing:
        scheduled_s = now_s if self._scheduled_s is None else self._scheduled_s
        first_s = now_s if self._first_token_s is None else self._first_token_s
        return Timing(
            queue_s=scheduled_s - self._arrived_s,
            encode_s=self._encode_s,
            prefill_s=first_s - scheduled_s,
            decode_s=now_s - first_s,
        )
