"""Compile a form in a process of its own first: what crashes or fills memory costs its request alone.

llguidance follows references by recursion and merges schemas without a limit: a few kilobytes can end the process
that reads them. Run as a program, this file reads a grammar on stdin, compiles it over bytes, and tells it in Lark, or
what is wrong with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
import threading
from functools import lru_cache

if __name__ == "__main__":
    os.nice(10)  # now: to import the next takes longer than to compile a form

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

# What one mask may cost is some ten milliseconds: the whole step waits for it.
LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

ONE = threading.Lock()  # at a time
CPU_S = 1
MEMORY_BYTES = 256 << 20  # beyond its start; of addresses, of which each thread takes some for nothing
STACK_BYTES = 1 << 20  # less than any thread of the server has
DEADLINE_S = 30.0  # by the clock
TOKEN = re.compile(r"<\[[0-9]+\]>")  # by its id, of a vocabulary that is not this one
GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # llama.cpp's grammars


@lru_cache(maxsize=256)
def rehearse(grammar: str) -> str:
    """In Lark. Blocks. Raises ValueError with llguidance's reason, or for what does not end within its bounds."""
    command = [sys.executable, "-P", __file__]
    try:
        with ONE:
            done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise ValueError("its compilation does not end") from None
    if done.returncode:
        raise ValueError(done.stdout.decode() or "its compilation takes more time or memory than a form may have")
    return done.stdout.decode()


def _compile(grammar: str) -> None:
    try:
        grammar = gbnf_to_lark(grammar) if GBNF.search(grammar) else grammar
    except Exception as error:  # it raises what its parser stumbles on
        _tell(f"it is no GBNF: {error}", 1)
    matcher = LLMatcher(LLTokenizer("byte"), TOKEN.sub("<[0]>", grammar), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    _tell(matcher.get_error() if matcher.is_error() else grammar, matcher.is_error())


def _tell(words: str, code: int) -> None:
    sys.stdout.buffer.write(words.encode())
    sys.stdout.flush()
    os._exit(code)


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:  # Linux's
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(STACK_BYTES)
    compiling = threading.Thread(target=_compile, args=(sys.stdin.buffer.read().decode(),))
    compiling.start()
    compiling.join()
    sys.exit(1)  # it raised


if __name__ == "__main__":
    _main()
