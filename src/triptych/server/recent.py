"""The last minute's measurements, for percentiles that are true and not a bucket's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

WINDOW_S = 60.0
MOST = 8192  # measurements kept: on a busy server the window is shorter than a minute


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of `count` measurements, in seconds; None where there is none."""

    count: int
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Recent:
    """Measurements with the time when each was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, seconds: float) -> None:
        self._seen.append((self._clock(), seconds))

    def percentiles(self) -> Percentiles:
        begin = self._clock() - WINDOW_S
        while self._seen and self._seen[0][0] < begin:
            self._seen.popleft()
        if not self._seen:
            return Percentiles(count=0)
        p50, p95, p99 = np.percentile([seconds for _, seconds in self._seen], (50, 95, 99)).tolist()
        return Percentiles(count=len(self._seen), p50=p50, p95=p95, p99=p99)
