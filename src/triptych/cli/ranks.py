"""`triptych bench ranks`: what sums between ranks take, and a model cut between devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from triptych.cli.tables import console_of, table_of

if TYPE_CHECKING:
    from triptych.core.device import DeviceSpec
    from triptych.plan.pareto import AllReduce, Cell, Ladder

BATCHES = (1, 4, 16, 64)
DEGREES = (2, 4, 8)


@click.command(short_help="What sums between ranks take; a model cut between devices.")
@click.argument("model", required=False, metavar="[BUNDLE|CHECKPOINT|demo]")
@click.option("--hardware", metavar="NAME", help="A data sheet: MODEL cut between devices of it.")
@click.option("--ranks", "num_ranks", type=click.IntRange(2, 16), default=2, show_default=True, help="Processes.")
def verb(model: str | None, hardware: str | None, num_ranks: int) -> None:
    """Time all-reduces between processes of this machine, over gloo: three algorithms, 1 KiB to 4 MiB.

    With a MODEL and --hardware nothing is timed: a step of the decoder is planned for each degree of tensor
    parallelism and each batch, by the data sheet and a ring over its slowest link. What nothing else beats in time,
    bytes moved and tokens a second of a device is marked.
    """
    if (model is None) != (hardware is None):
        raise click.UsageError("MODEL and --hardware belong together: a model and the data sheet it is cut on")
    if model is None or hardware is None:
        from triptych.plan.pareto import fit_ladder
        from triptych.plan.ranks import measure_ladder

        samples = measure_ladder(num_ranks)
        _show_ladder(samples, fit_ladder(samples))
        return
    from triptych.cli.plan import folder_of
    from triptych.plan.sheets import load

    _show_cells(*_cells(folder_of(model), load(hardware)))


def _cells(model: Path, device: DeviceSpec) -> tuple[tuple[Cell, ...], tuple[Cell, ...], str]:
    """All, those that nothing beats, and which degrees were left out and why."""
    from triptych.errors import ConfigError
    from triptych.plan.pareto import assumed_ladder, cells, front
    from triptych.plan.roofline import Roofline
    from triptych.plan.work import Step, check_cut
    from triptych.session.planning import read_model

    spec, held, _ = read_model(model, "int8")

    def compute_s(degree: int, batch: int) -> float:
        parts = Roofline(spec=spec, held=held, device=device, degree=degree).parts(Step(answers=batch))
        return sum(part.total_s for part in parts.values())

    most = 2 * spec.decoder.hidden * max(BATCHES)
    reasons: dict[int, str] = {}
    for degree in DEGREES:
        try:
            check_cut(spec.decoder, degree)
        except ConfigError as error:
            reasons[degree] = str(error)
        if degree > device.num_devices:
            reasons[degree] = f"a machine has {device.num_devices} of {device.name}"
    degrees = [degree for degree in DEGREES if degree not in reasons]
    found = cells(spec.decoder, [assumed_ladder(device, degree, most) for degree in degrees], BATCHES, compute_s)
    return found, front(found, lambda cell: cell.costs), "\n".join(dict.fromkeys(reasons.values()))


def _show_ladder(samples: tuple[AllReduce, ...], ladder: Ladder) -> None:
    console = console_of(140)
    names = [line.algorithm for line in ladder.lines]
    table = table_of(f"All-reduce between {ladder.num_ranks} ranks, µs", "bytes", *names)
    for size in sorted({one.num_bytes for one in samples}):
        taken = {one.algorithm: one.seconds.value for one in samples if one.num_bytes == size}
        fastest = min(taken, key=taken.__getitem__)
        marked = [f"{'[bold]' if name == fastest else ''}{1e6 * taken[name]:,.0f}" for name in names]
        table.add_row(f"{size:,}", *marked)
    console.print(table)
    for line in ladder.lines:
        console.print(f"{line.algorithm}: {1e6 * line.latency_s:,.0f} µs + bytes at {1e-9 / line.byte_s:.3g} GB/s")
    for edge, before, after in ladder.crossovers():
        console.print(f"from {edge:,.0f} bytes on {after} is faster than {before}")
    console.print(f"half of the sizes lie within {ladder.error:.0%} of the lines", style="dim")


def _show_cells(found: tuple[Cell, ...], kept: tuple[Cell, ...], left_out: str) -> None:
    headings = ("devices", "batch", "step", "sums", "bytes\nof sums", "tokens/s\nof a device", "on the\nfront")
    table = table_of("A step by devices that share it", *headings)
    for cell in found:
        times = (f"{1e3 * seconds:.3f} ms" for seconds in (cell.step_s, cell.all_reduce_s))
        table.add_row(
            str(cell.tensor_parallel), str(cell.batch), *times,
            f"{cell.all_reduce_bytes:,}", f"{cell.tokens_per_s:,.0f}", "yes" if cell in kept else "",
        )  # fmt: skip
    console = console_of(140)
    console.print(table)
    if left_out:
        console.print(left_out, style="dim", markup=False)
