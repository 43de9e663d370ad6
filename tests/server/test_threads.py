"""How many prompts are prepared at once, and what the one too many is told."""

from __future__ import annotations

import threading
import time
from typing import Any

import anyio
import pytest

from triptych.errors import RETRY_S, OverloadError
from triptych.server.threads import Threads


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


async def refusal(threads: Threads) -> OverloadError:
    """Of one more, while two work and two wait."""
    free = threading.Event()
    try:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(threads.run, lambda: free.wait(10))
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(OverloadError, match="2 prompts wait to be prepared, the limit is 2") as refused:
                await threads.run(time.time)
            free.set()
            return refused.value
    finally:
        free.set()


def test_one_too_many_is_told_when_those_who_wait_are_through():
    async def ask() -> Any:
        clock = Clock()
        threads = Threads(2, max_waiting=2, clock=clock)
        for _ in range(3):
            await threads.run(lambda: clock.advance(6.4))
        return await refusal(threads)

    error = anyio.run(ask)
    assert error.retry_after_s == 7
    assert error.hint == "try again in 7 s"


def test_before_any_was_prepared_nothing_is_known():
    async def ask() -> Any:
        return await refusal(Threads(2, max_waiting=2))

    assert anyio.run(ask).retry_after_s == RETRY_S


@pytest.mark.parametrize(("predicted_s", "said_s"), [(0, RETRY_S), (0.02, 1), (3.01, 4), (86_400, 3600)])
def test_what_is_predicted_is_said_in_whole_seconds_up_to_an_hour(predicted_s, said_s):
    assert OverloadError("full", retry_after_s=predicted_s).retry_after_s == said_s
