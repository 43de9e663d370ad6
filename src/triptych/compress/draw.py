"""Some of many samples, drawn at random: those with media are never left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from triptych.compress.samples import Sample


def draw(samples: Sequence[Sample], num_tokens: int) -> list[Sample]:
    """All, or in their own order as many as have so many tokens together: of those with media one at least, and no
    smaller a share than of the others."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    shown, told = ([place for place in order if samples[place].has_media is has_media] for has_media in (True, False))
    shares = {place: at / len(shown) for at, place in enumerate(shown)}  # of each kind, before it is drawn
    shares |= {place: (at + 1) / len(told) for at, place in enumerate(told)}  # and once it is
    order = sorted(shares, key=shares.__getitem__)
    ends = np.cumsum([samples[place].num_tokens for place in order])
    return [samples[place] for place in sorted(order[: int(np.searchsorted(ends, num_tokens)) + 1])]
