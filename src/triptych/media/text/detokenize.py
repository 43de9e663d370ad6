"""Token ids to text as they arrive: as if decoded at once, and never half a character.

Two kinds of vocabulary are known: byte-level (GPT-2, Llama 3, Qwen), whose tokens are bytes in disguise, and
SentencePiece (Llama 2, Mistral), whose tokens are text with `▁` for a space and `<0xNN>` for a lone byte. Both come
down to a table of bytes by token id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from triptych.errors import CheckpointError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's disguise: printable Latin-1 stands for itself, the other bytes for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How token texts become text, as tokenizer.json's `decoder` says."""

    is_byte_level: bool = False
    replaces: tuple[tuple[str, str], ...] = ()
    has_byte_fallback: bool = False
    num_strip: int = 0  # spaces taken from the beginning of the whole text
    drop_first: str = ""  # taken from the first token, wherever in it: Metaspace's prefix
    joint: str = ""  # between tokens, where there is no decoder

    def piece(self, token: str) -> bytes:
        if self.is_byte_level:
            known = [_ALPHABET.get(character) for character in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if self.has_byte_fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in self.replaces:
            token = token.replace(old, new)
        return token.encode()


def read_decoding(tokenizer: Tokenizer) -> Decoding:
    """Raises CheckpointError on a decoder that is not one of the two kinds."""
    if tokenizer.decoder is None:
        return Decoding(joint=" ")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    facts: dict[str, Any] = {"replaces": ()}
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            facts["is_byte_level"] = True
        elif kind == "ByteFallback":
            facts["has_byte_fallback"] = True
        elif kind == "Replace" and "String" in step["pattern"]:
            facts["replaces"] += ((step["pattern"]["String"], step["content"]),)
        elif kind == "Metaspace":
            facts["replaces"] += ((step["replacement"], " "),)
            facts["drop_first"] = "" if step.get("prepend_scheme") == "never" else step["replacement"]
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            facts["num_strip"] = step["start"]
        elif kind != "Fuse":
            raise CheckpointError(
                f"the tokenizer's decoder has a step {json.dumps(step)[:120]} that is not known here",
                hint="known: ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip of leading spaces",
            )
    return Decoding(**facts)


class Detokenizer:
    """One answer's text. `skipped` are the special tokens' ids, which have none."""

    def __init__(self, token_of: Callable[[int], str | None], decoding: Decoding, skipped: frozenset[int]) -> None:
        self._token_of = token_of
        self._decoding = decoding
        self._skipped = skipped
        self._held = b""  # the beginning of a character
        self._is_first = True
        self._num_strip = decoding.num_strip

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return self._strip("".join(map(self._push, token_ids)))

    def flush(self, *, has_ended: bool = False) -> str:
        """Nothing follows. Half a character is dropped where the answer was cut, and U+FFFD where it ends so."""
        held, self._held = self._held, b""
        return self._strip(self._broken(held)) if has_ended else ""

    def _push(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._token_of(token_id)
        if token is None:
            return ""
        before = ""
        if self._is_first:
            token = token.replace(self._decoding.drop_first, "") if self._decoding.drop_first else token
        else:
            before = self._decoding.joint
        self._is_first = False
        piece = self._decoding.piece(token)
        if self._decoding.is_byte_level:
            return self._complete(self._held + piece)
        if self._decoding.has_byte_fallback and _BYTE.fullmatch(token):
            return self._complete(self._held + piece)
        held, self._held = self._held, b""
        return self._broken(held) + before + piece.decode()

    def _complete(self, raw: bytes) -> str:
        """Decode all but a beginning of a character at the end; each broken run inside is one U+FFFD."""
        text = ""
        while raw:
            try:
                self._held = b""
                return text + raw.decode()
            except UnicodeDecodeError as error:
                text += raw[: error.start].decode()
                if error.reason == "unexpected end of data":
                    self._held = raw[error.start :]
                    return text
                text += self._broken(raw[error.start : error.end])
                raw = raw[error.end :]
        return text

    def _broken(self, raw: bytes) -> str:
        """As `tokenizers` shows it: one mark for a broken byte-level run, one for each lone byte token."""
        return REPLACEMENT * (len(raw) if self._decoding.has_byte_fallback else bool(raw))

    def _strip(self, text: str) -> str:
        while self._num_strip and text:
            if not text.startswith(" "):
                self._num_strip = 0
                break
            text, self._num_strip = text[1:], self._num_strip - 1
        return text
