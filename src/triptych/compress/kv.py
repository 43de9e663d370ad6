"""What forgetting needs to know of a model: how its queries lie, and how densely each layer looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.backends.torch_graph import Hooks
from triptych.compress.attention import density, looking
from triptych.compress.model import Model
from triptych.compress.samples import Sample
from triptych.core.policy import KVPolicy
from triptych.core.queries import FILE, Queries
from triptych.core.rope import rope_frequencies, turn
from triptych.core.spec import DecoderSpec
from triptych.errors import ConfigError

SINKS = 4  # first tokens whose queries are unlike all others
FLOORS = {"image": 0.1, "audio": 0.1, "video": 0.1}  # visual sinks are lost without (EffiVLM-Bench)


class KVWatch:
    """Looks at a decoder's attention while samples run through it, one after another.

    Of each layer and head: the mean and covariance of queries turned back to position 0 (arXiv:2510.00636), over text
    that follows media, or all text where there is none: such are the queries still to come. Of each layer: the share
    of causal entries of at least 1 % of their row's greatest (VL-Cache, arXiv:2410.23317).
    """

    def __init__(self, spec: DecoderSpec) -> None:
        shape = (spec.num_layers, spec.num_heads, spec.head_dim)
        self._frequencies = rope_frequencies(spec.rope, spec.head_dim)
        self._count = 0
        self._sum = np.zeros(shape)
        self._products = np.zeros((*shape, spec.head_dim))
        self._density = np.zeros(spec.num_layers)
        self._rows: Tensor = torch.empty(0)
        self._layer = 0

    def begin(self, sample: Sample) -> Hooks:
        """What looks at the next sample; its rows weigh as many as they are."""
        modality = torch.from_numpy(sample.modality.astype(np.int64))
        after = looking(modality)
        self._rows = after if bool(after.any()) else modality == 0
        self._rows[:SINKS] = False
        self._count += int(self._rows.sum())
        self._layer = 0
        return Hooks(on_attention=self._look)

    def _look(self, name: str, query: Any, key: Any, value: Any) -> None:
        """Queries and keys (1, heads, T, head_dim), turned by position."""
        with torch.no_grad():
            logits = query[0] @ key[0].mT * query.shape[-1] ** -0.5
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            attention = logits.masked_fill_(~mask, -torch.inf).softmax(-1)
            num_rows = int(self._rows.sum())
            if num_rows:
                self._density[self._layer] += num_rows * density(attention, self._rows)
                own = turned_back(query[0].numpy(), self._frequencies)[:, self._rows.numpy()].astype(np.float64)
                self._sum[self._layer] += own.sum(axis=1)
                self._products[self._layer] += own.transpose(0, 2, 1) @ own
        self._layer += 1

    def queries(self) -> Queries:
        mean = self._sum / self._count
        covariance = self._products / self._count - mean[..., :, None] * mean[..., None, :]
        return Queries(mean=mean.astype(np.float32), covariance=covariance.astype(np.float32))

    def layer_density(self) -> tuple[float, ...]:
        return tuple((self._density / self._count).tolist())


def turned_back(query: Any, frequencies: Any) -> Any:
    """Queries of positions 0, 1, 2 … as they were before RoPE: (heads, T, head_dim)."""
    angles = np.arange(query.shape[1], dtype=np.float32)[:, None] * frequencies
    return turn(query, np.cos(angles), -np.sin(angles))


def measure_kv(
    model: Model, samples: Sequence[Sample], spec: DecoderSpec, progress: Callable[[str, float], None]
) -> tuple[KVPolicy, Queries]:
    """The policy that these samples speak for, and the queries that `core/queries.FILE` beside it holds.

    The method is snapkv: it forgets when the question has been read, and then nothing measured beforehand does as well
    (docs/decisions/0010); "expected" may be chosen in its place. Raises ConfigError on samples without text.
    """
    watch = KVWatch(spec)
    if not any((sample.modality[SINKS:] == 0).any() for sample in samples):
        raise ConfigError("no sample has text to measure queries on", hint="give conversations with answers")
    for done, sample in enumerate(samples):
        progress("queries", done / len(samples))
        with torch.no_grad():
            last = np.array([sample.num_tokens - 1])
            model.decode(torch.from_numpy(sample.embeddings), last, {"decoder": watch.begin(sample)})
    progress("queries", 1.0)
    policy = KVPolicy(method="snapkv", statistics=FILE, layer_density=watch.layer_density(), floors=FLOORS)
    return policy, watch.queries()
