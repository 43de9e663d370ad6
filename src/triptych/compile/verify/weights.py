"""Hold every weight of a compiled part against the checkpoint's own, group by group.

A part's output is the sum of thousands of groups of weights, so one wrong scale drowns in the noise that 4 bits make.
Here each group stands alone: rounding leaves its length (`gain`) and direction nearly as they were, whatever the
model, while a wrong scale, zero point, order or sign does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op

from triptych.compile.graph import Store
from triptych.compile.join import rows
from triptych.compile.verify.metrics import MAX_DB, decibels
from triptych.core.quantized import Held, plain

FAINT = 1e-6  # of a weight's mean energy: a fainter group changes nothing that can be seen
SUFFIX = ".weight"  # of the names that `graph.Store` gives


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFigures:
    """One weight against the checkpoint's."""

    name: str
    sqnr_db: float  # of the whole weight
    group_sqnr_db: float  # of its worst group
    gain: float  # of its worst group: max(g, 1/g), g = ⟨true, held⟩ / ⟨true, true⟩; infinite when g ≤ 0


class Audit(Store):
    """A store that holds nothing: handed each weight by a part's builder, it looks it up in the compiled part.

    So no second copy of the weights is ever in memory. `figures` has one entry a weight; one that the compiled part
    lacks, or has besides, or has in another shape, is infinitely far away.
    """

    def __init__(self, compiled: ov.Model) -> None:
        super().__init__("fp32")
        named = (node for node in compiled.get_ordered_ops() if node.get_friendly_name().endswith(SUFFIX))
        self._compiled = {name: (node, own) for node in named for name, own in rows(node)}
        self._last: tuple[Any, NDArray[np.float32]] = (None, np.empty(0, np.float32))  # a node and its values
        self.figures: list[WeightFigures] = []

    def weight(self, name: str, weight: Held, *, least_bits: int = 4) -> Any:
        node, own = self._compiled.pop(name + SUFFIX, (None, slice(0)))
        held = self._values(node)[own]
        if held.shape != weight.shape:
            self.figures.append(_lost(name))
        else:
            true = np.asarray(plain(weight), np.float32)
            self.figures.append(compare(name, true, held, num_groups(node)))
        return op.broadcast(op.constant(np.float32(0)), op.constant(np.array(weight.shape, np.int64)))

    def _values(self, node: Any) -> NDArray[np.float32]:
        """A joined weight's are asked for once for each of its names, one after another."""
        if node is not None and node is not self._last[0]:
            self._last = (node, values(node))
        return self._last[1] if node is not None else np.empty(0, np.float32)

    def small(self, values: Held, name: str | None = None) -> Any:
        if name is not None:
            self._compiled.pop(name, None)  # outputs judge it
        return super().small(values)

    def finish(self) -> list[WeightFigures]:
        """All figures; call it when the builder is done."""
        return self.figures + [_lost(name.removesuffix(SUFFIX)) for name in self._compiled]


def compare(name: str, true: NDArray[np.float32], held: NDArray[np.float32], groups: int) -> WeightFigures:
    """Compare (rows, …) arrays: each row in `groups` runs of neighbours."""
    a = true.reshape(len(true) * groups, -1)
    b = held.reshape(a.shape)
    energy = np.einsum("gi,gi->g", a, a, dtype=np.float64)
    product = np.einsum("gi,gi->g", a, b, dtype=np.float64)
    noise = np.einsum("gi,gi->g", a - b, a - b, dtype=np.float64)
    seen = energy > FAINT * energy.mean()
    gain = product[seen] / energy[seen]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(gain > 0, np.maximum(gain, 1 / gain), np.inf)
    return WeightFigures(
        name=name,
        sqnr_db=decibels(float(energy.sum()), float(noise.sum())),
        group_sqnr_db=decibels(1.0, float((noise[seen] / energy[seen]).max(initial=0.0))),
        gain=float(ratio.max(initial=1.0)),
    )


def values(node: Any) -> NDArray[np.float32]:
    """What a weight's constants stand for, computed here: this code shares nothing with the code that wrote them."""
    inputs = [node.input_value(index).get_node() for index in range(node.get_input_size())]
    match node.get_type_name():
        case "Constant":
            return _constant(node)
        case "Convert":
            return values(inputs[0])
        case "Reshape":
            return values(inputs[0]).reshape(tuple(node.get_output_shape(0)))
        case "Subtract":
            return values(inputs[0]) - values(inputs[1])
        case "Multiply":
            return values(inputs[0]) * values(inputs[1])
        case other:
            raise AssertionError(f"{node.get_friendly_name()}: a weight is not made by {other}")


def num_groups(node: Any) -> int:
    """How many groups of neighbours share a scale in each row of a weight; 1 where a row has one scale or none."""
    while node.get_type_name() in ("Convert", "Reshape"):
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Multiply":
        return 1
    scales = node.input_value(1).get_node().get_output_shape(0)
    return int(scales[1]) if len(scales) == 3 else 1


def _constant(node: Any) -> NDArray[np.float32]:
    shape, kind = tuple(node.get_output_shape(0)), node.get_output_element_type(0)
    raw = node.get_tensor_view().data if hasattr(node, "get_tensor_view") else node.data
    if kind == ov.Type.u4:  # two in a byte, the first in the low half
        pairs = np.asarray(raw).reshape(-1).view(np.uint8)
        both = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
        return both[: int(np.prod(shape))].astype(np.float32).reshape(shape)
    if kind == ov.Type.bf16:
        return (np.asarray(raw).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.asarray(raw).astype(np.float32).reshape(shape)


def _lost(name: str) -> WeightFigures:
    return WeightFigures(name=name, sqnr_db=-MAX_DB, group_sqnr_db=-MAX_DB, gain=float("inf"))
