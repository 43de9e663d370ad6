"""Pages dealt out to layers: every row has one slot of its own, and blocks are counted whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine.evict.layout import Deal, Layout


def test_a_block_is_one_page_a_layer_counted_on_each_device():
    assert Deal.over(3).pages([0, 4]).tolist() == [[0, 12], [1, 13], [2, 14]]
    apart = Deal.over(3, ("a", "b", "a"))
    assert apart.pages([0, 4]).tolist() == [[0, 8], [0, 4], [1, 9]]


def test_layers_that_keep_half_free_half_of_the_blocks():
    deal = Deal.over(2)
    layout = Layout(deal, [np.arange(0, 64, 2), np.arange(32)], 64)
    assert layout.num_blocks(64) == 1
    layout.grow([4], 64)
    assert layout.table.tolist() == [[8], [9]]


def test_what_one_layer_does_not_need_another_takes():
    layout = Layout(Deal.over(2), [np.arange(96), np.arange(20)], 96)
    assert layout.num_blocks(96) == 2
    layout.grow([1, 3], 96)
    assert layout.table.tolist() == [[2, 6, 3], [7, 7, 7]]
    assert layout.num_blocks(97) == 3


def test_a_device_lends_its_pages_to_no_other():
    layout = Layout(Deal.over(2, ("a", "b")), [np.arange(96), np.arange(20)], 96)
    assert layout.num_blocks(96) == 3


@settings(deadline=None)
@given(
    kept=st.lists(st.integers(1, 100), min_size=4, max_size=4),
    growth=st.lists(st.integers(1, 70), max_size=5),
    devices=st.sampled_from([(), ("a", "b", "a", "a"), ("a", "a", "b", "b")]),
)
def test_every_row_of_every_layer_has_one_slot_however_it_grows(kept, growth, devices):
    deal = Deal.over(4, devices)
    layout, border, num_blocks = Layout(deal, [np.arange(count) for count in kept], 100), 100, 0
    for more in [0, *growth]:
        border += more
        need = layout.num_blocks(border)
        layout.grow(list(range(num_blocks, need)), border)
        num_blocks = need
        lengths = layout.lengths(border)
        assert lengths.tolist() == [count + border - 100 for count in kept]
        for group in deal.groups:
            slots = np.concatenate([layout.slots(layer, np.arange(lengths[layer])) for layer in group])
            assert len(set(slots.tolist())) == len(slots)
            assert slots.max() < num_blocks * len(group) * 32
        pages = sum(-(-int(length) // 32) for length in lengths)
        assert num_blocks == -(-pages // 4) or devices, "no more blocks than the pages need"
