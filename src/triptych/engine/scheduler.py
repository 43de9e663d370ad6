"""Who computes how many tokens in this step.

There is no prefill and no decode: a sequence has tokens that are not computed yet, one when it is answering and many
when it is new, and a step takes some of them (vLLM's scheduler has the idea). Answering sequences go first, so a long
prompt never starves a running answer; what is left of the step goes to prompts, in chunks.

Pictures are encoded beside the steps, those of prompts that wait for room too. A prompt whose first chunk shows one
that is not there yet waits outside, so others pass it by.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from triptych.backends.base import BLOCK_TOKENS
from triptych.core.request import Patches, StepRecord
from triptych.engine.blocks import Blocks, blocks_for, key_of
from triptych.engine.draft import Drafter
from triptych.engine.features import Features
from triptych.engine.qos import Turns, follows, tokens_of
from triptych.engine.sequence import Sequence, Status

Rank = tuple[int, float, int]  # priority, turn, arrival: lower goes first

LOOK_AHEAD = 64  # waiting sequences with pictures that a step looks at
LEAST_STEP = 3  # tokens besides answers; steps of fewer cut prompts wherever they must
MAX_SCORED = 64  # tokens a step of a prompt whose probabilities are asked for: each is a row of logits


class Work(StepRecord, frozen=True, kw_only=True):
    """Compute tokens [start, start + num_tokens) of one sequence, and some that are guessed to come behind them."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_drafted: int = 0
    is_apart: bool = False  # each token is computed as if it came in a step of its own, which has the same bits

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_drafted

    @property
    def is_last(self) -> bool:
        """After this the sequence has nothing left to compute, so its next token is sampled."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is done next: begin to encode these items, and compute these tokens meanwhile."""

    works: tuple[Work, ...]
    encode: tuple[Patches, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_step_tokens: int
    max_sequences: int
    max_encode_tiles: int  # at once; one item is always allowed, however many tiles it has
    share_prefixes: bool = True
    min_computed: int = 2  # tokens at a prompt's end that are never taken from the prefix cache
    batch_invariant: bool = False  # whatever was computed token by token is never computed, or found, otherwise


class Scheduler:
    """Holds every unfinished sequence, and gives blocks out and takes them back."""

    def __init__(self, limits: Limits, blocks: Blocks, features: Features, drafter: Drafter | None = None) -> None:
        self.limits = limits
        self.blocks = blocks
        self.features = features
        self.waiting: list[tuple[Rank, Sequence]] = []
        self.running: list[Sequence] = []  # in the order of their rank
        self.encoding: set[str] = set()  # digests of the items under way
        self.preemptions = 0
        self.prefix_queries = 0  # tokens
        self.prefix_hits = 0
        self._rank: dict[str, Rank] = {}
        self._turns = Turns()
        self._gone: list[tuple[Rank, Sequence]] = []  # never let in, and ended since the last step
        self._arrivals = 0
        self._drafter = drafter

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        self._rank[sequence.request.id] = (
            sequence.request.priority,
            self._turns.take(sequence.request),
            self._arrivals,
        )
        self._wait(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, and take back all it holds."""
        if sequence.status is Status.WAITING:
            self.waiting = [entry for entry in self.waiting if entry[1] is not sequence]
            if sequence.is_new:
                self._gone.append((self._rank_of(sequence), sequence))
        else:
            self.running.remove(sequence)
        self._take_back(sequence, sequence.finish())
        del self._rank[sequence.request.id]

    def commit(self, works: Iterable[Work]) -> None:
        """They were computed: move each border, let others find full blocks, let go of items that were passed."""
        for work in works:
            sequence = work.sequence
            sequence.commit(work.num_tokens)
            self._publish(sequence)
            self._let_go(sequence, sequence.passed())

    def encoded(self, digest: str) -> list[Sequence]:
        """An item has been encoded, or could not be; returns who waits for it."""
        self.encoding.discard(digest)
        waiting = (sequence for _, sequence in self.waiting)
        return [sequence for sequence in (*self.running, *waiting) if digest in sequence.held]

    @property
    def num_answers(self) -> int:
        """Sequences that only their next token is to be computed of."""
        return sum(running.num_uncomputed == 1 for running in self.running)

    def schedule(self, *, now_s: float, prompt_tokens: int | None = None) -> Step:
        """The next step; without works when nothing can be computed. prompt_tokens: that it may have at most."""
        if self._gone:
            self._move_up()
        plan = _Plan(self.limits, prompt_tokens, is_encoding=bool(self.encoding))
        for sequence in sorted(self.running, key=lambda running: running.num_uncomputed > 1):
            if sequence.status is Status.RUNNING:  # an earlier one may have preempted it
                self._extend(sequence, plan)
        self._encode_ahead(plan)
        for sequence in self._next():
            if not plan.has_room or len(self.running) >= self.limits.max_sequences:
                break
            if not self._admit(sequence, plan, now_s):
                break
        self.encoding.update(plan.encode)
        if self._drafter is not None and plan.only_answers:
            self._draft(self._drafter, plan)
        return plan.step()

    # ── one sequence ───────────────────────────────────────────────────────────────────────────────────────────

    def _extend(self, sequence: Sequence, plan: _Plan) -> None:
        self._look(sequence, sequence.num_computed, plan)
        num_tokens = plan.chunk(sequence, self.features)
        if num_tokens == 0:
            return
        end = sequence.num_computed + num_tokens
        need = max(0, sequence.blocks_for(end) - len(sequence.blocks))  # it may have one more, for guessed tokens
        while need > self.blocks.num_free:
            victim = self._victim(plan)
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.grow(self.blocks.allocate(need), end)
        plan.add(sequence, num_tokens)

    def _draft(self, drafter: Drafter, plan: _Plan) -> None:
        """Compute guessed tokens as well, where there are blocks for them."""
        works = plan.works
        sizes = drafter.sizes([work.sequence for work in works], plan.tokens_left)
        for work, size in zip(works, sizes, strict=True):
            need = max(0, work.sequence.blocks_for(work.end + size) - len(work.sequence.blocks))
            if size and need <= self.blocks.num_free:
                work.sequence.grow(self.blocks.allocate(need), work.end + size)
                plan.put(work.but(num_drafted=size, is_apart=self.limits.batch_invariant))

    def _next(self) -> Iterator[Sequence]:
        """Who may be let in, in order; of those that show pictures only some, since most of them wait for these."""
        num_shown = 0
        for _, sequence in self.waiting.copy():
            num_shown += bool(sequence.request.spans)
            if num_shown <= LOOK_AHEAD or not sequence.request.spans:
                yield sequence

    def _encode_ahead(self, plan: _Plan) -> None:
        """Ask for the pictures of those who wait, be there room for their tokens or not: so the encoder need not rest.

        In a full cache only for the first in line, who then never waits for what others hold who cannot begin either.
        """
        showing = (sequence for _, sequence in self.waiting if sequence.request.spans)
        for sequence in itertools.islice(showing, LOOK_AHEAD):
            if not plan.may_encode:
                return
            self._look(sequence, len(self._cached_prefix(sequence)) * BLOCK_TOKENS, plan)
            plan.may_encode = not self.features.is_full

    def _look(self, sequence: Sequence, start: int, plan: _Plan) -> bool:
        """Ask for the pictures that a step from `start` may show; whether all of them are there."""
        is_ready, asked, misses = True, [], 0
        for patches in sequence.patches_in(start, min(start + self.limits.max_step_tokens, sequence.num_tokens)):
            digest = patches.digest
            is_there = digest in self.features
            if not (is_there or digest in self.encoding or digest in plan.encode):
                if not plan.encode_too(patches):
                    is_ready = False
                    break
                misses += 1
            is_ready = is_ready and is_there
            if digest not in sequence.held:
                asked.append(digest)
        if asked:
            self.features.hold(asked, misses=misses)
            sequence.hold(asked, misses=misses)
        return is_ready

    def _admit(self, sequence: Sequence, plan: _Plan, now_s: float) -> bool:
        """Let a waiting sequence in, unless it waits for its pictures; False where it lacks blocks."""
        cached = self._cached_prefix(sequence)
        num_cached = len(cached) * BLOCK_TOKENS
        if not self._look(sequence, num_cached, plan):
            return True
        need = blocks_for(sequence.num_tokens) - len(cached)
        if need > self.blocks.num_free_besides(cached) - self._promised():
            return False
        rank = self._rank_of(sequence)
        self.waiting.remove((rank, sequence))
        self._turns.served(rank[1])
        self.blocks.share(cached)
        self.prefix_queries += sequence.num_tokens
        self.prefix_hits += num_cached
        sequence.admit(cached, num_cached=num_cached, now_s=now_s)
        bisect.insort(self.running, sequence, key=self._rank_of)
        self._extend(sequence, plan)
        return True

    def _promised(self) -> int:
        """Blocks that prompts already let in have yet to take."""
        return sum(max(0, one.blocks_for(one.num_tokens) - len(one.blocks)) for one in self.running)

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks to share; the last token is always computed, for its logits, or as many as forgetting looks at."""
        if not self.limits.share_prefixes or sequence.is_scored:
            return []
        most = sequence.num_prompt_tokens if self.limits.batch_invariant else sequence.num_tokens
        whole = max(0, most - self.limits.min_computed) // BLOCK_TOKENS
        self._fill_keys(sequence, whole)
        return self.blocks.find(sequence.block_keys[:whole])

    def _fill_keys(self, sequence: Sequence, count: int) -> None:
        keys, tokens = sequence.block_keys, sequence.tokens
        for index in range(len(keys), count):
            content = tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].tobytes()
            keys.append(key_of(sequence.request, content, index, keys[-1] if keys else None))

    def _publish(self, sequence: Sequence) -> None:
        if not self.limits.share_prefixes or sequence.layout is not None:  # what has forgotten is no prefix
            return
        most = sequence.num_prompt_tokens if self.limits.batch_invariant else sequence.num_computed
        full = min(sequence.num_computed, most) // BLOCK_TOKENS
        for index in range(sequence.num_published, full):
            self._fill_keys(sequence, index + 1)
            self.blocks.publish(sequence.blocks[index], sequence.block_keys[index])
        sequence.published(full)

    def _victim(self, plan: _Plan) -> Sequence:
        """The running sequence of the lowest rank that this step does not compute yet."""
        return next(running for running in reversed(self.running) if not plan.has(running))

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._take_back(sequence, sequence.preempt())
        self._wait(sequence)

    def _take_back(self, sequence: Sequence, blocks: list[int]) -> None:
        self.blocks.release(blocks)
        self._let_go(sequence, list(sequence.held))

    def _let_go(self, sequence: Sequence, digests: list[str]) -> None:
        if digests:
            self.features.release(digests)
            sequence.held = [digest for digest in sequence.held if digest not in digests]

    def _move_up(self) -> None:
        """Some ended before they began: what their callers asked for later need not wait for them."""
        tokens: dict[str, float] = defaultdict(float)  # that each caller asks less for
        ends: dict[str, float] = {}  # of each caller's request before
        for (priority, turn, arrival), one in sorted([*self._gone, *self.waiting], key=lambda entry: entry[0][2]):
            caller = one.request.caller
            if not follows(turn, ends.get(caller, turn)):  # it waits for others, or for what has begun
                tokens.pop(caller, None)
            ends[caller] = turn + tokens_of(one.request)
            if one.is_finished:
                tokens[caller] += tokens_of(one.request)
            elif one.is_new and caller in tokens:
                self._rank[one.request.id] = (priority, self._turns.sooner(turn, tokens[caller]), arrival)
        self._turns.give_back(tokens, ends)
        self._gone = []
        self.waiting = sorted(((self._rank_of(one), one) for _, one in self.waiting), key=lambda entry: entry[0])

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, (self._rank_of(sequence), sequence), key=lambda entry: entry[0])

    def _rank_of(self, sequence: Sequence) -> Rank:
        return self._rank[sequence.request.id]


class _Plan:
    """A step while it is being made: what room is left in it."""

    def __init__(self, limits: Limits, prompt_tokens: int | None, *, is_encoding: bool) -> None:
        self.encode: dict[str, Patches] = {}  # by digest
        self._is_invariant = limits.batch_invariant
        self._is_narrow = limits.max_step_tokens < limits.max_sequences + LEAST_STEP
        self.tokens_left = limits.max_step_tokens
        self._prompt_tokens_left = limits.max_step_tokens if prompt_tokens is None else prompt_tokens
        self._tiles_left = limits.max_encode_tiles
        self.may_encode = not is_encoding
        self._works: dict[str, Work] = {}

    @property
    def works(self) -> tuple[Work, ...]:
        return tuple(self._works.values())

    @property
    def only_answers(self) -> bool:
        """Whether everybody in it has answered something, and is given its next token."""
        return all(work.is_last and work.num_tokens == 1 and work.sequence.num_answer_tokens for work in self.works)

    @property
    def has_room(self) -> bool:
        return min(self.tokens_left, self._prompt_tokens_left) > 0

    def has(self, sequence: Sequence) -> bool:
        return sequence.request.id in self._works

    def encode_too(self, patches: Patches) -> bool:
        """Whether there is room to encode this one as well; if so, it is."""
        num_tiles = len(patches.tiles)
        if not self.may_encode or (num_tiles > self._tiles_left and self.encode):
            return False
        self._tiles_left -= num_tiles
        self.encode[patches.digest] = patches
        return True

    def chunk(self, sequence: Sequence, features: Features) -> int:
        """How many of the sequence's tokens still fit: up to the first picture that is not encoded yet.

        A prompt is cut so that no token of it is alone: attention sums one token in another order than several.
        """
        start, whole = sequence.num_computed, sequence.num_uncomputed
        if self._is_invariant and start < sequence.num_prompt_tokens:  # what was answered is computed apart, then
            whole = min(whole, sequence.num_prompt_tokens - start)
        num_tokens = min(whole, self.tokens_left)
        if num_tokens > 1:
            num_tokens = min(num_tokens, self._prompt_tokens_left, MAX_SCORED if sequence.is_scored else num_tokens)
        for span in sequence.spans_in(start, start + num_tokens):
            if span.digest not in features:
                num_tokens = max(0, span.start - start)
                break
        if whole - num_tokens == 1 < num_tokens:
            num_tokens -= 1
        return num_tokens if num_tokens != 1 or whole == 1 or self._is_narrow else 0

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        is_apart = self._is_invariant and num_tokens > 1 and start >= sequence.num_prompt_tokens  # after a preemption
        self.put(Work(sequence=sequence, start=start, num_tokens=num_tokens, is_apart=is_apart))
        self.tokens_left -= num_tokens
        self._prompt_tokens_left -= num_tokens if num_tokens > 1 else 0

    def put(self, work: Work) -> None:
        self._works[work.sequence.request.id] = work

    def step(self) -> Step:
        return Step(works=self.works, encode=tuple(self.encode.values()))
