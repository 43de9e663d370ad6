"""What a way between memories is worth: ΔV = α·bandwidth + β·cache hits, fitted by its kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.core.device import DeviceSpec, Link, Worth
from triptych.errors import MeasurementError
from triptych.plan.system import LANE_BYTES, LOCAL

FAR = 20  # the kernel's distance of another socket, as firmware usually has it
PRIOR_WEIGHT = 0.1  # of the prior, in observations
MOST_ERROR = 0.25  # of a fit: root mean square, in shares of the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A kind of way between memories. generation, lanes: of PCIe, None for memory; distance: the kernel's, of nodes."""

    generation: int | None = None
    lanes: int | None = None
    distance: int = LOCAL

    @classmethod
    def of(cls, link: Link) -> Way:
        return cls(generation=link.generation, lanes=link.lanes, distance=link.numa_distance or LOCAL)


def value(worth: Worth, bandwidth: float, hits: float) -> float:
    """ΔV, the speed as a share of the fastest; both are shares, 0 to 1."""
    return worth.alpha * bandwidth + worth.beta * hits


def copy_seconds(num_bytes: float, link: Link, times: int = 1) -> float:
    """In `times` copies: at the link's bandwidth where it was measured, else at ΔV of its peak with nothing cached."""
    share = 1.0
    if link.bytes_per_s.num_samples == 1:
        share = value(link.worth or assumed(Way.of(link)), 1.0, 0.0)
    return times * link.latency_s.value + num_bytes / (share * link.bytes_per_s.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One slice that ran. bandwidth, hits: as `value` takes them; speed: measured, of the fastest."""

    way: Way
    bandwidth: float
    hits: float
    speed: float


NEAR_WAY, FAR_WAY = Way(generation=5, lanes=16), Way(generation=4, lanes=8, distance=FAR)
NEAR, CROSS = (0.72, 0.28), (0.41, 0.59)  # the two operating points that are published, α and β


def assumed(way: Way) -> Worth:
    """Between the two published points: by the logarithm of the bandwidth, and by distance, half each."""
    peaks = [LANE_BYTES[one.generation or 5] * (one.lanes or 16) for one in (way, FAR_WAY, NEAR_WAY)]
    width = math.log(peaks[0] / peaks[1]) / math.log(peaks[2] / peaks[1])
    nearness = (FAR - way.distance) / (FAR - LOCAL)
    share = (min(1.0, max(0.0, width)) + min(1.0, max(0.0, nearness))) / 2
    alpha, beta = (far + share * (near - far) for near, far in zip(NEAR, CROSS, strict=True))
    return Worth(alpha=alpha, beta=beta)


def fit(observations: Sequence[Observation]) -> dict[Way, Worth]:
    """α and β of each kind of way that was observed, neither below 0; held to the assumed by a tenth of an observation.

    Raises MeasurementError where they do not explain the speeds.
    """
    found = {}
    for way in dict.fromkeys(one.way for one in observations):
        own = [one for one in observations if one.way == way]
        facts = np.array([[one.bandwidth, one.hits] for one in own])
        speeds = np.array([one.speed for one in own])
        errors = []
        for index in range(len(own)):
            rest = np.arange(len(own)) != index
            errors.append(speeds[index] - facts[index] @ _solve(way, facts[rest], speeds[rest]))
        error = float(np.sqrt(np.mean(np.square(errors))))
        if error > MOST_ERROR:
            raise MeasurementError(
                f"{way}: bandwidth and cache hits miss {len(own)} measured speeds by {error:.2f} of the fastest",
                hint=f"at most {MOST_ERROR} can be believed: measure again, on a quiet machine",
            )
        alpha, beta = _solve(way, facts, speeds).tolist()
        found[way] = Worth(alpha=alpha, beta=beta, error=error, num_observations=len(own))
    return found


def _solve(way: Way, facts: NDArray[np.float64], speeds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative weights: of two unknowns, either the free solution or one of them is 0."""
    prior, hold = assumed(way), math.sqrt(PRIOR_WEIGHT)
    rows = np.concatenate([facts, hold * np.eye(2)])
    wanted = np.concatenate([speeds, [hold * prior.alpha, hold * prior.beta]])
    free = np.linalg.lstsq(rows, wanted)[0]
    alone = [np.diag(rows.T @ wanted / np.square(rows).sum(axis=0))[index].clip(0) for index in range(2)]
    found: NDArray[np.float64] = (
        free if free.min() >= 0 else min(alone, key=lambda own: np.square(rows @ own - wanted).sum())
    )
    return found


# ── slices ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Work is cut into tiles of `tile_bytes`; each is used by `group` of its users before the next is fetched.

    row_bytes: what each user has besides, in the same cache.
    """

    tile_bytes: int
    group: int
    row_bytes: int = 0


def hit_share(piece: Slice, cache_bytes: int) -> float:
    """Of a tile's reads, those that a cache serves: all but the first, as far as tile and group fit into it.

    What is read in turn and is larger than the cache pushes itself out: from half its size on fewer hit, from
    one and a half on none.
    """
    fits = min(1.0, max(0.0, 1.5 - (piece.tile_bytes + piece.group * piece.row_bytes) / cache_bytes))
    return fits * (piece.group - 1) / piece.group


def rank_slices(pieces: Sequence[Slice], device: DeviceSpec, link: Link) -> list[tuple[float, Slice]]:
    """By ΔV, best first, of equal ones the larger. `link`: that tiles come over, to one of the device's nodes."""
    cache, worth = device.tiers[-2], link.worth or assumed(Way.of(link))
    num_nodes = len({one.target for one in device.links if one.kind in ("memory", "numa")}) or 1
    bandwidth = min(1.0, link.bytes_per_s.value * num_nodes / cache.bytes_per_s.value)
    own = cache.num_bytes // num_nodes
    scored = [(value(worth, bandwidth, hit_share(piece, own)), piece) for piece in pieces]
    return sorted(scored, key=lambda pair: (-pair[0], -pair[1].tile_bytes))
