"""The traffic that a plan is made for: kinds of requests, their shares and sizes, how fast they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from triptych.core.spec import Fact


class Sizes(Fact, frozen=True, kw_only=True):
    """How many tokens: `least` to `most`, log-uniform between, so that half lie below their geometric mean."""

    least: int
    most: int

    @classmethod
    def exactly(cls, tokens: int) -> Self:
        return cls(least=tokens, most=tokens)


class RequestKind(Fact, frozen=True, kw_only=True):
    """Requests alike in all but their words."""

    name: str
    share: float  # of all requests; shares need not add up to 1, they are weighed against one another
    prompt: Sizes  # tokens of text, the chat template's own among them
    answer: Sizes
    images: int = 0
    image_side: tuple[int, int] = (448, 448)  # width, height in pixels, as sent
    shared_prefix: int = 0  # of the prompt's tokens, the first so many are the same in all requests of the kind

    def faults(self) -> Iterator[str]:
        if not 0 <= self.share < float("inf"):
            yield f".share is {self.share}"
        for name, sizes in (("prompt", self.prompt), ("answer", self.answer)):
            if not 1 <= sizes.least <= sizes.most:
                yield f".{name} goes from {sizes.least} to {sizes.most} tokens"
        if self.images < 0 or min(self.image_side) < 1:
            yield f" has {self.images} images of {self.image_side[0]}x{self.image_side[1]} pixels"
        if not 0 <= self.shared_prefix < self.prompt.least:
            yield f".shared_prefix is {self.shared_prefix}, the shortest prompt has {self.prompt.least} tokens"


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

    def faults(self) -> Iterator[str]:
        """What cannot be, in sentences."""
        if self.arrivals == "closed" and (self.concurrency or 0) < 1:
            yield "closed arrivals need `concurrency`, the callers that ask at once"
        if self.arrivals == "poisson" and not 0 < (self.rate_per_s or 0) < float("inf"):
            yield "poisson arrivals need `rate_per_s`, requests a second"
        if self.num_requests < 1:
            yield f"num_requests is {self.num_requests}"
        if sum(kind.share for kind in self.kinds) <= 0:
            yield "no kind has a share above 0"
        for kind in self.kinds:
            yield from (f"kinds.{kind.name}{said}" for said in kind.faults())
