"""Texts for calibration and for the loss, free to use and never the same.

usage: python bench/texts.py FOLDER [NAME …]      writes calibration.npy, talks.npy, docs.npy and held_out.npy there

held out: the Python language reference that CPython carries (`pydoc_data.topics`, PSF licence); people wrote it.
calibration: what the model itself says when it is let run, seeded; it needs no licence and knows nothing of the above.
talks: more of it, half drawn as calibration is and half from all tokens; said in bf16, which takes half the time.
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
TALKS = 128  # of each half of the talks


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


def own_words(model: Any, num_windows: int = SPOKEN, seed: int = 0, least: float = 0.02) -> NDArray[np.int32]:
    """What a `torch_llama.Llama` says from one random token on, (num_windows, WINDOW); `least` as `say` has it."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(3, len(model.weights["embed_tokens"]), (num_windows, 1), generator=draw)
    with torch.no_grad():
        said: NDArray[np.int32] = model.say(first, WINDOW, draw, least).numpy().astype(np.int32)
    return said


def talks(model: Any) -> NDArray[np.int32]:
    """(2 · TALKS, WINDOW)."""
    return np.concatenate([own_words(model, TALKS, 1), own_words(model, TALKS, 2, least=0.0)])


def main() -> None:
    from torch_llama import Llama

    folder, asked = Path(sys.argv[1]), sys.argv[2:]
    made = {
        "held_out": lambda: held_out(folder),
        "docs": lambda: docs(folder),
        "calibration": lambda: own_words(Llama(folder)),
        "talks": lambda: talks(Llama(folder).in_bf16()),
    }
    for name in asked or made:
        np.save(folder / f"{name}.npy", made[name]())


if __name__ == "__main__":
    main()
