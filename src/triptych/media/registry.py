"""The unified token registry: which modality owns which ids; spans, and the digest that keys a cache.

Global ids are disjoint by modality. Text subwords keep the tokenizer's ids; the i-th token of a picture is
`IMAGE_BASE + i`, of a sound `AUDIO_BASE + i`. So a global id tells its modality, and for media which row of the
item's features it shows; the span tells which item.

      0 ──────── 2^24 ───────────── 2^25 ───────────── 2^26 ── 2^27
      │ text      │ image rows       │ audio rows       │ video │
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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


def place(
    text_ids: Sequence[int], placeholder_id: int | None, items: Sequence[Patches]
) -> tuple[NDArray[np.int32], tuple[Span, ...]]:
    """Give each placeholder of a tokenized prompt its row of an item, in order.

    text_ids: what the tokenizer made of the prompt, each picture already written out as its `num_tokens`
    placeholders. Returns the global ids, (num_tokens,) int32, and one span for each run of one item's rows.
    """
    ids = np.asarray(text_ids, np.int32).copy()
    slots = np.flatnonzero(ids == placeholder_id) if placeholder_id is not None else np.empty(0, np.int64)
    wanted = sum(item.num_tokens for item in items)
    assert len(slots) == wanted, f"{len(slots)} placeholders for {wanted} media tokens"
    spans: list[Span] = []
    taken = 0
    for item in items:
        own = slots[taken : taken + item.num_tokens]
        taken += item.num_tokens
        ids[own] = BASE[item.modality] + np.arange(len(own), dtype=np.int32)
        spans += [
            Span(start=int(run[0]), num_tokens=len(run), modality=item.modality, digest=item.digest)
            for run in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1)
            if len(run)
        ]
    return ids, tuple(spans)


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
