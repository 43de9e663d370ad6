"""What an analysis found, and the page that draws it."""

from __future__ import annotations

from importlib.resources import files

import msgspec

from triptych.compress.attention import LayerAttention
from triptych.compress.prediction import KeepPoint, Prediction, verdict
from triptych.core.spec import Fact

PAGE, SLOT = "analysis/page.html", "/*ANALYSIS*/"  # in the package's data; where its JSON goes


class PartBytes(Fact, frozen=True, kw_only=True):
    name: str
    precision: str
    num_parameters: int
    num_bytes: int


class Sensitivity(Fact, frozen=True, kw_only=True):
    """The loss with this alone rounded to nearest. layer: "" for the whole part. divergence: mean KL, nats a token."""

    part: str
    layer: str
    bits: int
    divergence: float
    same_top: float


class Glance(Fact, frozen=True, kw_only=True):
    """A sample to look at. shares: a layer's attention to each media token, of a text row's whole.

    tiles: RGB in base64, `side` pixels square. places: of each media token the tile and the cell on a grid of `grid` a
    side; empty where tokens have no place in the picture. words: the nearest word to each token's row, or "".
    """

    sample: str
    side: int
    tiles: tuple[str, ...]
    grid: int
    places: tuple[tuple[int, int], ...]
    words: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]


class Analysis(Fact, frozen=True, kw_only=True):
    name: str
    fed: str  # the samples, in words
    method: str  # of the reduction whose loss was measured
    parts: tuple[PartBytes, ...]
    sensitivities: tuple[Sensitivity, ...]
    layers: tuple[LayerAttention, ...]  # means of the samples with media, or of all where none has any
    proposed: float | None  # share of media tokens that is enough for nine samples of ten, as attention has it
    points: tuple[KeepPoint, ...]
    predictions: tuple[Prediction, ...]
    glances: tuple[Glance, ...]


def page(analysis: Analysis) -> str:
    """One HTML file that needs nothing else; its JSON lies in it, and its own script draws it."""
    template = files("triptych").joinpath("data", PAGE).read_text(encoding="utf-8")
    content = msgspec.to_builtins(analysis) | {"verdict": verdict(analysis.predictions)}
    data = msgspec.json.encode(content).decode().replace("<", "\\u003c")  # or a name could end the script
    return template.replace(SLOT, data)
