"""How steps are filled: prompts beside answers, in few sizes; one rule for the engine and for plans."""

from __future__ import annotations

STRETCH = 0.4  # a step with prompts in it may take so much longer than one of answers alone; the encoder adds to it
LEAST_TOKENS = 8  # of prompts in a step, however slow: they must get on
FINE, COARSE = 4, 16  # of how many tokens a step's number is a multiple, up to COARSE_FROM and beyond
COARSE_FROM = 32  # the decoder fills a step of more rows up to a multiple of COARSE (backends/ov)
ENCODER_SHARE = 1 / 7  # of the machine that a tower which gives way takes while steps are computed (decisions/0016)


def size_of(tokens: int, *, up: bool = True) -> int:
    """The next of the numbers of tokens that steps are measured and filled by."""
    step = 1 if tokens <= FINE else FINE if tokens <= COARSE_FROM else COARSE
    return (tokens + step - 1 if up else tokens) // step * step
