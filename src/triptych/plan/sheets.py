"""Machines that are not here: what their data sheets promise, as `DeviceSpec`s."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec
from msgspec.structs import replace

from triptych.core.device import DeviceSpec, Figure, Held, Link, Rate, Tier
from triptych.core.spec import Fact
from triptych.errors import ConfigError
from triptych.plan.system import LANE_BYTES
from triptych.plan.work import BITS

ROWS = tuple(2**power for power in range(13))
LAUNCH_S = 3e-6  # of one operator: about what a CUDA kernel costs, and what OpenVINO's cost on a CPU


class Sheet(Fact, frozen=True, kw_only=True):
    """One entry of data/plan/hardware.json. All rates are a second's."""

    id: str
    name: str
    kind: Literal["cpu", "gpu", "npu"]
    num_devices: int  # of an ordinary machine
    num_cores: int
    memory_bytes: int
    memory: tuple[str, float]  # its name, bytes
    cache: tuple[str, int, float]  # the last level's name, bytes held, bytes
    flops: dict[Held, float]  # by precision of weights and activations, dense
    watts: float
    pcie: tuple[int, int] | None = None  # generation, lanes
    nvlink: float | None = None  # bytes, from one device to any other
    notes: tuple[str, ...]


def names() -> tuple[str, ...]:
    return tuple(_sheets())


def load(name: str) -> DeviceSpec:
    """Raises ConfigError that lists the names when there is none like it."""
    sheet = _sheets().get(name.lower())
    if sheet is None:
        raise ConfigError(
            f"no data sheet of {name!r}",
            hint=f"there are {', '.join(names())}; measure another machine with `triptych measure -o FILE`",
        )
    return DeviceSpec(
        name=sheet.name, kind=sheet.kind, source="data sheet", num_devices=sheet.num_devices,
        num_cores=sheet.num_cores, memory_bytes=sheet.memory_bytes,
        tiers=(
            Tier(name=sheet.cache[0], num_bytes=sheet.cache[1], bytes_per_s=Figure.exact(sheet.cache[2])),
            Tier(name=sheet.memory[0], num_bytes=sheet.memory_bytes, bytes_per_s=Figure.exact(sheet.memory[1])),
        ),
        rates=tuple(_rates(sheet)), launch_s=Figure.exact(LAUNCH_S), links=tuple(_links(sheet)), watts=sheet.watts,
        notes=(*sheet.notes, "peaks: real rates are lower", f"{LAUNCH_S * 1e6:g} µs an operator"),
    )  # fmt: skip


@cache
def _sheets() -> dict[str, Sheet]:
    content = (files("triptych") / "data/plan/hardware.json").read_bytes()
    return {sheet.id: sheet for sheet in msgspec.json.decode(content, type=tuple[Sheet, ...])}


def _rates(sheet: Sheet) -> Iterator[Rate]:
    """The roof at each number of rows. Weights in four bits are widened: to int8 on a CPU, to 16 bits on a GPU."""
    widened: dict[Held, float] = {"int4": sheet.flops["int8" if sheet.kind == "cpu" else "bf16"]}
    for precision, peak in (widened | sheet.flops).items():
        weight_bytes = BITS[precision] / 8
        for rows in ROWS:
            weights = min(sheet.memory[1] / weight_bytes, peak / (2 * rows))  # a second
            held, flops = Figure.exact(weights * weight_bytes), Figure.exact(2 * rows * weights)
            yield Rate(precision=precision, rows=rows, flops=flops, weight_bytes_per_s=held)


def _links(sheet: Sheet) -> Iterator[Link]:
    """From the host to a device, and between two devices: by NVLink, or else over the host's PCIe."""
    latency = Figure.exact(10e-6)
    if sheet.pcie is not None:
        generation, lanes = sheet.pcie
        peak = Figure.exact(LANE_BYTES[generation] * lanes)
        host = Link(source="cpu:0", target="gpu:0", kind="pcie", bytes_per_s=peak, latency_s=latency,
                    generation=generation, lanes=lanes)  # fmt: skip
        yield host
        if sheet.num_devices > 1 and sheet.nvlink is None:
            yield replace(host, source="gpu:0", target="gpu:1")
    if sheet.nvlink is not None:
        peak = Figure.exact(sheet.nvlink)
        yield Link(source="gpu:0", target="gpu:1", kind="nvlink", bytes_per_s=peak, latency_s=latency.times(0.5))
