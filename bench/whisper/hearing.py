"""What Whisper hears in the clips, and how many words of it are wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor, WhisperForConditionalGeneration

from whisper.clips import RATE, Clip

PROMPT = (50258, 50259, 50359, 50363)  # start of transcript, English, transcribe, no timestamps
END = 50257
MAX_TOKENS = 120
NUMERALS = {"1": "one", "2": "two", "3": "three"}


def spectra(clips: Sequence[Clip]) -> Tensor:
    """Log-mel, (pieces of all clips, 80, 3000): what the encoder takes."""
    pieces = [piece for clip in clips for piece in clip.pieces]
    extract = WhisperFeatureExtractor()
    return extract(pieces, sampling_rate=RATE, return_tensors="pt").input_features  # type: ignore[no-any-return]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def transcribe(model: WhisperForConditionalGeneration, hidden: Tensor) -> Tensor:
    """Greedy tokens of each row of the encoder's output, all rows at once: the prompt, what is heard, then END."""
    tokens = torch.tensor([PROMPT]).repeat(len(hidden), 1)
    heard, cache = [], None
    for _ in range(MAX_TOKENS):
        step = model(encoder_outputs=(hidden,), decoder_input_ids=tokens, cache=cache, use_cache=True)
        cache = step.cache
        tokens = step.logits[:, -1:].argmax(-1)
        heard.append(tokens)
        if bool((torch.cat(heard, 1) == END).any(1).all()):
            break
    found = torch.cat(heard, 1)
    found[(found == END).cumsum(1) > 0] = END
    return torch.cat([torch.tensor([PROMPT]).repeat(len(hidden), 1), found], 1)


def spelt(tokens: Tensor, words: PreTrainedTokenizerFast) -> list[str]:
    return [words.decode([token for token in row if token < END]) for row in tokens.tolist()]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def log_probabilities(model: WhisperForConditionalGeneration, hidden: Tensor, heard: Tensor) -> Tensor:
    """Of every token after each of `heard` (rows, tokens), which stand in END where a row is over."""
    logits = model(encoder_outputs=(hidden,), decoder_input_ids=heard, use_cache=False).logits
    return torch.log_softmax(logits.float(), -1)[heard != END]


@dataclass(frozen=True, slots=True, kw_only=True)
class WordErrors:
    """Of each line of the references: its words, and how many edits lead from them to what was heard."""

    words: tuple[int, ...]
    edits: tuple[int, ...]

    @property
    def rate(self) -> float:
        return sum(self.edits) / sum(self.words)

    def interval(self) -> tuple[float, float]:
        """95 % of the rates that lines drawn with replacement give."""
        return _interval(self.words, self.edits)

    def more_than(self, other: WordErrors) -> tuple[float, float]:
        """95 % interval of the difference of rates on the same lines: 0 within it means none is shown."""
        return _interval(self.words, [own - its for own, its in zip(self.edits, other.edits, strict=True)])


def _interval(words: Sequence[int], edits: Sequence[int]) -> tuple[float, float]:
    lines = np.random.default_rng(0).integers(0, len(words), (10_000, len(words)))
    low, high = np.quantile(np.array(edits)[lines].sum(1) / np.array(words)[lines].sum(1), [0.025, 0.975])
    return float(low), float(high)


def word_errors(clips: Sequence[Clip], heard: Sequence[str]) -> WordErrors:
    """`heard` has the words of one piece after the other, clip by clip."""
    rest, words, edits = list(heard), [], []
    for clip in clips:
        text = " ".join(rest.pop(0) for _ in clip.pieces)
        lines = [normal(line) for line in clip.lines]
        found = edits_by_word([word for line in lines for word in line], normal(text))
        for line in lines:
            words.append(len(line))
            edits.append(sum(found[: len(line)]))
            found = found[len(line) :]
    return WordErrors(words=tuple(words), edits=tuple(edits))


def normal(text: str) -> list[str]:
    """Lower case, no marks but the apostrophe within a word; hyphens part words."""
    text = text.lower().replace("’", "'").replace("-", " ")
    words = re.sub(r"[^a-z0-9' ]", " ", text).split()
    return [NUMERALS.get(word.strip("'"), word.strip("'")) for word in words if word.strip("'")]


def edits_by_word(reference: Sequence[str], heard: Sequence[str]) -> list[int]:
    """Least edits (Levenshtein), each laid to the word it changed; a word too many to the one before it."""
    costs = np.zeros((len(reference) + 1, len(heard) + 1), int)
    costs[:, 0], costs[0] = np.arange(len(reference) + 1), np.arange(len(heard) + 1)
    for i, word in enumerate(reference, 1):
        for j, other in enumerate(heard, 1):
            costs[i, j] = min(costs[i - 1, j] + 1, costs[i, j - 1] + 1, costs[i - 1, j - 1] + (word != other))
    found, i, j = [0] * len(reference), len(reference), len(heard)
    while i or j:
        if i and j and costs[i, j] == costs[i - 1, j - 1] + (reference[i - 1] != heard[j - 1]):
            found[i - 1] += int(reference[i - 1] != heard[j - 1])
            i, j = i - 1, j - 1
        elif i and costs[i, j] == costs[i - 1, j] + 1:
            found[i - 1] += 1
            i -= 1
        else:
            found[max(i - 1, 0)] += 1
            j -= 1
    return found
