"""How long each stage takes, by modality: sums, calls and a histogram, which only grow."""

from __future__ import annotations

import bisect
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triptych.core.spec import Modality

Key = tuple[str, str]  # stage, modality

# Upper ends of the histogram's buckets, in seconds; one more bucket has what took longer.
BOUNDS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """One stage of one request. began_s: on the clock of `time.perf_counter`."""

    stage: str
    modality: Modality
    began_s: float
    seconds: float


class Ledger:
    """What one request spends before the engine has it. One thread at a time."""

    def __init__(self) -> None:
        self.spent: list[Spent] = []

    @contextmanager
    def time(self, stage: str, modality: Modality) -> Iterator[None]:
        """A block that fails is not entered."""
        began_s = time.perf_counter()
        yield
        self.add(stage, modality, began_s=began_s, seconds=time.perf_counter() - began_s)

    def add(self, stage: str, modality: Modality, *, began_s: float, seconds: float) -> None:
        self.spent.append(Spent(stage=stage, modality=modality, began_s=began_s, seconds=seconds))


class StageClock:
    """Seconds and buckets of each (stage, modality). `add` may be called from any thread."""

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = defaultdict(float)
        self._buckets: dict[Key, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, stage: str, modality: Modality, seconds: float) -> None:
        key = (stage, modality.name.lower())
        with self._lock:
            self.seconds[key] += seconds
            buckets = self._buckets.setdefault(key, [0] * (len(BOUNDS_S) + 1))
            buckets[bisect.bisect_left(BOUNDS_S, seconds)] += 1

    @contextmanager
    def time(self, stage: str, modality: Modality) -> Iterator[None]:
        """A block that fails is not entered."""
        began_s = time.perf_counter()
        yield
        self.add(stage, modality, time.perf_counter() - began_s)

    def buckets(self) -> dict[Key, tuple[int, ...]]:
        """Calls in each bucket, not added up; the last has what took longer than any bound."""
        with self._lock:
            return {key: tuple(counts) for key, counts in self._buckets.items()}
