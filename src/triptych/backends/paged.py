"""Swap a decoder's plain attention for OpenVINO's paged operator.

`_PagedAttentionExtension` is a private name of OpenVINO: its 28 inputs are those of the pinned version
(docs/decisions/0002), and a model that holds it cannot be saved. So it is put in when a decoder is opened.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import openvino as ov
from openvino import opset13 as op

from triptych.errors import BackendError, BundleError

Role = Literal["query", "key", "value", "mixed"]

PINNED = "2026.4.1"
RT_INFO = "triptych_attention"
HEADS: tuple[Role, ...] = ("query", "key", "value")
WATCHED = "watched"
CACHE_NAMES = ("key_cache.", "value_cache.")
BY_LAYER = ("past_lens", "block_indices")  # inputs that a layered decoder has once a layer


def node_name(layer: int, role: Role) -> str:
    """The name of a layer's rotated queries (T, heads * head_dim), keys, values, or attention output."""
    return f"layers.{layer}.{role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """What the operator must be told; kept in the model's own run-time info."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int  # 0: all earlier tokens

    def write(self, model: ov.Model) -> None:
        for name, value in asdict(self).items():
            model.set_rt_info(str(value), [RT_INFO, name])

    @classmethod
    def read(cls, model: ov.Model) -> AttentionFacts:
        """Raises BundleError on a model that is not one of our decoders."""
        if not model.has_rt_info([RT_INFO, "num_layers"]):
            raise BundleError("this model has no attention facts: it is not a decoder that triptych compiled")
        return cls(**{name: int(model.get_rt_info([RT_INFO, name]).astype(str)) for name in cls.__slots__})


def make_paged(model: ov.Model, *, layered: bool = False) -> AttentionFacts:
    """Replace every attention in place; adds the inputs of `backends/base.PagedDecoder` and two caches a layer.

    layered: each layer has lengths and a block table of its own, e.g. `past_lens.3` and `block_indices.3`.
    Raises BackendError when this OpenVINO's operator is not the pinned one's.
    """
    facts = AttentionFacts.read(model)
    values = _values(model)
    control, constants = _control_inputs(), _constants(facts)
    added = [node for name, node in control.items() if not (layered and name in BY_LAYER)]
    try:
        from openvino.op import _PagedAttentionExtension as PagedAttention

        for layer in range(facts.num_layers):
            caches = [_cache(f"{kind}_cache.{layer}", kind, facts) for kind in ("key", "value")]
            added += caches
            if layered:
                control |= {name: _parameter(f"{name}.{layer}", [-1], ov.Type.i32) for name in BY_LAYER}
                added += [control[name] for name in BY_LAYER]
            heads = [values[node_name(layer, role)] for role in HEADS]
            others = [node.output(0) for node in (*caches, *_rest(control, constants))]
            paged = PagedAttention([*heads, *others])
            _tell(paged, facts)
            for target in values[node_name(layer, "mixed")].get_target_inputs():
                target.replace_source_output(paged.output(0))
        model.add_parameters(added)
        model.validate_nodes_and_infer_types()
    except (ImportError, TypeError, RuntimeError) as error:
        raise BackendError(
            f"OpenVINO {ov.__version__} refused our use of its paged attention: {str(error).strip()[-300:]}",
            hint=f"triptych is written for OpenVINO {PINNED} exactly (installed: {version('openvino')})",
        ) from error
    return facts


def show_queries(model: ov.Model) -> None:
    """Give out each layer's rotated queries of the rows `watched` (W,), under their node's name."""
    values = _values(model)
    watched = _parameter(WATCHED, [-1], ov.Type.i64)
    for layer in range(AttentionFacts.read(model).num_layers):
        query = values[node_name(layer, "query")]
        query.set_names(set())
        shown = op.gather(query, watched, op.constant(np.int64(0)))
        shown.output(0).set_names({node_name(layer, "query")})
        model.add_results([op.result(shown.output(0))])
    model.add_parameters([watched])


def _values(model: ov.Model) -> dict[str, Any]:
    """Every value that has a name: an output that a node of that name has, or shares with others."""
    outputs = (output for node in model.get_ordered_ops() for output in node.outputs())
    return {name: output for output in outputs for name in output.get_names()}


def _control_inputs() -> dict[str, Any]:
    """Who computes how many tokens on which blocks, in the operator's order."""
    vectors = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    inputs = {name: _parameter(name, [-1], ov.Type.i32) for name in vectors}
    return inputs | {"max_context_len": _parameter("max_context_len", [], ov.Type.i32)}


def _rest(control: dict[str, Any], constants: list[Any]) -> list[Any]:
    """Inputs 5 to 27: three constants stand between those that change from step to step, the others after them."""
    vectors = (node for name, node in control.items() if name != "max_context_len")
    return [*vectors, *constants[:3], control["max_context_len"], *constants[3:]]


def _constants(facts: AttentionFacts) -> list[Any]:
    """Of all layers: OpenVINO compiles the faster the fewer nodes it finds. What serving does not use is empty."""
    no_floats, no_ints, no_bytes = (_empty(kind) for kind in (np.float32, np.int32, np.uint8))
    zero = op.constant(np.int32(0))
    return [
        op.constant(np.float32(facts.head_dim**-0.5)),  # scale
        op.constant(np.int32(facts.sliding_window)),
        no_floats,  # alibi slopes
        no_ints,  # score aggregation windows
        no_ints,  # rotated block indices
        op.constant(np.zeros([0, 1], np.int32)),  # rotation deltas
        op.constant(np.zeros([0, 1], np.float32)),  # rotation trig table
        no_floats,  # xattention threshold
        zero,  # xattention block size
        zero,  # xattention stride
        no_floats,  # sinks
        zero,  # adaptive rkv start size
        no_ints,  # adaptive rkv evictable sizes
        no_ints,  # adaptive rkv diversity blocks
        no_ints,  # adaptive rkv diversity block begins
        no_ints,  # token type ids
        no_bytes,  # qq bias
        no_ints,  # qq bias begins
    ]


def _cache(name: str, kind: str, facts: AttentionFacts) -> Any:
    node = _parameter(name, [-1, -1, -1, -1], ov.Type.dynamic)
    info = node.get_rt_info()
    info[f"num_{kind[0]}_heads"] = facts.num_kv_heads
    info[f"{kind[0]}_head_size"] = facts.head_dim
    return node


def _tell(paged: Any, facts: AttentionFacts) -> None:
    info = paged.get_rt_info()
    for kind in ("k", "v"):
        info[f"num_{kind}_heads"] = facts.num_kv_heads
        info[f"{kind}_head_size"] = facts.head_dim


def _parameter(name: str, shape: list[int], dtype: Any) -> Any:
    node = op.parameter(shape, dtype, name=name)
    node.output(0).set_names({name})
    return node


def _empty(kind: Any) -> Any:
    return op.constant(np.zeros([0], kind))
