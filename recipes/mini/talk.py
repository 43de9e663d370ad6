"""Long conversations to tune the caption's rows on: other pictures and other talk, then one picture and its questions.

What stands before the picture is run without gradients. Small talk is what bench/compression keeps for calibration;
its questions hold other turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench.compression.filler import HELD_OUT, TURNS
from torch import Tensor

from recipes.mini import decoder, tune
from recipes.mini.gallery import Gallery, Shown
from recipes.mini.questions import ASKED, answer

END, USER, ASSISTANT = "<|im_end|>\n", "<|im_start|>user\n", "<|im_start|>assistant\n"
MOST_PICTURES = 5  # before the one that is asked about


def turn(question: str, reply: str) -> str:
    """The rest of a user's message, the answer, and the beginning of the next message."""
    return question + END + ASSISTANT + reply + END + USER


def small_talk(rng: np.random.Generator) -> str:
    """One turn without pictures."""
    return turn(*TURNS[int(rng.integers(HELD_OUT, len(TURNS)))])


def drawing(gallery: Gallery, rng: np.random.Generator) -> Shown:
    """A caption that is no photograph's."""
    while (shown := gallery.shown(rng)).facts.photo:
        pass
    return shown


def before(model: Any, gallery: Gallery, rng: np.random.Generator) -> Tensor:
    """Other pictures, each with a question and its true answer, small talk between: (tokens, hidden)."""
    table = model.get_input_embeddings().weight
    parts = [decoder.embed(model, decoder.BEFORE_PICTURE)]
    for _ in range(int(rng.integers(1, MOST_PICTURES + 1))):
        shown, kind = drawing(gallery, rng), str(rng.choice(["colour", "count"]))
        said = turn(str(rng.choice(ASKED[kind])), answer(kind, shown.facts))
        parts += [shown.rows.detach().to(table.dtype)]
        parts += [decoder.embed(model, said + (small_talk(rng) if rng.random() < 0.6 else ""))]
    return torch.cat(parts)


def questions(shown: Shown, rng: np.random.Generator) -> list[tuple[str, str]]:
    """About the last picture, at once and after more talk, with answers."""
    facts = shown.facts
    kinds = ["colour", "count", *(["name", "name"] if len(facts.names) == 1 else ["list"])]
    made = [(str(rng.choice(ASKED[kind])), answer(kind, facts)) for kind in kinds]
    later = turn("Look at this picture.", "I see the picture.") + small_talk(rng)
    kinds = ["colour", "count"] if rng.random() < 0.5 else ["colour"]
    return made + [(later + str(rng.choice(ASKED[kind])), answer(kind, facts)) for kind in kinds]


def loss(model: Any, gallery: Gallery, rng: np.random.Generator) -> Tensor:
    """Mean cross-entropy of the answers about the last picture of one conversation, all its rows there."""
    from transformers import DynamicCache

    prefix, shown = before(model, gallery, rng), drawing(gallery, rng)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(inputs_embeds=prefix[None], cache=cache, use_cache=True)
    tree = tune.Tree(model, shown.rows, questions(shown, rng))
    allowed = torch.cat([torch.ones(len(tree.rows), len(prefix), dtype=torch.bool), tree.mask()], -1)
    bias = torch.zeros(allowed.shape, dtype=prefix.dtype).masked_fill(~allowed, -1e9)[None, None]
    place = (tree.position + len(prefix))[None]
    out = model.model(
        inputs_embeds=tree.rows[None], attention_mask=bias, position_ids=place, cache=cache, use_cache=True
    )
    asked = tree.targets != -100
    return F.cross_entropy(model.lm_head(out.last_hidden_state[0][asked]).float(), tree.targets[asked])
