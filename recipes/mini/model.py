"""The whole vision panel in plain torch: the reference that the compiled graphs are held against."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.mini.caption import COLOURS, COUNTS, NAME_TOKENS, Words, constant_sizes
from recipes.mini.connector import SLOTS, Names, Slots
from recipes.mini.tower import HEAD_WIDTH, TRUNK_WIDTH, Weights, head

NAME_SHARPNESS = 12.0
IMAGENET_SHARPNESS = 12.0
YES_SHARPNESS = 8.0
COLOUR_SHARPNESS = 4.0


class Panel(nn.Module):
    """Features of the vision part to visual tokens. `table` is the decoder's embedding matrix."""

    def __init__(self, said: Words, table: Tensor) -> None:
        super().__init__()
        self.said, hidden = said, table.shape[1]
        self.slots, self.names = Slots(), Names(said.num_concepts)
        self.head = nn.Linear(TRUNK_WIDTH, HEAD_WIDTH)
        self.imagenet = nn.Linear(HEAD_WIDTH, len(said.groups))
        self.photo = nn.Linear(HEAD_WIDTH, 1)
        self.constants = nn.Parameter(torch.zeros(len(said.constants), hidden))
        self.sharpness = torch.tensor([NAME_SHARPNESS, IMAGENET_SHARPNESS, YES_SHARPNESS, COLOUR_SHARPNESS])
        self.words = table.float()
        self.belongs = torch.zeros(len(said.groups), len(said.names) - said.num_concepts)
        self.belongs[torch.arange(len(said.groups)), torch.tensor(said.groups)] = 1.0

    def forward(self, features: Tensor) -> Tensor:
        """(N, CELLS, TRUNK_WIDTH + 3) to (N, NUM_TOKENS, hidden)."""
        objects, present, colour, photo, whole = self.decisions(features)
        objects = torch.softmax(NAME_SHARPNESS * objects, -1)
        classes = torch.softmax(self.imagenet(whole), -1) @ self.belongs
        classes = torch.softmax(IMAGENET_SHARPNESS * torch.log(classes + 1e-6), -1)
        said = self.said
        first = torch.zeros(SLOTS)
        first[0] = 1.0
        filled = (1 - photo) * present + photo * first  # (N, SLOTS)
        names = (1 - photo)[..., None, None] * self.spelled(objects, said.names[: said.num_concepts])
        shown = self.spelled(classes[:, None], said.names[said.num_concepts :])
        names = names + (photo * first)[..., None, None] * shown
        return self.typeset(names, filled, self.facts(colour, present, photo))

    def decisions(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Logits of each slot's name and of the colour, how surely a slot holds something and all is a photograph.

        names (N, SLOTS, concepts), present (N, SLOTS), colour (N, NUM_COLOURS), photo (N, 1), and the head's mean
        (N, HEAD_WIDTH).
        """
        seen = self.slots(features)
        cells = head(features[..., :TRUNK_WIDTH], self.head_weights())
        whole = cells.mean(1)
        photo = torch.sigmoid(YES_SHARPNESS * self.photo(whole))
        present = torch.sigmoid(
            YES_SHARPNESS * (seen.present - (seen.present.amax(-1, keepdim=True) - 0.5).clamp(max=0))
        )
        return self.names(seen.attention[:, :SLOTS] @ cells), present, seen.colour, photo, whole

    def head_weights(self) -> Weights:
        """The tower's head convolution under the tower's names."""
        return {"head.weight": self.head.weight[:, :, None, None], "head.bias": self.head.bias}

    def spelled(self, shares: Tensor, names: list[list[int]]) -> Tensor:
        """Shares of names (N, rows, names) as words (N, rows, NAME_TOKENS, hidden + 1); last: how full a place is."""
        ids = torch.tensor(names)
        full = (ids >= 0).float()[..., None]
        rows = torch.cat([self.words[ids.clamp_min(0)] * full, full], -1)
        return torch.einsum("nrc,cth->nrth", shares, rows)

    def facts(self, colour: Tensor, present: Tensor, photo: Tensor) -> list[Tensor]:
        """The words for kind, count and colour, (N, 1, hidden) each."""
        said = self.said
        number = present.sum(-1, keepdim=True).clamp(1, SLOTS)
        counts = (1 - (number - torch.arange(1, len(COUNTS))).abs()).clamp_min(0)
        colours = torch.softmax(COLOUR_SHARPNESS * colour, -1)
        shares = [torch.cat([1 - photo, photo], -1)]
        shares += [torch.cat([(1 - photo) * known, photo], -1) for known in (counts, colours)]
        ids = (said.kinds, said.counts, said.colours)
        assert len(ids[2]) == len(COLOURS)
        return [(share @ self.words[torch.tensor(i)])[:, None] for share, i in zip(shares, ids, strict=True)]

    def typeset(self, names: Tensor, filled: Tensor, facts: list[Tensor]) -> Tensor:
        """Everything at its place."""
        number = len(names)
        count, colour, before, end, pad = (c.expand(number, -1, -1) for c in self.constants.split(constant_sizes()))
        full = filled[..., None, None] * names[..., -1:]
        placed = filled[..., None, None] * names[..., :-1] + (1 - full) * pad[:, None]
        joint = filled[..., None] * self.words[self.said.joiner] + (1 - filled[..., None]) * pad
        slots = torch.cat([joint[:, :, None], placed], 2)  # (N, SLOTS, 1 + NAME_TOKENS, hidden)
        assert slots.shape[2] == 1 + NAME_TOKENS
        return torch.cat([facts[0], count, facts[1], colour, facts[2], before, slots.flatten(1, 2)[:, 1:], end], 1)
