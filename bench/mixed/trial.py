"""One server at one rate: it starts, warms up, is asked, and stops; what its callers saw is kept request by request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np
import psutil
import record
from traffic.served import Served
from traffic.visits import Manner, Visit, visit

from mixed.questions import arrivals, question
from mixed.servers import Contestant

WARM_SEED = 424_242
WARM = 12  # questions, six at once: every shape has been seen
NUM_ALONE = 5  # of each kind, one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request as its caller saw it. tpot_s: seconds a token after the first; error: None where it was whole."""

    has_picture: bool
    ttft_s: float
    tpot_s: float
    num_tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """rate: requests a second; 0 is one request after another. seed: of what was asked, and when.

    busy_before: share of the processors that others had.
    """

    server: str
    rate: float
    seed: int
    answers: tuple[Answer, ...]
    wall_s: float
    processor_s: float
    peak_bytes: int
    busy_before: float

    def share(self, name: str, q: float, has_picture: bool | None = None) -> float:
        """A quantile over the requests, or those of one kind; what failed counts as endless."""
        some = [one for one in self.answers if has_picture in (None, one.has_picture)]
        values = [float("inf") if one.error else getattr(one, name) for one in some]
        return float(np.quantile(values, q, method="higher"))

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Answers a second that kept both promises."""
        kept = [one for one in self.answers if not one.error and one.ttft_s <= ttft_s and one.tpot_s <= tpot_s]
        return len(kept) / self.wall_s

    @property
    def cost(self) -> float:
        """Core-seconds × GB a request."""
        return self.processor_s / len(self.answers) * self.peak_bytes / 1e9

    def saved(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, saved: dict[str, Any]) -> Trial:
        return cls(**{**saved, "answers": tuple(Answer(**one) for one in saved["answers"])})


def run(who: Contestant, rate: float, count: int, seed: int) -> Trial:
    """`count` requests, half of them with a picture, that arrive at `rate` a second."""
    busy = record.busy_share(0.5)
    with who.start() as served:
        asyncio.run(_warm(served))
        server = psutil.Process(served.pid)
        before, started = _processor_s(server), time.perf_counter()
        made = asyncio.run(_ask(served, rate, count, seed))
        wall_s, spent = time.perf_counter() - started, _processor_s(server) - before
        peak = sum(_peak(one) for one in (server, *server.children(recursive=True)))
    return Trial(
        server=who.name, rate=rate, seed=seed, answers=tuple(map(_answer, made)), wall_s=wall_s, processor_s=spent,
        peak_bytes=peak, busy_before=busy,
    )  # fmt: skip


def _client(served: Served) -> httpx.AsyncClient:
    """A connection a request: llama-server closes those it kept while the next request is on its way."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=served.url, timeout=600, limits=limits)


async def _warm(served: Served) -> None:
    asked = arrivals(WARM, WARM_SEED)
    seats = asyncio.Semaphore(6)

    async def sit(http: httpx.AsyncClient, index: int) -> None:
        async with seats:
            made = await visit(http, served.model, asked[index].question, Manner())
            if not made.is_whole or made.status != 200:
                raise SystemExit(f"{served.url} answered {made.status}: {made.error}")

    async with _client(served) as http:
        await sit(http, 0)
        await asyncio.gather(*(sit(http, index) for index in range(1, WARM)))


async def _ask(served: Served, rate: float, count: int, seed: int) -> Sequence[Visit]:
    async with _client(served) as http:
        if not rate:
            rng = random.Random(seed)
            asked = [question(rng, has_picture=index % 2 == 1) for index in range(count)]
            return [await visit(http, served.model, one, Manner()) for one in asked]
        started, under_way = time.perf_counter(), []
        for one in arrivals(count, seed):
            await asyncio.sleep(max(one.at / rate - (time.perf_counter() - started), 0))
            under_way.append(asyncio.create_task(visit(http, served.model, one.question, Manner())))
        return await asyncio.gather(*under_way)


def _answer(made: Visit) -> Answer:
    wanted = made.question.body["max_tokens"]
    error = made.error or (None if made.status == 200 and made.is_whole else f"status {made.status}")
    if error is None and made.num_tokens != wanted:
        error = f"{made.num_tokens} tokens, not {wanted}"
    return Answer(
        has_picture=made.question.has_picture, ttft_s=made.ttft_s or 0.0, tpot_s=made.tpot_s or 0.0,
        num_tokens=made.num_tokens, error=error,
    )  # fmt: skip


def _processor_s(server: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in (server, *server.children(recursive=True)))


def _peak(process: psutil.Process) -> int:
    with open(f"/proc/{process.pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
