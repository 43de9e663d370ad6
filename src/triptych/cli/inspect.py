"""`triptych inspect`: what a bundle holds, what was proved of it, and where it runs here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from triptych.cli.tables import console_of

if TYPE_CHECKING:
    from rich.table import Table

    from triptych.core.bundle import Bundle, Manifest, Measure


@click.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The manifest and the placements as one JSON object.")
@click.option(
    "--open/--no-open", "is_opened", default=True, show_default=True,
    help="Open each part on its device, to tell where it really runs. Takes as long as loading does.",
)  # fmt: skip
@click.option("--digests", is_flag=True, help="Read every file and hold it against its SHA-256 first.")
def verb(bundle: Path, as_json: bool, is_opened: bool, digests: bool) -> None:
    """Show a BUNDLE's parts, precisions, bytes, verification and placements."""
    from triptych.core.bundle import check_digests, open_bundle
    from triptych.core.spec import pretty_json

    opened = open_bundle(bundle, verify=check_digests if digests else None)
    places = _places(opened) if is_opened else {}
    if as_json:
        click.echo(pretty_json({"manifest": opened.manifest, "placements": places}), nl=False)
    else:
        _print_tables(opened.manifest, places)


def _places(bundle: Bundle) -> dict[str, str]:
    """Where each part runs, found out by opening it. A device that refuses says so in its place."""
    from triptych.backends import ov
    from triptych.backends.base import Placement
    from triptych.errors import TriptychError

    places: dict[str, str] = {}
    for part in bundle.manifest.parts:
        path, placement = bundle.file(part.files[0]), Placement()
        if part.name == "embedding":
            places[part.name] = "memory, mapped from its file"
            continue
        try:
            opened = ov.open_decoder(path, placement, "u8") if part.name == "decoder" else ov.open_part(path, placement)
            places[part.name] = opened.place()
        except TriptychError as error:
            places[part.name] = f"cannot run here: {error.message}"
    return places


def _print_tables(manifest: Manifest, places: dict[str, str]) -> None:
    from rich.markup import escape

    console = console_of(200)
    total = sum(manifest.num_bytes(part) for part in manifest.parts)
    console.print(f"[bold]{escape(manifest.name)}[/]  {manifest.spec.family}, {total / 1e6:,.1f} MB of weights")
    console.print(_parts(manifest, places))
    console.print(_evidence(manifest))
    for part in manifest.parts:
        for sentence in part.fallbacks:
            console.print(f"{part.name}: {sentence}", markup=False)
    for step in manifest.history:
        console.print(f"{step.stage} by triptych {step.version}")


def _parts(manifest: Manifest, places: dict[str, str]) -> Table:
    from rich.table import Table

    table = Table("part", "weights", title="Parts", title_justify="left")
    for heading in ("parameters", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("fallbacks", justify="right")
    table.add_column("verified")
    table.add_column("runs on", overflow="fold")
    for part in manifest.parts:
        table.add_row(
            part.name,
            part.precision,
            f"{part.num_parameters:,}",
            f"{manifest.num_bytes(part):,}",
            str(len(part.fallbacks)) if part.fallbacks else "none",
            _verdict(manifest, part.name),
            places.get(part.name, "not opened"),
        )
    return table


def _verdict(manifest: Manifest, subject: str) -> str:
    measures = [one for evidence in manifest.evidence if evidence.subject == subject for one in evidence.measures]
    gated = [one for one in measures if one.at_least is not None or one.at_most is not None]
    if not gated:
        return "as stored" if subject == "embedding" else "no"
    passed = sum(one.is_met for one in gated)
    return f"{passed} of {len(gated)} gates" if passed < len(gated) else f"yes, {passed} gates"


def _evidence(manifest: Manifest) -> Table:
    from rich.table import Table

    table = Table("of", "held against", "fed with", "measure", title="Verification", title_justify="left")
    table.add_column("value", justify="right")
    table.add_column("gate")
    table.add_column("met")
    for evidence in manifest.evidence:
        heading: tuple[str, str, str] = (evidence.subject, evidence.twin, evidence.inputs)
        for measure in evidence.measures:
            gate = _gate(measure)
            met = "yes" if measure.is_met else "[bold red]NO[/]"
            table.add_row(*heading, measure.name, f"{measure.value:.4g}", gate, met if gate else "")
            heading = ("", "", "")
        table.add_section()
    return table


def _gate(measure: Measure) -> str:
    words = []
    if measure.at_least is not None:
        words.append(f"≥ {measure.at_least:g}")
    if measure.at_most is not None:
        words.append(f"≤ {measure.at_most:g}")
    return ", ".join(words)
