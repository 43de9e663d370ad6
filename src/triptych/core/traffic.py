"""What came of a workload: when each request was asked, first answered and done, and what it took."""

from __future__ import annotations

from triptych.core.spec import Fact
from triptych.core.workload import Workload


class Served(Fact, frozen=True, kw_only=True):
    """One request. Seconds are since the traffic began; what never came is None."""

    kind: str  # RequestKind.name
    asked_s: float  # when it was due: that the caller was late is its own delay
    first_s: float | None = None  # its first token was in the caller's hands
    done_s: float  # the last token, or the refusal
    prompt_tokens: int = 0  # visual tokens among them, after any reduction
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    image_tokens: int = 0
    answer_tokens: int = 0
    tiles: int = 0  # that its pictures were cut into
    text: str = ""  # the answer
    error: str | None = None  # the refusal or failure, in words

    @property
    def latency_s(self) -> float:
        return self.done_s - self.asked_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of an answer of one token."""
        if self.first_s is None or self.answer_tokens < 2:
            return None
        return (self.done_s - self.first_s) / (self.answer_tokens - 1)


class Traffic(Fact, frozen=True, kw_only=True):
    """One run of a workload. Processor seconds and memory are of this process and its children, caller included."""

    workload: Workload
    served: tuple[Served, ...]  # in the order in which they were due
    wall_s: float  # from the first request due to the last answer
    cpu_s: float
    peak_bytes: int  # resident, the greatest sample
    mean_bytes: int  # resident, over the run

    @property
    def answered(self) -> tuple[Served, ...]:
        return tuple(one for one in self.served if one.error is None)

    @property
    def requests_per_s(self) -> float:
        return len(self.answered) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens."""
        return sum(one.answer_tokens for one in self.answered) / self.wall_s
