"""Forget what a sequence will not miss, and give its blocks back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import BLOCK_TOKENS, LayeredDecoder
from triptych.core.policy import Eviction, KVPolicy
from triptych.core.queries import Queries
from triptych.core.spec import DecoderSpec
from triptych.engine.blocks import Blocks
from triptych.engine.evict import score
from triptych.engine.evict.choose import Context, choose, counts
from triptych.engine.evict.layout import Deal, Ints, Layout, slots_of
from triptych.engine.sequence import Sequence
from triptych.media.registry import modality_of

PLAIN: dict[Eviction, score.Scorer] = {
    "snapkv": score.snapkv,
    "tova": score.tova,
    "knorm": score.key_norm,
    "window": score.recency,
}
OBSERVED = 16  # last tokens whose queries SnapKV asks: half as many or twice as many diverge further (bench/kv)
SLACK = BLOCK_TOKENS  # rows a layer, in the mean, that a sequence may have beyond its budget


def queries_wanted(policy: KVPolicy) -> int:
    """Of how many last tokens a policy's method looks at the queries."""
    return {"snapkv": min(OBSERVED, policy.window), "tova": 1}.get(policy.method, 0)


@dataclass(slots=True)
class Forgotten:
    """What was forgotten so far. Counters only grow."""

    rows: int = 0  # over all layers
    compactions: int = 0
    seconds: float = 0.0


class Evictor:
    """Chooses, moves and frees, after a step and on the engine's thread. For decoders whose layers forget apart."""

    def __init__(
        self, decoder: LayeredDecoder, spec: DecoderSpec, policy: KVPolicy, queries: Queries | None = None
    ) -> None:
        """`queries` are what `policy.statistics` names; the "expected" method needs them."""
        self.method = policy.method
        self.deal = Deal.over(spec.num_layers, policy.devices)
        self.done = Forgotten()
        self.num_queries = queries_wanted(policy)
        self._decoder = decoder
        if policy.method == "expected":
            assert queries is not None
            self._score: score.Scorer = score.ExpectedAttention(spec, queries.mean, queries.covariance)
        else:
            self._score = PLAIN[policy.method]

    # ── what a step needs ──────────────────────────────────────────────────────────────────────────────────────

    def inputs(self, sequences: Many[Sequence], begins: Ints) -> dict[str, NDArray[Any]]:
        """The layered decoder's own inputs. begins: (S+1,), where each sequence's tokens are among the step's."""
        tables = [self._table(sequence) for sequence in sequences]
        past = np.stack([self._lengths(sequence) for sequence in sequences], axis=1)
        wanted = {
            "past_lens": past.astype(np.int32),
            "block_indices": np.concatenate(tables, axis=1).astype(np.int32),
            "block_indices_begins": np.cumsum([0, *(table.shape[1] for table in tables)]).astype(np.int32),
            "max_context_len": np.array((past + np.diff(begins)).max(), np.int32),
        }
        if self.num_queries:
            ends = begins[1:]
            counts = [self._num_watched(*each) for each in zip(sequences, np.diff(begins).tolist(), strict=True)]
            wanted["watched"] = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)])
        return wanted

    def observe(self, sequences: Many[Sequence], begins: Ints, out: Mapping[str, NDArray[Any]]) -> None:
        """Keep the last queries of those who will forget by them; the step is not committed yet."""
        start = 0
        for sequence, num_tokens in zip(sequences, np.diff(begins).tolist(), strict=True):
            num_new = self._num_watched(sequence, num_tokens)
            if num_new:
                new = out["queries"][:, start : start + num_new]
                if sequence.queries is None:
                    sequence.queries = np.zeros((new.shape[0], self.num_queries, *new.shape[2:]), new.dtype)
                sequence.queries[:, self._places(sequence.num_computed + num_tokens, num_new)] = new
                start += num_new

    def _places(self, end: int, count: int) -> Ints:
        """Where the queries of the `count` tokens before `end` lie: round and round."""
        places: Ints = np.arange(end - count, end) % self.num_queries
        return places

    def _num_watched(self, sequence: Sequence, num_tokens: int) -> int:
        """Of the next `num_tokens` those, at their end, that are among the sequence's last `num_queries`."""
        if not self.num_queries or sequence.request.kv is None:
            return 0
        end = sequence.num_computed + num_tokens
        return max(0, end - max(sequence.num_computed, sequence.num_tokens - self.num_queries))

    # ── forgetting ─────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, sequence: Sequence, blocks: Blocks) -> None:
        """If the sequence has outgrown its budget: choose, copy what stays into fewer blocks, give the others back.

        Blocks that others share, or that can be found by prefix, are read and let go of, never written.
        """
        started = time.perf_counter()
        context = self._due(sequence)
        if context is None:
            return
        most = self._counts(sequence, context)
        if self.deal.num_blocks(most) > blocks.num_free_without(sequence.blocks):
            return  # others hold what this one would have to write on
        chosen = [self._choose(sequence, layer, context, int(count)) for layer, count in enumerate(most)]
        layout = Layout(self.deal, [tokens for _, tokens in chosen], sequence.num_computed)
        old = self._table(sequence)
        blocks.release(sequence.blocks)
        own = blocks.allocate(layout.num_blocks(sequence.num_computed))
        layout.grow(own, sequence.num_computed)
        targets = [layout.slots(layer, np.arange(len(tokens))) for layer, tokens in enumerate(layout.kept)]
        before = self._lengths(sequence).sum()
        sequence.forget(own, layout)
        self._decoder.move([slots_of(table, rows) for table, (rows, _) in zip(old, chosen, strict=True)], targets)
        self.done.rows += int(before - self._lengths(sequence).sum())
        self.done.compactions += 1
        self.done.seconds += time.perf_counter() - started

    def _due(self, sequence: Sequence) -> Context | None:
        """What to choose by, if it is time; asks again only once it can be."""
        policy = sequence.request.kv
        if policy is None or policy.budget == 1.0 or sequence.num_computed < sequence.forget_from:
            return None
        context = Context(
            policy=policy,
            modality=modality_of(sequence.tokens[: sequence.num_computed]),
            num_protected=sequence.request.num_protected,
        )
        excess = float((self._lengths(sequence) - self._counts(sequence, context)).mean())
        if excess >= SLACK and self.deal.num_blocks(self._counts(sequence, context)) < len(sequence.blocks):
            return context
        sequence.forget_from = sequence.num_computed + max(1, int(SLACK - excess))
        return None

    def _counts(self, sequence: Sequence, context: Context) -> Ints:
        return np.minimum(counts(context, self.deal.num_layers), self._lengths(sequence))

    def _lengths(self, sequence: Sequence) -> Ints:
        if sequence.layout is None:
            return np.full(self.deal.num_layers, sequence.num_computed)
        return sequence.layout.lengths(sequence.num_computed)

    def _table(self, sequence: Sequence) -> Ints:
        return self.deal.pages(sequence.blocks) if sequence.layout is None else sequence.layout.table

    def _choose(self, sequence: Sequence, layer: int, context: Context, count: int) -> tuple[Ints, Ints]:
        """Rows of a layer that stay, and which tokens they are."""
        num_rows = int(self._lengths(sequence)[layer])
        layout = sequence.layout
        tokens = np.arange(num_rows) if layout is None else layout.tokens(layer, sequence.num_computed)
        if count >= num_rows:
            return np.arange(num_rows), tokens
        pages = self._table(sequence)[layer, : -(-num_rows // BLOCK_TOKENS)]
        keys, values = self._decoder.read(layer, pages, num_rows)
        queries = sequence.queries
        if queries is not None:
            queries = queries[layer, self._places(sequence.num_computed, self.num_queries)]
        view = score.LayerView(layer=layer, keys=keys, values=values, position=sequence.next_position, queries=queries)
        rows = choose(self._score(view), tokens, context, count)
        return rows, tokens[rows]
