"""Texts for calibration and for the loss, free to use and never the same.

usage: python bench/texts.py FOLDER      writes calibration.npy, docs.npy and held_out.npy beside the weights

held out: the Python language reference that CPython carries (`pydoc_data.topics`, PSF licence); people wrote it.
calibration: what the model itself says when it is let run, seeded; it needs no licence and knows nothing of the above.
docs: numpy's docstrings (BSD licence), people's again: of the held-out text's kind, though not of its words.
"""

from __future__ import annotations

import inspect
import pydoc_data.topics
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 512  # tokens
SPOKEN = 24  # windows of calibration


def held_out(folder: Path, num_windows: int = 16) -> NDArray[np.int32]:
    """Windows of held-out tokens, (num_windows, WINDOW), spread evenly over the text."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    text = re.sub(r"[*=~^+|-]{4,}", "", text)  # underlines and frames of tables
    return _windows(folder, text, num_windows)


def docs(folder: Path, num_windows: int = SPOKEN) -> NDArray[np.int32]:
    """Windows of numpy's docstrings, examples left out."""
    texts = [inspect.getdoc(getattr(np, name)) or "" for name in sorted(np.__all__)]
    lines = [line.strip() for text in texts for line in text.split("Examples\n---")[0].splitlines()]
    return _windows(folder, "\n".join(line for line in lines if not set(line) <= set("-=")), num_windows)


def _windows(folder: Path, text: str, num_windows: int) -> NDArray[np.int32]:
    from tokenizers import Tokenizer

    ids = np.array(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids, np.int32)
    starts = np.linspace(0, len(ids) - WINDOW, num_windows).astype(int)
    return np.stack([ids[start : start + WINDOW] for start in starts])


def own_words(model: Any, num_windows: int = SPOKEN, seed: int = 0) -> NDArray[np.int32]:
    """What a `torch_llama.Llama` says from one random token on, (num_windows, WINDOW)."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(3, len(model.weights["embed_tokens"]), (num_windows, 1), generator=draw)
    with torch.no_grad():
        said: NDArray[np.int32] = model.say(first, WINDOW, draw).numpy().astype(np.int32)
    return said


def main() -> None:
    from torch_llama import Llama

    folder = Path(sys.argv[1])
    np.save(folder / "held_out.npy", held_out(folder))
    np.save(folder / "docs.npy", docs(folder))
    np.save(folder / "calibration.npy", own_words(Llama(folder)))


if __name__ == "__main__":
    main()
