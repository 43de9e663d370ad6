"""A plan as a file: what was asked, predicted with an interval, and measured once it ran."""

from __future__ import annotations

from typing import Self

from triptych.core.device import DeviceSpec
from triptych.core.spec import Fact
from triptych.core.workload import Workload

PLAN_VERSION = 1


class Prediction(Fact, frozen=True, kw_only=True):
    """One figure. `lowest` to `highest` should hold nine of ten measurements. `measured`: None until it was run."""

    name: str  # "ttft_p50", "tpot_p50", "requests_per_s", "tokens_per_s", "memory_bytes", …
    unit: str
    value: float
    lowest: float
    highest: float
    measured: float | None = None

    @classmethod
    def within(cls, error: float, name: str, unit: str, value: float) -> Self:
        """error: of a tenth, measurements may be a tenth more, or as much less."""
        return cls(name=name, unit=unit, value=value, lowest=value / (1 + error), highest=value * (1 + error))

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None before it was measured."""
        return None if not self.measured else self.value / self.measured - 1


class Target(Fact, frozen=True, kw_only=True):
    """What was asked for: seconds at the 95th percentile, and a rate or a number of devices."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    requests_per_s: float | None = None
    num_devices: int | None = None

    def rate(self, workload: Workload) -> float | None:
        """Requests a second in all; None: from callers that never pause."""
        return self.requests_per_s or (workload.rate_per_s if workload.arrivals == "poisson" else None)


class Choice(Fact, frozen=True, kw_only=True):
    """One way to serve it. fits: memory and targets; `reason` says what speaks against it, or for it."""

    device: str
    num_devices: int
    tensor_parallel: int = 1
    replicas: int = 1
    batch: int  # answers at once, of one replica
    placement: dict[str, str] = {}  # part → device, of one replica
    placed: str = ""  # why they lie there, in words
    predictions: tuple[Prediction, ...]
    fits: bool
    reason: str


class Plan(Fact, frozen=True, kw_only=True):
    """What `triptych plan` writes, and `triptych plan --check` fills and compares."""

    version: int = PLAN_VERSION
    model: str
    weights_digest: str | None = None  # of a bundle; None: planned from a checkpoint's shapes alone
    devices: tuple[DeviceSpec, ...]
    workload: Workload
    target: Target
    choices: tuple[Choice, ...]  # best first
    assumptions: tuple[str, ...]  # what the figures stand on, in words
    checked: str | None = None  # when and where it was measured
