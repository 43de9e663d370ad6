"""A workload's requests made ready: random words and pictures, prompts and answers of exact lengths."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from triptych.core.chat import Chat, ImagePart, Message
from triptych.core.request import Sampling
from triptych.core.workload import RequestKind, Workload
from triptych.errors import ConfigError
from triptych.plan.choose import quantiles
from triptych.session.prompt import Prompt
from triptych.session.session import Session

BLOCK = 16  # pixels a side of one colour of a random picture: it packs as a photograph does


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to be. prepare: blocks, as a server's own preparation does; what it takes is the request's time."""

    kind: str
    prepare: Callable[[], Prompt]
    sampling: Sampling


def jobs(session: Session, workload: Workload) -> list[Job]:
    """`workload.num_requests` jobs; the same for the same workload and vocabulary.

    Shares are kept to the request, and sizes are the quantiles of their distribution in random order: two runs of
    different seeds differ in words and order, hardly in work. Raises ConfigError for what the model cannot be asked.
    """
    _check(session, workload)
    rng = np.random.default_rng(workload.seed)
    known = words(session)
    made: list[Job] = []
    shares = counts([kind.share for kind in workload.kinds], workload.num_requests)
    for kind, count in zip(workload.kinds, shares, strict=True):
        prefix = known[rng.integers(len(known), size=kind.shared_prefix)]
        own = 0 if not kind.images else _own_tokens(session, kind, rng)
        lengths = zip(quantiles(kind.prompt, count, rng), quantiles(kind.answer, count, rng), strict=True)
        for prompt_tokens, answer_tokens in lengths:
            fresh = known[rng.integers(len(known), size=max(prompt_tokens - len(prefix) - own, 0))]
            shown = [random_png(rng, kind.image_side) for _ in range(kind.images)]
            prepare = partial(_prepare, session, prefix.tolist(), fresh.tolist(), shown)
            made.append(Job(kind=kind.name, prepare=prepare, sampling=exactly(answer_tokens)))
    return [made[index] for index in rng.permutation(len(made))]


def exactly(num_tokens: int) -> Sampling:
    """So many tokens, whatever the model would rather do; the likeliest ones."""
    return Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def counts(shares: Sequence[float], total: int) -> list[int]:
    """How many of each, by largest remainder."""
    exact = [share * total / sum(shares) for share in shares]
    whole = [math.floor(value) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda index: whole[index] - exact[index])
    return [count + (index in by_rest[: total - sum(whole)]) for index, count in enumerate(whole)]


def _check(session: Session, workload: Workload) -> None:
    wrong = next(workload.faults(), None)
    if wrong is not None:
        raise ConfigError(f"{workload.name}: {wrong}")
    for kind in workload.kinds:
        longest, room = kind.prompt.most + kind.answer.most, session.plan.max_model_len
        if longest > room:
            raise ConfigError(
                f"{workload.name}, {kind.name}: prompt and answer have up to {longest:,} tokens, "
                f"the context holds {room:,}",
                hint="shorten them in the workload, or open the model with a larger --max-model-len",
            )


def words(session: Session) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Ids that a text may consist of."""
    text = session.text
    vocab = range(session.manifest.spec.decoder.vocab_size)
    silent = text.silent_ids | text.eos_ids
    return np.array([index for index in vocab if index not in silent and text.token_bytes(index)])


def _own_tokens(session: Session, kind: RequestKind, rng: np.random.Generator) -> int:
    """Text tokens of a prompt of pictures alone: the template's, and the marks around the pictures' rows."""
    bare = session.prepare_chat(_chat([random_png(rng, kind.image_side) for _ in range(kind.images)]))
    own = bare.num_tokens - sum(span.num_tokens for span in bare.spans)
    if kind.shared_prefix + own > kind.prompt.least:
        needs = f"{own} with {kind.images} pictures, and {kind.shared_prefix} shared ones"
        raise ConfigError(
            f"{kind.name}: a prompt of {kind.prompt.least} text tokens cannot be: the chat template takes {needs}",
            hint=f"at least {own + kind.shared_prefix}",
        )
    return own


def _prepare(session: Session, prefix: list[int], fresh: list[int], shown: list[bytes]) -> Prompt:
    if not shown:
        return session.prepare_text(prefix + fresh)
    return padded(session.prepare_chat(_chat(shown)), prefix, fresh)


def padded(prompt: Prompt, before: Sequence[int], after: Sequence[int]) -> Prompt:
    """The prompt with text ids before and after it."""
    positions = prompt.positions
    if positions is not None:
        end = len(before) + prompt.num_positions
        moved = (np.arange(len(before)), positions + len(before), np.arange(end, end + len(after)))
        positions = np.concatenate(moved).astype(np.int32)
    return replace(
        prompt,
        token_ids=np.concatenate([before, prompt.token_ids, after]).astype(np.int32),
        positions=positions,
        num_positions=len(before) + prompt.num_positions + len(after),
        spans=tuple(replace(span, start=span.start + len(before)) for span in prompt.spans),
    )


def _chat(shown: Sequence[bytes]) -> Chat:
    return Chat(messages=(Message(role="user", parts=tuple(ImagePart(source=data) for data in shown)),))


def random_png(rng: np.random.Generator, size: tuple[int, int]) -> bytes:
    """A file of random blocks of colour. size: width, height in pixels."""
    width, height = size
    grid = rng.integers(0, 256, (-(-height // BLOCK), -(-width // BLOCK), 3), dtype=np.uint8)
    pixels = grid.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)[:height, :width].reshape(height, -1)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # each begins with its filter: none
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
