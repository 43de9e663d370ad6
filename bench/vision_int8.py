"""How much faster a vision encoder is in static int8 than in f32, and how near: ViT-B/16, and triptych-mini's tower.

usage: python bench/vision_int8.py [--only vit|mini] [--rounds 7] [--batch 8] [--operators] [--json OUT]

Weights a scale a channel, inputs a scale a matrix by the greatest value seen on other pictures than those that are
compared. The ViT has random weights: its speed is a real one, its likeness is not. All forms in turn, in one process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import record
from openvino import opset13 as op
from rich.console import Console

from triptych.backends import ov as backend
from triptych.backends.base import Executable, Placement
from triptych.compile import conv, vit
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import family_of
from triptych.compile.graph import Store, Weight
from triptych.compile.mini import assemble
from triptych.compile.verify.metrics import likeness
from triptych.core.quantized import Held, Quantized, plain
from triptych.core.spec import VisionSpec

VIT = VisionSpec(
    kind="vit", image_size=224, num_tokens=196, hidden=768, patch=16, num_layers=12, num_heads=12, intermediate=3072,
    activation="gelu_tanh", post_norm=True, mean=(0.5,) * 3, std=(0.5,) * 3,
)  # fmt: skip
TARGETS = {"vit": 2.5, "mini": 1.5}
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Watch(Store):
    """A store that remembers what meets each weight."""

    def __init__(self) -> None:
        super().__init__("fp32")
        self.inputs: dict[str, Any] = {}
        self._x: Any = None

    def met(self, x: Any, weight: Held) -> Any:
        self._x = x
        return x

    def weight(self, name: str, weight: Held, *, least_bits: int = 4) -> Any:
        self.inputs[name] = self._x
        return super().weight(name, weight, least_bits=least_bits)

    def small(self, values: Held, name: str | None = None) -> Any:
        if name is not None and name.endswith("depthwise.weight"):
            self.inputs[name.removesuffix(".weight")] = self._x
        return super().small(values, name)


def greatest(spec: VisionSpec, weight: Weight, pixels: Pixels) -> dict[str, float]:
    """Of each weight, the greatest of the numbers that it meets."""
    watch = Watch()
    model = build(spec, weight, watch)
    axes = lambda x: op.constant(np.arange(len(x.get_output_partial_shape(0)), dtype=np.int64))  # noqa: E731
    tops = [op.result(op.reduce_max(op.abs(x), axes(x), False)) for x in watch.inputs.values()]
    found = ov.Core().compile_model(ov.Model(tops, model.get_parameters(), "watch"), "CPU")(pixels)
    return {name: float(found[index]) for index, name in enumerate(watch.inputs)}


def rounded(values: np.ndarray[Any, Any], top: float) -> Quantized:
    """Symmetric, 8 bits, a scale a row: the plain rounding."""
    rows = values.reshape(len(values), -1).astype(np.float32)
    scales = np.maximum(np.abs(rows).max(1, keepdims=True) / 127, 1e-12)
    codes = np.clip(np.rint(rows / scales), -128, 127) + 128
    return Quantized(
        bits=8,
        codes=codes.astype(np.uint8)[:, None],
        scales=scales[..., None].astype(np.float32),
        zeros=np.full((len(rows), 1, 1), 128, np.uint8),
        shape=values.shape,
        input_scale=top / 127,
    )


def in_int8(spec: VisionSpec, weight: Weight, pixels: Pixels, *, inputs: bool = True) -> Weight:
    """The same weights, each that multiplies in 8 bits."""
    tops = greatest(spec, weight, pixels)

    def held(name: str) -> Held:
        values = plain(weight(name))
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or module not in tops:
            return values
        made = rounded(values, tops[module])
        return made if inputs else replace(made, input_scale=None)

    return held


def build(spec: VisionSpec, weight: Weight, store: Store) -> ov.Model:
    return (conv if spec.kind == "conv" else vit).build(spec, weight, store)


def random_vit(seed: int = 0) -> Weight:
    """Weights of a trained one's sizes: its norms hold the numbers in bounds."""
    rng = np.random.default_rng(seed)
    shapes = {"patch_embedding.weight": (768, 3, 16, 16), "position_embedding.weight": (196, 768)}
    shapes |= {"fc1.weight": (3072, 768), "fc2.weight": (768, 3072), "fc1.bias": (3072,)}
    kept: dict[str, Any] = {}

    def weight(name: str) -> Any:
        if name not in kept:
            tail = ".".join(name.split(".")[-2:])
            square = (768, 768) if tail.endswith("_proj.weight") else (768,)
            shape = shapes.get(tail, square)
            is_norm = "norm" in tail and tail.endswith("weight")
            drawn = rng.standard_normal(shape, dtype=np.float32)
            kept[name] = np.ones(shape, np.float32) if is_norm else drawn / np.float32(np.prod(shape[1:]) ** 0.5 + 20)
        return kept[name]

    return weight


def mini() -> tuple[VisionSpec, Weight]:
    checkpoint = Checkpoint.open(assemble(Path.home() / ".cache" / "triptych"))
    family = family_of(checkpoint)
    spec = family.read_spec(checkpoint)
    assert spec.vision is not None
    return spec.vision, family.weights(checkpoint, spec)["vision"]


def opened(spec: VisionSpec, weight: Weight, store: Store, place: Placement, folder: Path) -> Executable:
    path = folder / f"{len(list(folder.iterdir()))}.xml"
    ov.save_model(build(spec, weight, store), path, compress_to_fp16=False)
    return backend.open_part(path, place)


def pictures(spec: VisionSpec, count: int, seed: int) -> Pixels:
    """Smooth blotches: what a camera gives is smooth, too."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (count, 8, 8, 3)).astype(np.float32)
    ticks = np.linspace(0, 7, spec.image_size)
    low, share = np.floor(ticks).astype(int), (ticks % 1)[:, None, None]
    high = np.minimum(low + 1, 7)
    down = coarse[:, low] * (1 - share) + coarse[:, high] * share
    across = down[:, :, low] * (1 - share[:, 0]) + down[:, :, high] * share[:, 0]
    return across.astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    measures, targets = [], []
    for name in [asked.only] if asked.only else list(TARGETS):
        found, target = measured(name, asked)
        measures += found
        targets.append(target)
    if asked.json:
        settings = {"rounds": asked.rounds, "batch": asked.batch}
        record.write(asked.json, record.record("vision_int8", measures, targets, settings))


def measured(name: str, asked: argparse.Namespace) -> tuple[list[record.Measure], record.Target]:
    spec, weight = (VIT, random_vit()) if name == "vit" else mini()
    calibration, shown = pictures(spec, 8, 1), pictures(spec, asked.batch, 2)
    held = in_int8(spec, weight, calibration)
    exact, device = Placement(compute="float", num_threads=2), Placement(num_threads=2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        forms = {
            "f32": opened(spec, weight, Store("fp32"), exact, folder),
            "bf16": opened(spec, weight, Store("fp32"), device, folder),
            "int8 weights": opened(spec, weight, Store("int8"), device, folder),
            "int8 static": opened(spec, held, Store("stored"), device, folder),
        }
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        outputs = {form: part({"pixels": shown})["features"] for form, part in forms.items()}
        for _ in range(asked.rounds):
            for form, part in forms.items():
                started = time.perf_counter()
                part({"pixels": shown})
                seconds[form].append(time.perf_counter() - started)
        if asked.operators:
            tell_operators(spec, held)
    return told(name, asked.batch, seconds, outputs)


def told(
    name: str, batch: int, seconds: dict[str, list[float]], outputs: dict[str, Any]
) -> tuple[list[record.Measure], record.Target]:
    console, measures = Console(), []
    for form, taken in seconds.items():
        speed = record.measure(f"{name} images", form, "images/s", [batch / one for one in taken])
        near = likeness(outputs["f32"], outputs[form])
        measures.append(speed)
        for what, value in (("cosine", near.cosine), ("sqnr", near.sqnr_db)):
            measures.append(record.measure(f"{name} {what}", form, "dB" if what == "sqnr" else "1", [value]))
        console.print(f"{name} {form}: {speed.value:.1f} images/s, cosine {near.cosine:.5f}, {near.sqnr_db:.1f} dB")
    ratios = [slow / fast for slow, fast in zip(seconds["f32"], seconds["int8 static"], strict=True)]
    ratio = record.measure("", "", "", ratios)
    console.print(f"{name}: int8 static is {ratio.value:.2f} times f32 ({ratio.lowest:.2f} … {ratio.highest:.2f})")
    target = record.Target(
        name=f"{name}: static int8 over f32, images/s", value=ratio.value, unit="×", at_least=TARGETS[name],
        lowest=ratio.lowest, highest=ratio.highest,
    )  # fmt: skip
    return measures, target


def tell_operators(spec: VisionSpec, weight: Weight) -> None:
    """What the plugin ran, by kind and arithmetic."""
    compiled = ov.Core().compile_model(
        build(spec, weight, Store("stored")), "CPU", {"PERF_COUNT": True, "INFERENCE_NUM_THREADS": 2}
    )
    request = compiled.create_infer_request()
    for _ in range(2):
        request.infer([pictures(spec, 8, 2)])
    spent: Counter[str] = Counter()
    for info in request.profiling_info:
        spent[f"{info.node_type} {info.exec_type}"] += info.real_time.total_seconds()
    for kind, seconds in spent.most_common(16):
        print(f"{1000 * seconds:8.2f} ms  {kind}")


if __name__ == "__main__":
    main()
