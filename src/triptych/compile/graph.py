"""The few operations that models are made of, as OpenVINO nodes; low-bit weights among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op

from triptych.compile.quantize import F16_HUGE, F16_TINY, quantize
from triptych.core.bundle import Precision
from triptych.core.packing import pack_nibbles
from triptych.core.quantized import Held, Quantized, plain
from triptych.core.rope import rope_frequencies
from triptych.core.spec import RopeSpec
from triptych.errors import CheckpointError, ConfigError

Array = NDArray[Any]
Weight = Callable[[str], Held]  # of one part, a tensor by the name that its builder knows
Value = Any  # an openvino Output or Node: what one operation hands the next
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu6"]
GROUP_SIZES = (32, 64, 128)
FINEST: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
STORED: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class Store:
    """How weights are held. It changes as a part is built: it counts parameters and remembers what fell back.

    fp32: as they are. bf16, fp16: constants of that type, widened where used. int8: a scale and a zero point an
    output channel. int4: a scale and a zero point a group of `group_size` inputs; int8 where groups do not fit, or
    four bits would not do. stored: each in the type that it has.
    Weights that come in low bits are transcribed, integers, scales and zero points, when `transcribes` or where they
    have just the bits that are asked for; else they are rounded a second time.
    """

    def __init__(
        self, precision: Precision | Literal["stored"], *, group_size: int = 64, transcribes: bool = False
    ) -> None:
        if group_size not in GROUP_SIZES:
            raise ConfigError(f"group size {group_size} is not one of {GROUP_SIZES}")
        self.precision = precision
        self.group_size = group_size
        self.num_parameters = 0
        self.num_rounded = 0  # weights transcribed of which inputs are rounded too
        self._transcribes = transcribes or precision == "stored"
        self._fallbacks: list[str] = []  # sentences, e.g. "layers.0.mlp.down_proj: width 100 …: int8"
        self._alike: Counter[str] = Counter()  # sentences that hold for many weights
        self._came: Counter[str] = Counter()  # weights taken over as they came, by "4 bits" or "bf16"
        self._told: set[Precision] = set()  # of those
        self._rounded: dict[tuple[str, int, float], Value] = {}

    @property
    def told(self) -> Precision:
        """The precision in a word: the one that was asked for, or the coarsest of those that were found."""
        found = self._told if self.precision == "stored" else {self.precision, *self._told}
        return max(found, key=FINEST.index, default="fp32")

    @property
    def fallbacks(self) -> list[str]:
        """What is not as one word for the part's precision tells, in sentences."""
        alike = [f"{what}: {count:,} weights" for what, count in self._alike.items()]
        mixed = ", ".join(f"{count:,} weights in {what}" for what, count in self._came.most_common())
        return [*self._fallbacks, *alike, *([f"taken over as they came: {mixed}"] if len(self._came) > 1 else [])]

    def linear(self, x: Value, name: str, weight: Held, bias: Held | None = None) -> Value:
        """x (…, width) @ weight (rows, width)ᵀ + bias (rows,). `name` as in `weight`."""
        y = op.matmul(self.met(x, weight), self.weight(name, weight), False, True)
        return y if bias is None else op.add(y, self.small(bias, f"{name}.bias"))

    def met(self, x: Value, weight: Held) -> Value:
        """x as `weight` meets it: rounded to 8 bits where it has an `input_scale`.

        Symmetric, as compressed-tensors rounds; but what cannot be negative has all 255 steps for its one side.
        """
        if not isinstance(weight, Quantized) or weight.input_scale is None or not self._keeps(weight):
            return x
        node = x if isinstance(x, ov.Node) else x.get_node()
        key = (node.get_name(), 0 if isinstance(x, ov.Node) else x.get_index(), weight.input_scale)
        if key not in self._rounded:
            reach = np.float32(weight.input_scale)
            low, high = (-128 * reach, 127 * reach) if not _is_positive(node) else (np.float32(0), 127 * reach)
            ends = (constant(np.float32(low)), constant(np.float32(high)))
            self._rounded[key] = op.fake_quantize(x, *ends, *ends, 256)
        return self._rounded[key]

    def weight(self, name: str, weight: Held, *, least_bits: int = 4) -> Value:
        """A constant of any rank ≥ 2 in the store's precision, read as f32; axis 0 is the output channel.

        The node is called `name`.weight: verification finds it again in the compiled part. `least_bits` is for a
        weight whose errors nothing after it evens out: 8 keeps it from int4.
        """
        self.num_parameters += int(np.prod(weight.shape))
        if isinstance(weight, Quantized) and self._keeps(weight):
            held = self._transcribed(weight)
        else:
            if isinstance(weight, Quantized) and self.precision != "fp32":
                self._alike[f"{weight.bits} bits rounded a second time, as asked"] += 1
            held = self._held(name, plain(weight), least_bits)
        held.set_friendly_name(f"{name}.weight")
        return held

    def _keeps(self, weight: Quantized) -> bool:
        return self._transcribes or {"int4": 4, "int8": 8}.get(self.precision) == weight.bits

    def _transcribed(self, weight: Quantized) -> Any:
        """The very numbers. OpenVINO multiplies with 4 and 8 bits: fewer and odd ones lie in the next wider.

        Rows of odd width it multiplies wrongly with either: 14 % off was seen.
        """
        if len(weight.shape) == 2 and weight.shape[1] % 2:
            self._alike[f"{weight.bits} bits of odd width are held in fp32"] += 1
            return constant(plain(weight))
        self._told.add("int4" if weight.bits <= 4 else "int8")
        self._came[f"{weight.bits} bits"] += 1
        if weight.bits not in (4, 8):
            self._alike[f"{weight.bits} bits lie in {4 if weight.bits < 4 else 8}"] += 1
        if weight.input_scale is None:
            return decompressed(weight, weight.shape)
        self.num_rounded += 1
        return _signed(weight) if weight.is_symmetric else decompressed(weight, weight.shape)

    def _held(self, name: str, weight: Array, least_bits: int) -> Any:
        precision = self.precision if self.precision != "stored" else STORED.get(str(weight.dtype), "fp32")
        if self.precision == "stored":
            self._told.add(precision)
            self._came[precision] += 1
        match precision:
            case "fp32":
                return constant(_finite(name, np.asarray(weight, np.float32)))
            case "bf16" | "fp16":
                return _widened(name, weight, precision)
            case "int8":
                return self._int8(name, weight)
            case "int4":
                return self._int4(name, weight, least_bits)

    def small(self, values: Held, name: str | None = None) -> Value:
        """A norm's scale, a bias, a table: kept in f32 whatever the precision. `name`: its tensor's."""
        numbers = plain(values)
        self.num_parameters += numbers.size
        held = constant(np.asarray(numbers, np.float32))
        if name is not None:
            held.set_friendly_name(name)
        return held

    def _int8(self, name: str, weight: Array) -> Value:
        """OpenVINO 2026.4.1 multiplies bf16 rows of odd width wrongly with 8-bit weights: 10 % off and more."""
        width = weight.shape[-1]
        if weight.ndim == 2 and width % 2:
            self._fallbacks.append(f"{name}: width {width:,} is odd: bf16")
            return _widened(name, weight, "bf16")
        return _low_bit(name, weight, 8, None)

    def _int4(self, name: str, weight: Array, least_bits: int) -> Value:
        width = weight[0].size
        if least_bits > 4:
            self._fallbacks.append(f"{name}: its errors are the part's own: int8")
        elif width % self.group_size:
            self._fallbacks.append(f"{name}: width {width:,} is not a multiple of {self.group_size}: int8")
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
    bits, scales = 4 if held.bits <= 4 else 8, _narrowed(held).reshape(sides)
    wide = "f16" if scales.dtype == np.float16 else "f32"
    codes = op.convert(_codes(held.codes, layout, bits), wide)
    zeros = op.convert(_codes(held.zeros, sides, bits), wide)
    values = op.multiply(op.subtract(codes, zeros), constant(scales))
    if layout != tuple(shape):
        values = op.reshape(values, constant(np.array(shape, np.int64)), False)
    return op.convert(values, "f32") if wide == "f16" else values


def _narrowed(held: Quantized) -> Array:
    """Scales in half precision where they are the same in it, as most of bf16 are: half the bytes. f32 otherwise.

    A kernel's are f32 always: it is put together once, and in half precision its numbers would be rounded.
    """
    wide = held.scales.astype(np.float32)
    is_safe = len(held.shape) == 2 and bool(np.all((np.abs(wide) >= F16_TINY) & (np.abs(wide) < F16_HUGE)))
    narrow = wide.astype(np.float16) if is_safe else wide
    return narrow if np.array_equal(narrow.astype(np.float32), wide) else wide


def _signed(held: Quantized) -> Value:
    """Signed codes → Convert → Multiply, of the weight's own shape: what OpenVINO multiplies with rounded inputs."""
    codes = (held.codes.astype(np.int16) - (1 << (held.bits - 1))).astype(np.int8).reshape(held.shape)
    if held.codes.shape[1] > 1:
        return decompressed(held, held.shape)
    sides = (len(codes),) + (1,) * (codes.ndim - 1)
    return op.multiply(op.convert(op.constant(codes), "f32"), constant(held.scales.astype(np.float32).reshape(sides)))


def _is_positive(node: Any) -> bool:
    return bool(node.get_type_name() == "Clamp" and node.get_min() >= 0)


def _codes(codes: NDArray[np.uint8], shape: tuple[int, ...], bits: int) -> Value:
    if bits == 8:
        return op.constant(np.ascontiguousarray(codes.reshape(shape)))
    return _raw_constant(pack_nibbles(codes), shape, ov.Type.u4)


def _raw_constant(raw: Array, shape: tuple[int, ...], dtype: Any) -> Value:
    """A constant of a type numpy does not know, from its bytes."""
    tensor = ov.Tensor(dtype, ov.Shape(list(shape)))
    tensor.data.reshape(-1).view(np.uint8)[:] = raw.reshape(-1).view(np.uint8)
    return ov.op.Constant(tensor)
