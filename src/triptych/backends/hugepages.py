"""Put a process's large memory on huge pages, so that a decode step does not wait for addresses."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

log = logging.getLogger("triptych.backends")

HUGE = 1 << 21  # bytes of a huge page on x86-64 and on arm64 with small pages of 4 KiB
ADVISE = 14  # MADV_HUGEPAGE, which `madvise` mode asks for
COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1: now, and not when the kernel's own thread comes by
LATER_S = 1.0  # a server that starts has answered by then
Range = tuple[int, int]  # addresses, [start, end)


def promote_aside(after_s: float = LATER_S) -> threading.Thread:
    """Do as `promote` in a while, aside: while the kernel moves a page, whoever asks it for memory waits."""
    thread = threading.Timer(after_s, promote)
    thread.name, thread.daemon = "triptych-hugepages", True
    thread.start()
    return thread


def promote() -> int:
    """Move the anonymous memory of this process onto huge pages; returns the bytes for which the kernel agreed.

    Changes no value in memory. Where the kernel has no huge pages, or will not, nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for start, end in _in_use():  # one that is given back meanwhile is passed over
        madvise(start, end - start, ADVISE)
        if madvise(start, end - start, COLLAPSE) == 0:
            moved += end - start
    log.debug("%s bytes on huge pages", f"{moved:,}")
    return moved


def _in_use() -> list[Range]:
    """Runs of huge pages whose greater part is in memory: what was only reserved is not to be filled."""
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    held = ctypes.create_string_buffer(HUGE // mmap.PAGESIZE)
    runs: list[Range] = []
    for start, end in _whole_pages(_anonymous()):
        for page in range(start, end, HUGE):
            if mincore(page, HUGE, held) or 2 * held.raw.count(1) <= len(held):
                continue
            before = runs.pop() if runs and runs[-1][1] == page else (page, page)
            runs.append((before[0], page + HUGE))
    return runs


def _anonymous() -> list[Range]:
    """Ranges that may be written and that no file lies behind, the heap among them."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if fields[1].startswith("rw") and (len(fields) == 5 or fields[5] == "[heap]"):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            ranges.append((start, end))
    return ranges


def _whole_pages(ranges: Sequence[Range]) -> Iterator[Range]:
    """The huge pages that lie wholly inside each range."""
    for start, end in ranges:
        first, last = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if first < last:
            yield first, last
