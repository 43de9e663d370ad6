"""What a machine can do: operations a second, memory by tier, links; and what a step costs there."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Literal, Self

from msgspec.structs import replace

from triptych.core.spec import Fact

Source = Literal["measured", "data sheet", "fitted", "assumed"]
Held = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]  # how weights lie in memory


class Figure(Fact, frozen=True, kw_only=True):
    """One figure with its spread: a median of `num_samples`; a data sheet's has one sample and no spread."""

    value: float
    lowest: float
    highest: float
    num_samples: int = 1

    @classmethod
    def exact(cls, value: float) -> Self:
        return cls(value=value, lowest=value, highest=value)

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        return cls(value=median(samples), lowest=min(samples), highest=max(samples), num_samples=len(samples))

    def times(self, factor: float) -> Self:
        ends = (self.lowest * factor, self.highest * factor)
        return replace(self, value=self.value * factor, lowest=ends[0], highest=ends[1])


def spread(samples: Sequence[float]) -> float:
    """How far the middle half of two samples or more lies apart, over their median."""
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


class Tier(Fact, frozen=True, kw_only=True):
    """A level of memory: what fits into `num_bytes` is read at `bytes_per_s`. Fastest and smallest first."""

    name: str  # "L2", "L3", "DRAM", "HBM"
    num_bytes: int
    bytes_per_s: Figure


class Rate(Fact, frozen=True, kw_only=True):
    """Products of matrices: weights of one precision against `rows` activations of a token each."""

    precision: Held  # of the weights
    rows: int  # tokens at once: 1 is a GEMV
    flops: Figure  # operations a second, 2 for each weight and row
    weight_bytes_per_s: Figure  # the same measurement, as bytes of weights read a second


class Worth(Fact, frozen=True, kw_only=True):
    """What bandwidth and cache hits are worth on a way: ΔV = alpha * bandwidth + beta * hits, all of them shares.

    error: root mean square over slices that ran, each predicted by a fit to the others.
    """

    alpha: float
    beta: float
    error: float | None = None  # None: assumed
    num_observations: int = 0


class Link(Fact, frozen=True, kw_only=True):
    """A way between two devices or memories, one direction."""

    source: str  # "cpu:0", "gpu:1", "node:0"
    target: str
    kind: Literal["memory", "pcie", "nvlink", "numa", "socket"]
    bytes_per_s: Figure
    latency_s: Figure
    generation: int | None = None  # PCIe
    lanes: int | None = None
    numa_distance: int | None = None  # as the kernel says: 10 is local
    worth: Worth | None = None  # fitted; None: to be assumed, by plan/topology


class CostPoint(Fact, frozen=True, kw_only=True):
    """Seconds at one size; what lies between two points is interpolated, nothing beyond the last one."""

    size: float
    seconds: float
    lowest_s: float
    highest_s: float


class Efficiency(Fact, frozen=True, kw_only=True):
    """What steps of several models took on a device, as seconds a unit of their work (`plan/work`); all are fitted.

    With it a step of a model that was never run here is predicted; without it, from the device's own figures.
    """

    weight_s: dict[str, tuple[CostPoint, ...]]  # by precision: of one weight, by rows that it is multiplied with
    cached_s: tuple[CostPoint, ...]  # of one number of queries and keys of all layers, by cached tokens of all answers
    pair_s: float  # of one number of queries, for each pair of a prompt's token and one it looks at
    layer_s: float  # of a layer, whatever its size
    number_s: float  # of one number that a layer hands on
    answer_s: float  # of an answer: sampling, and bringing it to its reader
    step_s: float
    prompt_s: float  # of requests before their first step, and of their first tokens' way: together, not each
    tower: float = 1.0  # of a vision tower's seconds over those that the device's figures promise
    error: float  # |predicted / measured - 1| that nine of ten of the steps it was fitted to keep within


class DeviceSpec(Fact, frozen=True, kw_only=True):
    """One machine, or one device of it: what a roofline (Williams, Waterman and Patterson, 2009) needs."""

    name: str
    kind: Literal["cpu", "gpu", "npu"]
    source: Source
    num_devices: int = 1  # alike, in one machine
    num_cores: int  # of a CPU; multiprocessors of a GPU
    memory_bytes: int  # of one device
    tiers: tuple[Tier, ...]  # two at least: last-level cache and main memory
    rates: tuple[Rate, ...]
    launch_s: Figure  # of one operator: what an empty step of one operator takes
    links: tuple[Link, ...] = ()
    watts: float | None = None
    price_per_hour: float | None = None  # in `currency`, if someone stated one
    currency: str = "USD"
    efficiency: Efficiency | None = None  # of the engine's real steps on it, where some were measured
    notes: tuple[str, ...] = ()  # where its figures come from, what was assumed


class StepCost(Fact, frozen=True, kw_only=True):
    """What the engine's steps cost on one machine: monotone curves through measured points (isotonic, then PCHIP).

    A step of `n` answers with `c` cached tokens in all and `p` prompt tokens, before which `e` tokens of theirs were
    computed, takes about `decode(n) + cached(c) + prefill(p) + p * e * pair_s`; `core/curve.step_s` says so.
    """

    device: str  # DeviceSpec.name
    weights_digest: str  # of the bundle it was fitted on
    settings: str  # dtype, cache type and threads, in words: it holds for these alone
    decode: tuple[CostPoint, ...]  # by answers at once, of a step without prompts and with an empty cache
    cached: tuple[CostPoint, ...] = ()  # by cached tokens of all answers; without points `cached_token_s` says it
    cached_token_s: float  # seconds of attention a step for each cached token of all answers, on the average
    prefill: tuple[CostPoint, ...]  # by prompt tokens of a step, beyond its answers
    pair_s: float = 0.0  # for each pair of a prompt's token and an earlier one that a former step computed
    tiles: tuple[CostPoint, ...] = ()  # by tiles encoded and projected at once
    error: float  # |predicted / measured - 1| that nine of ten of the steps it was fitted to keep within
