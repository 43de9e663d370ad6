"""Whisper with some of its layers in few bits: fake-quantized, by the package's own quantizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from triptych.compress.awq import Channels, search
from triptych.compress.gptq import factored, gptq
from triptych.compress.rounding import Grid, fake_quantized, fitted
from triptych.compress.smooth import smooth_scales
from triptych.compress.unfold import columns, matrix
from triptych.core.quantized import dequantize

Layer = nn.Linear | nn.Conv1d
Part = Literal["encoder", "decoder", "conv"]
Method = Literal["nearest", "clipped", "awq", "gptq"]
Activations = Literal["float", "static", "dynamic"]
FED_BY_NORM = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "encoder_attn.q_proj", "fc1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Which layers, how their weights, how what they meet. `smooth`: SmoothQuant where a norm feeds the layer."""

    name: str
    part: Part
    bits: int
    group_size: int | None = None
    method: Method = "nearest"
    activations: Activations = "float"
    smooth: bool = False

    @property
    def grid(self) -> Grid:
        return Grid(bits=self.bits, group_size=self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Of one layer's inputs on calibration sound: their products, and the greatest magnitude of each channel."""

    channels: Channels
    peaks: Tensor


def layers(model: nn.Module, part: str) -> dict[str, Layer]:
    """By name: the linear layers of a tower, or the two convolutions before the encoder. The LM head is left out."""
    kind = nn.Conv1d if part == "conv" else nn.Linear
    tower = "model.encoder." if part == "conv" else f"model.{part}."
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kind) and name.startswith(tower)}


def size(model: nn.Module, variant: Variant) -> tuple[float, int]:
    """Bits a weight, scales included, and how many weights that is about."""
    found = [matrix(layer.weight) for layer in layers(model, variant.part).values()]
    bits = sum(fitted(variant.grid, "", weight.shape[1])[0].num_bits(*weight.shape) for weight in found)
    return bits / sum(weight.numel() for weight in found), sum(weight.numel() for weight in found)


def watched(model: nn.Module, run: Callable[[], object]) -> dict[str, Seen]:
    """What each layer meets while `run` uses the model once."""
    found: dict[str, Seen] = {}

    def watch(name: str) -> Callable[[Layer, tuple[Tensor, ...]], None]:
        def hook(layer: Layer, args: tuple[Tensor, ...]) -> None:
            rows = _rows(layer, args[0])
            seen = Seen(channels=Channels.of(rows), peaks=rows.abs().amax(0))
            found[name] = _together(found[name], seen) if name in found else seen

        return hook

    every = [(name, layer) for part in ("encoder", "decoder", "conv") for name, layer in layers(model, part).items()]
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in every]
    run()
    for handle in handles:
        handle.remove()
    return found


@contextmanager
def rounded(model: nn.Module, variant: Variant, seen: Mapping[str, Seen]) -> Iterator[None]:
    """The model is changed within, and as it was afterwards."""
    chosen = layers(model, variant.part)
    before = {name: layer.weight.data for name, layer in chosen.items()}
    scales = _scales(chosen, variant, seen)
    handles = []
    for name, layer in chosen.items():
        layer.weight.data = _weight(layer, scales.get(name), variant, seen[name])
        if variant.activations != "float":
            handles.append(layer.register_forward_pre_hook(_rounding(scales.get(name), variant, seen[name])))
    yield
    for handle in handles:
        handle.remove()
    for name, layer in chosen.items():
        layer.weight.data = before[name]


def _scales(chosen: Mapping[str, Layer], variant: Variant, seen: Mapping[str, Seen]) -> dict[str, Tensor]:
    """Of the layers whose input may be divided, in the norm before them; those that share it share the scales."""
    found: dict[str, Tensor] = {}
    for name in chosen:
        if name in found or not name.endswith(FED_BY_NORM) or not (variant.smooth or variant.method == "awq"):
            continue
        stem = name.removesuffix("q_proj").removesuffix("k_proj").removesuffix("v_proj")
        together = [other for other in chosen if other == name or ("self_attn." in name and other.startswith(stem))]
        together = [other for other in together if other.endswith(FED_BY_NORM)]
        weights = [chosen[other].weight.data for other in together]
        if variant.smooth:
            greatest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
            scales = smooth_scales(seen[name].peaks, greatest)
        else:
            grid = fitted(variant.grid, name, weights[0].shape[1])[0]
            scales = search(weights, seen[name].channels, grid).scales
        found |= dict.fromkeys(together, scales)
    return found


def _weight(layer: Layer, scales: Tensor | None, variant: Variant, seen: Seen) -> Tensor:
    """In f32 what the codes stand for; scaled still where the input is divided in the open (activations in 8 bits)."""
    whole = matrix(layer.weight.data)
    ones = torch.ones(whole.shape[1]) if scales is None else scales
    grid = fitted(variant.grid, "", whole.shape[1])[0]
    gram = seen.channels.gram
    if variant.method == "gptq":
        back = torch.from_numpy(dequantize(gptq(whole, factored(gram), grid)))
    elif variant.method == "awq":
        back = fake_quantized(whole * ones, grid, importance=gram.diagonal() / ones.square())
    else:
        back = fake_quantized(whole * ones, grid, clip=variant.method == "clipped")
    return (back if variant.activations != "float" else back / ones).reshape(layer.weight.shape)


def _rounding(scales: Tensor | None, variant: Variant, seen: Seen) -> Callable[[Layer, tuple[Tensor, ...]], Tensor]:
    """Divide what comes in by `scales` and round it to 8 bits: one step for all, or one for each token."""
    ones = torch.ones_like(seen.peaks) if scales is None else scales
    step = float((seen.peaks / ones).max()) / 127

    def hook(layer: Layer, args: tuple[Tensor, ...]) -> Tensor:
        x = args[0] / ones
        steps = step if variant.activations == "static" else x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (x / steps).round().clamp(-128, 127) * steps

    return hook


def _rows(layer: Layer, x: Tensor) -> Tensor:
    """What the weight's matrix multiplies, (n, width)."""
    if isinstance(layer, nn.Conv1d):
        x = columns(x, layer.weight, stride=layer.stride[0], padding=int(layer.padding[0]))
    return x.reshape(-1, x.shape[-1])


def _together(one: Seen, other: Seen) -> Seen:
    a, b = one.channels, other.channels
    channels = Channels(gram=a.gram + b.gram, total=a.total + b.total, num_tokens=a.num_tokens + b.num_tokens)
    return Seen(channels=channels, peaks=torch.maximum(one.peaks, other.peaks))
