"""What a machine can do, timed: products by precision and rows, reads by working set, copies, slices."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import openvino as ov
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from openvino import opset13 as op

from triptych.backends.base import Array, Placement
from triptych.backends.hugepages import promote
from triptych.backends.ov import open_model
from triptych.core.device import Held, spread
from triptych.core.progress import Progress, silent

BITS: dict[Held, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}  # that `triptych compile` writes
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WIDTH = 2048  # of the matrices, square
GROUP = 64  # weights that share a scale in int4
OPERATORS = 128  # in a chain of the least ones there are
BURST_S = 0.03  # of runs that make one sample
LINE = 8  # bytes of the numbers that are read
SMALL, LARGE = 1 << 12, 1 << 26  # bytes of a copy: its latency, and its bandwidth

Sampled = Callable[[], float]  # one sample, in seconds
K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`rows` activations (rows, width) times a chain of matrices of `num_weights` weights in all."""

    precision: Held
    rows: int
    num_weights: int
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Every thread its own share of `num_bytes`, again and again."""

    tier: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`num_bytes` from the processor's memory into another device's."""

    target: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """`num_bytes` of `source`, tile by tile; the cores beside `target` read each `group` times before the next."""

    source: str
    target: str
    num_bytes: int
    tile_bytes: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to probe. tiers: bytes of each working set by the memory it fits. nodes: the processors of each."""

    tiers: dict[str, int]
    nodes: dict[str, tuple[int, ...]]
    stream_bytes: int  # of weights in a chain: more than the caches hold
    tiles: tuple[int, ...] = ()  # bytes of the slices that main memory is read in
    groups: tuple[int, ...] = (1, 2, 4, 8)
    precisions: tuple[Held, ...] = tuple(BITS)
    rows: tuple[int, ...] = ROWS
    devices: tuple[str, ...] = ()  # beside the processor, as OpenVINO numbers them
    num_rounds: int = 7  # undisturbed ones; up to twice as many while a figure of them spreads too far
    most_spread: float = 0.5  # as `core/device.spread` has it, of products and reads
    most_busy: float = 0.15  # of the processors, by others: a round in which they had more counts for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Seconds of each subject, a sample a round. launch: of one operator that computes next to nothing.

    busy: share of the processors that others had, round by round, the disturbed ones among them.
    """

    launch: list[float]
    products: dict[Product, list[float]]
    reads: dict[Read, list[float]]
    slices: dict[Sliced, list[float]]
    copies: dict[Copy, list[float]]
    busy: list[float]


def probe(
    asked: Asked, placement: Placement, others: Callable[[], float] = float, progress: Progress = silent
) -> Probed:
    """Time everything in rounds, so that a spread shows what drifts.

    others: the share of the processors that others had since it was last called. Raises BackendError.
    """
    launch = _launch(placement)
    products: dict[Product, Sampled] = {}
    for index, precision in enumerate(asked.precisions, 1):
        products |= _products(precision, asked, placement)
        progress("making matrices", index / len(asked.precisions))
    if placement.device.startswith("cpu"):
        promote()  # as the engine does with its weights
    jobs: list[tuple[Sampled, list[float]]] = []

    def samples(group: Mapping[K, Sampled]) -> dict[K, list[float]]:
        found: dict[K, list[float]] = {subject: [] for subject in group}
        jobs.extend((group[subject], taken) for subject, taken in found.items())
        return found

    probed = Probed(
        launch=samples({"": launch})[""],
        products=samples(products),
        reads=samples(dict(_reads(asked))),
        slices=samples(dict(_slices(asked))),
        copies=samples({copy: sample for device in asked.devices for copy, sample in _copies(device)}),
        busy=[],
    )
    others()
    while len(probed.busy) < 2 * asked.num_rounds and not _is_settled(probed, asked):
        for index, (sample, taken) in enumerate(jobs):
            taken.append(sample())
            progress("timing", min(1.0, (len(probed.launch) - 1 + (index + 1) / len(jobs)) / asked.num_rounds))
        probed.busy.append(others())
        if probed.busy[-1] > asked.most_busy:
            for _, taken in jobs:
                taken.pop()
    return probed


def _is_settled(probed: Probed, asked: Asked) -> bool:
    figures = [*probed.products.values(), *probed.reads.values()]
    return len(probed.launch) >= asked.num_rounds and max(map(spread, figures), default=0.0) <= asked.most_spread


# ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def product_model(precision: Held, num_layers: int, width: int) -> ov.Model:
    """x (rows, width) f32 through `num_layers` square matrices of random weights, each after the other."""
    random = np.random.default_rng(0)
    x = op.parameter([-1, width], ov.Type.f32, name="x")
    value: Any = x
    for _ in range(num_layers):
        value = op.matmul(value, _weight(precision, width, random), False, True)
    return _model(x, value)


def _model(x: Any, y: Any) -> ov.Model:
    result = op.result(y)
    for node, name in ((x, "x"), (result, "y")):
        node.output(0).set_names({name})
    return ov.Model([result], [x], "probe")


def _weight(precision: Held, width: int, random: np.random.Generator) -> Any:
    """One matrix, in the operations that `compile/graph.py` writes; such that numbers keep their size."""
    scale = 1 / math.sqrt(width)
    if precision in ("fp32", "bf16"):
        values = random.standard_normal((width, width), np.float32) * np.float32(scale)
        if precision == "fp32":
            return op.constant(values)
        return op.convert(_constant(values.view(np.uint16)[:, 1::2], values.shape, ov.Type.bf16), "f32")
    bits, grouped = BITS[precision], precision == "int4"
    layout = (width, width // GROUP, GROUP) if grouped else (width, width)
    sides, kind = (*layout[:-1], 1), ov.Type.u4 if grouped else ov.Type.u8
    raw = np.frombuffer(random.bytes(width * width * bits // 8), np.uint8)
    middle = np.full(-(-math.prod(sides) * bits // 8), 0x88 if grouped else 128, np.uint8)
    spread = (1 << bits) / math.sqrt(12)  # standard deviation of a code
    codes = op.convert(_constant(raw, layout, kind), "f16")
    zeros = op.convert(_constant(middle, sides, kind), "f16")
    values = op.multiply(op.subtract(codes, zeros), op.constant(np.full(sides, scale / spread, np.float16)))
    if grouped:
        values = op.reshape(values, op.constant(np.array([width, width], np.int64)), False)
    return op.convert(values, "f32")


def _constant(raw: Array, shape: Sequence[int], dtype: Any) -> Any:
    tensor = ov.Tensor(dtype, ov.Shape(list(shape)))
    tensor.data.reshape(-1).view(np.uint8)[:] = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    return ov.op.Constant(tensor)


def _products(precision: Held, asked: Asked, placement: Placement) -> dict[Product, Sampled]:
    num_layers = max(1, round(asked.stream_bytes * 8 / BITS[precision] / WIDTH**2))
    model = product_model(precision, num_layers, WIDTH)
    weight_bytes = sum(node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant")
    if precision == "fp32":  # where the device is asked for nothing else, its own choice may be bf16
        placement = replace(placement, compute="float")
    part = open_model(model, placement)
    found: dict[Product, Sampled] = {}
    for rows in asked.rows:
        x = {"x": np.random.default_rng(rows).standard_normal((rows, WIDTH), np.float32)}
        part(x)
        num_weights = num_layers * WIDTH**2
        subject = Product(precision=precision, rows=rows, num_weights=num_weights, weight_bytes=weight_bytes)
        found[subject] = partial(burst, partial(part, x))
    return found


def _launch(placement: Placement) -> Sampled:
    """Of a long chain and a short one the difference, for each operator between them."""
    width, few = 16, 8
    x = {"x": np.ones((1, width), np.float32)}
    short, long = (open_model(product_model("fp32", count, width), placement) for count in (few, few + OPERATORS))

    def sample() -> float:
        return (burst(partial(long, x)) - burst(partial(short, x))) / OPERATORS

    sample()
    return sample


def burst(run: Callable[[], Any]) -> float:
    """Seconds of the best of as many runs as fit into BURST_S, two at least: what disturbs one adds to it."""
    times = [time.perf_counter()]
    while len(times) < 3 or times[-1] < times[0] + BURST_S:
        run()
        times.append(time.perf_counter())
    return float(np.diff(times).min())


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Reader:
    """Threads, one on each of the processors `cpus`, that read their own part of `num_bytes` beside `homes`."""

    def __init__(self, num_bytes: int, cpus: Sequence[int], homes: Sequence[int]) -> None:
        self._pool = ThreadPoolExecutor(len(cpus))
        self._cpus = cpus
        self._num_bytes = num_bytes
        places = [homes[index % len(homes)] for index in range(len(cpus))]
        self._shares = list(self._pool.map(partial(_fill, max(1, num_bytes // LINE // len(cpus))), places))
        self._passes = 1
        while self.seconds(num_bytes, self._passes) * self._passes < BURST_S:
            self._passes *= 2

    def sample(self) -> float:
        """Seconds in which all of it is read once, while it is read again and again."""
        return self.best(self._num_bytes, self._passes)

    def best(self, tile_bytes: int, group: int) -> float:
        """Likewise, but each tile `group` times before the next; the best of three."""
        return min(self.seconds(tile_bytes, group) for _ in range(3))

    def seconds(self, tile_bytes: int, group: int) -> float:
        numbers = len(self._shares[0])
        tile = max(1, numbers * tile_bytes // self._num_bytes)
        began = time.perf_counter()
        list(self._pool.map(partial(_read, tile, group), self._cpus, self._shares))
        return (time.perf_counter() - began) / group * numbers / (numbers // tile * tile)


def _read(tile: int, group: int, cpu: int, numbers: NDArray[np.int64]) -> None:
    tiles = as_strided(numbers, (len(numbers) // tile, group, tile), (tile * LINE, 0, LINE))
    with pinned(cpu):
        np.maximum.reduce(tiles, axis=2)  # of numpy's loops the one that waits for memory alone


@contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """This thread on one processor; on what has no such call, and where it is not ours, on any."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _fill(numbers: int, cpu: int) -> NDArray[np.int64]:
    """Memory beside a processor: it lies where it is first written."""
    with pinned(cpu):
        return np.ones(numbers, np.int64)


def _reads(asked: Asked) -> Iterator[tuple[Read, Sampled]]:
    cpus = [cpu for own in asked.nodes.values() for cpu in own]
    for tier, num_bytes in asked.tiers.items():
        yield Read(tier=tier, num_bytes=num_bytes), Reader(num_bytes, cpus, cpus).sample


def _slices(asked: Asked) -> Iterator[tuple[Sliced, Sampled]]:
    if not asked.tiles:
        return
    num_bytes = max(asked.tiles)
    for source, homes in asked.nodes.items():
        for target, cpus in asked.nodes.items():
            reader = Reader(num_bytes, cpus, homes)
            for tile_bytes, group in itertools.product(asked.tiles, asked.groups):
                piece = Sliced(source=source, target=target, num_bytes=num_bytes, tile_bytes=tile_bytes, group=group)
                yield piece, partial(reader.best, tile_bytes, group)


def _copies(device: str) -> Iterator[tuple[Copy, Sampled]]:
    """By a model on the device that hands back the greatest of the numbers it is given."""
    x = op.parameter([-1], ov.Type.f32, name="x")
    part = open_model(_model(x, op.reduce_max(x, op.constant(np.array([0], np.int64)), True)), Placement(device=device))
    for num_bytes in (SMALL, LARGE):
        run = partial(part, {"x": np.ones(num_bytes // 4, np.float32)})
        run()
        yield Copy(target=device, num_bytes=num_bytes), partial(burst, run)
