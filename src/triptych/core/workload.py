"""The traffic that a plan is made for: kinds of requests, their shares and sizes, how fast they come."""

from __future__ import annotations

from typing import Literal

from triptych.core.spec import Fact


class Sizes(Fact, frozen=True, kw_only=True):
    """How many tokens: `least` to `most`, log-uniform between, so that half lie below their geometric mean."""

    least: int
    most: int


class RequestKind(Fact, frozen=True, kw_only=True):
    """Requests alike in all but their words."""

    name: str
    share: float  # of all requests; shares need not add up to 1, they are weighed against one another
    prompt: Sizes  # tokens of text, the chat template's own among them
    answer: Sizes
    images: int = 0
    image_side: tuple[int, int] = (448, 448)  # width, height in pixels, as sent
    shared_prefix: int = 0  # of the prompt's tokens, the first so many are the same in all requests of the kind


class Workload(Fact, frozen=True, kw_only=True):
    """A mixture of requests. `triptych plan --workload FILE.yaml` reads one."""

    name: str
    kinds: tuple[RequestKind, ...]
    arrivals: Literal["poisson", "closed"] = "poisson"  # closed: `concurrency` callers, each asks when it was answered
    rate_per_s: float | None = None  # poisson
    concurrency: int | None = None  # closed
    num_requests: int = 200  # that a measurement or a simulation is made of
    seed: int = 0
    samples: str | None = None  # a samples.jsonl with real questions and their right answers, for `bench saving`
