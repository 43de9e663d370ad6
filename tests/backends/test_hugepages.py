"""Huge pages change where memory lies and nothing that is in it."""

from __future__ import annotations

import mmap
import sys
import threading

import numpy as np
import pytest

from triptych.backends import hugepages
from triptych.backends.hugepages import HUGE, promote


def test_nothing_in_memory_changes():
    before = np.random.default_rng(0).integers(0, 256, 3 * HUGE, np.uint8)
    after = before.copy()
    assert promote() >= 0
    np.testing.assert_array_equal(after, before)


def test_only_whole_huge_pages_are_moved():
    ranges = [(1, HUGE), (HUGE, 2 * HUGE), (HUGE + 1, 4 * HUGE + 5), (5, 6)]
    assert list(hugepages._whole_pages(ranges)) == [(HUGE, 2 * HUGE), (2 * HUGE, 4 * HUGE)]


def fresh(size: int) -> np.ndarray:
    """Memory that nobody had before, which `malloc` does not promise."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_what_was_only_reserved_is_not_filled():
    for thread in threading.enumerate():
        if thread.name == "triptych-hugepages":  # of an earlier test: a page that it moves is nowhere meanwhile
            thread.join()
    reserved, used = fresh(8 * HUGE), fresh(8 * HUGE)
    used[:] = 1
    runs = hugepages._in_use()

    def is_moved(array: np.ndarray) -> bool:
        """Any of its inside: a page that the kernel moves by itself is nowhere meanwhile, but not all at once."""
        first, last = array.ctypes.data + HUGE, array.ctypes.data + array.nbytes - HUGE
        return any(start < last and first < end for start, end in runs)

    assert is_moved(used)
    assert not is_moved(reserved)


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(hugepages.sys, "platform", "darwin")
    assert promote() == 0


def test_what_was_given_back_meanwhile_is_passed_over():
    kept = np.random.default_rng(0).integers(0, 256, 3 * HUGE, np.uint8)
    before, gone = kept.copy(), np.ones(4 * HUGE, np.uint8)
    thread = hugepages.promote_aside(0.0)
    del gone
    thread.join(timeout=10)
    assert not thread.is_alive()
    np.testing.assert_array_equal(kept, before)
