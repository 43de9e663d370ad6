"""The unified token registry: which modality owns which ids; spans, and the digest that keys a cache.

Global ids are disjoint by modality. Text subwords keep the tokenizer's ids; the i-th token of a picture is
`IMAGE_BASE + i`, of a sound `AUDIO_BASE + i`. So a global id tells its modality, and for media which row of the
item's features it shows; the span tells which item.

      0 ──────── 2^24 ───────────── 2^25 ───────────── 2^26 ── 2^27
      │ text      │ image rows       │ audio rows       │ video │
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.core.request import Patches, Span
from triptych.core.spec import Modality

IMAGE_BASE = 1 << 24
AUDIO_BASE = 1 << 25
VIDEO_BASE = 1 << 26
END = 1 << 27

BASE = {Modality.TEXT: 0, Modality.IMAGE: IMAGE_BASE, Modality.AUDIO: AUDIO_BASE, Modality.VIDEO: VIDEO_BASE}


def modality_of(token_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    """The `Modality` that owns each global id; shape as given. Raises ValueError on an id nobody owns."""
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= END):
        raise ValueError(f"global ids lie in [0, {END:,}); got {token_ids.min():,} to {token_ids.max():,}")
    edges = np.array([IMAGE_BASE, AUDIO_BASE, VIDEO_BASE])
    return np.searchsorted(edges, token_ids, side="right").astype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A prompt whose placeholders have become rows of items: the three fields of `Request` that say so."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32] | None
    spans: tuple[Span, ...]


def place(text_ids: Sequence[int], placeholder_id: int | None, items: Sequence[Patches]) -> Placed:
    """Give each placeholder of a tokenized prompt its row of an item, in order, and leave out what is reduced away.

    text_ids: what the tokenizer made of the prompt, each picture written out as `len(take)` placeholders, whatever
    its reduction. There is one span for each run of one item's rows that stand together.
    """
    whole = np.asarray(text_ids, np.int32)
    slots = np.flatnonzero(whole == placeholder_id) if placeholder_id is not None else np.empty(0, np.int64)
    wanted = sum(len(item.take) for item in items)
    assert len(slots) == wanted, f"{len(slots)} placeholders for {wanted} media tokens"
    ids, positions = whole.copy(), np.arange(len(whole), dtype=np.int32)
    stays = np.ones(len(whole), np.bool_)
    kept: list[NDArray[np.int64]] = []
    for item, own in zip(items, np.split(slots, np.cumsum([len(item.take) for item in items])), strict=False):
        mine = []
        for first, run in _runs(item, own):
            positions[run] = run[0] - first  # where row 0 would stand if nothing stood between
            mine.append(run[: item.reduction.count(len(run))])
        kept.append(np.concatenate([slots[:0], *mine]))
        stays[own] = False
        stays[kept[-1]] = True
        ids[kept[-1]] = BASE[item.modality] + np.arange(len(kept[-1]), dtype=np.int32)
    moved = np.cumsum(stays) - 1  # where each token that stays comes to stand
    spans = tuple(span for item, own in zip(items, kept, strict=True) for span in _spans(item, moved[own]))
    return Placed(token_ids=ids[stays], positions=None if stays.all() else positions[stays], spans=spans)


def _runs(item: Patches, slots: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The number of each run's first row, and the run's slots."""
    whole = item.reduction.is_whole
    lengths = [len(run) for run in _stretches(slots)] if whole else item.runs or (len(slots),)
    first = 0
    for length in lengths:
        run = slots[first : first + length]
        assert run[-1] - run[0] == length - 1, f"marks within a run of {length} placeholders"
        yield first, run
        first += length


def _spans(item: Patches, slots: NDArray[np.int64]) -> list[Span]:
    return [
        Span(start=int(run[0]), num_tokens=len(run), modality=item.modality, digest=item.digest)
        for run in _stretches(slots)
    ]


def _stretches(slots: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [run for run in np.split(slots, np.flatnonzero(np.diff(slots) > 1) + 1) if len(run)]


class DigestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that an item's features depend on; any difference gives another digest."""

    modality: Modality
    content_sha256: str  # of the decoded, oriented pixels or samples, not of a path or URL
    geometry: tuple[int, ...]  # width and height, or samples and rate
    settings: str  # the family's preprocessing facts and the request's own, as JSON
    weights_digest: str
    tenant: str


def digest(facts: DigestFacts) -> str:
    """The SHA-256 of the facts: 64 hex digits that key both the feature and the prefix cache."""
    return hashlib.sha256(b"triptych-span-1\0" + msgspec.json.encode(facts)).hexdigest()
