"""What holds of an engine's pages whatever it did."""

from __future__ import annotations

from triptych.engine.blocks import Blocks


def check(blocks: Blocks) -> None:
    """Every block is blank, findable and free, or counted; keys and blocks agree."""
    in_use = {block for block, count in enumerate(blocks._count) if count}
    assert not in_use & set(blocks._blank)
    assert not in_use & set(blocks._keyed_free)
    assert len(in_use) + blocks.num_free == blocks.num_blocks
    assert {blocks._key[block]: block for block in blocks._by_key.values()} == blocks._by_key
