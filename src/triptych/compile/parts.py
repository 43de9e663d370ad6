"""One part of a model as an OpenVINO graph, whatever its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import openvino as ov

from triptych.compile import conv, decoder, projector, softwords, vit
from triptych.compile.graph import Store, Weight
from triptych.core.spec import ModelSpec

PartName = Literal["vision", "projector", "decoder"]
Weights = Mapping[str, Weight]  # by part


def names(spec: ModelSpec) -> tuple[PartName, ...]:
    """The parts that this model has, in the order that data flows through them."""
    return ("decoder",) if spec.vision is None else ("vision", "projector", "decoder")


def build(part: PartName, spec: ModelSpec, weights: Weights, store: Store) -> ov.Model:
    """The part's graph, its weights held as `store` holds them. Raises CheckpointError."""
    if part == "decoder":
        return decoder.build(spec.decoder, weights[part], store)
    assert spec.vision is not None
    assert spec.projector is not None
    if part == "vision":
        tower = conv if spec.vision.kind == "conv" else vit
        return tower.build(spec.vision, weights[part], store)
    bridge = softwords if spec.projector.kind == "soft_words" else projector
    return bridge.build(spec.projector, spec.vision, weights[part], store)
