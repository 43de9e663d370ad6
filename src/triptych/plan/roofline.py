"""Seconds of each part of a step: compute, memory, launches, or as was fitted on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.curve import seconds_at
from triptych.core.device import CostPoint, DeviceSpec, Efficiency, Rate
from triptych.core.spec import ModelSpec
from triptych.errors import ConfigError
from triptych.plan.pareto import ring
from triptych.plan.work import BITS, Held, Step, Work, attended, check_cut, decoder_work, on_one_of, vision_work

ANSWER_S = 4e-6  # of an answer's token in the engine, where nothing was fitted (BLIS's prior)
STEP_S = 1.26e-4  # of the engine's own, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """A part's time by what bounds it; they overlap, except launches."""

    compute_s: float
    memory_s: float
    launch_s: float

    @property
    def total_s(self) -> float:
        return max(self.compute_s, self.memory_s) + self.launch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Times of one model on one device, by the device's figures alone, or by its `efficiency` where it was fitted."""

    spec: ModelSpec
    held: Held
    device: DeviceSpec
    degree: int = 1  # devices that share every product

    def parts(self, step: Step) -> dict[str, Seconds]:
        """Of a decoder's step, by the device's own figures; what was fitted is left aside."""
        works = decoder_work(self.spec.decoder, self.held, step)
        works = {name: on_one_of(work, self.degree, self.spec.decoder.num_kv_heads) for name, work in works.items()}
        resident = sum(work.weight_bytes + work.other_bytes for work in works.values())
        return {name: self._seconds(work, resident) for name, work in works.items()}

    def step_s(self, step: Step) -> float:
        """Seconds of a step and of the engine around it. Raises ConfigError beyond what was fitted."""
        fitted = self.device.efficiency
        if fitted is None:
            return self.by_figures_s(step)
        return float(sum(self.device_units(step, fitted).values()))

    def by_figures_s(self, step: Step) -> float:
        """The same, by the device's own figures alone."""
        parts = self.parts(step)
        return sum(part.total_s for part in parts.values()) + STEP_S + ANSWER_S * step.sampled + self._sums_s(step)

    def tile_s(self, num_tiles: int) -> float:
        """Seconds of so many tiles through tower and projector at once. Raises ConfigError for a tower of no shape."""
        return sum(self.tower_s(num_tiles).values())

    def tower_s(self, num_tiles: int) -> dict[str, float]:
        """The same, of `vision` and `projector` apart."""
        works = vision_work(self.spec, self.held, num_tiles)
        resident = sum(work.weight_bytes + work.other_bytes for work in works.values())
        fitted = self.device.efficiency
        factor = 1.0 if fitted is None else fitted.tower
        return {name: factor * self._seconds(work, resident).total_s for name, work in works.items()}

    def device_units(self, step: Step, fitted: Efficiency) -> dict[str, float]:
        """Seconds of a step's parts by what was fitted on the device."""
        decoder = self.spec.decoder
        works, (queries, read) = decoder_work(decoder, self.held, step), attended(decoder)
        found = {
            name: work.num_weights * _weight_s(fitted, work)
            for name, work in works.items()
            if work.num_weights and work.rows
        }
        found["cached"] = read * seconds_at(fitted.cached_s, step.cached) if step.cached else 0.0
        found["pairs"] = queries * fitted.pair_s * step.pairs
        found["launches"] = decoder.num_layers * fitted.layer_s
        found["numbers"] = decoder.num_layers * decoder.hidden * step.rows * fitted.number_s
        begun_s = fitted.prompt_s if any(chunk.is_last for chunk in step.chunks) else 0.0  # of all at once
        found["engine"] = fitted.step_s + fitted.answer_s * step.sampled + begun_s
        return found

    def _sums_s(self, step: Step) -> float:
        """Two sums over all devices in each layer, round the ring of the slowest links between them."""
        if self.degree == 1:
            return 0.0
        check_cut(self.spec.decoder, self.degree)
        num_bytes = 2.0 * step.rows * self.spec.decoder.hidden  # bf16
        return 2 * self.spec.decoder.num_layers * ring(self.device, self.degree).seconds(num_bytes)

    def _seconds(self, work: Work, resident: float) -> Seconds:
        bandwidth = _bandwidth(self.device, resident)
        faster = bandwidth / self.device.tiers[-1].bytes_per_s.value
        rate = rate_of(self.device, work.precision, work.rows, faster) if work.flops else math.inf
        return Seconds(
            compute_s=work.flops / rate,
            memory_s=(work.weight_bytes + work.other_bytes) / bandwidth,
            launch_s=work.operators * self.device.launch_s.value,
        )


def rate_of(device: DeviceSpec, precision: str, rows: int, faster: float = 1.0) -> float:
    """Operations a second with weights of `precision`, between measured rows by their logarithms, beyond them held.

    faster: times that weights are read faster than from main memory, where rates are measured: few rows wait for that,
    many are computed at the greatest rate at most.
    A precision without rates is taken for the next wider one that has some. Raises ConfigError where there is none.
    """
    held = sorted({rate.precision for rate in device.rates}, key=lambda name: BITS.get(name, 8.0))
    wide = [name for name in held if BITS.get(name, 8.0) >= BITS[precision]] or held[-1:]
    if not wide:
        raise ConfigError(f"{device.name} has no rate of products", hint="measure it: `triptych measure`")
    rates = sorted((rate for rate in device.rates if rate.precision == wide[0]), key=lambda rate: rate.rows)
    return min(faster * _between(rates, rows), max(rate.flops.value for rate in rates))


def _between(rates: Sequence[Rate], rows: int) -> float:
    if rows <= rates[0].rows:
        return rates[0].flops.value * (rows / rates[0].rows if len(rates) > 1 else 1.0)
    for low, high in zip(rates, rates[1:], strict=False):
        if rows <= high.rows:
            share = math.log(rows / low.rows) / math.log(high.rows / low.rows)
            return math.exp((1 - share) * math.log(low.flops.value) + share * math.log(high.flops.value))
    return rates[-1].flops.value


def _bandwidth(device: DeviceSpec, num_bytes: float) -> float:
    """Of the smallest memory that holds so much."""
    tier = next((tier for tier in device.tiers if num_bytes <= tier.num_bytes), device.tiers[-1])
    return tier.bytes_per_s.value


def _weight_s(fitted: Efficiency, work: Work) -> float:
    points: tuple[CostPoint, ...] | None = fitted.weight_s.get(work.precision)
    if points is None:
        known = ", ".join(sorted(fitted.weight_s))
        raise ConfigError(f"no step of a model in {work.precision} was measured, only in {known}")
    return seconds_at(points, work.rows)
