"""The process that is fuzzed: runs cases by number and tells how they went; may die of one.

usage: python -m fuzz.target PART FILE. It reads «first count» from stdin, writes the number it is at into FILE.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import struct
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Protocol

import psutil

MAX_FAULTS = 20  # told in words, of one report


class Cases(Protocol):
    def run(self, number: int) -> str:
        """The outcome in a few words; a fault begins with FAULT."""

    def close(self) -> None: ...


def open_part(part: str) -> Cases:
    if part == "media":
        from fuzz.media import Media

        return Media()
    if part == "pool":
        from fuzz.media import Pool

        return Pool()
    if part == "bodies":
        from fuzz.bodies import Bodies

        return Bodies()
    from fuzz.wire import Wire

    return Wire()


def main(part: str, place: Path) -> None:
    with place.open("r+b") as file, mmap.mmap(file.fileno(), 8) as at:
        cases = open_part(part)
        for line in sys.stdin:
            first, count = map(int, line.split())
            print(json.dumps(run(cases, range(first, first + count), at)), flush=True)
        cases.close()


def run(cases: Cases, numbers: range, at: mmap.mmap) -> dict[str, object]:
    outcomes: Counter[str] = Counter()
    faults: list[tuple[int, str]] = []
    slowest_s = 0.0
    for number in numbers:
        at[:8] = struct.pack("<Q", number)
        began = time.monotonic()
        try:
            outcome = cases.run(number)
        except Exception:
            outcome = f"FAULT: {traceback.format_exc()[-600:]}"
        slowest_s = max(slowest_s, time.monotonic() - began)
        outcomes["FAULT" if outcome.startswith("FAULT") else outcome] += 1
        if outcome.startswith("FAULT") and len(faults) < MAX_FAULTS:
            faults.append((number, outcome))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is held counts, and not what the allocator keeps for later
    resident = psutil.Process().memory_info().rss
    return {"outcomes": outcomes, "faults": faults, "slowest_s": slowest_s, "resident_bytes": resident}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
