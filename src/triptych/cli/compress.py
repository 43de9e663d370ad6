"""`triptych compress`: a checkpoint in, a smaller one out, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triptych.cli.tables import console_of
from triptych.cli.values import Count
from triptych.errors import ConfigError, install

if TYPE_CHECKING:
    from rich.table import Table

    from triptych.session.compression import Report


@click.command(
    epilog="""
\b
Examples:
  triptych compress ./SmolVLM-256M-Instruct -o small
  triptych compress demo -o small --recipe w4 --calibrate mine.jsonl --max-kld 0.1
  triptych compress ./llava-1.5-7b-hf -o small --recipe w4 --budget-bytes 4g
  triptych compile small -o bundle
"""
)
@click.argument("checkpoint", metavar="CHECKPOINT|demo")
@click.option(
    "-o", "--output", "target", required=True, type=click.Path(path_type=Path),
    help="The compressed checkpoint's folder. An older one there is replaced in one step; anything else is left alone.",
)  # fmt: skip
@click.option(
    "--recipe", default="modality", show_default=True, metavar="modality|w4|w8|FILE.toml",
    help="modality: vision int8, weights and activations; projector int4; decoder bf16; head int8. "
    "w4: decoder in 4.6 bits, most int4 and some int8. w8: everything int8. A file: steps of your own.",
)  # fmt: skip
@click.option(
    "--calibrate", "samples", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None,
    metavar="SAMPLES.jsonl",
    help="Chat messages as your users send them, one conversation a line. [default: a small built-in set]",
)  # fmt: skip
@click.option(
    "--budget-bytes", type=Count(), default=None, metavar="N",
    help="Bytes of all weights together: the decoder's layers get 4 or 8 bits each, by measured loss.",
)  # fmt: skip
@click.option(
    "--max-kld", type=click.FloatRange(0.0, min_open=True), default=None, metavar="X",
    help="Write nothing if the answers' mean KL divergence from fp32, on samples held out, is over X.",
)  # fmt: skip
def verb(checkpoint: str, target: Path, **asked: Any) -> None:
    """Compress a model's folder, each modality in its own way, and say what it cost.

    Needs torch (the `compress` extra). Prints the folder's path; `triptych compile` makes a bundle of it.
    """
    from triptych.cli.compile import progress_bar

    need_torch()
    from triptych.session.compression import CompressConfig, compress_checkpoint

    config = CompressConfig(**asked)
    with progress_bar() as progress:
        report = compress_checkpoint(_folder(checkpoint, config.cache), target, config, progress)
    click.echo(f"{report.path}")
    _print(report)


def need_torch() -> None:
    """Raises ConfigError where torch is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise ConfigError("compressing needs torch, which is not installed", hint=install("compress"))


def _folder(checkpoint: str, cache: Path) -> Path:
    if checkpoint == "demo":
        from triptych.compile.mini import assemble

        return assemble(cache)
    if not (Path(checkpoint) / "config.json").is_file():
        raise ConfigError(
            f"{checkpoint!r} is not a checkpoint's folder",
            hint="give a Hugging Face folder, or `demo`; nothing is downloaded by name",
        )
    return Path(checkpoint)


def _print(report: Report) -> None:
    """What became of each part, on stderr: stdout has the path."""
    console = console_of(160, stderr=True)
    console.print(_table(report))
    values = {measure.name: measure.value for measure in report.whole.measures}
    console.print(f"Loss of the whole on {report.whole.inputs}:", markup=False)
    for name, value in values.items():
        console.print(f"  {name}: {value:.4g}", markup=False)
    for remark in report.remarks:
        console.print(f"note: {remark}", markup=False)


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table("part", "became", title="Compressed", title_justify="left")
    for heading in ("bits a weight", "bytes before", "after", "KL alone", "same token alone"):
        table.add_column(heading, justify="right")
    for part in report.parts:
        measures = [] if part.evidence is None else [measure.value for measure in part.evidence.measures]
        table.add_row(
            part.part,
            part.became,
            f"{part.bits:.2f}",
            f"{part.bytes_before:,}",
            f"{part.bytes_after:,}",
            f"{measures[0]:.2g}" if measures else "",
            f"{measures[3]:.1f} %" if measures else "",
        )
    before, after = (sum(getattr(part, name) for part in report.parts) for name in ("bytes_before", "bytes_after"))
    table.add_section()
    whole = [measure.value for measure in report.whole.measures]
    table.add_row("together", "", "", f"{before:,}", f"{after:,}", f"{whole[0]:.2g}", f"{whole[3]:.1f} %")
    return table
