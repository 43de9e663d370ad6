"""Train a rounded decoder's scales and norms end to end: it learns to say what its exact self says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from triptych.backends.torch_graph import Hooks
from triptych.compress.model import Changed, Model
from triptych.compress.samples import Sample
from triptych.core.quantized import Held, Quantized
from triptych.errors import ConfigError

HEADS = ("lm_head", "embed_tokens")  # a tied head has the table's name
TOKENS = 1000  # judged ones that a step learns from, at least
RATE = 1e-3  # what a step moves a scale or a norm at most, of itself
WARM = 8  # steps until the rate is whole; from the first on it falls evenly
SAVED = 10  # steps between two savings
KIND = torch.bfloat16  # of products; all else is in f32
Lesson = tuple[Sample, Tensor]  # and what the exact head is given at its judged places


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """held: what is trained, a quantized weight's scales or a norm. beside: what else is changed in the model. path:
    where unfinished training lies."""

    held: Mapping[str, Held]
    beside: Changed
    steps: int
    path: Path
    progress: Callable[[float], None]


def train(model: Model, samples: Sequence[Sample], course: Course) -> dict[str, Held]:
    """`held` with scales and norms that say more of what the exact model says (arXiv:2407.11062, second phase).

    Codes stay. Goes on where a run that was broken off was saved last. Raises ConfigError on samples without an answer.
    """
    model.use({})
    taught, exact = lessons(model, samples), model.exact("embedding")
    head = next((name, exact[name]) for name in HEADS if name in model.parts["decoder"].weights)
    model.use(course.beside)
    growth = {name: torch.zeros(_values(held).shape, requires_grad=True) for name, held in course.held.items()}
    adam, start = torch.optim.Adam(list(growth.values()), betas=(0.9, 0.95)), 0
    if course.path.is_file():
        start, kept, state = torch.load(course.path)
        adam.load_state_dict(state)
        for name in growth:
            growth[name].data.copy_(kept[name])
    order = itertools.cycle(torch.randperm(len(taught), generator=torch.Generator().manual_seed(0)).tolist())
    for step in range(course.steps):
        batch: list[Lesson] = []
        while sum(len(sample.judged) for sample, _ in batch) < TOKENS:
            batch.append(taught[next(order)])
        if step < start:
            continue
        course.progress(step / course.steps)
        adam.param_groups[0]["lr"] = RATE * (1 - step / course.steps) * min(1.0, (step + 1) / WARM)
        adam.zero_grad()
        with torch.enable_grad():
            put(model, course.held, growth)
            num_judged = sum(len(sample.judged) for sample, _ in batch)
            for lesson in batch:  # one by one, or short answers by the dozen would fill the memory; all by what was put
                (divergence(model, lesson, head).sum() / num_judged).backward(retain_graph=True)
        adam.step()
        if (step + 1) % SAVED == 0:
            scratch = course.path.with_suffix(".part")
            torch.save((step + 1, growth, adam.state_dict()), scratch)
            scratch.replace(course.path)
    return {name: _stored(held, growth[name]) for name, held in course.held.items()}


def lessons(model: Model, samples: Sequence[Sample]) -> list[Lesson]:
    """What the model that is in place says."""
    found, given = list[Lesson](), dict[str, Tensor]()
    hooks = model.watched("decoder", lambda name, x: given.setdefault(name, x) if name in HEADS else x)
    for sample in (sample for sample in samples if len(sample.judged)):
        with torch.no_grad():
            model.decode(model.embed(sample), sample.judged, hooks)
        found.append((sample, given.popitem()[1]))
    if not found:
        raise ConfigError(f"none of the {len(samples)} samples has an answer to learn from", hint="train_steps = 0")
    return found


def put(model: Model, held: Mapping[str, Held], growth: Mapping[str, Tensor]) -> None:
    """In the decoder's graph, each scale and norm by its growth greater, as it will be stored."""
    for full, own in held.items():
        value = _grown(own, growth[full])
        if isinstance(own, Quantized):
            value = (torch.from_numpy(own.codes.astype(np.float32) - own.zeros) * value).reshape(own.shape).to(KIND)
        model.parts["decoder"].weights[full.removesuffix(".weight")] = value


def divergence(model: Model, lesson: Lesson, head: tuple[str, Tensor]) -> Tensor:
    """Of each judged place, in nats, (R,): from the exact model's words to those of the one in place, by one `head`."""
    weights, (sample, hidden) = model.parts["decoder"].weights, lesson
    exact = functional.linear(hidden, head[1])
    weights[head[0]] = head[1].to(KIND)

    def narrow(name: str, x: Tensor) -> Tensor:
        """Products are in their weight's type; the head's is of what is not as the exact one has it alone."""
        return (x - hidden if name == head[0] else x).to(weights[name].dtype)

    hooks = Hooks(on_input=narrow, on_output=lambda name, y: y.float() + (exact if name == head[0] else 0))
    said = model.decode(model.embed(sample), sample.judged, {"decoder": hooks}).log_softmax(-1)
    return functional.kl_div(said, exact.log_softmax(-1).reshape(said.shape), reduction="none", log_target=True).sum(-1)


def _values(held: Held) -> NDArray[Any]:
    """What grows of it."""
    return held.scales if isinstance(held, Quantized) else held


def _grown(held: Held, growth: Tensor) -> Tensor:
    """What grows of it, grown, in f32: as it will be stored, though its slope is of what it was before it was rounded
    (arXiv:1308.3432)."""
    values = _values(held)
    grown = torch.from_numpy(values.astype(np.float32)) * (1 + growth)
    stored = torch.from_numpy(grown.detach().numpy().astype(values.dtype).astype(np.float32))
    return grown + (stored - grown).detach()


def _stored(held: Held, growth: Tensor) -> Held:
    values = _grown(held, growth).detach().numpy().astype(_values(held).dtype)
    return replace(held, scales=values) if isinstance(held, Quantized) else values
