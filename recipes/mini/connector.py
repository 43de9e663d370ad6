"""The connector in torch: where slots look, whether they hold an object, its name, and the colour behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.mini.tower import HEAD_WIDTH, TRUNK_WIDTH, Weights, head

WIDTH = 128
HEADS = 4
LAYERS = 2
SLOTS = 4  # objects; one more query looks at the background
CELLS = 49
NUM_COLOURS = 11
COLOUR_WIDTH = 64
NAME_WIDTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Where the slots of a batch look and what they find. Shapes without the batch."""

    attention: Tensor  # (SLOTS + 1, CELLS): where each slot looks; the last is the background
    present: Tensor  # (SLOTS,): logit that the slot holds an object
    colour: Tensor  # (NUM_COLOURS,): logits of the background


class Attention(nn.Module):
    """Multi-head attention: plain matmul and softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x attends to memory."""
        q, k, v = (self.split(layer(y)) for layer, y in ((self.query, x), (self.key, memory), (self.value, memory)))
        weights = torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @staticmethod
    def split(x: Tensor) -> Tensor:
        """(N, T, WIDTH) to (N, HEADS, T, WIDTH / HEADS)."""
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention and MLP; with `cross`, a second attention that looks at the cells."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.norm1, self.attend = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.look = (nn.LayerNorm(WIDTH), Attention()) if cross else (None, None)
        self.norm3, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cells: Tensor | None = None) -> Tensor:
        """One layer."""
        normed = self.norm1(x)
        x = x + self.attend(normed, normed)
        if self.look is not None and self.norm2 is not None and cells is not None:
            x = x + self.look(self.norm2(x), cells)
        return x + self.down(F.gelu(self.up(self.norm3(x))))  # type: ignore[no-any-return]


class Slots(nn.Module):
    """From cells to slots: where objects are, how many, and the colour behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(TRUNK_WIDTH), nn.Linear(TRUNK_WIDTH + 3, WIDTH)
        self.position = nn.Parameter(torch.randn(CELLS, WIDTH) * 0.02)
        self.encoder = nn.ModuleList(Block(cross=False) for _ in range(LAYERS))
        self.cells_norm = nn.LayerNorm(WIDTH)
        self.queries = nn.Parameter(torch.randn(SLOTS + 1, WIDTH) * 0.5)
        self.decoder = nn.ModuleList(Block(cross=True) for _ in range(LAYERS))
        self.slots_norm = nn.LayerNorm(WIDTH)
        self.point, self.place = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.present = nn.Linear(WIDTH, 1)
        self.colour_up, self.colour_down = nn.Linear(3, COLOUR_WIDTH), nn.Linear(COLOUR_WIDTH, NUM_COLOURS)

    def forward(self, features: Tensor) -> Seen:
        """features: (N, CELLS, TRUNK_WIDTH + 3), the vision part's."""
        trunk, colours = features.split([TRUNK_WIDTH, 3], -1)
        cells = self.enter(torch.cat([self.norm(trunk), colours], -1)) + self.position
        for block in self.encoder:
            cells = block(cells)
        cells = self.cells_norm(cells)
        slots = self.queries.expand(len(features), -1, -1)
        for block in self.decoder:
            slots = block(slots, cells)
        slots = self.slots_norm(slots)
        logits = self.point(slots) @ self.place(cells).transpose(-1, -2) * WIDTH**-0.5
        attention = torch.softmax(logits.float(), -1)
        behind = attention[:, SLOTS:] @ colours.float()
        return Seen(
            attention=attention,
            present=self.present(slots[:, :SLOTS])[..., 0].float(),
            colour=self.colour_down(F.gelu(self.colour_up(behind[:, 0]))).float(),
        )


class Names(nn.Module):
    """What a pooled bit of the picture shows: a linear probe of the tower's head features and a small MLP beside it."""

    def __init__(self, num_concepts: int, drop: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEAD_WIDTH)
        self.probe = nn.Linear(HEAD_WIDTH, num_concepts)
        self.up, self.down = nn.Linear(HEAD_WIDTH, NAME_WIDTH), nn.Linear(NAME_WIDTH, num_concepts)
        self.drop = nn.Dropout(drop)

    def forward(self, pooled: Tensor) -> Tensor:
        """(…, HEAD_WIDTH) to concept logits."""
        x = self.drop(self.norm(pooled))
        return self.probe(x) + self.down(self.drop(F.gelu(self.up(x))))  # type: ignore[no-any-return]


def pool(features: Tensor, attention: Tensor, weights: Weights) -> Tensor:
    """Head features (between 0 and 6) averaged as each row of attention says: (N, rows, HEAD_WIDTH)."""
    return attention.to(features.dtype) @ head(features[..., :TRUNK_WIDTH], weights)
