"""Fit what a unit of work takes to steps of several models, so that others can be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from triptych.core.device import CostPoint, DeviceSpec, Efficiency
from triptych.core.spec import ModelSpec
from triptych.errors import MeasurementError
from triptych.plan.costs import NINE_OF_TEN, SeenStep, points, relative_nnls, risen, rises
from triptych.plan.roofline import Roofline
from triptych.plan.work import Chunk, Held, Step, attended, decoder_work

CACHED = (1024, 4096, 16384, 65536)
LEAST_MODELS = 2  # or what a layer takes and what its weights take could not be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenModel:
    """A model and its steps as they were measured."""

    spec: ModelSpec
    held: Held
    steps: tuple[SeenStep, ...]


def as_step(seen: SeenStep) -> Step:
    chunks = (Chunk(num_tokens=seen.prompt, earlier=seen.earlier),) if seen.prompt else ()
    return Step(answers=seen.answers, cached=seen.cached, chunks=chunks)


def fit_efficiency(device: DeviceSpec, models: Sequence[SeenModel]) -> Efficiency:
    """Non-negative least squares of relative errors; times rise with rows and with the cache. MeasurementError."""
    if len({(model.spec, model.held) for model in models}) < LEAST_MODELS:
        raise MeasurementError(f"steps of {len(models)} model were measured, at least {LEAST_MODELS} are needed")
    knots = sorted({as_step(seen).rows for model in models for seen in model.steps})
    precisions = sorted({part for model in models for part in (model.held.decoder, model.held.head)})
    rows, seconds = [], []
    for model in models:
        for seen in model.steps:
            rows.append(_row(model, as_step(seen), precisions, knots))
            seconds.append(seen.middle_s)
    found = relative_nnls(np.array(rows), np.array(seconds)).tolist()
    weight_s: dict[str, tuple[CostPoint, ...]] = {}
    at = 0
    for precision in precisions:
        weight_s[precision] = points(knots, np.cumsum(found[at : at + len(knots)]), (1.0, 1.0))
        at += len(knots)
    nothing = CostPoint(size=0, seconds=0.0, lowest_s=0.0, highest_s=0.0)
    cached = points(CACHED, np.cumsum(found[at : at + len(CACHED)]), (1.0, 1.0))
    names = ("pair_s", "layer_s", "number_s", "answer_s", "step_s", "prompt_s")
    rest = dict(zip(names, found[at + len(CACHED) :], strict=True))
    fitted = Efficiency(weight_s=weight_s, cached_s=(nothing, *cached), **rest, error=0.0)
    return _with_error(device, fitted, models)


def _with_error(device: DeviceSpec, fitted: Efficiency, models: Sequence[SeenModel]) -> Efficiency:
    on = msgspec.structs.replace(device, efficiency=fitted)
    errors = [
        abs(Roofline(spec=model.spec, held=model.held, device=on).step_s(as_step(seen)) / seconds - 1)
        for model in models
        for seen in model.steps
        for seconds in seen.seconds
    ]
    return msgspec.structs.replace(fitted, error=float(np.quantile(errors, NINE_OF_TEN)))


def _row(model: SeenModel, step: Step, precisions: Sequence[str], knots: Sequence[int]) -> list[float]:
    """Units of work of a step, in the order of `fit_efficiency`'s unknowns."""
    decoder = model.spec.decoder
    works = decoder_work(decoder, model.held, step).values()
    row: list[float] = []
    for precision in precisions:
        own = [work for work in works if work.num_weights and work.precision == precision]
        each = np.array([[work.num_weights * rise for rise in risen(work.rows, knots)] for work in own])
        row += each.sum(0).tolist() if own else [0.0] * len(knots)
    queries, read = attended(decoder)
    row += [read * rise for rise in rises(step.cached, CACHED)]
    prompts = any(chunk.is_last for chunk in step.chunks)
    numbers = decoder.num_layers * decoder.hidden * step.rows
    return [*row, queries * step.pairs, decoder.num_layers, numbers, step.sampled, 1.0, prompts]
