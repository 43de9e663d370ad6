"""Twice what a server can do, for an hour, with everything that goes wrong: no answer lost or crossed, memory flat?

usage: python bench/soak.py [BUNDLE|demo] --seconds 3600 --json bench/results/soak.json [-- FLAGS OF triptych serve]
       python bench/soak.py --seconds 60                (the short form)
       python bench/soak.py --seconds 3600 --state bench/.rivals/soak.state.json     (a broken run goes on from there)

What is measured first: each recorded question's answer while the server is alone, the gaps between its pieces, and how
many answers a second a closed loop gets (the capacity). Then requests arrive by chance (Poisson) at twice that rate:
text and pictures, short and long, schemas and tools, read at once, slowly, or left; bad media among them; and the
picture decoders are killed (kill -9) now and then. Every answer carries its question's secret: traffic/questions.py.
Refuses (exit 1) when a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import record
from traffic.questions import KINDS, Question, bad, messages, to_record
from traffic.served import Served, serving
from traffic.tally import ZEROES, Tally, judge, outcome, percentile
from traffic.visits import Manner, Visit, client, visit

RIVALS = Path(__file__).parent / ".rivals"
SETTLE_S = 60.0
SAVE_S = 10.0
CROWD_TOKENS, CROWDS = 128, 2
# a small server, so that queue, preemption and evictions are soaked too
FLAGS = (
    "--max-num-seqs", "8", "--max-model-len", "2048", "--max-num-queued-reqs", "32", "--kv-cache-bytes", "96M",
    "--encoder-cache-bytes", "2M", "--max-num-batched-tokens", "128",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What arrives. Shares are of all requests."""

    seats: int = 8  # answers that the server writes at once
    times_capacity: float = 2.0
    pictures: float = 0.4
    bad: float = 0.08
    left: float = 0.12
    slow: float = 0.06
    whole: float = 0.15
    kinds: tuple[str, ...] = tuple(KINDS)
    kill_every_s: float = 5.0
    pauses_s: tuple[float, ...] = (0.05, 0.5)  # of slow readers, between pieces
    capacity_s: float = 20.0
    has_eyes: bool = True
    is_exact: bool = True  # greedy answers come again byte for byte, whoever else is served


@dataclass(slots=True, kw_only=True)
class Soak:
    """One server's soak."""

    served: Served
    weather: Weather
    tally: Tally
    rng: random.Random = field(default_factory=random.Random)
    recorded: dict[str, str] = field(default_factory=dict)

    def question(self) -> Question:
        has_pictures = self.weather.has_eyes and self.rng.random() < self.weather.pictures
        kind = self.rng.choice(self.weather.kinds)
        return KINDS[kind](self.rng, self.rng.choice([1, 1, 2]) if has_pictures else 0)

    def manner(self) -> Manner:
        what, weather = self.rng.random(), self.weather
        if what < weather.left:
            if self.rng.random() < 0.5:
                return Manner(leave_s=self.rng.expovariate(2.0))
            return Manner(leave_after=self.rng.choice([1, 2, 5]))
        if what < weather.left + weather.slow:
            return Manner(pause_s=self.rng.choice(weather.pauses_s))
        return Manner(is_stream=what >= weather.left + weather.slow + weather.whole)

    async def record_alone(self) -> None:
        """Have the answers that must come again, and the gaps between pieces, while nobody else is there."""
        async with client(self.served) as http:
            for question in to_record(self.weather.has_eyes):
                if question.kind not in self.weather.kinds:
                    continue
                await visit(http, self.served.model, question, Manner())  # the first of its shape pays for it
                made = await visit(http, self.served.model, question, Manner())
                if outcome(made, {}) != "answered" or question.key is None:
                    raise SystemExit(f"alone, {question.key} failed: {made.status} {made.error} {made.finish}")
                if question.kind == "biased" or self.weather.is_exact:
                    self.recorded[question.key] = made.text
                if not question.has_picture:
                    self.tally.alone_s += made.gaps_s

    async def crowd(self) -> None:
        """Gaps while every seat answers text and nobody comes or goes."""
        body = {"max_tokens": CROWD_TOKENS, "ignore_eos": True, "temperature": 0}
        for _ in range(CROWDS):
            asked = [
                Question(kind="crowd", body={**body, "messages": messages(self.rng, "What are they about?", 0)})
                for _ in range(self.weather.seats)
            ]
            async with client(self.served) as http:
                made = await asyncio.gather(*(visit(http, self.served.model, one, Manner()) for one in asked))
            begins_s = max((one.piece_s[0] for one in made if one.piece_s), default=0.0)
            ends_s = min((one.piece_s[-1] for one in made if one.piece_s), default=0.0)
            for one in made:
                steady = [at for at in one.piece_s if begins_s <= at <= ends_s]
                self.tally.crowd_s += [later - at for at, later in zip(steady, steady[1:], strict=False)]

    async def capacity(self) -> float:
        """Answers a second, every seat taken again as soon as it is free."""
        made: list[Visit] = []
        started = time.perf_counter()

        async def sit() -> None:
            while not made or time.perf_counter() - started < self.weather.capacity_s:
                made.append(await visit(http, self.served.model, self.question(), Manner()))

        async with client(self.served) as http:
            await asyncio.gather(*(sit() for _ in range(self.weather.seats)))
        failed = [one for one in made if outcome(one, {}) != "answered"]
        if failed:
            raise SystemExit(f"{len(failed)} of {len(made)} failed without load: {failed[0]}")
        return len(made) / (time.perf_counter() - started)

    async def load(self, rate: float, seconds: float, state: Path | None) -> None:
        """Requests by chance, `rate` a second; returns when the last one has ended."""
        under_way: set[asyncio.Task[None]] = set()
        ends_s = time.perf_counter() + seconds
        self.tally.lives.append([])
        async with client(self.served) as http, client(self.served, is_slow=True) as slow, self._trouble(state):
            while (now_s := time.perf_counter()) < ends_s:
                question, manner = self.question(), self.manner()
                if self.rng.random() < self.weather.bad:
                    question, manner = bad(self.rng), Manner()
                task = asyncio.create_task(self._one(slow if manner.pause_s else http, question, manner))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                await asyncio.sleep(self.rng.expovariate(rate))
                self.tally.seconds += time.perf_counter() - now_s
            await asyncio.gather(*under_way)

    async def _one(self, http: httpx.AsyncClient, question: Question, manner: Manner) -> None:
        self.tally.count(await visit(http, self.served.model, question, manner), self.recorded)

    @contextlib.asynccontextmanager
    async def _trouble(self, state: Path | None) -> AsyncIterator[None]:
        async def kill() -> None:
            children = await asyncio.to_thread(self.served.decoders)
            if children:
                with contextlib.suppress(psutil.Error):
                    self.rng.choice(children).kill()
                    self.tally.kills += 1

        async def weigh() -> None:
            self.tally.lives[-1].append(self.served.resident())

        async def save() -> None:
            if state is not None:
                self.tally.save(state)

        each = ((self.weather.kill_every_s, kill), (1.0, weigh), (SAVE_S, save))
        tasks = [asyncio.create_task(_every(seconds, what)) for seconds, what in each]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def settle(self) -> None:
        """Wait until the server is idle, and write down what it still holds."""
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            counters = self.served.counters()
            self.tally.left_over = {name: counters[name] for name in ZEROES if name in counters}
            if not any(self.tally.left_over.values()):
                return
            await asyncio.sleep(0.2)


async def _every(seconds: float, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await what()


async def walk(served: Served, sizes: Sequence[int]) -> None:
    """Have every size of step once: what a runtime keeps for each is then kept before memory is watched."""
    rng = random.Random(0)
    async with client(served) as http:
        for size in sizes:
            ids = [rng.randrange(300, 900) for _ in range(size)]
            body = {"model": served.model, "prompt": ids, "max_tokens": 1}
            (await http.post("/v1/completions", json=body)).raise_for_status()


async def run(soak: Soak, seconds: float, state: Path | None = None) -> None:
    """All phases on one server. Raises SystemExit when it fails before there is any load."""
    tally, served = soak.tally, soak.served
    await soak.record_alone()
    await soak.crowd()
    tally.capacity.append(capacity := await soak.capacity())
    tally.heaps.append(await asyncio.to_thread(served.heaps))
    rate = capacity * soak.weather.times_capacity
    for _ in range(2):
        await soak.load(rate, seconds / 2, state)
        await soak.settle()
        tally.heaps.append(await asyncio.to_thread(served.heaps))
        await soak.crowd()  # the machine is slower in one half hour than in the next


def measures(tally: Tally) -> list[record.Measure]:
    life = max(tally.lives, key=len)
    found = [
        record.measure("capacity", "closed loop", "answers/s", tally.capacity),
        record.measure("resident size", "after warm-up", "B", life[int(len(life) * 0.3) :]),
    ]
    for name, gaps in (("alone", tally.alone_s), ("all seats, text alone", tally.crowd_s), ("load", tally.loaded_s)):
        for share in (0.5, 0.99) if gaps else ():
            value = percentile(gaps, share)
            found.append(
                record.Measure(
                    name=f"p{100 * share:.0f} between pieces of text", subject=name, unit="s", value=value,
                    lowest=min(gaps), highest=max(gaps), num_samples=len(gaps),
                )
            )  # fmt: skip
    return found


def facts(tally: Tally, flags: Sequence[str]) -> dict[str, Any]:
    return {
        "seconds": round(tally.seconds), "flags": " ".join(flags), "requests": sum(tally.outcomes.values()),
        "outcomes": dict(tally.outcomes), "answered": dict(tally.kinds), "decoders_killed": tally.kills,
        "servers": len(tally.lives) // 2, "heaps": tally.heaps, "faults": tally.faults,
        "resident_bytes_each_tenth": [
            life[:: max(len(life) // 10, 1)] for life in tally.lives
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--capacity-seconds", type=float, default=15.0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of question")
    parser.add_argument("--dtype", default="float", help="anything else: recorded answers are not compared")
    parser.add_argument("--walk", type=int, default=0, help="have every step of 1 to this many tokens first")
    parser.add_argument("--state", type=Path, help="where a broken run left off")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="after --, for triptych serve")
    asked = parser.parse_args()
    tally = Tally()
    if asked.state and asked.state.exists():
        tally = msgspec.json.decode(asked.state.read_bytes(), type=Tally)
    flags = [*FLAGS, "--dtype", asked.dtype, *asked.flags]
    weather = Weather(
        kinds=tuple(asked.kinds.split(",")), is_exact=asked.dtype == "float", capacity_s=asked.capacity_seconds
    )
    with serving(asked.model, flags, RIVALS / "soak.log") as served:
        asyncio.run(walk(served, range(1, asked.walk + 1)))
        soak = Soak(served=served, weather=weather, tally=tally)
        asyncio.run(run(soak, asked.seconds - tally.seconds, asked.state))
    aims = judge(tally)
    for aim in aims:
        print(f"{'ok  ' if aim.is_met else 'BAD '} {aim.name}: {aim.value:.3g} {aim.unit}")
    content = record.record("soak", measures(tally), aims, facts(tally, flags))
    for fault in tally.faults[:10]:
        print(f"     {fault}")
    if asked.json:
        record.write(asked.json, content)
    else:
        print(json.dumps(content["settings"], indent=1, ensure_ascii=False), json.dumps(content["measures"], indent=1))
    if not all(aim.is_met for aim in aims):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
