"""What calibration sees of the input of each weight: its gram, its mean and its range, by modality."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from triptych.compress.awq import Channels
from triptych.compress.model import Model, batches, fake_quantized
from triptych.compress.samples import Sample
from triptych.core.spec import Modality

FEW_VALUES = 4096  # of each run's input kept to choose a static step by
CUTS = tuple(1 - 0.05 * place for place in range(14))  # of the whole range


@dataclass(slots=True, kw_only=True)
class Seen:
    """Of one input. channels: empty for a depthwise kernel, whose channels meet no sum. most: max|x| a channel.
    rows: a few tokens of each run, the loudest among them. total: Σ x of all `num_tokens`, (width,).
    """

    channels: dict[Modality, Channels] = field(default_factory=dict)
    most: dict[Modality, Tensor] = field(default_factory=dict)
    rows: list[Tensor] = field(default_factory=list)
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    num_tokens: int = 0

    @property
    def mean(self) -> Tensor:
        return self.total / self.num_tokens

    @property
    def range(self) -> Tensor:
        """max|x| of each channel, whatever its modality."""
        return torch.stack(list(self.most.values())).amax(0)

    def step(self) -> float:
        """The static step of 8 bits that errs least on `rows`: the range may be cut, but not below a third."""
        rows, most = torch.cat(self.rows), float(self.range.max())
        if most == 0:
            return 0.0
        errors = {cut: float((fake_quantized(rows, most * cut / 127) - rows).square().sum()) for cut in CUTS}
        return most * min(errors, key=errors.__getitem__) / 127

    def add(self, modality: Modality, x: Tensor, *, has_gram: bool) -> None:
        """Tokens (n, width)."""
        self.total = self.total + x.sum(0)
        self.num_tokens += len(x)
        size = x.abs()
        most = size.amax(0)
        few = x[:: max(1, x.numel() // FEW_VALUES)]
        self.rows += [few.clone(), x[size.amax(1).argmax()][None].clone()]
        self.most[modality] = torch.maximum(self.most[modality], most) if modality in self.most else most
        if has_gram:
            new, old = Channels.of(x), self.channels.get(modality)
            if old is not None:
                old.gram.add_(new.gram)
                new = Channels(gram=old.gram, total=old.total + new.total, num_tokens=old.num_tokens + new.num_tokens)
            self.channels[modality] = new


def calibrate(model: Model, samples: Sequence[Sample], part: str, names: Collection[str]) -> dict[str, Seen]:
    """Run the samples as far as the last of `names`, all weights of one part of the graph.

    Weights that share an input, such as queries, keys and values, share what was seen of it.
    """
    watch = _Watch(names, {name: model.parts[part].weights[name] for name in names})
    hooks = model.watched(part, watch.look)
    with torch.no_grad():
        for sample in samples:
            if part == "decoder":
                embeddings = model.embed(sample)
                with watch.over(sample.modality):
                    model.decode(embeddings, np.arange(sample.num_tokens), hooks)
            for tiles in batches(sample) if part != "decoder" else ():
                with watch.over(None):
                    model.see(tiles, hooks)
    return watch.found


def gram_bytes(weights: Mapping[str, Tensor]) -> int:
    """Of memory for what is seen of these weights' inputs, were none shared, two modalities each."""
    return sum(8 * (weight[0].numel() ** 2) for weight in weights.values())


class _Done(Exception):
    """All has been seen: the rest of the part need not run."""


class _Watch:
    """Looks at the inputs of `names`, sample by sample."""

    def __init__(self, names: Collection[str], weights: Mapping[str, Tensor]) -> None:
        self.found: dict[str, Seen] = {}
        self._names = frozenset(names)
        self._weights = weights
        self._leader: dict[str, str] = {}  # whose input a weight shares
        self._inputs: dict[int, tuple[Any, str]] = {}
        self._left: set[str] = set()
        self._modality: Any = None

    @contextlib.contextmanager
    def over(self, modality: Any) -> Iterator[None]:
        """One run: tokens of these modalities; None: pictures. It ends where all has been seen."""
        self._modality, self._left, self._inputs = modality, set(self._names), {}
        with contextlib.suppress(_Done):
            yield

    def look(self, name: str, x: Tensor) -> Tensor:
        if name in self._left:
            self._left.remove(name)
            if self._led(name, x) == name:
                self._add(name, x)
            self.found[name] = self.found[self._leader[name]]
            if not self._left:
                raise _Done
        return x

    def _led(self, name: str, x: Tensor) -> str:
        if name not in self._leader:
            ref, leader = self._inputs.get(id(x), (lambda: None, name))
            same = ref() is x and self._weights[leader].shape[1:] == self._weights[name].shape[1:]
            self._leader[name] = leader if same else name
            self._inputs.setdefault(id(x), (weakref.ref(x), name))
        return self._leader[name]

    def _add(self, name: str, x: Tensor) -> None:
        seen = self.found.setdefault(name, Seen())
        rows = rows_of(x, self._weights[name])
        has_gram = self._weights[name].ndim < 5
        if self._modality is None:
            seen.add(Modality.IMAGE, rows, has_gram=has_gram)
            return
        for modality in np.unique(self._modality):
            seen.add(Modality(modality), rows[torch.from_numpy(self._modality == modality)], has_gram=has_gram)


def rows_of(x: Tensor, weight: Tensor) -> Tensor:
    """The rows that a weight multiplies, (n, width): a picture's are those under its kernel, without padding."""
    if weight.ndim == 2:
        return x.reshape(-1, x.shape[-1])
    if weight.ndim == 4 and weight.shape[-1] > 1:
        x = functional.unfold(x, weight.shape[2:])[..., None]
    return x.movedim(1, -1).reshape(-1, x.shape[1])
