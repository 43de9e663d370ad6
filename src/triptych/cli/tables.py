"""Tables and words on a terminal, and files beside them, alike in every command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def console_of(width: int, *, stderr: bool = False) -> Console:
    """As wide as the terminal; `width` where there is none."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def write(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    click.echo(f"{path} holds the {what}", err=True)


def table_of(title: str, *headings: str) -> Table:
    """The first column to the left, what is counted to the right."""
    from rich.table import Table

    table = Table(headings[0], title=title, title_justify="left")
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    return table
