"""A thousand requests, a third of them left in the middle: everything comes back, and memory stays flat."""

from __future__ import annotations

import asyncio
import gc

import httpx
import psutil

from asking import is_clean, png, see
from scripted import eventually, serving
from triptych.testing import plan, tiny_session

NUM_REQUESTS = 1000
ROUNDS = 4
FLAT_BYTES = 12 << 20  # over three quarters of them; one leaked picture or prompt each would be more


async def rush(url: str, first: int, number: int) -> None:
    limit = asyncio.Semaphore(12)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(index: int) -> None:
            pictures = [png(index % 50, (64, 48))] * (index % 2)
            body = {"messages": see(f"request {index}" + " padding" * 10, *pictures), "max_tokens": 8, "stream": True}
            leaves = index % 3 == 0
            if leaves:
                body["max_tokens"] = 200
            async with limit, client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_lines():
                    if leaves:
                        return

        await asyncio.gather(*(one(index) for index in range(first, first + number)))


def test_a_thousand_requests_a_third_aborted_leave_nothing_behind():
    memory, each = [], NUM_REQUESTS // ROUNDS
    with tiny_session(plan(num_blocks=300)) as session, serving(session) as url:
        for start in range(0, NUM_REQUESTS, each):
            asyncio.run(rush(url, start, each))
            assert eventually(lambda: is_clean(session) and session.stats().num_running == 0, within_s=30)
            gc.collect()
            memory.append(psutil.Process().memory_info().rss)
        finished = session.stats().finished

    assert sum(finished.values()) == NUM_REQUESTS
    assert finished["abort"] > NUM_REQUESTS // 4
    assert memory[-1] - memory[0] < FLAT_BYTES, memory
