"""Damage bytes and JSON as transmission, old software and malice do."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MAGIC = (0, 1, 2, 3, 7, 8, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**40, [], {}, [[]], [{}],
    {"": {}}, {"type": "text"}, {"type": "image_url"}, "", " ", "\0", "a", "\ud800", "\udfff\ud800", "\u202e", "\ufeff",
    "é", "👩\u200d👧", "a" * 5000, " " * 5000, "<|im_end|>", "<image>", "{{ 7*7 }}", "../../etc/passwd", "%s%n", "null",
    "NaN", "data:image/png;base64,", "data:,", "http://169.254.169.254/", "file:///etc/passwd", "auto", "required",
    "json_object",
)  # fmt: skip


def damaged(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    """One to four faults; most damaged PNGs get checksums that fit again, or nothing behind them would be reached."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        rng.choice(_FAULTS)(out, rng, corpus)
    if out.startswith(b"\x89PNG") and rng.random() < 0.8:
        _check_again(out)
    return bytes(out)


def _at(out: bytearray, rng: Random) -> int:
    """Half of the time near the start, where headers are."""
    return rng.randrange(min(len(out), 64) if rng.random() < 0.5 else len(out)) if out else 0


def _flip(out: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    for _ in range(rng.choice((1, 1, 2, 8)) if out else 0):
        out[_at(out, rng)] ^= 1 << rng.randrange(8)


def _byte(out: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    if out:
        out[_at(out, rng)] = rng.randrange(256)


def _number(out: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    kind = rng.choice(("<H", ">H", "<I", ">I"))
    size = struct.calcsize(kind)
    at = _at(out, rng)
    out[at : at + size] = struct.pack(kind, rng.choice(MAGIC) % (1 << 8 * size))


def _cut(out: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    del out[_at(out, rng) :]


def _drop(out: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    at = _at(out, rng)
    del out[at : at + rng.choice((1, 2, 4, 12, 100))]


def _repeat(out: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    at, size = _at(out, rng), rng.choice((1, 4, 12, 60, 300))
    out[at:at] = out[at : at + size] * rng.choice((1, 2, 30))


def _insert(out: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    at = _at(out, rng)
    out[at:at] = rng.randbytes(rng.choice((1, 2, 4, 40)))


def _splice(out: bytearray, rng: Random, corpus: Sequence[bytes]) -> None:
    other = rng.choice(corpus)
    start = rng.randrange(len(other))
    at = _at(out, rng)
    out[at : at + rng.choice((0, 16, 200))] = other[start : start + rng.choice((4, 16, 200))]


_FAULTS: tuple[Callable[[bytearray, Random, Sequence[bytes]], None], ...] = (
    _flip, _flip, _byte, _number, _number, _cut, _drop, _repeat, _insert, _splice,
)  # fmt: skip


def _check_again(png: bytearray) -> None:
    at = 8
    while at + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, at)
        end = at + 8 + length
        if end + 4 > len(png):
            return
        struct.pack_into(">I", png, end, zlib.crc32(png[at + 4 : end]))
        at = end + 4


def changed(content: Any, rng: Random, names: Sequence[str]) -> Any:
    """A JSON value with one to three places changed; `names` are known fields, which may turn up anywhere."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = _changed_once(content, rng, names)
    return content


def _changed_once(content: Any, rng: Random, names: Sequence[str]) -> Any:
    if isinstance(content, dict) and content and rng.random() < 0.85:
        key = rng.choice(list(content))
        return {**content, key: _changed_once(content[key], rng, names)}
    if isinstance(content, list) and content and rng.random() < 0.85:
        at = rng.randrange(len(content))
        return [*content[:at], _changed_once(content[at], rng, names), *content[at + 1 :]]
    if isinstance(content, dict):
        choice = rng.random()
        if choice < 0.3 and content:
            gone = rng.choice(list(content))
            return {key: value for key, value in content.items() if key != gone}
        return {**content, rng.choice((*names, "x" * rng.choice((1, 300)), "")): rng.choice(ODD)}
    if isinstance(content, list):
        return [*content, *content] if content and rng.random() < 0.3 else [*content, rng.choice(ODD)]
    if isinstance(content, str) and rng.random() < 0.4:
        return content + str(rng.choice(ODD))
    if isinstance(content, int) and rng.random() < 0.4:
        return content * rng.choice((-1, 0, 10, 1000)) + rng.choice((-1, 0, 1))
    return rng.choice(([content], {"a": content}, rng.choice(ODD), rng.choice(ODD)))


def deep(rng: Random) -> bytes:
    """JSON that nests, repeats or overflows."""
    size = rng.choice((10, 1000, 100_000))
    return rng.choice(
        (
            b"[" * size,
            b'{"a":' * size,
            b'{"messages":' + b"[" * size + b"]" * size + b"}",
            b'{"max_tokens":' + b"9" * size + b"}",
            b'{"temperature":1e' + b"9" * min(size, 1000) + b"}",
            b'{"messages":[' + b'{"role":"user","content":"a"},' * min(size, 20_000) + b"{}]}",
            b'{"prompt":"' + b"\\ud800" * min(size, 1000) + b'"}',
            b"\xef\xbb\xbf{}",
            b'{"model":"' + b"\xff" * 9 + b'"}',
            b"\x00" * size,
        )
    )
