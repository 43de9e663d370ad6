"""How little four and a half bits can cost: our quantizers on SmolLM2 off its grid, one after another.

usage: python bench/decoder_w4.py [--windows 16] [--only NAME …] [--json bench/results/decoder_w4.json] [--save FOLDER]

Bits are those of the decoder's linears, scales and zero points included; embedding and head stay as they are, for us
and for llama.cpp's files, whose weights are read and multiplied in f32: the figures are the weights' loss alone.
Calibration: what the model itself says. Loss: KL divergence on held-out text that people wrote (`texts.py`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from record import Measure, record, write  # noqa: E402
from torch_llama import NUM_LAYERS, Llama  # noqa: E402

from triptych.compress.bits import allocate  # noqa: E402
from triptych.compress.gptq import Effort, aimed, gptq  # noqa: E402
from triptych.compress.rounding import Grid, round_weight  # noqa: E402
from triptych.core.quantized import Quantized, dequantize, plain  # noqa: E402

MODELS = ROOT / "bench" / ".rivals" / "models"
FOLDER = MODELS / "smollm2-dithered-hf"
BUDGET = 4.6  # bits a weight, where none is asked for
SYMMETRIC, MIXED = Grid(bits=4, group_size=32), Grid(bits=4, group_size=64, symmetric=False)
# Error beside 4 bits in groups of 64, measured on two layers: how costs at one width are carried to others.
ERRORS = {3: 4.09, 4: 1.0, 5: 0.239, 6: 0.0579, 8: 0.0037}
UNITS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # what other runtimes fuse shares one width
CHUNK = 8  # windows at a time
HEAVIEST = 20.0  # of a token's weight beside the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    """importance: of each linear's output tokens, mean squared gradient over its mean (windows, T). costs: what 4 bits
    cost, half the mean squared product of gradient and error: the KL divergence's second-order part."""

    importance: dict[str, Any]
    costs: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to round. GPTQ takes layers in turn: each sees what those before it left. aims: at what was meant."""

    name: str
    grid: Grid
    round: str = "gptq"  # nearest (no clipping), clipped, gptq
    rounds: int = 1
    aims: bool = False
    felt: float = 0.0  # share of the tokens' weight that follows the gradient
    widths: bool = False
    budget: float = BUDGET


WAYS = (
    Way(name="nearest, symmetric 32", grid=SYMMETRIC, round="nearest"),
    Way(name="clipped, symmetric 32", grid=SYMMETRIC, round="clipped"),
    Way(name="GPTQ as published, symmetric 32", grid=SYMMETRIC, rounds=0),
    Way(name="GPTQ polished, symmetric 32", grid=SYMMETRIC),
    Way(name="GPTQ polished, asymmetric 64, widths by loss", grid=MIXED, widths=True),
    Way(name="and aimed", grid=MIXED, aims=True, widths=True),
    Way(name="and tokens by gradient", grid=MIXED, aims=True, felt=0.5, widths=True),
)


def feel(llama: Llama, windows: Any) -> Felt:
    """One backward pass a window, of the cross-entropy of what the model said itself: its own Fisher information."""
    squares: dict[str, list[Any]] = {name: [] for name in llama.names()}
    grams: dict[str, Any] = dict.fromkeys(squares, 0)
    kept: dict[str, list[tuple[Any, Any]]] = {name: [] for name in squares}
    for index, ids in enumerate(windows):
        print(f"  window {index} felt", flush=True)
        tapped = _Tapped(llama)
        logits = tapped.logits(ids[None])[0, :-1]
        functional.cross_entropy(logits, ids[1:], reduction="sum").backward()
        for name, (x, y) in tapped.seen.items():
            gradient = y.grad[0]
            square = gradient.square().mean(-1)
            squares[name].append(square)
            grams[name] = grams[name] + (x * square[:, None]).T @ x
            if index < 2:
                kept[name].append((x, gradient))
    costs = {}
    for name, pairs in kept.items():
        weight = llama.weights[name]
        nearest = round_weight(weight, MIXED, importance=grams[name].diagonal())
        lost = torch.from_numpy(dequantize(nearest)) - weight
        felt = [((x @ lost.T) * gradient).sum(-1).square() for x, gradient in pairs]
        costs[name] = float(torch.cat(felt).mean()) / 2
    stacked = {name: torch.stack(found) for name, found in squares.items()}
    return Felt(importance={name: found / found.mean() for name, found in stacked.items()}, costs=costs)


class _Tapped(Llama):
    """Remembers each linear's input and output, whose gradient is kept."""

    def __init__(self, llama: Llama) -> None:
        self.__dict__ = dict(llama.__dict__)
        self.seen: dict[str, tuple[Any, Any]] = {}

    def embed(self, ids: Any) -> Any:
        return super().embed(ids).clone().requires_grad_(True)

    def linear(self, x: Any, name: str) -> Any:
        y = super().linear(x, name)
        y.retain_grad()
        self.seen[name] = (x.detach()[0], y)
        return y


def allotted(llama: Llama, felt: Felt, budget: float) -> dict[str, Grid]:
    """Widths within the budget, one for linears that other runtimes fuse."""
    units = {
        f"{layer}.{'+'.join(unit)}": [name for name in llama.names() if _is_of(name, layer, unit)]
        for layer in range(NUM_LAYERS)
        for unit in UNITS
    }
    costs = {u: {b: sum(felt.costs[n] for n in names) * e for b, e in ERRORS.items()} for u, names in units.items()}
    sizes = {
        u: {b: sum(replace(MIXED, bits=b).num_bits(*llama.weights[n].shape) for n in names) for b in ERRORS}
        for u, names in units.items()
    }
    total = sum(llama.weights[name].numel() for name in llama.names())
    chosen = allocate(costs, sizes, int(budget * total))
    print(Counter((unit.split(".")[1], bits) for unit, bits in chosen.items()), flush=True)
    return {name: replace(MIXED, bits=bits) for unit, bits in chosen.items() for name in units[unit]}


def _is_of(name: str, layer: int, unit: Sequence[str]) -> bool:
    return name.startswith(f"layers.{layer}.") and name.rpartition(".")[2].removesuffix("_proj") in unit


Streams = tuple[list[Any], list[Any]]  # as it should be, and as it has become; by chunk of windows


@dataclass(slots=True)
class Turn:
    """Layer after layer: `true` is what it should be given, `left` what those before it, rounded, leave it."""

    llama: Llama
    rounded: Llama
    way: Way
    grids: Mapping[str, Grid]
    weights: Mapping[str, Any]  # of tokens, by linear; empty: all alike
    found: dict[str, Quantized]

    def layer(self, layer: int, true: list[Any], left: list[Any]) -> Streams:
        prefix = f"layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        xs, ys = self._both(lambda model, x: model.norm(x, f"{prefix}.input_layernorm"), true, left)
        self._round([f"{attention}.{name}_proj" for name in "qkv"], xs, ys)
        xs, ys = self._both(lambda model, x: model.attend(x, layer), xs, ys)
        self._round([f"{attention}.o_proj"], xs, ys, (true, left))
        true, left = self._added(f"{attention}.o_proj", (true, left), (xs, ys))
        xs, ys = self._both(lambda model, x: model.norm(x, f"{prefix}.post_attention_layernorm"), true, left)
        self._round([f"{mlp}.gate_proj", f"{mlp}.up_proj"], xs, ys)
        xs, ys = self._both(lambda model, x: model.gated(x, layer), xs, ys)
        self._round([f"{mlp}.down_proj"], xs, ys, (true, left))
        return self._added(f"{mlp}.down_proj", (true, left), (xs, ys))

    def _added(self, name: str, streams: Streams, inputs: Streams) -> Streams:
        left = [x + self.rounded.linear(y, name) for x, y in zip(streams[1], inputs[1], strict=True)]
        if not self.way.aims:
            return left, left
        return [x + self.llama.linear(y, name) for x, y in zip(streams[0], inputs[0], strict=True)], left

    def _both(self, step: Callable[[Llama, Any], Any], xs: list[Any], ys: list[Any]) -> Streams:
        """Without an aim the true stream is not needed, and is not computed."""
        left = [step(self.rounded, y) for y in ys]
        return [step(self.llama, x) for x in xs] if self.way.aims else left, left

    def _round(
        self, names: Sequence[str], xs: list[Any], ys: list[Any], added: tuple[list[Any], list[Any]] | None = None
    ) -> None:
        """`added`: the streams that the products are added to, whose difference is made good as well."""
        for name in names:
            weight = self.llama.weights[name]
            gram, missed = torch.zeros(2 * [weight.shape[1]]), torch.zeros(weight.shape)
            for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
                heavy = y * (self.weights[name][index][..., None] if name in self.weights else tempered(y))
                gram += heavy.flatten(0, 1).T @ y.flatten(0, 1)
                if self.way.aims:
                    gone = functional.linear(x - y, weight)
                    gone = gone if added is None else gone + added[0][index] - added[1][index]
                    missed += gone.flatten(0, 1).T @ heavy.flatten(0, 1)
            aim = aimed(weight, gram, missed) if self.way.aims else weight
            self.found[name] = gptq(aim, gram, self.grids[name], Effort(rounds=self.way.rounds))
            self.rounded.weights[name] = torch.from_numpy(dequantize(self.found[name]))


def tempered(x: Any) -> Any:
    """A token's weight, (…, 1): one that is far longer than the median, as those that attention sinks into, counts by
    its direction alone; else a handful of them would be all that a gram sees."""
    square = x.square().mean(-1, keepdim=True)
    return 1 / (1 + square / square.median())


def rounded(llama: Llama, way: Way, windows: Any, felt: Felt | None) -> dict[str, Quantized]:
    """Every linear, the way it is said."""
    grids = dict.fromkeys(llama.names(), way.grid)
    if way.round != "gptq":
        clip = way.round == "clipped"
        return {name: round_weight(llama.weights[name], way.grid, clip=clip) for name in grids}
    weights: dict[str, Any] = {}
    if felt is not None:
        grids = allotted(llama, felt, way.budget) if way.widths else grids
        for name, found in felt.importance.items() if way.felt else ():
            heavy = found.clamp(max=HEAVIEST)
            weights[name] = (way.felt * heavy / heavy.mean() + 1 - way.felt).split(CHUNK)
    other = llama.copy()
    turn = Turn(llama=llama, rounded=other, way=way, grids=grids, weights=weights, found={})
    true = [llama.embed(ids) for ids in windows.split(CHUNK)]
    left = list(true)
    for layer in range(NUM_LAYERS):
        true, left = turn.layer(layer, true, left)
        print(f"  layer {layer}", flush=True)
    return turn.found


def save(found: Mapping[str, Quantized], target: Path, way: Way) -> None:
    """The folder, which `triptych compile` and transformers open; embedding, head and norms stay as they are."""
    from triptych.compile.checkpoint import Checkpoint
    from triptych.compress.write import Beside, Source, write_checkpoint
    from triptych.core.bundle import Compression, Step

    checkpoint = Checkpoint.open(FOLDER)
    source = Source(folder=FOLDER, config=checkpoint.config, tensors=checkpoint.tensors)
    step = Step(stage="compress", version="bench/decoder_w4.py", inputs_digest="", outputs_digest="")
    changes = {"decoder": {f"model.{name}.weight": held for name, held in found.items()}}
    write_checkpoint(source, target, changes, Beside(compression=Compression(recipe=way.name, step=step)))


def losses(llama: Llama, other: Llama, windows: Any) -> dict[str, Any]:
    """KL divergence of each position, and whether the likeliest token stays."""
    klds, same = [], []
    for ids in windows:
        right, found = (torch.log_softmax(model.logits(ids[None])[0], -1) for model in (llama, other))
        klds.append((right.exp() * (right - found)).sum(-1))
        same.append(right.argmax(-1) == found.argmax(-1))
    return {"kld": torch.stack(klds), "same": torch.stack(same)}


def llama_cpp(llama: Llama, path: Path) -> tuple[Llama, float]:
    """llama.cpp's file as weights, embedding and head left exact, and its bits a weight of the linears."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    from triptych.compile.gguf import GgufFile

    file, other, num_bits, numel = GgufFile(path), llama.copy(), 0.0, 0
    for name, tensor in file.tensors.items():
        own = name.removeprefix("model.").removesuffix(".weight")
        if own in llama.names():
            values = np.array(plain(file.read(tensor)), np.float32)
            size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
            num_bits += values.size / size * block_bytes * 8
            numel += values.size
            other.weights[own] = torch.from_numpy(values)
    return other, num_bits / numel


def measures(subject: str, bits: float, found: Mapping[str, Any]) -> list[Measure]:
    """The mean's extremes are those of windows: texts differ more than quantizers."""
    by_window = found["kld"].mean(1)
    values = {
        "bits a weight": (bits, "bit", (bits, bits)),
        "KL divergence, mean": (float(found["kld"].mean()), "nat", (float(by_window.min()), float(by_window.max()))),
        "KL divergence, 99 %": (float(found["kld"].flatten().quantile(0.99)), "nat", None),
        "same likeliest token": (100 * float(found["same"].float().mean()), "%", None),
    }
    count = len(by_window)
    return [
        Measure(name=name, subject=subject, unit=unit, value=value, lowest=(span or (value,))[0],
                highest=(span or (value,))[-1], num_samples=count)
        for name, (value, unit, span) in values.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16, help="of calibration, 512 tokens each")
    parser.add_argument("--budget", type=float, default=BUDGET, help="bits a weight, where widths are chosen")
    parser.add_argument("--docs", type=int, default=0, help="of them, windows of numpy's docstrings")
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--only", nargs="*", help="begin of the names of ways to take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", type=Path, help="the last way's weights, as a folder in compressed-tensors' format")
    asked = parser.parse_args()
    llama = Llama(FOLDER)
    windows = _calibration(asked.windows, asked.docs)
    held = torch.from_numpy(np.load(FOLDER / "held_out.npy")).long()
    held = held[:: max(1, len(held) // asked.held_out)]
    done: list[Measure] = []
    every = [replace(way, budget=asked.budget) for way in WAYS]
    ways = [way for way in every if not asked.only or way.name.startswith(tuple(asked.only))]
    felt = _felt(llama, windows, ways)
    with torch.no_grad():
        for way in ways:
            started = time.perf_counter()
            found = rounded(llama, way, windows, felt)
            other = llama.copy()
            other.weights |= {name: torch.from_numpy(dequantize(each)) for name, each in found.items()}
            bits = sum(each.num_bits for each in found.values()) / sum(each.codes.size for each in found.values())
            done += measures(way.name, bits, losses(llama, other, held))
            if asked.save:
                save(found, asked.save, way)
            _tell(done[-4:], time.perf_counter() - started)
        for kind in ("q4_k_m", "q4_0") if not asked.only or "llama.cpp" in asked.only else ():
            other, bits = llama_cpp(llama, MODELS / f"smollm2-dithered-{kind}.gguf")
            done += measures(f"llama.cpp {kind.upper()}", bits, losses(llama, other, held))
            _tell(done[-4:], 0.0)
    if asked.json:
        settings = {"calibration_windows": len(windows), "of_docstrings": asked.docs, "held_out_windows": len(held)}
        write(asked.json, record("decoder_w4", done, settings=settings))


def _calibration(num_windows: int, num_docs: int) -> Any:
    said, docs = (np.load(FOLDER / f"{name}.npy") for name in ("calibration", "docs"))
    return torch.from_numpy(np.concatenate([said[: num_windows - num_docs], docs[:num_docs]])).long()


def _felt(llama: Llama, windows: Any, ways: Sequence[Way]) -> Felt | None:
    """On a few windows where it only sets widths, on all where it weighs tokens."""
    if not any(way.widths for way in ways):
        return None
    return feel(llama, windows if any(way.felt for way in ways) else windows[[0, -1]])


def _tell(found: Sequence[Measure], seconds: float) -> None:
    print(
        found[0].subject,
        *(f"{each.name} {each.value:.4f}" for each in found),
        f"{seconds:.0f} s",
        sep=" · ",
        flush=True,
    )


if __name__ == "__main__":
    main()
