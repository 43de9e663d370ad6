"""What was probed as a `DeviceSpec`: medians with spreads, and none that contradicts another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from triptych.core.device import DeviceSpec, Figure, Link, Rate, Tier, spread
from triptych.errors import MeasurementError
from triptych.plan.system import UNTOLD, System
from triptych.plan.topology import Observation, Slice, Way, fit, hit_share

if TYPE_CHECKING:
    from triptych.backends.probe import Asked, Probed

MOST_SPREAD = 0.5  # of a median: the middle half of its samples lie closer together
MOST_FALL = 0.25  # of the rate of large products, from the first third of the rounds to the last
LEAST_ROUNDS = 5  # undisturbed ones
TOLERANCE = 1.25  # by which two figures of one memory may disagree: it drifts while it is measured
MOST_IDLE = 2.5  # of main memory's bandwidth over what the best product reads
MOST_APART = 1.5  # of main memory, read as one working set and in slices: by two loops, in the same rounds
LEAST_STREAM = 16 << 20  # a third of the fewest bytes of weights that are timed
QUIET = "end what else runs here, then measure again"


def questions(system: System, devices: Sequence[str] = ()) -> Asked:
    """Half of each level of cache; main memory in four times the last; weights in thrice it, or what memory allows."""
    from triptych.backends.probe import Asked

    last = system.caches[-1].num_bytes
    return Asked(
        tiers={f"L{cache.level}": cache.num_bytes // 2 for cache in system.caches} | {"DRAM": 4 * last},
        nodes={node.name: node.cpus for node in system.nodes},
        stream_bytes=min(3 * max(last, LEAST_STREAM), system.memory_bytes // 64),
        tiles=(last // 8, last // 2, last, 2 * last, 4 * last),
        devices=tuple(devices),
        most_spread=MOST_SPREAD,
    )


def describe(probed: Probed, system: System, name: str) -> DeviceSpec:
    """Raises MeasurementError for what was disturbed, or contradicts itself."""
    _undisturbed(probed)
    sizes = {f"L{cache.level}": cache.num_bytes for cache in system.caches} | {"DRAM": system.memory_bytes}
    tiers = tuple(
        Tier(name=read.tier, num_bytes=sizes[read.tier], bytes_per_s=_figure(read.num_bytes, taken))
        for read, taken in probed.reads.items()
    )
    rates = tuple(
        Rate(precision=one.precision, rows=one.rows, flops=_figure(2 * one.rows * one.num_weights, taken),
             weight_bytes_per_s=_figure(one.weight_bytes, taken))
        for one, taken in probed.products.items()
    )  # fmt: skip
    spec = DeviceSpec(
        name=name, kind="cpu", source="measured", num_cores=len(system.cpus), memory_bytes=system.memory_bytes,
        tiers=tiers, rates=rates, launch_s=Figure.of(probed.launch), notes=tuple(_notes(system, probed)),
        links=(*_links(probed, system, tiers), *system.links),
    )  # fmt: skip
    return check(spec)


def check(spec: DeviceSpec) -> DeviceSpec:
    """The same, if its figures agree; whoever reads one from a file calls this. Raises MeasurementError."""
    if len(spec.tiers) < 2:
        raise MeasurementError(
            f"{spec.name}: {len(spec.tiers)} tiers of memory", hint="a cache and main memory are the least"
        )
    for what, figure in _figures(spec):
        if not 0 < figure.lowest <= figure.value <= figure.highest < float("inf"):
            raise MeasurementError(f"{spec.name}: {what} is {figure.value:g}, {figure.lowest:g} to {figure.highest:g}")
    for fast, slow in pairwise(spec.tiers):
        if fast.num_bytes >= slow.num_bytes:
            raise MeasurementError(
                f"{spec.name}: {fast.name} holds {fast.num_bytes:,} B, {slow.name} no more than that"
            )
        if slow.bytes_per_s.value > 1.1 * fast.bytes_per_s.value:
            raise MeasurementError(
                f"{spec.name}: {fast.name} is read at {_gb(fast.bytes_per_s.value)}, slower than {slow.name} at "
                f"{_gb(slow.bytes_per_s.value)}",
                hint=QUIET,
            )
    _within_memory(spec)
    return spec


def _within_memory(spec: DeviceSpec) -> None:
    """Products and slices read main memory as fast as it is said to be; more rows take no fewer seconds."""
    memory = spec.tiers[-1]
    for rate in spec.rates:
        bytes_per_s = rate.weight_bytes_per_s.value
        if bytes_per_s > TOLERANCE * memory.bytes_per_s.value:
            raise MeasurementError(
                f"{spec.name}: {rate.precision} weights are read at {_gb(bytes_per_s)} by {rate.rows} rows, "
                f"{memory.name} gives {_gb(memory.bytes_per_s.value)}: one of the two is wrong",
                hint="measure the machine again; was its bandwidth written by hand, or the process moved?",
            )
    best = max((rate.weight_bytes_per_s.value for rate in spec.rates), default=0.0)
    if spec.rates and memory.bytes_per_s.value > MOST_IDLE * best:
        raise MeasurementError(
            f"{spec.name}: {memory.name} gives {_gb(memory.bytes_per_s.value)}, no product reads weights at more than "
            f"{_gb(best)}: one of the two is wrong",
            hint="measure the machine again",
        )
    sliced = sum(link.bytes_per_s.value for link in spec.links if link.kind == "memory")  # every node its own
    if sliced and not 1 / MOST_APART <= memory.bytes_per_s.value / sliced <= MOST_APART:
        raise MeasurementError(
            f"{spec.name}: {memory.name} gives {_gb(memory.bytes_per_s.value)}, read in slices {_gb(sliced)}: one of "
            "the two is wrong",
            hint="measure the machine again; was its bandwidth written by hand?",
        )
    for precision in sorted({rate.precision for rate in spec.rates}):
        own = sorted((rate for rate in spec.rates if rate.precision == precision), key=lambda rate: rate.rows)
        for few, many in pairwise(own):
            if many.weight_bytes_per_s.value > 2 * few.weight_bytes_per_s.value:
                raise MeasurementError(
                    f"{spec.name}: {many.rows} rows took less than half the time of {few.rows} in {precision}",
                    hint=QUIET,
                )


def _undisturbed(probed: Probed) -> None:
    if len(probed.launch) < LEAST_ROUNDS:
        raise MeasurementError(
            f"of {len(probed.busy)} rounds {len(probed.launch)} were undisturbed, {LEAST_ROUNDS} are the least: "
            f"others used up to {max(probed.busy):.0%} of the processors",
            hint=QUIET,
        )
    most = max(one.rows for one in probed.products)
    for one, taken in probed.products.items():
        third = max(1, len(taken) // 3)
        fall = 1 - statistics.median(taken[:third]) / statistics.median(taken[-third:])
        if one.rows == most and fall > MOST_FALL:
            raise MeasurementError(
                f"products in {one.precision} became {fall:.0%} slower in the course of it: the processor is throttled",
                hint="let it cool, or lift its power limit, then measure again",
            )
    groups = (
        [(f"{one.rows} rows in {one.precision}", taken) for one, taken in probed.products.items()],
        [(f"reading from {one.tier}", taken) for one, taken in probed.reads.items()],
        [(f"copying {one.num_bytes:,} B to {one.target}", taken) for one, taken in probed.copies.items()],
    )
    for what, taken in (pair for group in groups for pair in group):
        if spread(taken) > MOST_SPREAD:
            raise MeasurementError(
                f"{what}: the middle half of its {len(taken)} samples lies {spread(taken):.0%} of their median apart, "
                f"{MOST_SPREAD:.0%} is the most",
                hint=QUIET,
            )


def _links(probed: Probed, system: System, tiers: Sequence[Tier]) -> Iterator[Link]:
    """Between nodes what is read tile by tile, and what bandwidth and hits are worth there; then into other devices."""
    worths = fit(list(_observations(probed, system, tiers)))
    for (source, target), rate in _plain(probed).items():
        distance = system.between(source, target)
        kind: Literal["memory", "numa"] = "memory" if source == target else "numa"
        yield Link(source=source, target=target, kind=kind, bytes_per_s=rate, latency_s=Figure.exact(0.0),
                   numa_distance=distance, worth=worths[Way(distance=distance)])  # fmt: skip
    for copy, taken in probed.copies.items():
        small = min((one for one in probed.copies if one.target == copy.target), key=lambda one: one.num_bytes)
        if copy != small:
            rate, latency = _figure(copy.num_bytes, taken), Figure.of(probed.copies[small])
            yield Link(source="cpu:0", target=copy.target, kind="pcie", bytes_per_s=rate, latency_s=latency)


def _plain(probed: Probed) -> dict[tuple[str, str], Figure]:
    """Bytes a second of each way where no cache helps: of all tiles that were read once."""
    once: dict[tuple[str, str], list[float]] = {}
    for one, taken in probed.slices.items():
        if one.group == 1:
            once.setdefault((one.source, one.target), []).extend(seconds / one.num_bytes for seconds in taken)
    return {way: _figure(1, taken) for way, taken in once.items()}


def _observations(probed: Probed, system: System, tiers: Sequence[Tier]) -> Iterator[Observation]:
    """Shares of the last cache's speed at the reading node, each round by itself: memory drifts between them."""
    parts = {node.name: len(node.cpus) / len(system.cpus) for node in system.nodes}
    best = next(np.array(taken) / one.num_bytes for one, taken in probed.reads.items() if one.tier == tiers[-2].name)
    once = {(one.source, one.target): np.array(taken) / one.num_bytes for one, taken in probed.slices.items()
            if one.group == 1}  # fmt: skip
    for one, taken in probed.slices.items():
        own, cache = best / parts[one.target], tiers[-2].num_bytes
        yield Observation(
            way=Way(distance=system.between(one.source, one.target)),
            bandwidth=float(np.median(own / once[one.source, one.target])),
            hits=hit_share(Slice(tile_bytes=one.tile_bytes, group=one.group), round(cache * parts[one.target])),
            speed=float(np.median(own / (np.array(taken) / one.num_bytes))),
        )


def _notes(system: System, probed: Probed) -> Iterator[str]:
    rounds = f"{len(probed.launch)} rounds, {len(probed.busy) - len(probed.launch)} more were disturbed"
    nodes = "1 NUMA node" if len(system.nodes) == 1 else f"{len(system.nodes)} NUMA nodes"
    yield f"{system.cpu}; {nodes}; {rounds}"
    yield "rates: chains of 2048 × 2048 matrices larger than the caches, by OpenVINO; fp32 with 32-bit arithmetic"
    yield "tiers: every thread its own part of a working set half as large as the caches of that level"
    if system.caches == (UNTOLD,):
        yield f"the kernel tells of no cache: the last is assumed to hold {UNTOLD.num_bytes:,} B"
    for card in system.cards:
        lanes = f"PCIe {card.generation} x{card.lanes}" if card.generation and card.lanes else "lanes unknown"
        yield f"{card.vendor} card {card.address}, {lanes}, node {card.node}: its link's peak, not measured"


def _figures(spec: DeviceSpec) -> Iterator[tuple[str, Figure]]:
    for tier in spec.tiers:
        yield f"{tier.name}'s bandwidth", tier.bytes_per_s
    for rate in spec.rates:
        yield f"{rate.precision}'s rate with {rate.rows} rows", rate.flops
        yield f"{rate.precision}'s bytes with {rate.rows} rows", rate.weight_bytes_per_s
    for link in spec.links:
        yield f"bandwidth from {link.source} to {link.target}", link.bytes_per_s


def _figure(amount: float, taken: Sequence[float]) -> Figure:
    """`amount` a second."""
    return Figure.of([amount / seconds for seconds in taken])


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.1f} GB/s"
