"""Texts for calibration and for the loss, free to use and never the same.

held out: the Python language reference that CPython carries (`pydoc_data.topics`, PSF licence); people wrote it.
calibration: what the model itself says when it is let run, seeded; it needs no licence and knows nothing of the above.
"""

from __future__ import annotations

import pydoc_data.topics
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
WINDOW = 512  # tokens
BOS = 1


def held_out(folder: Path, num_windows: int = 16) -> NDArray[np.int32]:
    """Windows of held-out tokens, (num_windows, WINDOW), spread evenly over the text."""
    from tokenizers import Tokenizer

    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    text = re.sub(r"[*=~^+|-]{4,}", "", text)  # underlines and frames of tables
    ids = np.array(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids, np.int32)
    starts = np.linspace(0, len(ids) - WINDOW, num_windows).astype(int)
    return np.stack([ids[start : start + WINDOW] for start in starts])


def own_words(model: Any, num_windows: int = 64, seed: int = 0) -> NDArray[np.int32]:
    """What a transformers model says from one random token on, (num_windows, WINDOW), sampled at temperature 1."""
    import torch

    torch.manual_seed(seed)
    first = torch.randint(3, model.config.vocab_size, (num_windows, 1))
    started = torch.cat([torch.full_like(first, BOS), first], 1)
    said = model.generate(
        started, attention_mask=torch.ones_like(started), do_sample=True, top_k=0, top_p=0.98, temperature=1.0,
        min_new_tokens=WINDOW - 2, max_new_tokens=WINDOW - 2, suppress_tokens=[0, 2], pad_token_id=2,
    )  # fmt: skip
    return said.numpy().astype(np.int32)


def main() -> None:
    """Write calibration.npy and held_out.npy beside the weights."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    np.save(folder / "held_out.npy", held_out(folder))
    np.save(folder / "calibration.npy", own_words(model))


if __name__ == "__main__":
    main()
