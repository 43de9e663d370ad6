"""Operations and weights of a bundle's part, counted in its graph where its shape does not tell."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from xml.etree import ElementTree

from msgspec.structs import replace

from triptych.core.bundle import Bundle
from triptych.core.spec import Counted, ModelSpec

PRODUCTS = ("Convolution", "GroupConvolution", "MatMul")


def counted(spec: ModelSpec, bundle: Bundle) -> ModelSpec:
    """The spec with what the graphs of its tower and projector hold, where their shapes do not tell."""
    vision, projector = spec.vision, spec.projector
    if vision is not None and vision.kind == "conv":
        spec = replace(spec, vision=replace(vision, counted=_of(bundle, "vision")))
    if projector is not None and projector.kind == "soft_words":
        spec = replace(spec, projector=replace(projector, counted=_of(bundle, "projector")))
    return spec


def _of(bundle: Bundle, name: str) -> Counted | None:
    part = bundle.manifest.part(name)
    if part is None:
        return None
    return Counted(flops=flops_of(bundle.file(part.files[0])), num_weights=part.num_parameters)


def flops_of(graph: Path) -> float:
    """Of the products in an OpenVINO graph, for one tile: sizes that it leaves open count as 1."""
    flops = 0.0
    for layer in ElementTree.parse(graph).getroot().iter("layer"):
        if layer.get("type") not in PRODUCTS:
            continue
        (given, weights), (out, *_) = _sizes(layer, "input"), _sizes(layer, "output")
        if layer.get("type") == "MatMul":
            data = layer.find("data")
            summed = given[-2 if data is not None and data.get("transpose_a") == "true" else -1]
        else:  # (…, channels in, height, width) of a kernel
            summed = prod(weights[1 - len(out) :])
        flops += 2.0 * prod(out) * summed
    return flops


def _sizes(layer: ElementTree.Element, side: str) -> Sequence[list[int]]:
    ports = layer.find(side)
    return [] if ports is None else [[max(1, int(dim.text or 1)) for dim in port.iter("dim")] for port in ports]
