"""`triptych compile`: a checkpoint in, a verified bundle out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from triptych.cli.values import Count, Pairs

WEIGHTS = ("auto", "int4", "int8", "bf16", "fp16", "fp32")


@click.command(
    epilog="""
\b
Examples:
  triptych compile ./SmolVLM-256M-Instruct -o smolvlm
  triptych compile ./llava-1.5-7b-hf -o llava --parts vision=int8,projector=bf16,decoder=int4
  triptych compile ./SmolVLM-256M-Instruct -o smolvlm --verify reference
"""
)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o", "--output", "bundle", required=True, type=click.Path(path_type=Path),
    help="The bundle's folder. An older bundle there is replaced in one step; anything else is left alone.",
)  # fmt: skip
@click.option(
    "--weights", type=click.Choice(WEIGHTS), default="auto", show_default=True,
    help="How weights are held. int4: smallest, fastest answers. int8: nearly exact. auto: what suits each part.",
)  # fmt: skip
@click.option(
    "--parts", type=Pairs(), default=None, metavar="PART=PRECISION,…",
    help="Precision of single parts (vision, projector, decoder, embedding); the others follow --weights.",
)  # fmt: skip
@click.option(
    "--verify", type=click.Choice(["graph", "reference"]), default="graph", show_default=True,
    help="graph: each part against the same graph in fp32. reference: against transformers on torch as well "
    "(the `reference` extra). A part that misses its gate is refused and nothing is written.",
)  # fmt: skip
@click.option(
    "--group-size", type=Count(), default=None, metavar="N",
    help="Weights that share a scale in int4. Smaller is closer to the original and larger in bytes.",
)  # fmt: skip
def verb(checkpoint: Path, bundle: Path, parts: dict[str, str] | None, group_size: int | None, **asked: Any) -> None:
    """Compile a model's folder into a BUNDLE: parts that a device can run, each proved equal to its twin.

    Needs no torch. Prints the bundle's path.
    """
    from triptych.compile.assemble import compile_checkpoint
    from triptych.compile.config import CompileConfig

    asked["parts"] = parts or {}
    if group_size is not None:
        asked["group_size"] = group_size
    with progress_bar() as progress:
        made = compile_checkpoint(checkpoint, bundle, CompileConfig(**asked), progress)
    click.echo(f"{made.path}")
    total = sum(made.manifest.num_bytes(part) for part in made.manifest.parts)
    click.echo(f"{len(made.manifest.parts)} parts, {total:,} bytes; `triptych inspect {bundle}` shows them", err=True)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr, or a line for each new thing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield in_lines(lambda line: click.echo(line, err=True))
        return
    with Progress(TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn(), console=console) as bar:
        tasks: dict[str, Any] = {}

        def move(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=share)

        yield move


def in_lines(say: Callable[[str], None]) -> Callable[[str, float], None]:
    """Progress for what cannot move a bar: a line for each new thing."""
    seen: set[str] = set()

    def tell(what: str, share: float) -> None:
        if what not in seen:
            seen.add(what)
            say(f"{what} …")

    return tell
