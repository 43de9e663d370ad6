"""`triptych bench`: how fast a bundle is on this machine, and what it saves there."""

from __future__ import annotations

import click

from triptych.cli import batch, ranks, saving
from triptych.cli.tables import console_of, table_of


@click.group()
def verb() -> None:
    """Measure a bundle on this machine."""


verb.add_command(batch.verb, "batch")
verb.add_command(ranks.verb, "ranks")
verb.add_command(saving.verb, "saving")


@verb.command(short_help="Pictures and tokens a second, bandwidth used.")
@click.argument("model", metavar="BUNDLE|CHECKPOINT|demo")
@click.option("--json", "as_json", is_flag=True, help="All figures as one JSON object.")
@click.option("--num-threads", type=click.IntRange(1), metavar="N", help="CPU threads of each part.")
def hardware(model: str, as_json: bool, num_threads: int | None) -> None:
    """Print the platform table: pictures a second, prefill over them, bandwidth used, tokens a second.

    Minutes, for more than a small model. Nothing else should run meanwhile.
    """
    from triptych.cli.compile import progress_bar
    from triptych.core.spec import pretty_json
    from triptych.engine.config import EngineConfig
    from triptych.session.hardware import bench_bundle

    with progress_bar() as progress:
        found = bench_bundle(model, EngineConfig(num_threads=num_threads), progress)
    if as_json:
        click.echo(pretty_json(found), nl=False)
        return
    console = console_of(140)
    table = table_of(f"{found.bundle} on {found.place}", "", "median", "lowest to highest", "unit")
    for row in found.rows:
        spread = f"{row.figure.lowest:,.1f} to {row.figure.highest:,.1f}"
        table.add_row(row.name, f"{row.figure.value:,.1f}", spread, row.unit)
    console.print(table)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
