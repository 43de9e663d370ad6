"""The operations of our fp32 graphs in torch, by OpenVINO's type name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from triptych.errors import BackendError

Operation = Callable[..., Any]  # tensors in, in the node's order; a tensor, or a tuple of them, out
Make = Callable[[Any], Operation]  # a node, whose attributes and constants are read once


def _plain(run: Operation) -> Make:
    return lambda node: run


def _ints(node: Any, index: int) -> list[int]:
    """Constant input `index`: a shape, an order, axes."""
    source = node.input_value(index).get_node()
    if source.get_type_name() != "Constant":
        raise BackendError(f"torch cannot run {node.get_friendly_name()}: its input {index} is no constant")
    return [int(value) for value in source.data.reshape(-1)]


def _unlike(node: Any, what: str) -> BackendError:
    return BackendError(f"torch cannot run {node.get_friendly_name()}, a {node.get_type_name()} with {what}")


# ── products ────────────────────────────────────────────────────────────────────────────────────────────────────


def _matmul(node: Any) -> Operation:
    attributes = node.get_attributes()
    first, second = attributes["transpose_a"], attributes["transpose_b"]
    if second and not first and len(node.get_input_partial_shape(1)) == 2:
        return lambda x, weight: functional.linear(x, weight)
    return lambda a, b: torch.matmul(a.mT if first else a, b.mT if second else b)


def _convolution(node: Any) -> Operation:
    """2-D, padded unevenly where the graph is: (N, C, H, W) by (out, in, h, w), or by (groups, out, in, h, w)."""
    attributes = node.get_attributes()
    if len(node.get_input_partial_shape(0)) != 4 or str(attributes["auto_pad"]).lower() != "explicit":
        raise _unlike(node, f"rank {len(node.get_input_partial_shape(0))} and pads {attributes['auto_pad']}")
    (top, left), (bottom, right) = attributes["pads_begin"], attributes["pads_end"]
    stride, dilation = list(attributes["strides"]), list(attributes["dilations"])

    def run(x: Any, weight: Any) -> Any:
        groups = 1
        if weight.ndim == 5:
            groups, weight = len(weight), weight.flatten(0, 1)
        if (top, left) == (bottom, right):
            return functional.conv2d(x, weight, None, stride, [top, left], dilation, groups)
        return functional.conv2d(
            functional.pad(x, [left, right, top, bottom]), weight, None, stride, 0, dilation, groups
        )

    return run


def _attention(node: Any) -> Operation:
    """Queries, keys, values, and a boolean mask where the graph has one: true where a query may look."""
    causal = bool(node.get_attributes()["causal"])
    if node.get_input_size() > 4:
        raise _unlike(node, "a scale")
    return partial(_attend, causal)


def _attend(causal: bool, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)


# ── norms, reductions, activations ──────────────────────────────────────────────────────────────────────────────


def _mvn(node: Any) -> Operation:
    attributes, axes = node.get_attributes(), _ints(node, 1)
    last = len(node.get_input_partial_shape(0)) - 1
    if axes not in ([-1], [last]) or not attributes["normalize_variance"]:
        raise _unlike(node, f"axes {axes}")
    if str(attributes["eps_mode"]).lower() != "inside_sqrt":
        raise _unlike(node, f"eps {attributes['eps_mode']}")
    return lambda x, axes: functional.layer_norm(x, x.shape[-1:], None, None, attributes["eps"])


def _reduce(run: Operation) -> Make:
    def make(node: Any) -> Operation:
        axes, keep = _ints(node, 1), node.get_attributes()["keep_dims"]
        return lambda x, _: run(x, axes, keep)

    return make


def _softmax(node: Any) -> Operation:
    return partial(torch.softmax, dim=node.get_attributes()["axis"])


def _gelu(node: Any) -> Operation:
    kind = str(node.get_attributes()["approximation_mode"]).lower()
    return partial(functional.gelu, approximate="tanh" if kind == "tanh" else "none")


def _swish(node: Any) -> Operation:
    if node.get_input_size() > 1 and node.input_value(1).get_node().data.item() != 1.0:
        raise _unlike(node, "a beta that is not 1")
    return lambda x, *_: functional.silu(x)


def _clamp(node: Any) -> Operation:
    attributes = node.get_attributes()
    return partial(torch.clamp, min=attributes["min"], max=attributes["max"])


def _avg_pool(node: Any) -> Operation:
    attributes = node.get_attributes()
    if any(attributes["pads_begin"]) or any(attributes["pads_end"]):
        raise _unlike(node, "pads")
    return partial(functional.avg_pool2d, kernel_size=list(attributes["kernel"]), stride=list(attributes["strides"]))


# ── shapes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _reshape(node: Any) -> Operation:
    """A 0 keeps the dimension at its place where the graph says so."""
    dims, keeps = _ints(node, 1), node.get_attributes()["special_zero"]

    def run(x: Any, _: Any) -> Any:
        return x.reshape([x.shape[place] if keeps and dim == 0 else dim for place, dim in enumerate(dims)])

    return run


def _transpose(node: Any) -> Operation:
    order = _ints(node, 1)
    return lambda x, _: x.permute(order)


def _unsqueeze(node: Any) -> Operation:
    rank, axes = len(node.get_output_partial_shape(0)), _ints(node, 1)
    places = sorted(axis % rank for axis in axes)

    def run(x: Any, _: Any) -> Any:
        for place in places:
            x = x.unsqueeze(place)
        return x

    return run


def _tile(node: Any) -> Operation:
    times = _ints(node, 1)
    return lambda x, _: x.repeat(times)


def _concat(node: Any) -> Operation:
    axis = node.get_attributes()["axis"]
    return lambda *values: torch.cat(values, axis)


def _split(node: Any) -> Operation:
    (axis,), lengths = _ints(node, 1), _ints(node, 2)

    def run(x: Any, *_: Any) -> Any:
        rest = x.shape[axis] - sum(length for length in lengths if length >= 0)
        return tuple(torch.split(x, [rest if length < 0 else length for length in lengths], axis))

    return run


def _slice(node: Any) -> Operation:
    starts, stops, steps = (_ints(node, index) for index in (1, 2, 3))
    axes = _ints(node, 4) if node.get_input_size() > 4 else list(range(len(starts)))
    if min(steps) < 1:
        raise _unlike(node, f"steps {steps}")

    def run(x: Any, *_: Any) -> Any:
        where = [slice(None)] * x.ndim
        for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
            where[axis] = slice(start, stop, step)
        return x[tuple(where)]

    return run


def _gather(node: Any) -> Operation:
    (axis,) = _ints(node, 2)
    if node.get_attributes().get("batch_dims", 0):
        raise _unlike(node, "batch dimensions")

    def run(x: Any, indices: Any, _: Any) -> Any:
        found = x.index_select(axis, indices.reshape(-1))
        return found.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis:][1:]])

    return run


def _range(start: Any, stop: Any, step: Any) -> Any:
    return torch.arange(int(start), int(stop), int(step), dtype=torch.int64)


TYPES = {"f32": torch.float32, "i64": torch.int64, "i32": torch.int32, "boolean": torch.bool}


def _convert(node: Any) -> Operation:
    kind = str(node.get_attributes()["destination_type"])
    if kind not in TYPES:
        raise _unlike(node, f"type {kind}")
    return lambda x: x.to(TYPES[kind])


OPERATIONS: dict[str, Make] = {
    "MatMul": _matmul,
    "Convolution": _convolution,
    "GroupConvolution": _convolution,
    "ScaledDotProductAttention": _attention,
    "MVN": _mvn,
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "ReduceMax": _reduce(torch.amax),
    "Softmax": _softmax,
    "Gelu": _gelu,
    "Swish": _swish,
    "Clamp": _clamp,
    "AvgPool": _avg_pool,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Tile": _tile,
    "Concat": _concat,
    "VariadicSplit": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Convert": _convert,
    "Broadcast": _plain(lambda x, shape: x.broadcast_to(shape.tolist())),
    "ShapeOf": _plain(lambda x: torch.tensor(x.shape, dtype=torch.int64)),
    "Range": _plain(_range),
    "Add": _plain(operator.add),
    "Subtract": _plain(operator.sub),
    "Multiply": _plain(operator.mul),
    "Divide": _plain(operator.truediv),
    "Power": _plain(torch.pow),
    "Minimum": _plain(torch.minimum),
    "Less": _plain(operator.lt),
    "GreaterEqual": _plain(operator.ge),
    "LogicalAnd": _plain(torch.logical_and),
    "Abs": _plain(torch.abs),
    "Log": _plain(torch.log),
    "Relu": _plain(torch.relu),
    "Sigmoid": _plain(torch.sigmoid),
    "Sqrt": _plain(torch.sqrt),
    "Cos": _plain(torch.cos),
    "Sin": _plain(torch.sin),
}
