"""The few operations that models are made of, as OpenVINO nodes; low-bit weights among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op

from triptych.compile.quantize import quantize
from triptych.core.bundle import Precision
from triptych.core.packing import pack_nibbles
from triptych.core.quantized import Quantized
from triptych.core.spec import RopeSpec
from triptych.errors import CheckpointError, ConfigError

Array = NDArray[Any]
Weight = Callable[[str], Array]  # of one part, a tensor by the name that its builder knows
Value = Any  # an openvino Output or Node: what one operation hands the next
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu6"]
GROUP_SIZES = (32, 64, 128)


class Store:
    """How weights are held. It changes as a part is built: it counts parameters and remembers what fell back.

    fp32: as they are. bf16, fp16: constants of that type, widened where used. int8: a scale and a zero point an
    output channel. int4: a scale and a zero point a group of `group_size` inputs; int8 where groups do not fit, or
    four bits would not do.
    """

    def __init__(self, precision: Precision, *, group_size: int = 64) -> None:
        if group_size not in GROUP_SIZES:
            raise ConfigError(f"group size {group_size} is not one of {GROUP_SIZES}")
        self.precision = precision
        self.group_size = group_size
        self.fallbacks: list[str] = []  # sentences, e.g. "layers.0.mlp.down_proj: width 100 …: int8"
        self.num_parameters = 0

    def linear(self, x: Value, name: str, weight: Array, bias: Array | None = None) -> Value:
        """x (…, width) @ weight (rows, width)ᵀ + bias (rows,). `name` as in `weight`."""
        y = op.matmul(x, self.weight(name, weight), False, True)
        return y if bias is None else op.add(y, self.small(bias, f"{name}.bias"))

    def weight(self, name: str, weight: Array, *, least_bits: int = 4) -> Value:
        """A constant of any rank ≥ 2 in the store's precision, read as f32; axis 0 is the output channel.

        The node is called `name`.weight: verification finds it again in the compiled part. `least_bits` is for a
        weight whose errors nothing after it evens out: 8 keeps it from int4.
        """
        self.num_parameters += weight.size
        held = self._held(name, weight, least_bits)
        held.set_friendly_name(f"{name}.weight")
        return held

    def _held(self, name: str, weight: Array, least_bits: int) -> Any:
        match self.precision:
            case "fp32":
                return constant(_finite(name, np.asarray(weight, np.float32)))
            case "bf16" | "fp16":
                return _widened(name, weight, self.precision)
            case "int8":
                return self._int8(name, weight)
            case "int4":
                return self._int4(name, weight, least_bits)

    def small(self, values: Array, name: str | None = None) -> Value:
        """A norm's scale, a bias, a table: kept in f32 whatever the precision. `name`: its tensor's."""
        self.num_parameters += values.size
        held = constant(np.asarray(values, np.float32))
        if name is not None:
            held.set_friendly_name(name)
        return held

    def _int8(self, name: str, weight: Array) -> Value:
        """OpenVINO 2026.4.1 multiplies bf16 rows of odd width wrongly with 8-bit weights: 10 % off and more."""
        width = weight.shape[-1]
        if weight.ndim == 2 and width % 2:
            self.fallbacks.append(f"{name}: width {width:,} is odd: bf16")
            return _widened(name, weight, "bf16")
        return _low_bit(name, weight, 8, None)

    def _int4(self, name: str, weight: Array, least_bits: int) -> Value:
        width = weight[0].size
        if least_bits > 4:
            self.fallbacks.append(f"{name}: its errors are the part's own: int8")
        elif width % self.group_size:
            self.fallbacks.append(f"{name}: width {width:,} is not a multiple of {self.group_size}: int8")
        else:
            return _low_bit(name, weight, 4, self.group_size)
        return self._int8(name, weight)


def constant(values: Array | np.generic) -> Value:
    """A copy of `values` in the graph, of the same type."""
    return op.constant(np.asarray(values, order="C"))


def parameter(name: str, shape: list[int], dtype: Any) -> Value:
    """An input called `name`; -1 marks a dimension that may change from call to call."""
    node = op.parameter(shape, dtype, name=name)
    return named(node, name)


def named(value: Value, name: str) -> Value:
    """Give a node a name that survives saving, and its tensor the same."""
    node = value if isinstance(value, ov.Node) else value.get_node()
    node.set_friendly_name(name)
    node.output(0).set_names({name})
    return value


def reshape(x: Value, *dims: int) -> Value:
    """0 keeps the dimension at that place, -1 takes what is left."""
    return op.reshape(x, constant(np.array(dims, np.int64)), True)


def transpose(x: Value, *order: int) -> Value:
    return op.transpose(x, constant(np.array(order, np.int64)))


def activation(x: Value, kind: Activation) -> Value:
    match kind:
        case "gelu":
            return op.gelu(x, "erf")
        case "gelu_tanh":
            return op.gelu(x, "tanh")
        case "quick_gelu":
            return op.multiply(x, op.sigmoid(op.multiply(x, constant(np.float32(1.702)))))
        case "silu":
            return op.swish(x)
        case "relu6":
            return op.clamp(x, 0.0, 6.0)


def rms_norm(x: Value, scale: Value, eps: float) -> Value:
    """Over the last axis (arXiv:1910.07467)."""
    mean = op.reduce_mean(op.power(x, constant(np.float32(2))), constant(np.array([-1], np.int64)), True)
    root = op.sqrt(op.add(mean, constant(np.float32(eps))))
    return op.multiply(op.multiply(x, op.divide(constant(np.float32(1)), root)), scale)


def layer_norm(x: Value, scale: Value, bias: Value, eps: float) -> Value:
    """Over the last axis (arXiv:1607.06450)."""
    normal = op.mvn(x, constant(np.array([-1], np.int64)), True, eps, "INSIDE_SQRT")
    return op.add(op.multiply(normal, scale), bias)


def rope_frequencies(spec: RopeSpec, head_dim: int) -> NDArray[np.float32]:
    """Radians a position turns each pair of a head's numbers, (head_dim / 2,), after scaling."""
    frequencies = 1.0 / spec.theta ** (np.arange(0, head_dim, 2) / head_dim)
    match spec.scaling:
        case "none":
            pass
        case "linear":
            frequencies = frequencies / spec.factor
        case "llama3":
            turns = spec.original_positions * frequencies / (2 * np.pi)
            share = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
            share = np.clip(share, 0.0, 1.0)
            frequencies = frequencies * (share + (1 - share) / spec.factor)
    return frequencies.astype(np.float32)


def rope_tables(position_ids: Value, spec: RopeSpec, head_dim: int) -> tuple[Value, Value]:
    """Cosines and sines for each position, (T, 1, 1, head_dim) each."""
    turn = constant(rope_frequencies(spec, head_dim)[None])
    angle = op.multiply(op.unsqueeze(op.convert(position_ids, "f32"), constant(np.int64(1))), turn)
    angle = op.unsqueeze(op.concat([angle, angle], -1), constant(np.array([1, 2], np.int64)))
    return op.cos(angle), op.sin(angle)


def rotate(x: Value, tables: tuple[Value, Value]) -> Value:
    """Turn x (T, heads, 1, head_dim) by its position, halves against each other.

    Written with the very operations, and the rank, that OpenVINO fuses into one.
    """
    half = x.get_output_partial_shape(0)[3].get_length() // 2
    first, second = op.variadic_split(x, constant(np.int64(3)), constant(np.array([half, -1], np.int64))).outputs()
    turned = op.concat([op.multiply(second, constant(np.float32(-1))), first], -1)
    return op.add(op.multiply(x, tables[0]), op.multiply(turned, tables[1]))


def split_heads(x: Value, num_heads: int, head_dim: int) -> Value:
    """(N, T, heads * head_dim) → (N, heads, T, head_dim)."""
    return transpose(reshape(x, 0, 0, num_heads, head_dim), 0, 2, 1, 3)


def join_heads(x: Value, width: int) -> Value:
    """(N, heads, T, head_dim) → (N, T, width)."""
    return reshape(transpose(x, 0, 2, 1, 3), 0, 0, width)


def attention(heads: tuple[Value, Value, Value], *, causal: bool = False, mask: Value | None = None) -> Value:
    """Softmax attention over queries, keys and values, (N, heads, T, head_dim) each and out.

    `mask` is boolean, (T, T): true where a query (row) may look.
    """
    query, key, value = heads
    if mask is None:
        return op.scaled_dot_product_attention(query, key, value, causal=causal)
    return op.scaled_dot_product_attention(query, key, value, mask, causal=False)


def _finite(name: str, values: Array) -> Array:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name}: {(~np.isfinite(values)).sum():,} of {values.size:,} values are not finite")
    return values


def _widened(name: str, weight: Array, precision: Literal["bf16", "fp16"]) -> Value:
    import ml_dtypes

    values = _finite(name, np.asarray(weight, np.float32))
    if precision == "bf16":
        narrow = values.astype(ml_dtypes.bfloat16, order="C")
        node = _raw_constant(narrow.view(np.uint16), narrow.shape, ov.Type.bf16)
    else:
        with np.errstate(over="ignore"):
            half = values.astype(np.float16, order="C")  # OpenVINO misreads one that is not
        if not np.isfinite(half).all():
            raise CheckpointError(
                f"{name}: {np.abs(values).max():.4g} does not fit fp16, whose greatest is 65,504",
                hint="hold this part in bf16, int8 or fp32",
            )
        node = op.constant(half)
    return op.convert(node, "f32")


def _low_bit(name: str, weight: Array, bits: int, group_size: int | None) -> Value:
    """Codes, zero points and scales as the plugins fuse them into a matrix product."""
    try:
        held = quantize(weight.reshape(len(weight), -1), bits=bits, group_size=group_size)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return decompressed(held, weight.shape)


def decompressed(held: Quantized, shape: tuple[int, ...]) -> Value:
    """Codes → Convert → Subtract → Multiply → Reshape → Convert, read as f32 of `shape`."""
    grouped = held.codes.shape[1] > 1
    layout = held.codes.shape if grouped else (held.codes.shape[0], held.codes.shape[2])
    sides = layout[:-1] + (1,)
    wide = "f16" if held.scales.dtype == np.float16 else "f32"
    codes = op.convert(_codes(held.codes, layout, held.bits), wide)
    zeros = op.convert(_codes(held.zeros, sides, held.bits), wide)
    values = op.multiply(op.subtract(codes, zeros), constant(held.scales.reshape(sides)))
    if layout != tuple(shape):
        values = op.reshape(values, constant(np.array(shape, np.int64)), False)
    return op.convert(values, "f32") if wide == "f16" else values


def _codes(codes: NDArray[np.uint8], shape: tuple[int, ...], bits: int) -> Value:
    if bits == 8:
        return op.constant(np.ascontiguousarray(codes.reshape(shape)))
    return _raw_constant(pack_nibbles(codes), shape, ov.Type.u4)


def _raw_constant(raw: Array, shape: tuple[int, ...], dtype: Any) -> Value:
    """A constant of a type numpy does not know, from its bytes."""
    tensor = ov.Tensor(dtype, ov.Shape(list(shape)))
    tensor.data.reshape(-1).view(np.uint8)[:] = raw.reshape(-1).view(np.uint8)
    return ov.op.Constant(tensor)
