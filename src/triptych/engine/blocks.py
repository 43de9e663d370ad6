"""Pages of KV cache, shared by prefix.

A block holds 32 tokens of every layer. Its key is a chain: the key of the block before it, its 32 global ids, and
the digests of the media items they show. So a hit means the same tokens over the same pictures for the same
tenant; a block that is not full has no key and is never shared, and a shared block is never written again.

    free, never keyed ──allocate──▶ in use (count ≥ 1) ──publish──▶ in use, findable
           ▲                              │ release to 0                  │ release to 0
           └──────────────────────────────┘                              ▼
           └────────────────── allocate, oldest first ────────── free, still findable
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from triptych.backends.base import BLOCK_TOKENS
from triptych.core.request import Request


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def key_of(request: Request, tokens: bytes, index: int, before: bytes | None) -> bytes:
    """The key of block `index`, of 32 tokens given as their little-endian bytes: 32 bytes of SHA-256.

    The first key of a chain holds the tenant, so no chain crosses tenants. Every part that is hashed has a length of
    its own or says it: no two different blocks are the same bytes, whatever a caller calls its salt.
    """
    start, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
    root = hashlib.sha256(b"tenant\0" + request.tenant.encode("utf-8", "surrogatepass")).digest()
    chain = hashlib.sha256(root + b"\0" if before is None else before + b"\1")
    chain.update(tokens)
    for span in request.spans:
        if span.start < end and span.end > start:
            digest = span.digest.encode()
            chain.update(struct.pack("<II", max(span.start, start) - start, len(digest)) + digest)
    return chain.digest()


class Blocks:
    """Which pages are free, who shares which, and which prefix lies where."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._keyed_free: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._count = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._keyed_free)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `keys` that is cached. Changes nothing."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_besides(self, blocks: Iterable[int]) -> int:
        """How many could be allocated once `blocks` are shared. Changes nothing."""
        return self.num_free - sum(1 for block in blocks if self._count[block] == 0)

    def num_free_without(self, blocks: Iterable[int]) -> int:
        """How many could be allocated once one sequence has let go of `blocks`. Changes nothing."""
        return self.num_free + sum(1 for block in blocks if self._count[block] == 1)

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence reads these cached blocks."""
        for block in blocks:
            self._keyed_free.pop(block, None)
            self._count[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks to write on; the caller has asked `num_free` first."""
        assert count <= self.num_free
        taken = [self._blank.pop() if self._blank else self._forget_oldest() for _ in range(count)]
        for block in taken:
            self._count[block] = 1
        return taken

    def publish(self, block: int, key: bytes) -> None:
        """A block is full: let others find it. The first one under a key is kept."""
        if self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def withdraw(self, blocks: Iterable[int]) -> None:
        """What lies in these is wrong: nobody else finds them. Their sequence still holds them."""
        for block in blocks:
            key, self._key[block] = self._key[block], None
            if key is not None:
                del self._by_key[key]

    def release(self, blocks: Iterable[int]) -> None:
        """A sequence lets go. Deepest first, so that a chain is forgotten from its end."""
        for block in reversed(list(blocks)):
            self._count[block] -= 1
            assert self._count[block] >= 0, f"block {block} released twice"
            if self._count[block] == 0:
                if self._key[block] is None:
                    self._blank.append(block)
                else:
                    self._keyed_free[block] = None

    def _forget_oldest(self) -> int:
        block, _ = self._keyed_free.popitem(last=False)
        key = self._key[block]
        assert key is not None
        del self._by_key[key]
        self._key[block] = None
        return block
