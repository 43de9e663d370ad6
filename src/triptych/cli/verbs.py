"""The command `triptych`: its verbs, its version, and how its errors look."""

from __future__ import annotations

import errno
import sys
from typing import Any

import click

from triptych.cli import analyze, ask, bench, compile, compress, inspect, measure, plan, serve
from triptych.errors import TriptychError

EXAMPLES = """
\b
First steps:
  triptych ask demo --image cat.png "What is this?"     a small model that fetches itself
  triptych serve demo                                   the same behind an OpenAI-compatible API

\b
Your own model, from a Hugging Face folder (SmolVLM, Idefics3, LLaVA):
  triptych compress ./SmolVLM-256M-Instruct -o small    int8 eyes, int4 projector, and what that costs
  triptych compile ./SmolVLM-256M-Instruct -o smolvlm --weights int8
  triptych inspect smolvlm                              parts, bytes, what was verified, where it runs
  triptych serve smolvlm --port 8000 --max-num-seqs 16

\b
What it costs:
  triptych measure -o machine.json                      a minute: memory, products, ways between them
  triptych bench hardware smolvlm                       pictures and tokens a second, bandwidth used

`triptych VERB --help` explains each verb. Data goes to stdout, logs to stderr; exit codes: 0 done, 2 a wrong
flag or setting, 3 a checkpoint, 4 a bundle, 5 a part that failed its verification, 6 a device, 7 the demo's download,
8 a measurement that contradicts itself.
"""


class Verbs(click.Group):
    """Tells errors that a person can mend without a traceback, and lists the verbs in the order of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TriptychError as error:
            tell(error)
            sys.exit(error.exit_code)
        except OSError as error:  # a full disk, a folder that may not be written
            if error.errno == errno.EPIPE:  # click's: who read our stdout has left
                raise
            where = "" if error.filename is None else f"{error.filename}: "
            tell(TriptychError(f"{where}{error.strerror or error}"))
            sys.exit(TriptychError.exit_code)


def tell(error: TriptychError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), error.message))
    if error.hint:
        console.print(Text.assemble(("hint:  ", "bold cyan"), error.hint))


@click.group(
    cls=Verbs, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="triptych", prog_name="triptych", message="%(prog)s %(version)s")
def main() -> None:
    """Make multimodal models cheap to serve on the machine you have: compress, compile, prove, serve."""


for module in (analyze, compress, compile, inspect, serve, ask, measure, plan, bench):
    main.add_command(module.verb, module.__name__.rpartition(".")[2])
