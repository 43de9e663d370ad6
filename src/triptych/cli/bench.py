"""`triptych bench`: how fast a bundle is on this machine, and what it saves there."""

from __future__ import annotations

import click


@click.group()
def verb() -> None:
    """Measure a bundle on this machine."""
