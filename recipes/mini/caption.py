"""The caption that visual tokens spell, every word at its fixed place.

    kind | Count: | N | . Background: | C | . Objects: | name , name , name , name | .\\n

Each name has NAME_TOKENS places and a joiner stands between two names; what is not there is a pad. Constant rows and
the pad are learned (they start as the words above); kind, count, colour, joiner and names are rows of the decoder's
embedding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.mini import assets
from recipes.mini.prepare import concepts
from recipes.mini.questions import NUMBERS, UNKNOWN, Facts
from recipes.mini.scenes import COLOUR_NAMES

NUM_TOKENS = 32
NAME_TOKENS = 4
KINDS = ["drawing", "photograph"]
COUNTS = [*NUMBERS[1:], UNKNOWN]
COLOURS = [*COLOUR_NAMES, UNKNOWN]
SLOTS = 4
BEFORE_COUNT, BEFORE_COLOUR, BEFORE_NAMES, END, PAD, JOINER = " Count:", ". Background:", ". Objects:", ".\n", " ", ","
# Breeds and rare terms of architecture are named by their kind.
IMAGENET_KINDS = {"dog": range(151, 269), "cat": range(281, 286), "building": (442, 449)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Token ids of every word the caption may say; names are padded with -1."""

    kinds: list[int]
    counts: list[int]
    colours: list[int]
    joiner: int
    constants: list[int]  # what the learned rows start as: before count, before colour, before names, end, pad
    names: list[list[int]]  # concepts, then names of ImageNet classes, each once
    groups: list[int]  # which of the latter each of the 1000 classes bears
    spelled: list[str]  # the same names as text
    num_concepts: int


@cache
def tokenizer() -> Tokenizer:
    """SmolLM2's own."""
    return Tokenizer.from_file(str(assets.WORK / "smollm2-hf" / "tokenizer.json"))


def token_ids(text: str) -> list[int]:
    """Plain text to ids, nothing added."""
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def imagenet_names() -> list[str]:
    """A short name for each ImageNet class: its first lemma, cut from the left to whole words that fit NAME_TOKENS."""
    folder = assets.PYPI["imagenet"].folder / "timm" / "data" / "_info"
    lemmas = dict(line.split("\t", 1) for line in (folder / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    names = []
    for i, synset in enumerate((folder / "imagenet_synsets.txt").read_text().split()):
        words = lemmas[synset].split(",")[0].replace("_", " ").strip().split()
        while len(token_ids(" " + " ".join(words))) > NAME_TOKENS and len(words) > 1:
            words = words[1:]
        kind = next((kind for kind, span in IMAGENET_KINDS.items() if i in span), None)
        names.append(kind or " ".join(words))
    return names


def words() -> Words:
    """Every word, looked up."""
    of_class = imagenet_names()
    once = list(dict.fromkeys(of_class))
    spelled = [row["name"] for row in concepts()] + once
    names = [token_ids(" " + name)[:NAME_TOKENS] for name in spelled]
    constants = [i for text in (BEFORE_COUNT, BEFORE_COLOUR, BEFORE_NAMES, END, PAD) for i in token_ids(text)]
    return Words(
        kinds=[token_ids(" " + kind)[0] for kind in KINDS],
        counts=[token_ids(" " + count)[0] for count in COUNTS],
        colours=[token_ids(" " + colour)[0] for colour in COLOURS],
        joiner=token_ids(JOINER)[0],
        constants=constants,
        names=[ids + [-1] * (NAME_TOKENS - len(ids)) for ids in names],
        groups=[once.index(name) for name in of_class],
        spelled=spelled,
        num_concepts=len(concepts()),
    )


def constant_sizes() -> list[int]:
    """How many learned rows stand before the count, before the colour, before the names, at the end, and as padding."""
    return [len(token_ids(text)) for text in (BEFORE_COUNT, BEFORE_COLOUR, BEFORE_NAMES, END, PAD)]


def spell(facts: Facts, places: list[int], said: Words, table: Tensor, constants: Tensor) -> Tensor:
    """The caption of known facts, (NUM_TOKENS, hidden), its names in the slots `places`."""
    count, colour, names, end, pad = constants.split(constant_sizes())
    rows = [table[said.kinds[int(facts.photo)]][None], count, table[said.counts[COUNTS.index(facts.count)]][None]]
    rows += [colour, table[said.colours[COLOURS.index(facts.colour)]][None], names]
    slots = [pad.expand(NAME_TOKENS + 1, -1).clone() for _ in range(SLOTS)]
    for name, place in zip(facts.names, places, strict=False):
        for i, token in enumerate([said.joiner, *said.names[said.spelled.index(name)]]):
            if token >= 0:
                slots[place][i] = table[token]
    return torch.cat([*rows, torch.cat(slots)[1:], end])


def main() -> None:
    """Print the words."""
    said = words()
    print(json.dumps({"constants": constant_sizes(), "imagenet": said.spelled[said.num_concepts :][:1000:25]}))
    print(max(map(len, said.names)), [s for s, n in zip(said.spelled, said.names, strict=True) if -1 not in n][:60])


if __name__ == "__main__":
    main()
