"""Logits to token ids."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from math import isfinite, log

import numpy as np
from numpy.typing import NDArray

from triptych.core.request import Delta, Sampling, StepRecord, TokenLogprob
from triptych.engine.sequence import Sequence
from triptych.errors import RequestError

Logits = NDArray[np.float32]

BLOCKS = 64  # for each of the highest that are looked for
GREEDY_BELOW = 1e-5  # as in vLLM: a temperature that 32 bits cannot divide by


class Choice(StepRecord, frozen=True, kw_only=True):
    """The next token of one sequence."""

    token_id: int
    logprob: TokenLogprob | None


def said(sequence: Sequence, choice: Choice | None) -> Delta:
    """What a step gave a sequence, once it was appended; the first token brings what was asked of the prompt."""
    if choice is None:
        return Delta(request_id=sequence.request.id)
    return Delta(
        request_id=sequence.request.id,
        token_ids=(choice.token_id,),
        logprobs=() if choice.logprob is None else (choice.logprob,),
        prompt_logprobs=sequence.prompt_logprobs if sequence.num_answer_tokens == 1 else None,
    )


def sample(
    logits: Rows[Logits] | Logits, sequences: Rows[Sequence], *, eos_ids: frozenset[int]
) -> list[Choice | RequestError | None]:
    """One token for each row, None where the model gave NaN or infinity. `logits` is not changed.

    logits: (vocab,) each; row i belongs to sequences[i]. A row's choice depends on its own logits, settings,
    guide and random generator alone, never on its neighbours. A guide that cannot go on is its row's error.
    """
    choices: list[Choice | RequestError | None] = []
    for row, sequence in zip(logits, sequences, strict=True):
        token_id = int(row.argmax())
        if not isfinite(row[token_id]):  # argmax stops at the first NaN
            choices.append(None)
            continue
        try:
            choices.append(_choose(row, token_id, sequence, eos_ids))
        except RequestError as error:
            choices.append(error)
    return choices


def _choose(logits: Logits, greedy: int, sequence: Sequence, eos_ids: frozenset[int]) -> Choice | None:
    """greedy: the likeliest token of all. Raises what the sequence's matcher raises."""
    settings, matcher = sequence.request.sampling, sequence.matcher
    allowed = None if matcher is None else matcher.allowed()
    is_plain = allowed is None and not _changes_logits(settings, sequence)
    changed = logits if is_plain else _adjust(logits, sequence, eos_ids, allowed)
    best = greedy if is_plain else int(changed.argmax())
    if not isfinite(changed[best]):
        return None
    is_greedy = settings.temperature < GREEDY_BELOW or settings.top_k == 1
    token_id = best if is_greedy else _draw(changed, settings, sequence.generator)
    if matcher is not None:
        token_id = matcher.take(token_id, room=settings.max_tokens - sequence.num_answer_tokens - 1)
    count = settings.num_logprobs
    return Choice(token_id=token_id, logprob=None if count is None else logprob(logits, token_id, count))


def _changes_logits(settings: Sampling, sequence: Sequence) -> bool:
    return bool(
        settings.repetition_penalty != 1.0
        or settings.presence_penalty
        or settings.frequency_penalty
        or settings.logit_bias
        or sequence.num_answer_tokens < settings.min_tokens
    )


def _adjust(logits: Logits, sequence: Sequence, eos_ids: frozenset[int], allowed: NDArray[np.bool_] | None) -> Logits:
    """Penalties, bias, the guide and the minimum length, in vLLM's order, on a copy.

    A form outranks the minimum: where nothing but an end may follow, the answer ends.
    """
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
    if allowed is not None:
        changed[~allowed] = -np.inf
    if sequence.num_answer_tokens < settings.min_tokens:
        ends = [end for end in eos_ids | settings.stop_ids if end < len(changed)]
        if allowed is None or allowed.sum() > allowed[ends].sum():
            changed[ends] = -np.inf
    return changed


def _draw(logits: Logits, settings: Sampling, generator: np.random.Generator) -> int:
    """Temperature, then top-k, top-p and min-p over what is left, then one draw by inverse distribution."""
    weights = np.exp((logits - logits.max()) / np.float32(settings.temperature))
    ids = _kept(weights, settings)
    mass = np.cumsum(weights if ids is None else weights[ids], dtype=np.float64)
    drawn = min(int(np.searchsorted(mass, generator.random() * mass[-1], side="right")), len(mass) - 1)
    return drawn if ids is None else int(ids[drawn])


def _kept(weights: Logits, settings: Sampling) -> NDArray[np.int64] | None:
    """The ids that may be drawn, most likely first; None for all of them, in order of id.

    weights: (vocab,) of which the largest is 1. Top-k goes first, top-p is of what it left (as vLLM has it).
    """
    vocab = len(weights)
    top_k = vocab if settings.top_k is None else min(settings.top_k, vocab)
    if top_k == vocab and settings.top_p >= 1.0 and settings.min_p <= 0.0:
        return None
    if top_k < vocab:
        ids = highest(weights, top_k)
    else:  # all below this floor together weigh less than what top-p leaves out
        floor = (1.0 - settings.top_p) * weights.sum(dtype=np.float64) / vocab
        ids = np.flatnonzero(weights >= max(floor, settings.min_p))
        ids = ids[np.lexsort((ids, -weights[ids]))]
    kept = weights[ids].astype(np.float64)
    if settings.top_p < 1.0:
        total = kept.sum() if top_k < vocab else weights.sum(dtype=np.float64)
        ids = ids[np.cumsum(kept) - kept < settings.top_p * total]
    return ids[weights[ids] >= settings.min_p]


def score(sequence: Sequence, places: NDArray[np.int64], logits: Logits) -> bool:
    """Tell a sequence how likely its prompt's tokens after `places` were; False where the model gave NaN or infinity.

    logits: (num_places, vocab).
    """
    count = sequence.request.sampling.num_prompt_logprobs
    if count is None or not np.isfinite(logits).all():
        return count is None
    for place, row in zip((places + 1).tolist(), logits, strict=True):
        sequence.scored(place, logprob(row, int(sequence.tokens[place]), count))
    return True


def logprob(logits: Logits, token_id: int, count: int) -> TokenLogprob:
    """How likely a token was, and the `count` most likely ones beside it. logits: (vocab,)."""
    peak, count = float(logits.max()), min(count, len(logits))
    total = peak + log(np.exp(logits.astype(np.float64) - peak).sum())
    top = highest(logits, count).tolist() if count else []
    return TokenLogprob(
        token_id=token_id,
        logprob=float(logits[token_id]) - total,
        top=tuple((other, float(logits[other]) - total) for other in top),
    )


def highest(values: Logits, count: int) -> NDArray[np.int64]:
    """The places of the `count` highest, highest first. values: (n,), n ≥ count ≥ 1.

    None is lower than the lowest of as many blocks' own highest; few others are as high, and only these are parted.
    """
    size = max(1, len(values) // (BLOCKS * count))
    blocks = values[: len(values) // size * size].reshape(-1, size).max(axis=1)
    ids = np.flatnonzero(values >= np.partition(blocks, -count)[-count])
    ids = ids[np.argpartition(-values[ids], count - 1)[:count]]
    return ids[np.lexsort((ids, -values[ids]))]
