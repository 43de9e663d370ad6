"""`triptych bench batch`: speed by callers at once, and the batch that keeps a promise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triptych.cli.tables import console_of, table_of, write
from triptych.cli.values import NewFile, Seconds

if TYPE_CHECKING:
    from triptych.core.bundle import Manifest
    from triptych.core.device import DeviceSpec
    from triptych.plan.batch import BatchCurve, Found

LIMITS = {"ttft": "ttft_p95", "tpot": "tpot_p95", "latency": "latency_p95"}


@click.command(short_help="How fast by callers at once; the batch for a rate or bound.")
@click.argument("model", metavar="BUNDLE|CHECKPOINT|demo")
@click.option("--workload", "workload_name", required=True, metavar="FILE|NAME", help="Kinds of requests and sizes.")
@click.option("--callers", default="1,2,4,8,16", show_default=True, metavar="N,N,…", help="Measured at these.")
@click.option("--tokens-per-s", type=Seconds(0, min_open=True), metavar="R", help="The smallest batch that reaches it.")
@click.option("--requests-per-s", type=Seconds(0, min_open=True), metavar="R", help="Likewise.")
@click.option(
    "--ttft", type=Seconds(0, min_open=True), metavar="S", help="Seconds to the first token, 95th percentile, at most."
)
@click.option("--tpot", type=Seconds(0, min_open=True), metavar="S", help="Seconds for each token after it, likewise.")
@click.option("--latency", type=Seconds(0, min_open=True), metavar="S", help="Seconds of a whole answer, likewise.")
@click.option(
    "--machine", metavar="FILE", help="This machine, by `triptych measure`: held against the runs of one caller."
)
@click.option("-o", "--output", type=NewFile(), help="Runs and result as JSON.")
@click.option("--html", type=NewFile(), help="Write the report as one HTML file.")
def verb(model: str, workload_name: str, callers: str, **asked: Any) -> None:
    """Measure rising numbers of callers, three runs each, and find the batch for a rate or a bound on latency.

    The batch found is run once more, to see if it holds. What was not measured is not said: nothing is extrapolated.
    A target that no measured batch surely keeps is refused, with the nearest there is.
    """
    from triptych.cli.compile import progress_bar
    from triptych.cli.plan import devices_of
    from triptych.cli.workloads import read_workload
    from triptych.engine.config import EngineConfig
    from triptych.plan.batch import Bound, inverse_batch_search
    from triptych.plan.extra import extra
    from triptych.session import Session
    from triptych.session.curves import Grid, confirm, measure_curve

    grid, workload = Grid(concurrencies=_sizes(callers)), read_workload(workload_name)
    output, html, machine = asked.pop("output"), asked.pop("html"), asked.pop("machine")
    device = None if machine is None else devices_of((machine,))[0]
    extra("scipy.optimize")  # what lacks would be found out at the end
    if html is not None:
        extra("matplotlib")
    named = [(LIMITS.get(name, name), value) for name, value in asked.items() if value is not None]
    found: Found | None = None
    with Session.open(model, config=EngineConfig(max_num_seqs=max(grid.concurrencies))) as session:
        with progress_bar() as progress:
            curve = measure_curve(session, workload, grid, progress)
        if device is not None:
            _check(curve, session.manifest, device)
        _show_curve(curve)
        _write(output, curve, None)
        if named:
            bounds = [Bound(metric=metric, value=value) for metric, value in named]
            found = confirm(session, workload, inverse_batch_search(curve, bounds), grid)
    if found is not None:
        _show_found(found)
        _write(output, curve, found)
    if html is not None:
        from triptych.plan.report import curve_page

        write(html, curve_page(f"{Path(model).name}, {workload.name}", curve.points, found).encode(), "report")


def _sizes(callers: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(size) for size in callers.split(",")}))
    except ValueError:
        sizes = ()
    if len(sizes) < 3 or sizes[0] < 1:
        raise click.BadParameter(f"{callers!r}: three numbers or more, such as 1,2,4,8", param_hint="--callers")
    return sizes


def _check(curve: BatchCurve, manifest: Manifest, device: DeviceSpec) -> None:
    """Raises MeasurementError where the machine is said to read slower or faster than it was seen to."""
    from triptych.plan.points import check_bandwidth

    decoder = manifest.part("decoder")
    if decoder is not None and 1 in curve.runs:
        check_bandwidth(curve.runs[1][0], manifest.num_bytes(decoder), device)


def _show_curve(curve: BatchCurve) -> None:
    title = f"{len(curve.points)} runs, medians; most tokens at {curve.peak} callers"
    table = table_of(title, "callers", "tokens/s", "from – to", "requests/s", "TTFT p95", "TPOT p95")
    figures = {name: curve.at(name) for name in ("tokens_per_s", "requests_per_s", "ttft_p95", "tpot_p95")}
    for size, runs in curve.runs.items():
        rate, requests, *seconds = (float(figures[name][size - curve.batches[0]]) for name in figures)
        rates = [run.tokens_per_s for run in runs]
        spread = f"{min(rates):,.1f} – {max(rates):,.1f}"
        table.add_row(
            str(size), f"{rate:,.1f}", spread, f"{requests:.3g}", *(f"{1000 * one:,.1f} ms" for one in seconds)
        )
    console = console_of(140)
    console.print(table)
    law = curve.usl
    console.print(
        f"scalability law: {law.rate:.4g} tokens/s of one, contention {law.contention:.3f}, coherency "
        f"{law.coherency:.4f}; {law.error:.0%} from the curve",
        style="dim",
    )


def _show_found(found: Found) -> None:
    console = console_of(140)
    console.print(f"batch {found.batch} (likely {found.least} to {found.most}): {found.reason}")
    for bound in found.bounds:
        said = found[bound.metric]
        console.print(
            f"  {bound.metric}: asked {bound.value:.4g}, predicted {said.value:.4g} {said.unit} ({said.lowest:.4g} to "
            f"{said.highest:.4g}), one run measured {said.measured or 0:.4g}"
        )


def _write(output: Path | None, curve: BatchCurve, found: Found | None) -> None:
    from triptych.core.spec import pretty_json

    if output is not None:
        output.write_bytes(pretty_json({"points": curve.points, "usl": curve.usl, "peak": curve.peak, "found": found}))
