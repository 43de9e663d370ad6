"""`triptych bench saving`: before and after, same traffic and quality, factor by factor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triptych.cli.tables import console_of, write
from triptych.cli.values import NewFile

if TYPE_CHECKING:
    from triptych.plan.saving import Saving

CHECKPOINT = "BUNDLE|CHECKPOINT|demo"


@click.command(
    short_help="What it saves against a plain bf16 pipeline.",
    epilog="""
\b
Examples:
  triptych bench saving demo --workload mixed --html saving.html
  triptych bench saving small --plain ./SmolVLM-256M-Instruct --workload work.yaml --reduce cenprune:0.5
""",
)
@click.argument("model", metavar=CHECKPOINT)
@click.option("--plain", metavar=CHECKPOINT, help="The baseline: the checkpoint, compiled in bf16 once, or a bundle of "
              "it. Needed where MODEL is a bundle.")  # fmt: skip
@click.option("--workload", "workload_name", required=True, metavar="FILE|NAME",
              help="Kinds of requests, sizes, how fast they come; `samples`: questions and right answers.")  # fmt: skip
@click.option("--reduce", metavar="METHOD:KEEP", help="Ours leaves visual tokens out: cenprune:0.5 keeps half.")
@click.option("--kv-cache-dtype", type=click.Choice(["u8", "u4", "bf16"]), default="u8", show_default=True,
              help="Ours' cached keys and values.")  # fmt: skip
@click.option("--max-num-seqs", type=click.IntRange(1), default=16, show_default=True, help="Ours' answers at once.")
@click.option("--num-threads", type=click.IntRange(1), metavar="N", help="CPU threads of each part, of both.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="How often each way is measured.")
@click.option("--kept", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Keep each run there, and measure none again: an interrupted bench goes on.")  # fmt: skip
@click.option("--html", type=NewFile(), help="Write the report as one HTML file.")
@click.option("--json", "as_json", is_flag=True, help="All runs and figures as one JSON object.")
def verb(model: str, plain: str | None, workload_name: str, html: Path | None, as_json: bool, **asked: Any) -> None:
    """Measure what MODEL saves against a plain bf16 pipeline: core-seconds × GB, and each factor switched off in turn.

    Some twenty runs of the workload, each in a process of its own: minutes. Nothing else should run meanwhile. Exits
    with 8 where requests failed or traffic differed: a saving is of the same work.
    """
    from triptych.cli.compile import progress_bar
    from triptych.cli.settings import read_reduction
    from triptych.cli.workloads import read_workload
    from triptych.core.spec import pretty_json
    from triptych.errors import ConfigError
    from triptych.plan.extra import extra
    from triptych.plan.report import saving_page
    from triptych.session.opening import Source, find_bundle
    from triptych.session.saving import SavingConfig, measure_saving, plain_bundle

    if html is not None:
        extra("matplotlib")  # or it would be found out after minutes
    if plain is None and (Path(model) / "bundle.json").is_file():
        raise ConfigError("a bundle's baseline is not known", hint="--plain CHECKPOINT, the model it was made from")
    asked["reduction"] = read_reduction(asked.pop("reduce") or "cenprune:1.0")["reduction"]
    config = SavingConfig(workload=read_workload(workload_name), **asked)
    with progress_bar() as progress:
        ours = find_bundle(Source(model=model, progress=progress))
        found = measure_saving(ours, plain_bundle(plain or model, progress), config, progress)
    if html is not None:
        write(html, saving_page(found).encode(), "report")
    if as_json:
        click.echo(pretty_json(found), nl=False)
    else:
        _print(found)


def _print(saving: Saving) -> None:
    from rich.table import Table

    from triptych.plan.report import ENDS, OFF, ends, switched_off

    console = console_of(140)
    for head, rows in ((ENDS, ends(saving)), (OFF[:-1], switched_off(saving))):
        table = Table(*head)
        for row in rows:
            table.add_row(*row[: len(head)])
        console.print(table)
    low, high = saving.saved.lowest, saving.saved.highest
    console.print(f"Saved: {saving.saved.value:.1%} of core-seconds × GB ({low:.1%} to {high:.1%}).", style="bold")
    if saving.kept is not None:
        console.print(f"Kept: {saving.kept.value:.1%} of the right answers, of {saving.num_questions} questions.")
    for complaint in saving.complaints():
        console.print(f"But: {complaint}.")
