"""Logits to token ids."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.core.request import Sampling, TokenLogprob
from triptych.engine.sequence import Sequence

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The next token of one sequence."""

    token_id: int
    logprob: TokenLogprob | None


def sample(logits: Logits, sequences: Rows[Sequence], *, eos_ids: frozenset[int]) -> list[Choice]:
    """One token for each row. logits: (num_rows, vocab); row i belongs to sequences[i]. `logits` is not changed.

    A row's choice depends on its own logits, settings and random generator alone, never on its neighbours.
    """
    greedy = logits.argmax(axis=-1)
    choices = []
    for row, sequence in enumerate(sequences):
        settings = sequence.request.sampling
        is_plain = not _changes_logits(settings, sequence)
        changed = logits[row] if is_plain else _adjust(logits[row], sequence, eos_ids)
        if settings.temperature == 0.0:
            token_id = int(greedy[row] if is_plain else changed.argmax())
        else:
            token_id = _draw(changed, settings, sequence.generator)
        choices.append(Choice(token_id=token_id, logprob=_logprob(logits[row], token_id, settings)))
    return choices


def _changes_logits(settings: Sampling, sequence: Sequence) -> bool:
    return bool(
        settings.repetition_penalty != 1.0
        or settings.presence_penalty
        or settings.frequency_penalty
        or settings.logit_bias
        or sequence.num_answer_tokens < settings.min_tokens
    )


def _adjust(logits: Logits, sequence: Sequence, eos_ids: frozenset[int]) -> Logits:
    """Penalties, bias and the minimum length, in vLLM's order, on a copy."""
    settings, changed = sequence.request.sampling, logits.copy()
    if settings.repetition_penalty != 1.0:
        seen = np.unique(sequence.tokens)
        seen = seen[seen < len(changed)]  # media ids have no logit
        values = changed[seen]
        changed[seen] = np.where(values > 0, values / settings.repetition_penalty, values * settings.repetition_penalty)
    if settings.presence_penalty or settings.frequency_penalty:
        answered, counts = np.unique(sequence.answer, return_counts=True)
        changed[answered] -= settings.presence_penalty + settings.frequency_penalty * counts.astype(np.float32)
    for token_id, bias in settings.logit_bias.items():
        changed[token_id] += bias
    if sequence.num_answer_tokens < settings.min_tokens:
        changed[list(eos_ids | settings.stop_ids)] = -np.inf
    return changed


def _draw(logits: Logits, settings: Sampling, generator: np.random.Generator) -> int:
    """Temperature, then top-k, top-p and min-p over what is left, then one draw by inverse distribution."""
    scaled = logits.astype(np.float64) / settings.temperature
    ids = _truncate(scaled, settings)
    kept = scaled if ids is None else scaled[ids]
    mass = np.cumsum(np.exp(kept - kept.max()))
    drawn = int(np.searchsorted(mass, generator.random() * mass[-1], side="right"))
    drawn = min(drawn, len(mass) - 1)
    return drawn if ids is None else int(ids[drawn])


def _truncate(scaled: NDArray[np.float64], settings: Sampling) -> NDArray[np.int64] | None:
    """The ids that may be drawn, most likely first; None for all of them, in order of id."""
    top_k = settings.top_k if settings.top_k is not None and settings.top_k < len(scaled) else None
    if top_k is None and settings.top_p >= 1.0 and settings.min_p <= 0.0:
        return None
    ids = np.arange(len(scaled)) if top_k is None else np.argpartition(-scaled, top_k - 1)[:top_k]
    ids = ids[np.argsort(-scaled[ids], kind="stable")]
    weights = np.exp(scaled[ids] - scaled[ids[0]])
    if settings.top_p < 1.0:
        before = np.cumsum(weights) - weights  # mass of the more likely ones
        ids = ids[before < settings.top_p * weights.sum()]
    if settings.min_p > 0.0:
        ids = ids[weights[: len(ids)] >= settings.min_p]
    return ids


def _logprob(logits: Logits, token_id: int, settings: Sampling) -> TokenLogprob | None:
    if settings.num_logprobs is None:
        return None
    high = logits.astype(np.float64)
    high -= high.max()
    high -= np.log(np.exp(high).sum())
    count = min(settings.num_logprobs, len(high))
    top = np.argpartition(-high, count - 1)[:count] if count else np.empty(0, np.int64)
    top = top[np.lexsort((top, -high[top]))]
    return TokenLogprob(
        token_id=token_id,
        logprob=float(high[token_id]),
        top=tuple((int(other), float(high[other])) for other in top),
    )
