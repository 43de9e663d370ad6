"""Faults to plant into a compiler: each wraps the function that builds a part, and breaks what it builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from openvino import opset13 as op

from triptych.compile import decoder, graph, projector, vit
from triptych.compile.verify import against, served
from triptych.core.quantized import Quantized
from triptych.core.spec import ModelSpec, RopeSpec

Build = Callable[..., Any]  # as parts.build
Plant = Callable[[Build], Build]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fault:
    """part: the subject that must be refused. kind: of the tiny checkpoint. patch: of a module, while all runs."""

    name: str
    part: str
    plant: Plant = lambda build: build
    kind: str = "smolvlm"
    precision: str = "int4"
    patch: Callable[[], Any] = lambda: mock.MagicMock()  # a context manager that does nothing


# ── how a fault is planted ──────────────────────────────────────────────────────────────────────────────────────


def tensors(**edits: Callable[[Array], Array]) -> Plant:
    """Hand the builder other tensors: `vision__post_layernorm__weight` is vision's `post_layernorm.weight`."""
    named = {tuple(key.split("__", 1)): edit for key, edit in edits.items()}

    def plant(build: Build) -> Build:
        def broken(part: str, spec: ModelSpec, weights: Mapping[str, Any], store: Any) -> Any:
            def weight(name: str) -> Array:
                edit = named.get((part, name.replace(".", "__")))
                values: Array = weights[part](name)
                return values if edit is None else edit(values)

            return build(part, spec, {**weights, part: weight}, store)

        return broken

    return plant


def facts(part: str, **changes: Any) -> Plant:
    """Hand the builder another spec of one part."""

    def plant(build: Build) -> Build:
        def broken(name: str, spec: ModelSpec, weights: Any, store: Any) -> Any:
            own = msgspec.structs.replace(getattr(spec, part), **changes)
            return build(name, msgspec.structs.replace(spec, **{part: own}), weights, store)

        return broken

    return plant


def inside(target: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Replace a function that the builders use."""

    def plant(build: Build) -> Build:
        def broken(*arguments: Any) -> Any:
            with mock.patch.object(target, name, make(getattr(target, name))):
                return build(*arguments)

        return broken

    return plant


def patched(target: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, make(getattr(target, name)))


# ── what is broken ──────────────────────────────────────────────────────────────────────────────────────────────


def transposed(values: Array) -> Array:
    assert values.shape[0] == values.shape[1]
    return np.ascontiguousarray(values.T)


def rolled(values: Array) -> Array:
    return np.roll(values, 1, axis=0)


def doubled(values: Array) -> Array:
    return values * 2


def zeroed(values: Array) -> Array:
    return np.zeros_like(values)


def one_row_doubled(values: Array) -> Array:
    out = np.array(values)
    out[3] *= 2
    return out


def two_heads_swapped(values: Array) -> Array:
    """Rows of the first two heads, whose size is 16 in every tiny decoder but one."""
    out = np.array(values)
    out[:16], out[16:32] = values[16:32], values[:16]
    return out


def fourth(edit: Callable[[Quantized], Quantized]) -> Callable[[Any], Any]:
    """Break the fourth weight that is quantized, and no other."""

    def make(quantize: Any) -> Any:
        count = iter(range(1_000_000))

        def broken(*arguments: Any, **settings: Any) -> Quantized:
            held: Quantized = quantize(*arguments, **settings)
            return edit(held) if next(count) == 3 else held

        return broken

    return make


def every(edit: Callable[[Quantized], Quantized]) -> Callable[[Any], Any]:
    def make(quantize: Any) -> Any:
        return lambda *arguments, **settings: edit(quantize(*arguments, **settings))

    return make


def one_scale_doubled(held: Quantized) -> Quantized:
    scales = np.array(held.scales)
    scales[2, -1] *= 2
    return replace(held, scales=scales)


def zero_points_off(held: Quantized) -> Quantized:
    return replace(held, zeros=(held.zeros + 1).clip(max=2**held.bits - 1).astype(np.uint8))


def colours_swapped(normalized: Any) -> Any:
    def broken(pixels: Any, spec: Any) -> Any:
        order = op.constant(np.array([2, 1, 0], np.int64))
        return normalized(op.gather(pixels, order, op.constant(np.int64(3))), spec)

    return broken


def queries_ahead() -> Plant:
    """Queries turn by a position more than keys do."""

    def plant(build: Build) -> Build:
        def broken(*arguments: Any) -> Any:
            true_tables, true_rotate, turns, ahead = decoder.rope_tables, decoder.rotate, iter(range(99)), []

            def rope_tables(position_ids: Any, *rest: Any) -> Any:
                ahead.append(true_tables(op.add(position_ids, op.constant(np.int64(1))), *rest))
                return true_tables(position_ids, *rest)

            def rotate(x: Any, tables: Any) -> Any:
                return true_rotate(x, tables if next(turns) % 2 else ahead[-1])

            with mock.patch.object(decoder, "rope_tables", rope_tables), mock.patch.object(decoder, "rotate", rotate):
                return build(*arguments)

        return broken

    return plant


def heads_reversed(join_heads: Any) -> Any:
    def broken(x: Any, width: int) -> Any:
        num_heads = x.get_output_partial_shape(0)[1].get_length()
        order = op.constant(np.arange(num_heads)[::-1].copy())
        return join_heads(op.gather(x, order, op.constant(np.int64(1))), width)

    return broken


def seeing_ahead(attention: Any) -> Any:
    return lambda heads, **settings: attention(heads)


def high_half_first(pack: Any) -> Any:
    return lambda values: (pack(values) << 4) | (pack(values) >> 4)


def shuffled_otherwise(transpose: Any) -> Any:
    """Pixel shuffle whose squares are read by columns."""
    return lambda x, *order: transpose(x, *((0, 1, 3, 4, 2, 5) if len(order) == 6 else order))


# ── in the form that is served ──────────────────────────────────────────────────────────────────────────────────


def arrays(edit: Callable[[dict[str, Any]], None]) -> Callable[[], Any]:
    """Change what a step hands to the paged decoder."""

    def make(step: Any) -> Any:
        def broken(*arguments: Any) -> dict[str, Any]:
            found = {name: np.array(values) for name, values in step(*arguments).items()}
            edit(found)
            return found

        return broken

    return patched(served, "step", make)


def _later(found: dict[str, Any]) -> Array:
    """Of each token, whether its sequence had tokens before this step."""
    return np.repeat(found["past_lens"], np.diff(found["subsequence_begins"]))


def positions_off(found: dict[str, Any]) -> None:
    found["position_ids"] += _later(found) > 0


def positions_restart(found: dict[str, Any]) -> None:
    found["position_ids"] -= _later(found)


def pages_exchanged(found: dict[str, Any]) -> None:
    begins = found["block_indices_begins"]
    for first, end, past in zip(begins, begins[1:], found["past_lens"], strict=False):
        if end - first > 1 and past > 0:
            pages = found["block_indices"]
            pages[first], pages[first + 1] = pages[first + 1], pages[first]


def past_short(found: dict[str, Any]) -> None:
    found["past_lens"] -= found["past_lens"] > 0


GRAPH = (
    Fault("transposed projector weight", "projector", tensors(projector__linear_2__weight=transposed), kind="llava"),
    Fault(
        "one channel's scale doubled", "vision", inside(graph, "quantize", fourth(one_scale_doubled)), precision="int8"
    ),
    Fault("one group's scale doubled", "vision", inside(graph, "quantize", fourth(one_scale_doubled))),
    Fault("zero points off by one", "vision", inside(graph, "quantize", every(zero_points_off))),
    Fault("halves of a byte exchanged", "vision", inside(graph, "pack_nibbles", high_half_first)),
    Fault("colours swapped", "vision", inside(vit, "normalized", colours_swapped)),
    Fault("patch positions shifted", "vision", tensors(vision__embeddings__position_embedding__weight=rolled)),
    Fault("vision heads reversed", "vision", inside(vit, "join_heads", heads_reversed)),
    Fault("wrong vision norm eps", "vision", facts("vision", norm_eps=1e-3), precision="fp32"),
    Fault("quick_gelu for gelu", "vision", facts("vision", activation="quick_gelu"), precision="fp32"),
    Fault("pixels shuffled otherwise", "projector", inside(projector, "transpose", shuffled_otherwise)),
    Fault("newline row missing", "projector", tensors(projector__newline=zeroed), kind="llava-next"),
    Fault("queries a position ahead", "decoder", queries_ahead()),
    Fault(
        "two query heads swapped", "decoder", tensors(decoder__layers__0__self_attn__q_proj__weight=two_heads_swapped)
    ),
    Fault("decoder heads reversed", "decoder", inside(decoder, "join_heads", heads_reversed)),
    Fault("attention looks ahead", "decoder", inside(decoder, "attention", seeing_ahead)),
    Fault("wrong decoder norm eps", "decoder", facts("decoder", norm_eps=1e-2), precision="fp32"),
    Fault("a norm's scale doubled", "decoder", tensors(decoder__norm__weight=doubled)),
    Fault("last layer dropped", "decoder", facts("decoder", num_layers=1)),
    Fault("pages exchanged", "served", patch=arrays(pages_exchanged)),
    Fault("positions off by one after the first chunk", "served", patch=arrays(positions_off)),
    Fault("positions start again in each chunk", "served", patch=arrays(positions_restart)),
    Fault("the past a token short", "served", patch=arrays(past_short)),
)

REFERENCE = (
    Fault("transposed projector weight", "projector", tensors(projector__linear_2__weight=transposed), kind="llava"),
    Fault("projector's activation", "projector", facts("projector", activation="gelu_tanh"), kind="llava"),
    Fault("newline row missing", "projector", tensors(projector__newline=zeroed), kind="llava-next"),
    Fault("pixels shuffled otherwise", "projector", inside(projector, "transpose", shuffled_otherwise)),
    Fault("colours swapped", "vision", inside(vit, "normalized", colours_swapped)),
    Fault("patch positions shifted", "vision", tensors(vision__embeddings__position_embedding__weight=rolled)),
    Fault(
        "one row of a weight doubled", "vision", tensors(vision__encoder__layers__0__mlp__fc1__weight=one_row_doubled)
    ),
    Fault("vision heads reversed", "vision", inside(vit, "join_heads", heads_reversed)),
    Fault("wrong vision norm eps", "vision", facts("vision", norm_eps=1e-4)),
    Fault("quick_gelu for gelu", "vision", facts("vision", activation="quick_gelu")),
    Fault("the tower's last layer dropped", "vision", facts("vision", num_layers=1)),
    Fault("queries a position ahead", "decoder", queries_ahead()),
    Fault(
        "two query heads swapped", "decoder", tensors(decoder__layers__0__self_attn__q_proj__weight=two_heads_swapped)
    ),
    Fault("decoder heads reversed", "decoder", inside(decoder, "join_heads", heads_reversed)),
    Fault("attention looks ahead", "decoder", inside(decoder, "attention", seeing_ahead)),
    Fault("wrong decoder norm eps", "decoder", facts("decoder", norm_eps=1e-3)),
    Fault("wrong rope theta", "decoder", facts("decoder", rope=RopeSpec(theta=9000.0))),
    Fault("biases of queries and keys left out", "decoder", facts("decoder", qkv_bias=False), kind="llava-qwen2"),
    Fault("last layer dropped", "decoder", facts("decoder", num_layers=1)),
    Fault(
        "colours swapped before the tower",
        "preprocessing",
        patch=patched(against, "prepare", lambda prepare: lambda *a: (prepare(*a)[0][..., ::-1], None)),
    ),
    Fault(
        "tiles in another order",
        "preprocessing",
        patch=patched(against, "prepare", lambda prepare: lambda *a: (np.roll(prepare(*a)[0], 1, axis=0), None)),
    ),
    Fault(
        "a placeholder too few",
        "preprocessing",
        patch=patched(against, "prompt_ids", lambda ids: lambda *a: ids(*a)[1:]),
    ),
)
