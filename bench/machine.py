"""This machine as `triptych measure` finds it, and what a bundle does on it, as `triptych bench hardware` says.

usage: python bench/machine.py [--bundle demo] [--json bench/results/machine.json] [--machine machine.json]

A minute each, alone on the machine: a measurement that was disturbed is refused. `--machine` also writes the file that
`triptych plan --machine` reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import record

from triptych.core.device import DeviceSpec, Figure
from triptych.engine.config import EngineConfig
from triptych.session.hardware import Platform, bench_bundle, measure_machine

SHOWN_ROWS = (1, 16, 512)


def of_machine(spec: DeviceSpec) -> Iterator[record.Measure]:
    for tier in spec.tiers:
        yield _measure("reading", tier.name, "B/s", tier.bytes_per_s)
    for rate in spec.rates:
        if rate.rows in SHOWN_ROWS:
            yield _measure(f"products with {rate.rows} rows", rate.precision, "operations/s", rate.flops)
            yield _measure(f"weights read with {rate.rows} rows", rate.precision, "B/s", rate.weight_bytes_per_s)
    yield _measure("one operator more", "openvino", "s", spec.launch_s)
    for link in spec.links:
        if link.worth is not None and link.worth.error is not None:
            way = f"{link.source} to {link.target}"
            for name in ("alpha", "beta", "error"):
                yield record.measure(f"slices' {name}", way, "share", [getattr(link.worth, name)])


def of_bundle(platform: Platform) -> Iterator[record.Measure]:
    for row in platform.rows:
        yield _measure(row.name, platform.bundle, row.unit, row.figure)


def _measure(name: str, subject: str, unit: str, figure: Figure) -> record.Measure:
    return record.Measure(name=name, subject=subject, unit=unit, **msgspec.structs.asdict(figure))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", default="demo")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--machine", type=Path)
    asked = parser.parse_args()
    busy = record.busy_share()
    spec = measure_machine()
    if asked.machine is not None:
        asked.machine.write_bytes(msgspec.json.format(msgspec.json.encode(spec), indent=1) + b"\n")
    platform = bench_bundle(asked.bundle, EngineConfig())
    settings = {"busy_before": busy, "bundle": platform.bundle, "notes": [*spec.notes, *platform.notes]}
    content = record.record("machine", [*of_machine(spec), *of_bundle(platform)], settings=settings)
    if asked.json is not None:
        record.write(asked.json, content)
    for measure in content["measures"]:
        sys.stdout.write(
            f"{measure['subject']:<20} {measure['name']:<40} {measure['value']:>14.6g} {measure['unit']}\n"
        )


if __name__ == "__main__":
    main()
