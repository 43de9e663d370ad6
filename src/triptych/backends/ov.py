"""OpenVINO on CPU, Intel GPU and NPU: one part of a model, or a decoder over pages of cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from triptych.backends.base import (
    BLOCK_TOKENS,
    Array,
    CacheType,
    Executable,
    LayeredDecoder,
    PagedDecoder,
    Placement,
)
from triptych.backends.hugepages import promote_aside
from triptych.backends.paged import BY_LAYER, CACHE_NAMES, WATCHED, AttentionFacts, make_paged, node_name, show_queries
from triptych.backends.pool import Pool, dequantize
from triptych.core.filling import COARSE, COARSE_FROM
from triptych.errors import BackendError, ConfigError

COMPUTE = {"float": "f32", "bfloat16": "bf16", "half": "f16"}
CAPABILITY = {"float": "FP32", "bfloat16": "BF16", "half": "FP16"}
GROUPS = (32, 64)  # on SmolLM2 in int8, 64 beside OpenVINO's own 32: prefill +16 %, decode +5 %, KL 0.008 for 0.007
U4_GROUP = 32  # numbers that share a scale in a u4 cache: 6 bits each instead of 5, at less than half the divergence
SMALL = 1 << 16  # bytes of an input that are sooner copied than given anew
LARGE = 32 << 20  # bytes of weights from which their pages matter: more than the caches of most processors hold


@cache
def devices() -> tuple[str, ...]:
    """The devices OpenVINO sees here, as `Placement.device` names them."""
    names = (name.partition(".") for name in _core().available_devices)
    return tuple(f"{kind.lower()}:{number or 0}" for kind, _, number in names)


def check_device(device: str) -> None:
    """Raises ConfigError that lists the devices when this is none of them."""
    if device not in devices():
        raise ConfigError(f"no device {device!r} here", hint=f"OpenVINO sees {', '.join(devices())}")


def open_part(path: Path, placement: Placement) -> Executable:
    """Load one part where it was placed. Raises ConfigError on an unknown device, BackendError if it refuses."""
    return open_model(_read(path), placement)


def open_model(model: ov.Model, placement: Placement) -> Executable:
    """`open_part` of a graph that lies on no disk."""
    return _Part(_compile(model, placement, {}))


def compile_part(path: Path, placement: Placement, *, num_threads: int) -> Any:
    """One part of a CPU, compiled for one tile at a time; raises as `open_part`."""
    return _compile(_read(path), placement, {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": num_threads})


def open_plain_decoder(path: Path, placement: Placement) -> Executable:
    """The decoder as it lies on disk, the slow twin of `open_decoder`: one whole sequence a call.

    in: embeddings (T, hidden) f32, position_ids (T,) i64, sampled (R,) i64; out: logits (R, vocab) f32.
    """
    return open_part(path, placement)


def open_decoder(path: Path, placement: Placement, cache: CacheType) -> PagedDecoder:
    """Load a decoder with paged attention. Raises ConfigError, BackendError, and BundleError if it is no decoder."""
    model = _read(path)
    make_paged(model)
    decoder = _Decoder(_compile(model, placement, _cache_properties(model, placement, cache)))
    _settle(decoder, path, placement)
    return decoder


def open_layered_decoder(
    path: Path, placement: Placement, cache: CacheType, *, with_queries: bool = False
) -> LayeredDecoder:
    """Load a decoder whose layers may forget apart; raises as `open_decoder`. `with_queries`: it gives them out too."""
    model = _read(path)
    facts = make_paged(model, layered=True)
    if with_queries:
        show_queries(model)
    decoder = _Layered(_compile(model, placement, _cache_properties(model, placement, cache)), facts, cache)
    _settle(decoder, path, placement)
    return decoder


def _settle(decoder: _Decoder, path: Path, placement: Placement) -> None:
    if placement.device.startswith("cpu") and path.with_suffix(".bin").stat().st_size >= LARGE:
        decoder.settle()


class _Part:
    """One compiled model and the one request that runs it; for one thread at a time."""

    _copies = True

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._inputs = {port.get_any_name(): port for port in compiled.inputs}
        self._types = {
            name: port.get_element_type().to_dtype()
            for name, port in self._inputs.items()
            if not name.startswith(CACHE_NAMES)
        }
        self._held: dict[str, Array] = {}  # the last call's inputs, where OpenVINO reads them
        self._outputs = [(port.get_any_name(), index) for index, port in enumerate(compiled.outputs)]

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        if arrays.keys() != self._types.keys():
            raise BackendError(f"inputs are {sorted(self._types)}, got {sorted(arrays)}")
        try:
            for name, dtype in self._types.items():
                self._set(name, np.asarray(arrays[name], dtype, order="C"))
            self._request.infer(share_outputs=True)
        except RuntimeError as error:
            raise BackendError(f"{self.place()}: {_reason(error)}") from error
        outputs = ((name, self._request.get_output_tensor(index).data) for name, index in self._outputs)
        return {name: data.copy() if self._copies else data for name, data in outputs}

    def _set(self, name: str, array: Array) -> None:
        """Give an input; small ones are copied, and into the tensor that is there already where the shape is the same.

        A new tensor takes OpenVINO 7 µs, and a step has eight.
        """
        is_small, held = array.nbytes <= SMALL, self._held.get(name)
        if is_small and held is not None and held.shape == array.shape:
            held[...] = array
            return
        self._held[name] = array.copy() if is_small else array
        self._request.set_tensor(self._inputs[name], ov.Tensor(self._held[name], shared_memory=True))

    def place(self) -> str:
        return describe(self._compiled)


class _Decoder(_Part):
    """A paged decoder that owns its cache."""

    _copies = False  # megabytes of logits, read before the next step

    def __init__(self, compiled: Any) -> None:
        super().__init__(compiled)
        ports = {name: port for name, port in self._inputs.items() if name.startswith(CACHE_NAMES)}
        self._caches = {name: (port, _block_shape(port)) for name, port in ports.items()}
        self._tensors: list[Any] = []
        self._spare: Array = np.zeros(1)  # pages that no sequence has, for `_filled`

    @property
    def block_bytes(self) -> int:
        bits = (math.prod(shape) * int(port.get_element_type().bitwidth) for port, shape in self._caches.values())
        return sum(bits) // 8

    def allocate(self, num_blocks: int) -> None:
        if self._tensors:
            raise BackendError(f"the cache is already made: {self._tensors[0].shape[0] - 1:,} blocks")
        try:
            for port, shape in self._caches.values():
                tensor = ov.Tensor(port.get_element_type(), ov.Shape([num_blocks + 1, *shape]))  # one for `_filled`
                self._request.set_tensor(port, tensor)
                self._tensors.append(tensor)
            self._spare = np.array([num_blocks])
        except (RuntimeError, MemoryError) as error:
            need = num_blocks * self.block_bytes
            raise BackendError(f"no memory for {num_blocks:,} blocks of KV cache, {need:,} B: {error}") from error

    def settle(self) -> None:
        """Have OpenVINO pack its weights, which it does in the first run, and soon put them on huge pages.

        Decoding one sequence of SmolLM2-135M gains 17 % (docs/decisions/0008). Call before `allocate`.
        """
        self.allocate(1)
        hidden = self._inputs["embeddings"].get_partial_shape()[1].get_length()
        for start, num_tokens in ((0, BLOCK_TOKENS - 1), (BLOCK_TOKENS - 1, 1)):
            positions = np.arange(start, start + num_tokens)
            self(
                {
                    "embeddings": np.full((num_tokens, hidden), 0.01, np.float32),
                    "position_ids": positions,
                    "past_lens": self._by_layer(start),
                    "subsequence_begins": np.array([0, num_tokens]),
                    "block_indices": self._by_layer(0),
                    "block_indices_begins": np.array([0, 1]),
                    "max_context_len": np.array(start + num_tokens),
                    "sampled": np.array([num_tokens - 1]),
                }
            )
        self._tensors.clear()
        promote_aside()

    def _by_layer(self, number: int) -> Array:
        return np.array([number])

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        if not self._tensors:
            raise BackendError("the cache was not made", hint="call `allocate` before the first step")
        return super().__call__(self._filled(arrays) if arrays.keys() == self._types.keys() else arrays)

    def _filled(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """With a last sequence that nobody reads, so that OpenVINO sees few different numbers of rows.

        It keeps buffers for each that it has ever seen, 0.7 MB on SmolLM2-135M.
        """
        num_rows = len(arrays["position_ids"])
        extra = -num_rows % COARSE
        if num_rows <= COARSE_FROM or not extra:
            return arrays
        embeddings, blocks = arrays["embeddings"], arrays["block_indices"]
        more = {
            "embeddings": np.zeros((extra, embeddings.shape[1]), embeddings.dtype),
            "position_ids": np.arange(extra),
            "past_lens": self._by_layer(0),
            "subsequence_begins": [num_rows + extra],
            "block_indices": self._spare,
            "block_indices_begins": [blocks.shape[-1] + 1],
        }
        axes = {"embeddings": 0}  # the others grow along their last
        return {**arrays, **{n: np.concatenate([arrays[n], rows], axis=axes.get(n, -1)) for n, rows in more.items()}}


class _Layered(_Decoder):
    """A `LayeredDecoder`: the layers of a device share one pool of key pages and one of value pages."""

    def __init__(self, compiled: Any, facts: AttentionFacts, cache: CacheType) -> None:
        super().__init__(compiled)
        self.num_layers = facts.num_layers
        self._facts = facts
        self._cache = cache
        self._pools: dict[str, list[Pool]] = {kind: [] for kind in CACHE_NAMES}  # by kind and layer

    def allocate(self, num_blocks: int, devices: Sequence[str] = ()) -> None:
        if self._tensors:
            raise BackendError("the cache is already made")
        for device in set(devices):
            check_device(device)
            if not device.startswith("cpu"):
                raise BackendError(
                    f"layers' caches on {device}: only on cpu:0 yet", hint="leave KVPolicy.devices empty"
                )
        try:
            for kind in CACHE_NAMES:
                self._pools[kind] = self._share(kind, num_blocks + 1)  # one for `_filled`
        except MemoryError as error:
            need = num_blocks * self.block_bytes
            raise BackendError(f"no memory for {num_blocks:,} blocks of KV cache, {need:,} B: {error}") from error
        self._spare = np.arange(self.num_layers, dtype=np.int32)[:, None] + num_blocks * self.num_layers

    def _share(self, kind: str, num_blocks: int) -> list[Pool]:
        """One pool, set as every layer's cache of its kind."""
        port, (num_heads, _, width) = self._caches[f"{kind}0"]
        dtype = port.get_element_type()
        pool = Pool(num_blocks * self.num_layers, num_heads, width * int(dtype.bitwidth) // 8)
        tensor = ov.Tensor(pool.pages, ov.Shape([len(pool.pages), num_heads, BLOCK_TOKENS, width]), dtype)
        for layer in range(self.num_layers):
            self._request.set_tensor(self._caches[f"{kind}{layer}"][0], tensor)
        self._tensors.append(tensor)
        return [pool] * self.num_layers

    def read(self, layer: int, pages: NDArray[np.int64], num_rows: int) -> tuple[Array, Array]:
        found = []
        for kind in CACHE_NAMES:
            rows = self._pools[kind][layer].pages[pages].swapaxes(0, 1)
            rows = rows.reshape(len(rows), -1, rows.shape[-1])[:, :num_rows]
            found.append(dequantize(rows, self._cache, self._facts.head_dim))
        return found[0], found[1]

    def move(self, sources: Sequence[NDArray[np.int64]], targets: Sequence[NDArray[np.int64]]) -> None:
        for pools in self._pools.values():
            rows = [pool.rows(slots) for pool, slots in zip(pools, sources, strict=True)]
            for pool, slots, own in zip(pools, targets, rows, strict=True):
                pool.put(slots, own)

    def _by_layer(self, number: int) -> Array:
        return np.full((self.num_layers, 1), number)

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        if not self._tensors:
            raise BackendError("the cache was not made", hint="call `allocate` before the first step")
        filled = dict(self._filled(arrays))
        if WATCHED in self._types:
            filled.setdefault(WATCHED, np.empty(0, np.int64))
        for name in BY_LAYER:
            filled |= {f"{name}.{layer}": row for layer, row in enumerate(filled.pop(name))}
        out = _Part.__call__(self, filled)
        names = [node_name(layer, "query") for layer in range(self.num_layers)]
        shown = [out.pop(name) for name in names if name in out]
        if shown:
            out["queries"] = np.stack(shown).reshape(self.num_layers, -1, self._facts.num_heads, self._facts.head_dim)
        return out


def describe(compiled: Any) -> str:
    """Where a compiled model really runs, in the runtime's words: device, arithmetic, threads."""
    device = ",".join(compiled.get_property("EXECUTION_DEVICES"))
    words = [f"{device} ({_core().get_property(device, 'FULL_DEVICE_NAME').strip()})"]
    supported = compiled.get_property("SUPPORTED_PROPERTIES")
    if "INFERENCE_PRECISION_HINT" in supported:
        words.append(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
    if "INFERENCE_NUM_THREADS" in supported:
        num_threads = compiled.get_property("INFERENCE_NUM_THREADS")
        words.append(f"{num_threads} thread{'s' * (num_threads != 1)}")
    return ", ".join(words)


@cache
def _core() -> Any:
    return ov.Core()


def _their_name(device: str) -> str:
    check_device(device)
    kind, _, number = device.partition(":")
    return f"GPU.{number}" if kind == "gpu" else kind.upper()


def _read(path: Path) -> ov.Model:
    try:
        return _core().read_model(path)
    except RuntimeError as error:
        raise BackendError(f"OpenVINO cannot read {path}: {_reason(error)}") from error


def _compile(model: ov.Model, placement: Placement, properties: dict[str, Any]) -> Any:
    device = _their_name(placement.device)
    try:
        return _core().compile_model(model, device, _properties(device, placement, model) | properties)
    except RuntimeError as error:
        raise BackendError(f"{placement.device} refused {model.get_friendly_name()}: {_reason(error)}") from error


def _properties(device: str, placement: Placement, model: ov.Model) -> dict[str, Any]:
    """What to ask of a device.

    float, bfloat16, half: arithmetic of that type throughout, so that `float` equals fp32 arithmetic. auto: the
    device's own choice, and on a CPU, beside low-bit weights, activations in 8 bits, in groups (`_group`).
    """
    wanted: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    if placement.num_threads is not None and device == "CPU":
        wanted["INFERENCE_NUM_THREADS"] = placement.num_threads
    if placement.compute == "auto":
        return wanted | (_rounding(device, _group(model)) if device == "CPU" else {})
    able = _core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    if CAPABILITY[placement.compute] not in able:
        raise ConfigError(
            f"{placement.device} has no {placement.compute} arithmetic",
            hint=f"it has {', '.join(able)}; `auto` takes its best",
        )
    return wanted | {"INFERENCE_PRECISION_HINT": COMPUTE[placement.compute]} | _rounding(device, 0)


def _group(model: ov.Model) -> int:
    """How many activations share a scale: no more than weights do, beside which OpenVINO would round none at all."""
    constants = (node for node in model.get_ops() if node.get_type_name() == "Constant")
    shapes = [node.get_output_shape(0) for node in constants if int(node.get_output_element_type(0).bitwidth) <= 8]
    return min([GROUPS[-1], *(int(shape[2]) for shape in shapes if len(shape) == 3 and shape[2] in GROUPS)])


def _rounding(device: str, group_size: int) -> dict[str, Any]:
    """How many activations share a scale when they are rounded to 8 bits; 0: never. Where a device can be told."""
    name = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
    return {name: group_size} if name in _core().get_property(device, "SUPPORTED_PROPERTIES") else {}


def _cache_properties(model: ov.Model, placement: Placement, cache: CacheType) -> dict[str, Any]:
    device = _their_name(placement.device)
    is_float = placement.compute == "float" or "BF16" not in _core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    if cache == "bf16" and is_float:
        raise ConfigError("a bf16 KV cache needs bf16 arithmetic", hint="choose the f32, u8 or u4 cache")
    if cache == "f32" and not is_float:
        raise ConfigError("an f32 KV cache needs float arithmetic", hint="choose the bf16, u8 or u4 cache")
    wanted: dict[str, Any] = {"KV_CACHE_PRECISION": cache}
    if cache in ("u8", "u4"):
        # by channel, OpenVINO's default, keys would depend on where a prompt was cut into chunks
        wanted["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
    if cache == "u4" and AttentionFacts.read(model).head_dim % U4_GROUP == 0:
        wanted |= {"KEY_CACHE_GROUP_SIZE": U4_GROUP, "VALUE_CACHE_GROUP_SIZE": U4_GROUP}
    return wanted


def _block_shape(port: Any) -> tuple[int, ...]:
    """Shape of one block of one cache, (heads, 32, bytes or numbers a token)."""
    dimensions = list(port.get_partial_shape())[1:]
    if not all(dimension.is_static for dimension in dimensions) or dimensions[1].get_length() < BLOCK_TOKENS:
        shape = port.get_partial_shape()
        raise BackendError(f"{port.get_any_name()} has shape {shape}: not {BLOCK_TOKENS}-token blocks")
    return tuple(dimension.get_length() for dimension in dimensions)


def _reason(error: Exception) -> str:
    """The last lines of an OpenVINO message: the first ones name its own source files."""
    return str(error).strip()[-400:]
