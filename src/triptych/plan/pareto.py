"""Tensor parallelism: sums by size, degree × batch, and what nothing else dominates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from triptych.core.device import DeviceSpec, Figure
from triptych.core.spec import DecoderSpec, Fact
from triptych.errors import ConfigError, MeasurementError
from triptych.plan.extra import extra
from triptych.plan.work import check_cut

One = TypeVar("One")
REDUCED_A_LAYER = 2  # after the attention's output and after the second matrix of the MLP (arXiv:1909.08053)


class AllReduce(Fact, frozen=True, kw_only=True):
    """One measured size. topology: what lies between the ranks: "nvlink", "pcie switch", "socket", "gloo"."""

    topology: str
    num_ranks: int
    algorithm: str
    num_bytes: int  # that each rank contributes
    seconds: Figure


class Line(Fact, frozen=True, kw_only=True):
    """α + β·bytes of one algorithm (Hockney, 1994)."""

    algorithm: str
    latency_s: float
    byte_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + self.byte_s * num_bytes


class Ladder(Fact, frozen=True, kw_only=True):
    """All-reduces between so many ranks of one topology: at each size the algorithm that is fastest there."""

    topology: str
    num_ranks: int
    lines: tuple[Line, ...]
    most_bytes: int  # measured up to here
    error: float  # median of |predicted / measured - 1|, of the fastest at each size

    def fastest(self, num_bytes: float) -> Line:
        """Raises ConfigError beyond what was measured."""
        if num_bytes > self.most_bytes:
            raise ConfigError(
                f"an all-reduce of {num_bytes:,.0f} B between {self.num_ranks} ranks: measured up to "
                f"{self.most_bytes:,} B on {self.topology}",
                hint="measure larger sizes, or plan smaller batches",
            )
        return min(self.lines, key=lambda line: line.seconds(num_bytes))

    def crossovers(self) -> tuple[tuple[float, str, str], ...]:
        """Sizes at which another algorithm becomes the fastest: (bytes, the one before, the one after)."""
        pairs = [(one, other) for one in self.lines for other in self.lines if one.byte_s > other.byte_s]
        met = [((other.latency_s - one.latency_s) / (one.byte_s - other.byte_s), one, other) for one, other in pairs]
        inside = [
            (size, one, other) for size, one, other in sorted(met, key=lambda at: at[0]) if self._is_edge(size, one)
        ]
        return tuple((size, one.algorithm, other.algorithm) for size, one, other in inside)

    def _is_edge(self, size: float, line: Line) -> bool:
        if not 0 < size <= self.most_bytes:
            return False
        return line.seconds(size) <= self.fastest(size).seconds(size) * (1 + 1e-9)


def fit_ladder(samples: Sequence[AllReduce]) -> Ladder:
    """Least squares of the relative error, α and β not below zero, for each algorithm of one topology.

    Raises MeasurementError for samples of several, or of fewer than three sizes.
    """
    classes = {(one.topology, one.num_ranks) for one in samples}
    if len(classes) != 1:
        raise MeasurementError(f"a ladder is of one topology and number of ranks, not of {sorted(classes)}")
    names = sorted({one.algorithm for one in samples})
    lines = tuple(_line(name, [one for one in samples if one.algorithm == name]) for name in names)
    ladder = Ladder(
        topology=samples[0].topology,
        num_ranks=samples[0].num_ranks,
        lines=lines,
        most_bytes=max(one.num_bytes for one in samples),
        error=0.0,
    )
    best = {size: min(one.seconds.value for one in samples if one.num_bytes == size) for size in _sizes(samples)}
    errors = [abs(ladder.fastest(size).seconds(size) / seconds - 1) for size, seconds in best.items()]
    return msgspec.structs.replace(ladder, error=float(np.median(errors)))


def ring(device: DeviceSpec, num_ranks: int) -> Line:
    """Over the slowest link between devices, or over the host where there is none: 2(n-1) turns, each with an n-th.

    Raises ConfigError for a device that tells of no link.
    """
    links = [link for link in device.links if link.kind in ("nvlink", "pcie")]
    between = [link for link in links if not link.source.startswith(("cpu:", "node:"))] or links
    if not between:
        raise ConfigError(f"{device.name} tells of no link between its devices", hint="plan for one of them")
    slowest, turns = min(between, key=lambda link: link.bytes_per_s.value), 2 * (num_ranks - 1)
    latency_s, byte_s = turns * slowest.latency_s.value, turns / num_ranks / slowest.bytes_per_s.value
    return Line(algorithm=f"ring over {slowest.kind}", latency_s=latency_s, byte_s=byte_s)


def assumed_ladder(device: DeviceSpec, num_ranks: int, most_bytes: int) -> Ladder:
    lines = (ring(device, num_ranks),)
    return Ladder(topology=device.name, num_ranks=num_ranks, lines=lines, most_bytes=most_bytes, error=0.0)


def _line(name: str, samples: Sequence[AllReduce]) -> Line:
    if len(_sizes(samples)) < 3:
        raise MeasurementError(f"{name}: {len(_sizes(samples))} sizes were measured, a line needs 3")
    sizes = np.array([one.num_bytes for one in samples], float)
    seconds = np.array([one.seconds.value for one in samples])
    columns = np.stack([1 / seconds, sizes / sizes.max() / seconds], axis=1)
    (latency_s, scaled), _ = extra("scipy.optimize").nnls(columns, np.ones(len(samples)))
    return Line(algorithm=name, latency_s=float(latency_s), byte_s=float(scaled / sizes.max()))


def _sizes(samples: Sequence[AllReduce]) -> list[int]:
    return sorted({one.num_bytes for one in samples})


# ── degree × batch ───────────────────────────────────────────────────────────────────────────────────────────────


class Cell(Fact, frozen=True, kw_only=True):
    """One way to cut a decoder: a step of `batch` answers on `tensor_parallel` devices."""

    tensor_parallel: int
    batch: int
    step_s: float  # TPOT
    all_reduce_s: float  # of it
    all_reduce_bytes: int  # that each device contributes to a step
    tokens_per_s: float  # of one device

    @property
    def costs(self) -> tuple[float, float, float]:
        """What is to be small: time, traffic, and the devices that a token takes."""
        return self.step_s, float(self.all_reduce_bytes), -self.tokens_per_s


def cells(
    decoder: DecoderSpec,
    ladders: Sequence[Ladder],
    batches: Sequence[int],
    compute_s: Callable[[int, int], float],
) -> tuple[Cell, ...]:
    """Degree 1, and that of each ladder, at each batch. compute_s: of a step on one device, (degree, batch) → seconds.

    Raises ConfigError for a degree that does not cut the decoder's heads evenly, or a size beyond its ladder.
    """
    found: list[Cell] = []
    for ladder in (None, *ladders):
        degree = 1 if ladder is None else ladder.num_ranks
        check_cut(decoder, degree)
        for batch in batches:
            size = batch * decoder.hidden * 2  # bf16
            count = REDUCED_A_LAYER * decoder.num_layers
            reduce_s = 0.0 if ladder is None else count * ladder.fastest(size).seconds(size)
            step_s = compute_s(degree, batch) + reduce_s
            found.append(
                Cell(
                    tensor_parallel=degree,
                    batch=batch,
                    step_s=step_s,
                    all_reduce_s=reduce_s,
                    all_reduce_bytes=0 if ladder is None else count * size,
                    tokens_per_s=batch / step_s / degree,
                )
            )
    return tuple(found)


def nondominated(costs: ArrayLike) -> NDArray[np.bool_]:
    """(n, d) → (n,): rows that no other is at least as small as in all columns; of equal rows the first."""
    rows = np.asarray(costs, np.float64)
    below = (rows[:, None] <= rows[None]).all(axis=-1)  # [i, j]: i is nowhere greater than j
    same = below & below.T
    beaten = (below & ~same) | (same & np.tri(len(rows), k=-1, dtype=bool).T)
    found: NDArray[np.bool_] = np.logical_not(np.any(beaten, axis=0))
    return found


def front(options: Sequence[One], costs: Callable[[One], tuple[float, ...]]) -> tuple[One, ...]:
    """The options that nothing dominates, in their order."""
    kept = nondominated([costs(option) for option in options]) if options else ()
    return tuple(option for option, is_kept in zip(options, kept, strict=True) if is_kept)
