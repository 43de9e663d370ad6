"""What the connector is trained on: slots matched to objects, helper heads for names, places, colour."""

from __future__ import annotations

from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.mini.connector import SLOTS, Connector, Seen

ORDERS = torch.tensor(list(permutations(range(SLOTS))))  # (24, SLOTS): which object each slot takes
SMOOTHING = 0.1
Batch = dict[str, Tensor]


def targets(cover: Tensor) -> Tensor:
    """Cover maps (N, SLOTS, G, G) to where to look (N, SLOTS + 1, CELLS), the background last; rows sum to one."""
    objects = cover.flatten(2)
    clear = (1 - objects.sum(1, keepdim=True)).clamp(0, 1) ** 4
    wanted = torch.cat([objects**1.5, clear], 1) + 1e-6
    return wanted / wanted.sum(-1, keepdim=True)


def match(seen: Seen, wanted: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The cheapest order of objects over slots (N, SLOTS), and its mean cost: place, presence and name together."""
    held = (ids >= 0).float()
    log_attention = seen.attention[:, :SLOTS].clamp_min(1e-6).log()
    place = -torch.einsum("nsc,noc->nso", log_attention, wanted[:, :SLOTS])
    log_names = F.log_softmax(seen.names, -1)
    index = ids.clamp_min(0)[:, None].expand(-1, SLOTS, -1)
    name = -(1 - SMOOTHING) * log_names.gather(-1, index) - SMOOTHING * log_names.mean(-1, keepdim=True)
    yes, no = F.softplus(-seen.present)[..., None], F.softplus(seen.present)[..., None]
    cost = held[:, None] * (place + name + 2 * yes) + (1 - held[:, None]) * 2 * no
    totals = torch.stack([cost[:, torch.arange(SLOTS), order].sum(-1) for order in ORDERS], -1)
    with torch.no_grad():
        best = totals.argmin(-1)
    return ORDERS[best], totals.gather(-1, best[:, None])[:, 0].mean()


def loss(model: Connector, features: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The sum of all losses of a batch, and its parts for the log."""
    seen = model(features)
    wanted = targets(batch["cover"])
    _, slots = match(seen, wanted, batch["ids"])
    background = -(wanted[:, SLOTS] * seen.attention[:, SLOTS].clamp_min(1e-6).log()).sum(-1).mean()
    colour = F.cross_entropy(seen.colour, batch["colour"])
    taught = model.classify((wanted[:, :SLOTS].to(features.dtype) @ features)[..., :1280]).float()
    ids = batch["ids"].flatten()
    name = F.cross_entropy(taught.flatten(0, 1)[ids >= 0], ids[ids >= 0], label_smoothing=SMOOTHING)
    parts = {"slots": slots.item(), "background": background.item(), "colour": colour.item(), "name": name.item()}
    return slots + 0.5 * background + colour + name, parts


@torch.no_grad()
def score(seen: Seen, batch: Batch) -> dict[str, Tensor]:
    """Right or wrong, sample by sample: names of single objects, all names as a set, colour, count."""
    ids = batch["ids"]
    present = seen.present > 0
    named = seen.names.argmax(-1)
    single = (ids >= 0).sum(-1) == 1
    best = named.gather(1, seen.present.argmax(-1, keepdim=True))[:, 0]
    found = ((named[:, None] == ids[..., None]) & present[:, None]).any(-1)
    return {
        "single": (best == ids[:, 0])[single].float(),
        "recall": found[ids >= 0].float(),
        "colour": (seen.colour.argmax(-1) == batch["colour"]).float(),
        "count": (present.sum(-1) == (ids >= 0).sum(-1)).float(),
    }
