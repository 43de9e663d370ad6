"""`triptych analyze`: where a model's bytes, its sensitivity and its attention are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triptych.cli.tables import console_of, table_of, write
from triptych.cli.values import NewFile
from triptych.core.policy import METHODS

if TYPE_CHECKING:
    from rich.table import Table

    from triptych.compress.report import Analysis


@click.command(
    epilog="""
\b
Examples:
  triptych analyze demo --html report.html
  triptych analyze ./SmolVLM-256M-Instruct --samples samples.jsonl
  triptych analyze ./SmolVLM-256M-Instruct --samples samples.jsonl --json > analysis.json
"""
)
@click.argument("model", metavar="CHECKPOINT|BUNDLE|demo")
@click.option(
    "--samples", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Chat messages as OpenAI has them, one conversation a line; pictures as paths beside the file. "
    "A small built-in set if not given.",
)  # fmt: skip
@click.option(
    "--html", type=NewFile(),
    help="Write the report as one HTML file that needs nothing else.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="All figures as one JSON object.")
@click.option(
    "--reduce", "method", type=click.Choice(METHODS), default="cenprune", show_default=True,
    help="Who drops visual tokens when the loss of keeping fewer is measured.",
)  # fmt: skip
def verb(model: str, html: Path | None, as_json: bool, **asked: Any) -> None:
    """Show where a model's bytes, its sensitivity and its attention are, measured on samples.

    Needs torch (the `compress` extra) and the exact weights: a checkpoint, or a bundle in fp32. Minutes for a small
    model; what is measured is kept, so that an interrupted run goes on where it ended.
    """
    from triptych.cli.compile import progress_bar
    from triptych.cli.compress import need_torch

    need_torch()
    from triptych.compress.report import page
    from triptych.core.spec import pretty_json
    from triptych.session.analysis import AnalyzeConfig, analyze_model

    with progress_bar() as progress:
        found = analyze_model(_folder(model), AnalyzeConfig(**asked), progress)
    if html is not None:
        write(html, page(found).encode(), "report")
    if as_json:
        click.echo(pretty_json(found), nl=False)
    else:
        _print(found)


def _folder(model: str) -> Path:
    if model != "demo":
        return Path(model)
    from triptych.compile.mini import assemble
    from triptych.session.opening import CACHE

    return assemble(CACHE)


def _print(found: Analysis) -> None:
    from rich.markup import escape

    from triptych.compress.prediction import verdict

    console = console_of(140)
    console.print(f"[bold]{escape(found.name)}[/]  on {escape(found.fed)}")
    for table in (_parts(found), _layers(found), *([_keep(found), _predictions(found)] if found.points else [])):
        console.print(table)
    if found.proposed is not None:
        console.print(f"Proposed from attention: keep {found.proposed:.0%} of the visual tokens.", style="bold")
        console.print(verdict(found.predictions))


def _parts(found: Analysis) -> Table:
    table = table_of("Parts: KL divergence in nats a token with this part alone rounded", "part", "parameters", "bytes",
                   "precision", "4 bits", "8 bits", "same token, 4 bits")  # fmt: skip
    losses = {(one.part, one.bits): one for one in found.sensitivities if not one.layer}
    for part in found.parts:
        four, eight = losses.get((part.name, 4)), losses.get((part.name, 8))
        table.add_row(
            part.name, f"{part.num_parameters:,}", f"{part.num_bytes:,}", part.precision,
            *(_figure(one.divergence) if one else "" for one in (four, eight)), f"{four.same_top:.1%}" if four else "",
        )  # fmt: skip
    return table


def _layers(found: Analysis) -> Table:
    """The decoder's layers: what they lose, and what they look at."""
    table = table_of("Decoder by layer: rounding, and cross-modal entropies over log n (0: one token, 1: all alike)",
                   "layer", "4 bits", "8 bits", "text→image", "image→text", "gap", "unmasked probe", "probe gap",
                   "tokens attended to", "on images", "density")  # fmt: skip
    losses = {(one.layer, one.bits): one.divergence for one in found.sensitivities if one.part == "decoder"}
    for index, layer in enumerate(found.layers):
        rounded = (losses.get((f"layers.{index}", bits)) for bits in (4, 8))
        between = (layer.text_media, layer.media_text, layer.gap, layer.probe, layer.probe_gap)
        number = "" if layer.effective is None else f"{layer.effective:.1f}"
        media = sum(share for name, share in layer.mass.items() if name != "text")
        table.add_row(
            str(index), *map(_figure, rounded), *map(_share, between), number, f"{media:.1%}", f"{layer.density:.2f}"
        )
    return table


def _keep(found: Analysis) -> Table:
    table = table_of(f"Visual tokens kept by {found.method}: predicted against measured, means of samples", "keep",
                   "predicted shortfall", "attention lost", "KL divergence", "same token")  # fmt: skip
    for keep in sorted({point.keep for point in found.points}):
        own = [point for point in found.points if point.keep == keep]
        mark = " ← proposed" if keep == found.proposed else ""
        table.add_row(
            f"{keep:.0%}{mark}", f"{_mean(one.shortfall for one in own):.1%}", f"{_mean(one.lost for one in own):.2%}",
            _figure(_mean(one.divergence for one in own)), f"{_mean(one.same_top for one in own):.1%}",
        )  # fmt: skip
    return table


def _predictions(found: Analysis) -> Table:
    table = table_of("Does it predict the measured loss? Rank correlation, 1 is perfect", "predicted by",
                   "all samples and ratios", "samples at one ratio")  # fmt: skip
    for one in found.predictions:
        table.add_row(one.name, *("" if rho is None else f"{rho:+.2f}" for rho in (one.overall, one.within)))
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / len(held)
