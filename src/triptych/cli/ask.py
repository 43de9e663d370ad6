"""`triptych ask`: one question, the answer streamed to the terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from triptych.session import TextDelta


@click.command(
    epilog="""
\b
Examples:
  triptych ask demo --image apple.png "What is this?"
  triptych ask ./smolvlm --image a.jpg --image b.jpg "What differs?" --max-tokens 60
  triptych ask demo "Name three primes." > answer.txt
"""
)
@click.argument("model", metavar="BUNDLE|CHECKPOINT|demo")
@click.argument("question")
@click.option(
    "--image", "images", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A picture to ask about; may be given several times, in order.",
)  # fmt: skip
@click.option("--system", help="What the model is told before the question.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Longest answer.")
@click.option(
    "--temperature", type=click.FloatRange(0.0, 2.0), default=0.0, show_default=True,
    help="0: always the likeliest word. Higher: more varied.",
)  # fmt: skip
@click.option("--seed", type=int, help="Repeats a varied answer.")
def verb(model: str, question: str, images: tuple[Path, ...], system: str | None, **sampling: Any) -> None:
    """Ask MODEL a question, about pictures or not. The answer goes to stdout, figures to stderr."""
    from triptych.cli.compile import progress_bar
    from triptych.session import Session, Source

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal's encoding has no emoji
    with progress_bar() as progress:
        opened = Session.open(Source(model=model, progress=progress))
    with opened as session:
        for delta in session.begin(question, images=images, system=system, **sampling):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    click.echo()
    _print_figures(delta)


def _print_figures(last: TextDelta) -> None:
    usage, timing = last.usage, last.timing
    if usage is None or timing is None:
        return
    words = [f"{usage.prompt_tokens:,} tokens in", f"{usage.completion_tokens:,} out"]
    if usage.image_tokens:
        words[0] += f" ({usage.image_tokens:,} of pictures, encoded in {timing.encode_s:.2f} s)"
    if last.finish is not None and last.finish.value == "length":
        words[1] += " (cut by --max-tokens)"
    words.append(f"first token after {timing.queue_s + timing.prefill_s:.2f} s")
    if usage.completion_tokens > 1 and timing.decode_s > 0:
        words.append(f"{(usage.completion_tokens - 1) / timing.decode_s:.1f} tokens/s")
    click.echo(", ".join(words), err=True)
