"""Threads that prepare prompts: so many at once, so many waiting, how long until these are through."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from triptych.engine.pace import Estimate
from triptych.errors import OverloadError

Value = TypeVar("Value")


class Threads:
    """A crowd of one kind of work never takes another's: each kind has its own."""

    def __init__(self, number: int, *, max_waiting: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limiter = anyio.CapacityLimiter(number)
        self._max_waiting = max_waiting
        self._clock = clock
        self._spent = Estimate()  # seconds a piece, in its thread

    async def run(self, work: Callable[[], Value]) -> Value:
        """Raises OverloadError that says when those who wait now are through."""
        waiting = self._limiter.statistics().tasks_waiting
        if waiting >= self._max_waiting:
            raise OverloadError(
                f"{waiting:,} prompts wait to be prepared, the limit is {self._max_waiting:,}",
                retry_after_s=waiting * self._spent.value / self._limiter.total_tokens,
            )
        return await anyio.to_thread.run_sync(self._timed, work, limiter=self._limiter)  # it counts until it ends

    def _timed(self, work: Callable[[], Value]) -> Value:
        began_s = self._clock()
        try:
            return work()
        finally:
            self._spent.see(self._clock() - began_s)
