"""What the connector is trained on: slots matched to objects in their places, and the colour behind them."""

from __future__ import annotations

from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.mini.connector import SLOTS, Seen

ORDERS = torch.tensor(list(permutations(range(SLOTS))))  # (24, SLOTS): which object each slot takes
Batch = dict[str, Tensor]


def targets(cover: Tensor) -> Tensor:
    """Cover maps (N, SLOTS, G, G) to where to look (N, SLOTS + 1, CELLS), the background last; rows sum to one."""
    objects = cover.flatten(2)
    clear = (1 - objects.sum(1, keepdim=True)).clamp(0, 1) ** 4
    wanted = torch.cat([objects**1.5, clear], 1) + 1e-6
    return wanted / wanted.sum(-1, keepdim=True)


def match(seen: Seen, wanted: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """The cheapest order of objects over slots (N, SLOTS), and its mean cost: place and presence together."""
    place = -torch.einsum("nsc,noc->nso", seen.attention[:, :SLOTS].clamp_min(1e-6).log(), wanted[:, :SLOTS])
    yes, no = F.softplus(-seen.present)[..., None], F.softplus(seen.present)[..., None]
    cost = held[:, None] * (place + 2 * yes) + (1 - held[:, None]) * 2 * no
    totals = torch.stack([cost[:, torch.arange(SLOTS), order].sum(-1) for order in ORDERS], -1)
    best = totals.detach().argmin(-1)
    return ORDERS[best], totals.gather(-1, best[:, None])[:, 0].mean()


def loss(seen: Seen, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The sum of the losses of a batch, and its parts for the log."""
    wanted = targets(batch["cover"])
    _, slots = match(seen, wanted, (batch["ids"] >= 0).float())
    background = -(wanted[:, SLOTS] * seen.attention[:, SLOTS].clamp_min(1e-6).log()).sum(-1).mean()
    colour = F.cross_entropy(seen.colour, batch["colour"])
    parts = {"slots": slots.item(), "background": background.item(), "colour": colour.item()}
    return slots + 0.5 * background + colour, parts


@torch.no_grad()
def score(seen: Seen, batch: Batch) -> dict[str, Tensor]:
    """Right or wrong, sample by sample: the background's colour, and how many objects there are."""
    held = (batch["ids"] >= 0).sum(-1)
    return {
        "colour": (seen.colour.argmax(-1) == batch["colour"]).float(),
        "count": ((seen.present > 0).sum(-1) == held).float(),
    }
