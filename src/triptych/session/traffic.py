"""Run a workload against an open session, and note when each answer came."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import psutil

from triptych.core.progress import Progress, silent
from triptych.core.traffic import Served, Traffic
from triptych.core.workload import Workload
from triptych.errors import ConfigError, TriptychError
from triptych.session.answer import TextDelta
from triptych.session.jobs import Job, exactly, jobs
from triptych.session.session import Session

SAMPLE_S = 0.25  # between looks at the memory: one takes a millisecond
WARM_TOKENS = 6  # of each answer before the measurement
WARM_SEED = 7_919  # other words than the measurement's, or its prompts would be cached


def serve(session: Session, workload: Workload, *, progress: Progress = silent) -> Traffic:
    """Warm up, then run all of it. Refused and failed requests are part of the traffic, with their errors.

    Blocks; not to be called within an event loop. Raises ConfigError for a workload that the model cannot be asked,
    and RequestError where a picture of its kind is refused already before the traffic.
    """
    todo = jobs(session, workload)
    warm_up(session, workload)
    return run(session, workload, todo, progress)


def warm_up(session: Session, workload: Workload) -> None:
    """One request of each kind alone, then as many at once as the traffic may have: shapes are compiled on first use.

    Raises what a request of it raises alone.
    """
    at_once = min(workload.concurrency or session.plan.max_num_seqs, session.plan.max_num_seqs)
    other = msgspec.structs.replace(workload, seed=workload.seed + WARM_SEED)
    first = [
        msgspec.structs.replace(other, kinds=(kind,), arrivals="closed", concurrency=1, num_requests=1)
        for kind in workload.kinds
    ]
    closed = msgspec.structs.replace(other, arrivals="closed", concurrency=at_once, num_requests=at_once)
    for part in (*first, closed):
        short = [
            replace(job, sampling=exactly(min(WARM_TOKENS, job.sampling.max_tokens))) for job in jobs(session, part)
        ]
        failed = next((one.error for one in run(session, part, short).served if one.error is not None), None)
        if failed is not None and part.concurrency == 1:
            raise ConfigError(
                f"{workload.name}, {part.kinds[0].name}: {failed}", hint="no such request can be answered"
            )


def run(session: Session, workload: Workload, todo: Sequence[Job], progress: Progress = silent) -> Traffic:
    """Ask `todo`'s jobs in order as the workload says: when they are due, or whenever a caller is free. No warm-up."""
    return asyncio.run(_Run(session, workload, todo, progress).all())


@dataclass(slots=True)
class _Run:
    session: Session
    workload: Workload
    todo: Sequence[Job]
    progress: Progress
    began_s: float = 0.0
    served: dict[int, Served] = field(default_factory=dict)
    resident: list[int] = field(default_factory=list)
    names: Iterator[str] = field(
        default_factory=lambda: (f"traffic-{time.monotonic_ns()}-{i}" for i in itertools.count())
    )

    async def all(self) -> Traffic:
        cpu_s = _cpu_seconds()
        self.began_s = time.perf_counter()
        watching = asyncio.create_task(self._watch())
        try:
            await (self._poisson() if self.workload.arrivals == "poisson" else self._closed())
        finally:
            watching.cancel()
        wall_s = self._now()
        self.resident.append(_resident_bytes())
        return Traffic(
            workload=self.workload,
            served=tuple(sorted(self.served.values(), key=lambda one: one.asked_s)),
            wall_s=wall_s,
            cpu_s=_cpu_seconds() - cpu_s,
            peak_bytes=max(self.resident),
            mean_bytes=int(np.mean(self.resident)),
        )

    async def _closed(self) -> None:
        assert self.workload.concurrency, "closed arrivals have callers: `session/jobs` has looked"
        left = iter(range(len(self.todo)))

        async def caller() -> None:
            for index in left:
                await self._ask(index, self._now())

        await asyncio.gather(*(caller() for _ in range(self.workload.concurrency)))

    async def _poisson(self) -> None:
        assert self.workload.rate_per_s, "poisson arrivals have a rate: `session/jobs` has looked"
        gaps = np.random.default_rng(self.workload.seed).exponential(1 / self.workload.rate_per_s, len(self.todo))
        due = np.cumsum(gaps) - gaps[0]

        async def caller(index: int, due_s: float) -> None:
            await asyncio.sleep(max(due_s - self._now(), 0.0))
            await self._ask(index, due_s)

        await asyncio.gather(*(caller(index, float(due_s)) for index, due_s in enumerate(due)))

    async def _ask(self, index: int, asked_s: float) -> None:
        job = self.todo[index]
        one = Served(kind=job.kind, asked_s=asked_s, done_s=asked_s)
        text: list[str] = []
        last: TextDelta | None = None
        try:
            prompt = await asyncio.to_thread(job.prepare)
            tiles = sum(len(item.tiles) for item in prompt.patches.values())
            one = msgspec.structs.replace(one, prompt_tokens=prompt.num_tokens, tiles=tiles)
            async for last in self.session.start(prompt, job.sampling, request_id=next(self.names)):
                if one.first_s is None and last.token_ids:
                    one = msgspec.structs.replace(one, first_s=self._now())
                text.append(last.text)
        except TriptychError as error:
            one = msgspec.structs.replace(one, error=str(error))
        usage = None if last is None else last.usage
        if usage is not None:
            facts = {name: getattr(usage, name) for name in ("cached_tokens", "image_tokens")}
            one = msgspec.structs.replace(one, answer_tokens=usage.completion_tokens, **facts)
        self.served[index] = msgspec.structs.replace(one, done_s=self._now(), text="".join(text))
        self.progress(self.workload.name, len(self.served) / len(self.todo))

    async def _watch(self) -> None:
        while True:
            self.resident.append(_resident_bytes())
            await asyncio.sleep(SAMPLE_S)

    def _now(self) -> float:
        return time.perf_counter() - self.began_s


def processors_s() -> tuple[float, float]:
    """Seconds of all processors since the machine was started, and of those in use."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    inside = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user already
    total = float(sum(times) - inside)
    return total, float(total - idle)


def _each_process(read: Callable[[psutil.Process], float]) -> float:
    """Summed over this process and its children; those that end meanwhile are left out."""
    total, own = 0.0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            total += read(process)
        except psutil.Error:
            continue
    return total


def _cpu_seconds() -> float:
    return _each_process(lambda process: float(sum(process.cpu_times()[:2])))  # the user's and the system's


def _resident_bytes() -> int:
    return int(_each_process(lambda process: float(process.memory_info().rss)))
