"""Run a graph of OpenVINO nodes in torch, operation by operation, hooks looking on."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch

from triptych.backends.torch_graph.operations import OPERATIONS, Operation
from triptych.errors import BackendError

SUFFIX = ".weight"  # of the names that `compile/graph.Store` gives
MULTIPLIES = ("MatMul", "Convolution", "GroupConvolution")
ATTENTION = "ScaledDotProductAttention"

Slot = tuple[int, int]  # a node's place in the graph's order, and which of its outputs
Run = Generator[tuple[str, Any], Any, dict[str, Any]]  # of `TorchPart.halting`


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What looks on while a part runs. Each may return another tensor than it was given; None: nobody looks.

    on_input: a weight's name and the x that it multiplies; on_output: the product. on_value: the name and value of a
    node that has a name of ours (`layers.3.residual`, `layers.3.query`, `features`). on_attention: queries, keys and
    values, (N, heads, T, head_dim) each, before the softmax, under the name of the first node or weight of ours that
    the result meets (`layers.3.mixed`, `encoder.layers.3.self_attn.out_proj`).
    """

    on_input: Callable[[str, Any], Any] | None = None
    on_output: Callable[[str, Any], Any] | None = None
    on_value: Callable[[str, Any], Any] | None = None
    on_attention: Callable[[str, Any, Any, Any], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One node. `held`: which of its inputs is a weight, by name. `done`: what nobody reads after it."""

    index: int
    run: Operation
    inputs: tuple[Slot, ...]
    weight: str | None = None  # of a product
    name: str | None = None  # one of ours
    attention: str | None = None
    done: tuple[Slot, ...] = ()


class TorchPart:
    """One fp32 part in torch, in f32 on the CPU; shapes and names as `backends/base.Executable` has them.

    `weights` holds every named constant: a weight by its own name without `.weight` (`layers.3.mlp.up_proj`), a bias
    with its `.bias`. Assign to replace one, by a tensor that may require a gradient. Raises BackendError on an
    operation it does not know.
    """

    def __init__(self, model: ov.Model) -> None:
        nodes = list(model.get_ordered_ops())
        places = {node.get_name(): index for index, node in enumerate(nodes)}
        self.weights: dict[str, Any] = {}
        self._weight_at: dict[int, str] = {}
        self._constants: dict[Slot, Any] = {}
        self._inputs: dict[str, tuple[Slot, Any]] = {}
        self._outputs: dict[str, Slot] = {}
        steps = []
        for index, node in enumerate(nodes):
            sources = tuple(_sources(node, places))
            match node.get_type_name():
                case "Constant":
                    self._hold(index, node)
                case "Parameter":
                    dtype = torch.from_numpy(np.empty(0, node.get_output_element_type(0).to_dtype())).dtype
                    self._inputs[node.output(0).get_any_name()] = ((index, 0), dtype)
                case "Result":
                    self._outputs[node.input_value(0).get_any_name()] = sources[0]
                case _:
                    steps.append(self._step(index, node, sources))
        self._steps = _freed(steps, set(self._outputs.values()))

    @classmethod
    def open(cls, path: Path) -> TorchPart:
        """A part as `compile` saved it. Raises BackendError."""
        try:
            return cls(ov.Core().read_model(path))
        except RuntimeError as error:
            raise BackendError(f"{path}: {str(error).strip()[-300:]}") from error

    def __call__(self, arrays: Mapping[str, Any], hooks: Hooks | None = None) -> dict[str, Any]:
        """Arrays or tensors by input name → tensors by output name. Gradients follow torch's own mode."""
        run = self.halting(arrays, hooks)
        while True:
            try:
                next(run)
            except StopIteration as end:
                found: dict[str, Any] = end.value
                return found

    def halting(self, arrays: Mapping[str, Any], hooks: Hooks | None = None) -> Run:
        """As a call, but it halts before each product: gives the weight's name and its input, takes another input.

        What `weights` holds by then is what it goes on with.
        """
        if arrays.keys() != self._inputs.keys():
            raise BackendError(f"inputs are {sorted(self._inputs)}, got {sorted(arrays)}")
        hooks = hooks or Hooks()
        values: dict[Slot, Any] = {}
        for name, (slot, dtype) in self._inputs.items():
            values[slot] = torch.as_tensor(arrays[name]).to(dtype)
        for step in self._steps:
            found = yield from self._run(step, values, hooks)
            for place, value in enumerate(found if isinstance(found, tuple) else (found,)):
                values[step.index, place] = value
            for slot in step.done:
                values.pop(slot, None)
        return {name: self._value(slot, values) for name, slot in self._outputs.items()}

    def _run(self, step: _Step, values: dict[Slot, Any], hooks: Hooks) -> Generator[tuple[str, Any], Any, Any]:
        first = self._value(step.inputs[0], values) if step.inputs else None
        if step.weight is not None:
            first = first if hooks.on_input is None else hooks.on_input(step.weight, first)
            other = yield step.weight, first
            first = first if other is None else other
        inputs = [first, *(self._value(slot, values) for slot in step.inputs[1:])] if step.inputs else []
        if step.attention is not None and hooks.on_attention is not None:
            hooks.on_attention(step.attention, *inputs[:3])
        found = step.run(*inputs)
        if step.weight is not None and hooks.on_output is not None:
            found = hooks.on_output(step.weight, found)
        return found if step.name is None or hooks.on_value is None else hooks.on_value(step.name, found)

    def _value(self, slot: Slot, values: dict[Slot, Any]) -> Any:
        if slot in values:
            return values[slot]
        name = self._weight_at.get(slot[0])
        return self._constants[slot] if name is None else self.weights[name]

    def _hold(self, index: int, node: Any) -> None:
        values = torch.from_numpy(node.data.copy())
        name = node.get_friendly_name()
        if name.endswith((SUFFIX, ".bias")):
            self._weight_at[index] = name.removesuffix(SUFFIX)
            self.weights[self._weight_at[index]] = values
        else:
            self._constants[index, 0] = values

    def _step(self, index: int, node: Any, sources: tuple[Slot, ...]) -> _Step:
        kind = node.get_type_name()
        if kind not in OPERATIONS:
            raise BackendError(
                f"torch cannot run {node.get_friendly_name()}: it is a {kind}",
                hint="compress works on parts compiled with --weights fp32",
            )
        name = node.get_friendly_name()
        return _Step(
            index=index,
            run=OPERATIONS[kind](node),
            inputs=sources,
            weight=self._weight_at.get(sources[1][0]) if kind in MULTIPLIES else None,
            name=None if _is_automatic(name, kind) else name,
            attention=_name_after(node) if kind == ATTENTION else None,
        )


def _sources(node: Any, places: Mapping[str, int]) -> Iterator[Slot]:
    for index in range(node.get_input_size()):
        source = node.input_value(index)
        yield places[source.get_node().get_name()], source.get_index()


def _freed(steps: list[_Step], kept: set[Slot]) -> list[_Step]:
    """With what each step reads as the last, unless it is `kept`."""
    seen, freed = set(kept), []
    for step in reversed(steps):
        done = tuple(slot for slot in dict.fromkeys(step.inputs) if slot not in seen)
        seen.update(done)
        freed.append(replace(step, done=done))
    return freed[::-1]


def _is_automatic(name: str, kind: str) -> bool:
    """OpenVINO's own names are a type and a number."""
    return re.fullmatch(rf"{kind}_\d+", name) is not None


def _name_after(node: Any) -> str:
    """The first name of ours that the values of `node` meet: of a node, or of a weight that multiplies them."""
    while True:
        name, kind = node.get_friendly_name(), node.get_type_name()
        if not _is_automatic(name, kind):
            return str(name)
        if kind in MULTIPLIES:
            return str(node.input_value(1).get_node().get_friendly_name()).removesuffix(SUFFIX)
        targets = node.output(0).get_target_inputs()
        if not targets:
            return str(name)
        node = next(iter(targets)).get_node()
