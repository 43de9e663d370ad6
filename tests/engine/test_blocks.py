"""Pages: shared by prefix, forgotten oldest first, never written twice."""

from __future__ import annotations

import numpy as np
import pytest

import pages
from triptych.engine.blocks import Blocks, blocks_for, key_of
from triptych.testing import picture, request


def keys(prompt, tenant="") -> list[bytes]:
    asked = request("a", prompt, tenant=tenant)
    chain: list[bytes] = []
    for index in range(len(asked.token_ids) // 32):
        content = asked.token_ids[index * 32 : (index + 1) * 32].tobytes()
        chain.append(key_of(asked, content, index, chain[-1] if chain else None))
    return chain


def test_blocks_for_rounds_up():
    assert [blocks_for(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_a_key_holds_all_that_came_before():
    first, second = keys([*range(64)]), keys([900, *range(1, 64)])
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert keys([*range(96)])[:2] == first


@pytest.mark.parametrize("other", [picture(6, num_tiles=8), picture(5, num_tiles=8)])
def test_a_key_holds_the_pictures_shown_and_the_tenant(other):
    own = [picture(5, num_tiles=8), *range(64)]
    assert (keys([other, *range(64)]) == keys(own)) == (other.digest == "5x8")
    assert not set(keys(own)) & set(keys(own, tenant="t"))


def test_two_pictures_in_the_other_order_have_another_key():
    a, b = picture(1, num_tiles=8), picture(2, num_tiles=8)
    assert keys([a, b])[0] != keys([b, a])[0]


def test_a_published_block_is_found_until_it_is_reused():
    blocks = Blocks(3)
    chain = keys([*range(64)])
    taken = blocks.allocate(2)
    for block, key in zip(taken, chain, strict=True):
        blocks.publish(block, key)
    blocks.release(taken)
    assert blocks.num_free == 3
    assert blocks.find(chain) == taken
    blocks.allocate(1)
    assert blocks.find(chain) == taken, "the blank block is taken first"
    blocks.allocate(1)
    assert blocks.find(chain) == taken[:1], "a chain is forgotten from its end"
    pages.check(blocks)


def test_a_shared_block_is_free_only_when_all_let_go():
    blocks = Blocks(2)
    [block] = blocks.allocate(1)
    blocks.publish(block, b"k")
    blocks.share([block])
    blocks.release([block])
    assert blocks.num_free == 1
    blocks.release([block])
    assert blocks.num_free == 2
    with pytest.raises(AssertionError, match="released twice"):
        blocks.release([block])


def test_sharing_free_cached_blocks_leaves_less_to_allocate():
    blocks = Blocks(2)
    taken = blocks.allocate(2)
    blocks.publish(taken[0], b"k")
    blocks.release(taken)
    assert blocks.num_free_besides([taken[0]]) == 1
    assert blocks.num_free == 2


def test_random_use_keeps_every_invariant():
    generator = np.random.default_rng(1)
    blocks, held = Blocks(16), []
    for turn in range(3000):
        if held and generator.random() < 0.45:
            blocks.release(held.pop(generator.integers(len(held))))
        else:
            want = [bytes([generator.integers(6)]), bytes([10 + generator.integers(6)])]
            found = blocks.find(want)
            need = 2 - len(found)
            if need <= blocks.num_free_besides(found):
                blocks.share(found)
                fresh = blocks.allocate(need)
                for block, key in zip(fresh, want[len(found) :], strict=True):
                    blocks.publish(block, key)
                held.append(found + fresh)
        if turn % 50 == 0:
            pages.check(blocks)
    for taken in held:
        blocks.release(taken)
    assert blocks.num_free == 16
    pages.check(blocks)


def test_what_is_withdrawn_is_found_by_nobody_and_blank_once_all_let_go():
    blocks = Blocks(3)
    taken = blocks.allocate(3)
    for block, key in zip(taken, (b"a", b"b"), strict=False):
        blocks.publish(block, key)
    blocks.share(taken[:1])
    blocks.withdraw(taken)
    pages.check(blocks)
    assert blocks.find([b"a"]) == []
    blocks.release(taken)
    assert blocks.num_free == 2
    blocks.release(taken[:1])
    [fresh] = blocks.allocate(1)
    blocks.publish(fresh, b"a")
    assert blocks.find([b"a"]) == [fresh]
    pages.check(blocks)
