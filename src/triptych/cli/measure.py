"""`triptych measure`: what this machine can do, as a file that plans are made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from triptych.cli.tables import console_of, table_of, write
from triptych.cli.values import NewFile

if TYPE_CHECKING:
    from rich.table import Table

    from triptych.core.device import DeviceSpec, Figure


@click.command(
    epilog="""
\b
Examples:
  triptych measure -o machine.json
  triptych plan ./SmolVLM-256M-Instruct --machine machine.json --workload work.yaml
"""
)
@click.option("-o", "--output", type=NewFile(), help="Write the machine here, as JSON; to stdout if not given.")
@click.option("--name", help="What to call it. The processor's name and its number of cores, if not given.")
def verb(output: Path | None, name: str | None) -> None:
    """Measure this machine for a minute: memory by working set, products by precision and rows, copies.

    Nothing else should run meanwhile: figures that were disturbed, or that contradict one another, are refused.
    """
    from triptych.cli.compile import progress_bar
    from triptych.core.spec import pretty_json
    from triptych.session.hardware import measure_machine

    with progress_bar() as progress:
        spec = measure_machine(name, progress)
    _print(spec)
    if output is not None:
        write(output, pretty_json(spec), f"machine: `triptych plan MODEL --machine {output}` plans for it")
    else:
        click.echo(pretty_json(spec), nl=False)


def _print(spec: DeviceSpec) -> None:
    from rich.markup import escape

    console = console_of(140, stderr=True)
    console.print(f"[bold]{escape(spec.name)}[/], {spec.memory_bytes / 1e9:,.1f} GB of memory")
    for table in (_tiers(spec), _rates(spec), _links(spec), *_slices(spec)):
        console.print(table)
    console.print(f"One operator more in a graph: {spec.launch_s.value * 1e6:.1f} µs")
    for note in spec.notes:
        console.print(note, style="dim", markup=False)


def _tiers(spec: DeviceSpec) -> Table:
    table = table_of("Memory, read by all threads", "tier", "bytes", "GB/s", "lowest to highest")
    for tier in spec.tiers:
        table.add_row(tier.name, f"{tier.num_bytes:,}", *_figure(tier.bytes_per_s))
    return table


def _rates(spec: DeviceSpec) -> Table:
    """A line for each number of rows, a column for each precision."""
    precisions = list(dict.fromkeys(rate.precision for rate in spec.rates))
    table = table_of("Products by precision of the weights: G operations a second · GB of weights a second", "rows",
                   *precisions)  # fmt: skip
    for rows in sorted({rate.rows for rate in spec.rates}):
        own = {rate.precision: rate for rate in spec.rates if rate.rows == rows}
        cells = [
            f"{own[one].flops.value / 1e9:,.0f} · {own[one].weight_bytes_per_s.value / 1e9:.1f}" if one in own else ""
            for one in precisions
        ]
        table.add_row(str(rows), *cells)
    return table


def _links(spec: DeviceSpec) -> Table:
    table = table_of("Ways", "from → to", "kind", "GB/s", "lowest to highest", "latency, µs", "ΔV: α · β", "its error")
    for link in spec.links:
        lanes = f" {link.generation} x{link.lanes}" if link.lanes else ""
        latency = f"{link.latency_s.value * 1e6:.1f}" if link.latency_s.num_samples > 1 else "not measured"
        worth = ("assumed", "") if link.worth is None else (
            f"{link.worth.alpha:.2f} · {link.worth.beta:.2f}", f"{link.worth.error:.2f}")  # fmt: skip
        way = (f"{link.source} → {link.target}", f"{link.kind}{lanes}")
        table.add_row(*way, *_figure(link.bytes_per_s), latency, *worth)
    return table


def _slices(spec: DeviceSpec) -> Iterator[Table]:
    """What work that is cut into tiles runs at, by how many users share a tile while it is in the last cache."""
    from triptych.plan.topology import Slice, rank_slices

    cache, groups = spec.tiers[-2], (1, 2, 4, 8, 16)
    for link in spec.links:
        if link.worth is not None:
            table = table_of(f"Slices from {link.source}: ΔV, the share of {cache.name}'s speed, by users of a tile",
                           "tile, MiB", *map(str, groups))  # fmt: skip
            for tile in (cache.num_bytes // 8, cache.num_bytes, 4 * cache.num_bytes):
                pieces = [Slice(tile_bytes=tile, group=group) for group in groups]
                scored = {piece: value for value, piece in rank_slices(pieces, spec, link)}
                table.add_row(f"{tile / (1 << 20):,.1f}", *(f"{scored[piece]:.2f}" for piece in pieces))
            yield table


def _figure(figure: Figure) -> tuple[str, str]:
    spread = f"{figure.lowest / 1e9:,.1f} to {figure.highest / 1e9:,.1f}" if figure.num_samples > 1 else "not measured"
    return f"{figure.value / 1e9:,.1f}", spread
