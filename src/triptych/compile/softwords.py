"""A projector that speaks: a caption in soft rows of the decoder's own embedding table.

features (N, cells, 320 + 3) f32 → embeddings (N, tokens_out, hidden) f32, always in this order:

    kind | before_count | count | before_colour | colour | before_names | name , name , name , name | end

Slots look at the cells where an object is; the tower's head features there name it. A photograph is named by the
tower's own ImageNet classes instead, once. Each name has its fixed places; what is not there is a learned pad.
The plain twin is `recipes/mini/model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as op

from triptych.compile.graph import (
    Array,
    Store,
    Value,
    Weight,
    activation,
    attention,
    constant,
    join_heads,
    layer_norm,
    named,
    parameter,
    reshape,
    split_heads,
)
from triptych.core.quantized import plain
from triptych.core.spec import ProjectorSpec, VisionSpec
from triptych.errors import CheckpointError

HEADS = 4
LAYERS = 2
COLOURS = 3  # numbers at the end of each cell
EPS = 1e-5
ROWS = ("before_count", "before_colour", "before_names", "end", "pad")  # learned
WORDS = ("kinds", "counts", "colours", "joiner")  # rows of the decoder's table
NAMES = ("concepts", "classes")  # (names, places, hidden + 1): rows of the table, and 1 where a place is taken


def names() -> tuple[str, ...]:
    """Every tensor that `build` asks for."""
    linear = ["slots.enter", "slots.point", "slots.place", "slots.present", "slots.colour_up", "slots.colour_down"]
    linear += ["names.probe", "names.up", "names.down", "head", "imagenet", "photo"]
    norms = ["slots.norm", "slots.cells_norm", "slots.slots_norm", "names.norm"]
    for kind, attends in (("encoder", ("attend",)), ("decoder", ("attend", "look"))):
        for block in (f"slots.{kind}.{index}" for index in range(LAYERS)):
            linear += [f"{block}.{attend}.{part}" for attend in attends for part in ("query", "key", "value", "out")]
            linear += [f"{block}.up", f"{block}.down"]
            norms += [f"{block}.norm{place}" for place in ((1, 3) if kind == "encoder" else (1, 2, 3))]
    pairs = [f"{name}.{kind}" for name in (*linear, *norms) for kind in ("weight", "bias")]
    tables = [f"rows.{name}" for name in ROWS] + [f"words.{name}" for name in (*WORDS, *NAMES)]
    return (*pairs, *tables, "slots.position", "slots.queries", "groups", "sharpness")


def build(spec: ProjectorSpec, vision: VisionSpec, weight: Weight, store: Store) -> ov.Model:
    """The projector's graph; `weight` gives a tensor by a name of `names`. Raises CheckpointError on a wrong shape."""
    features = parameter("features", [-1, vision.num_tokens, vision.hidden], ov.Type.f32)
    trunk, colours = _split(features, [vision.hidden - COLOURS, COLOURS], 2)
    words = _Words(weight=weight, store=store)
    slots = words.slots(trunk, colours, vision.num_tokens)
    caption = words.caption(trunk, slots)
    if caption.get_output_partial_shape(0)[1].get_length() != spec.num_tokens:
        raise CheckpointError(f"the caption has {caption.get_output_partial_shape(0)[1]} places, not {spec.num_tokens}")
    return ov.Model([op.result(named(caption, "embeddings"))], [features], "projector")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """attention (N, slots, cells) of the objects; present (N, slots) and colour (N, colours): logits."""

    attention: Value
    present: Value
    colour: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Builds one step after another."""

    weight: Weight
    store: Store

    def slots(self, trunk: Value, colours: Value, num_cells: int) -> _Slots:
        """Where objects are and what colour is behind them."""
        queries = self.table("slots.queries")
        count, width = queries.shape
        cells = self.linear(op.concat([self.norm(trunk, "slots.norm"), colours], 2), "slots.enter")
        cells = op.add(cells, self.store.small(self.table("slots.position")[None]))
        for index in range(LAYERS):
            cells = self.block(cells, f"slots.encoder.{index}", None)
        cells = self.norm(cells, "slots.cells_norm")
        x = op.add(self.store.small(queries[None]), _zero_of(cells))
        for index in range(LAYERS):
            x = self.block(x, f"slots.decoder.{index}", cells)
        x = self.norm(x, "slots.slots_norm")
        logits = op.matmul(self.linear(x, "slots.point"), self.linear(cells, "slots.place"), False, True)
        look = op.softmax(_times(logits, width**-0.5), 2)
        objects, behind = _split(look, [count - 1, 1], 1)
        seen, _ = _split(x, [count - 1, 1], 1)
        shade = reshape(op.matmul(behind, colours, False, False), 0, COLOURS)
        colour = self.linear(activation(self.linear(shade, "slots.colour_up"), "gelu"), "slots.colour_down")
        return _Slots(
            attention=objects, present=reshape(self.linear(seen, "slots.present"), 0, count - 1), colour=colour
        )

    def block(self, x: Value, name: str, cells: Value | None) -> Value:
        """Attention among x, then over the cells where given, then an MLP; each on a normed copy and added."""
        normed = self.norm(x, f"{name}.norm1")
        x = op.add(x, self.attend(normed, normed, f"{name}.attend"))
        if cells is not None:
            x = op.add(x, self.attend(self.norm(x, f"{name}.norm2"), cells, f"{name}.look"))
        y = activation(self.linear(self.norm(x, f"{name}.norm3"), f"{name}.up"), "gelu")
        return op.add(x, self.linear(y, f"{name}.down"))

    def attend(self, x: Value, memory: Value, name: str) -> Value:
        width = self.weight(f"{name}.out.weight").shape[0]
        pairs = ((x, "query"), (memory, "key"), (memory, "value"))
        query, key, value = (split_heads(self.linear(y, f"{name}.{part}"), HEADS, width // HEADS) for y, part in pairs)
        return self.linear(join_heads(attention((query, key, value)), width), f"{name}.out")

    def caption(self, trunk: Value, slots: _Slots) -> Value:
        """Everything said, at its place."""
        name, kind, yes, shade = (float(value) for value in self.table("sharpness"))
        cells = activation(self.linear(trunk, "head"), "relu6")
        whole = op.reduce_mean(cells, _first(), False)
        photo = op.sigmoid(_times(self.linear(whole, "photo"), yes))  # (N, 1)
        drawn = _minus_from_one(photo)
        best = op.reduce_max(slots.present, _first(), True)
        present = op.subtract(slots.present, op.minimum(_plus(best, -0.5), constant(np.float32(0))))
        present = op.sigmoid(_times(present, yes))
        first = np.zeros((1, slots.present.get_output_partial_shape(0)[1].get_length()), np.float32)
        first[0, 0] = 1
        filled = op.add(op.multiply(drawn, present), op.multiply(photo, constant(first)))
        pooled = op.matmul(slots.attention, cells, False, False)
        objects = self.spelled(op.softmax(_times(self.named(pooled), name), 2), "concepts")
        shown = self.spelled(reshape(self.classes(whole, kind), 0, 1, -1), "classes")
        only_first = constant(first.reshape(1, -1, 1, 1))
        said = op.add(
            op.multiply(objects, reshape(drawn, 0, 1, 1, 1)),
            op.multiply(op.multiply(shown, only_first), reshape(photo, 0, 1, 1, 1)),
        )
        colour = op.softmax(_times(slots.colour, shade), 1)
        kinds, colours = op.concat([drawn, photo], 1), op.concat([op.multiply(colour, drawn), photo], 1)
        shares = (kinds, self.count(present, drawn, photo), colours)
        return self.typeset(said, reshape(filled, 0, -1, 1, 1), shares)

    def named(self, pooled: Value) -> Value:
        """Concept logits of pooled head features: a linear probe and a small MLP beside it."""
        x = self.norm(pooled, "names.norm")
        y = activation(self.linear(x, "names.up"), "gelu")
        return op.add(self.linear(x, "names.probe"), self.linear(y, "names.down"))

    def classes(self, whole: Value, sharpness: float) -> Value:
        """Shares of class names, (N, names): ImageNet classes of one name are added, then the shares sharpened."""
        groups = self.table("groups")
        belongs = np.zeros((len(self.table("words.classes")), len(groups)), np.float32)
        belongs[groups, np.arange(len(groups))] = 1
        shares = op.matmul(op.softmax(self.linear(whole, "imagenet"), 1), self.store.small(belongs), False, True)
        return op.softmax(_times(op.log(_plus(shares, 1e-6)), sharpness), 1)

    def count(self, present: Value, drawn: Value, photo: Value) -> Value:
        """Shares of the count words, (N, words); the last is «unknown»."""
        most = present.get_output_partial_shape(0)[1].get_length()
        number = op.clamp(op.reduce_sum(present, _first(), True), 1.0, float(most))
        away = op.abs(op.subtract(number, constant(np.arange(1, most + 1, dtype=np.float32)[None])))
        shares = op.relu(op.subtract(constant(np.float32(1)), away))
        return op.concat([op.multiply(shares, drawn), photo], 1)

    def spelled(self, shares: Value, name: str) -> Value:
        """Shares of names (N, rows, names) as words (N, rows, places, hidden + 1)."""
        table = self.table(f"words.{name}")
        count, places, width = table.shape
        flat = np.ascontiguousarray(table.reshape(count, places * width).T)
        return reshape(self.store.linear(shares, f"words.{name}", flat), 0, 0, places, width)

    def typeset(self, said: Value, filled: Value, shares: tuple[Value, Value, Value]) -> Value:
        """Names with their joiners and pads between the learned rows, and the words for kind, count and colour."""
        hidden = said.get_output_partial_shape(0)[3].get_length() - 1
        words, full = _split(said, [hidden, 1], 3)
        pad = self.store.small(self.table("rows.pad").reshape(1, 1, 1, hidden))
        joiner = self.store.small(self.table("words.joiner").reshape(1, 1, 1, hidden))
        places = op.multiply(words, filled)
        places = op.add(places, op.multiply(pad, _minus_from_one(op.multiply(full, filled))))
        joined = op.add(op.multiply(joiner, filled), op.multiply(pad, _minus_from_one(filled)))
        line = reshape(op.concat([joined, places], 2), 0, -1, hidden)
        line = op.slice(line, *(constant(np.array([value], np.int64)) for value in (1, 2**31 - 1, 1, 1)))
        nothing = _zero_of(line)
        fixed = {name: op.add(self.store.small(self.table(f"rows.{name}")[None]), nothing) for name in ROWS[:-1]}
        kind, count, colour = (
            reshape(op.matmul(share, self.store.small(self.table(f"words.{name}")), False, False), 0, 1, hidden)
            for share, name in zip(shares, WORDS, strict=False)
        )
        parts = [kind, fixed["before_count"], count, fixed["before_colour"], colour, fixed["before_names"]]
        return op.concat([*parts, line, fixed["end"]], 1)

    def table(self, name: str) -> Array:
        return plain(self.weight(name))

    def norm(self, x: Value, name: str) -> Value:
        scale, bias = (self.store.small(self.weight(f"{name}.{kind}"), f"{name}.{kind}") for kind in ("weight", "bias"))
        return layer_norm(x, scale, bias, EPS)

    def linear(self, x: Value, name: str) -> Value:
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        if len(weight.shape) != 2 or bias.shape != weight.shape[:1]:
            raise CheckpointError(
                f"projector {name}: weight {weight.shape} and bias {bias.shape} do not belong together"
            )
        return self.store.linear(x, name, weight, bias)


def _split(x: Value, sizes: list[int], axis: int) -> list[Value]:
    lengths = constant(np.array(sizes, np.int64))
    return list(op.variadic_split(x, constant(np.int64(axis)), lengths).outputs())


def _first() -> Value:
    """The axis after the samples'."""
    return constant(np.array([1], np.int64))


def _times(x: Value, factor: float) -> Value:
    return op.multiply(x, constant(np.float32(factor)))


def _plus(x: Value, term: float) -> Value:
    return op.add(x, constant(np.float32(term)))


def _minus_from_one(x: Value) -> Value:
    return op.subtract(constant(np.float32(1)), x)


def _zero_of(x: Value) -> Value:
    """(N, 1, 1) zeros, one a sample of x (N, T, width): what spreads a constant over the samples."""
    number = op.gather(op.shape_of(x), constant(np.array([0], np.int64)), constant(np.int64(0)))
    return op.broadcast(constant(np.float32(0)), op.concat([number, constant(np.array([1, 1], np.int64))], 0))
