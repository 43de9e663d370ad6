"""Plots of reports as SVG that takes the page's colours: roofline, knee, front, waterfall."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triptych.core.device import DeviceSpec
from triptych.core.spec import Fact
from triptych.plan.extra import extra
from triptych.plan.pareto import nondominated
from triptych.plan.points import Point
from triptych.plan.saving import Effect

# What is drawn in the colour on the left takes the page's variable on the right.
COLOURS = {
    "#010101": "--ink", "#020202": "--soft", "#030303": "--rule", "#040404": "--card",
    "#110101": "--one", "#120101": "--two", "#130101": "--three", "#140101": "--four",
}  # fmt: skip
INK, SOFT, RULE, CARD, ONE, TWO, THREE, FOUR = COLOURS
NEAR = 1.1  # roofs so near to one another are drawn as one
DECADE = 10  # beyond such a range an axis is logarithmic
NAMED = 6  # points of a front, at most
WIDTH, HEIGHT = 6.2, 3.9  # inches of 100 units
STYLE = {
    "font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "triptych",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": RULE, "axes.labelcolor": SOFT,
    "axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.6, "axes.axisbelow": True, "xtick.color": RULE,
    "ytick.color": RULE, "xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT, "text.color": INK,
    "axes.facecolor": "none", "figure.facecolor": "none", "legend.frameon": False, "legend.labelcolor": SOFT,
    "lines.linewidth": 1.8,
}  # fmt: skip


class Mark(Fact, frozen=True, kw_only=True):
    """A named point. On a roofline x: operations a byte, y: operations a second."""

    name: str
    x: float
    y: float


def drawn(draw: Callable[[Any], None], *, height: float = HEIGHT) -> str:
    """One `<svg>` of what `draw` does to a matplotlib figure. Raises ConfigError without matplotlib."""
    matplotlib, canvases = extra("matplotlib"), extra("matplotlib.figure")
    with matplotlib.rc_context(STYLE):
        canvas, out = canvases.Figure(figsize=(WIDTH, height), layout="constrained"), io.StringIO()
        draw(canvas)
        canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"|^<svg', r"<svg \1", svg, count=1)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    return re.sub(r"font: ?([^;\"]*?)(['\"]?[A-Z][^;\"]*)?sans-serif", r"font: \1 system-ui, sans-serif", svg)


def roofline(device: DeviceSpec, marks: Sequence[Mark] = ()) -> str:
    """What each memory and each precision allow, and where the parts of a step lie (Williams et al., 2009)."""
    best = _roofs(device)
    xs = np.logspace(-1, 4, 200)

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        for tier, colour in zip(device.tiers[::-1], (ONE, TWO, THREE, FOUR), strict=False):
            ys = np.minimum(xs * tier.bytes_per_s.value, max(best.values()))
            axes.plot(xs, ys, color=colour, label=f"{tier.name}, {tier.bytes_per_s.value / 1e9:,.0f} GB/s")
        for name, flops in best.items():
            axes.axhline(flops, color=SOFT, linewidth=0.8, linestyle=(0, (2, 3)))
            axes.text(xs[0], flops, f"{name} {flops / 1e9:,.0f} G/s", va="bottom", color=SOFT, fontsize=9)
        for mark in marks:
            axes.plot(mark.x, mark.y, "o", color=INK, markersize=5)
            axes.annotate(mark.name, (mark.x, mark.y), xytext=(6, -3), textcoords="offset points", fontsize=9)
        axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="operations a second")
        axes.legend(loc="lower right")

    return drawn(draw)


def knee(points: Sequence[Point], chosen: int | None = None) -> str:
    """Measured runs: answer tokens a second, and latencies, by callers at once. chosen: the batch a plan took."""
    callers = sorted({point.concurrency for point in points})
    runs = {count: [point for point in points if point.concurrency == count] for count in callers}

    def curve(axes: Any, read: Callable[[Point], float], name: str, colour: str) -> None:
        values = [[read(point) for point in runs[count]] for count in callers]
        middle = [float(np.median(one)) for one in values]
        low, high = ([abs(m - end(one)) for m, one in zip(middle, values, strict=True)] for end in (min, max))
        axes.errorbar(callers, middle, yerr=(low, high), color=colour, marker="o", markersize=4, capsize=2, label=name)

    def draw(canvas: Any) -> None:
        above, below = canvas.subplots(2, 1, sharex=True)
        curve(above, lambda point: point.tokens_per_s, "tokens a second", ONE)
        above.set(ylabel="tokens a second", ylim=(0, None))
        for name, colour in (("p50", ONE), ("p95", TWO), ("p99", THREE)):
            curve(below, lambda point, name=name: getattr(point.latency, name), name, colour)  # type: ignore[misc]
        below.set(xlabel="callers at once", ylabel="seconds an answer", ylim=(0, None), xscale="log")
        below.set_xticks(callers, [f"{count}" for count in callers], minor=False)
        below.minorticks_off()
        for axes in (above, below):
            if chosen is not None:
                axes.axvline(chosen, color=INK, linewidth=1, linestyle=(0, (2, 3)))
        below.legend(loc="upper left", ncols=3)

    return drawn(draw, height=5.0)


def front(marks: Sequence[Mark], xlabel: str, ylabel: str) -> str:
    """Options of which x is to be small and y large; those that nothing beats in both are joined and named."""
    kept = nondominated([(mark.x, -mark.y) for mark in marks])
    best = sorted((mark for mark, is_kept in zip(marks, kept, strict=True) if is_kept), key=lambda mark: mark.x)

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        axes.plot([m.x for m in marks], [m.y for m in marks], "o", color=SOFT, markersize=4, alpha=0.6, label="beaten")
        axes.step([m.x for m in best], [m.y for m in best], where="post", color=ONE, linewidth=1.2)
        axes.plot([m.x for m in best], [m.y for m in best], "o", color=ONE, markersize=6, label="on the front")
        for mark in best[:: -(-len(best) // NAMED) or 1]:
            axes.annotate(mark.name, (mark.x, mark.y), xytext=(7, -11), textcoords="offset points", fontsize=9)
        axes.set(xlabel=xlabel, ylabel=ylabel, yscale="log")
        if max(m.x for m in marks) > DECADE * min(m.x for m in marks):
            axes.set_xscale("log")
        axes.margins(x=0.18, y=0.14)
        axes.legend(loc="best")

    return drawn(draw)


def waterfall(effects: Sequence[Effect], unit: str, first: float) -> str:
    """From the baseline's cost, `first`, to ours; each factor's bar is what it takes away, or adds."""
    names = ["baseline", *(effect.name for effect in effects), "ours"]
    levels = first * np.cumprod([1.0, *(effect.step for effect in effects)])

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        rows = range(len(names))
        axes.barh(0, first, color=SOFT, height=0.66)
        for row, (before, after) in enumerate(zip(levels, levels[1:], strict=False), 1):
            axes.barh(row, abs(before - after), left=min(before, after), color=THREE if after <= before else TWO,
                      height=0.66)  # fmt: skip
            axes.plot([before, before], [row - 1.33, row + 0.33], color=RULE, linewidth=1)
            axes.text(max(before, after) + 0.01 * first, row, f"{after / before - 1:+.1%}", va="center", fontsize=9)
        axes.barh(len(effects) + 1, levels[-1], color=ONE, height=0.66)
        for row, value in ((0, first), (len(effects) + 1, levels[-1])):
            axes.text(value + 0.01 * first, row, f"{value:.3g}", va="center", fontsize=9)
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=unit, xlim=(0, 1.12 * max(levels)))

    return drawn(draw, height=0.8 + 0.34 * len(names))


def _roofs(device: DeviceSpec) -> dict[str, float]:
    """The most operations a second of each precision; those within a tenth of one another under one name."""
    best: dict[str, float] = {}
    for rate in device.rates:
        best[rate.precision] = max(best.get(rate.precision, 0.0), rate.flops.value)
    found: list[tuple[str, float]] = []
    for name, flops in sorted(best.items(), key=lambda one: one[1]):
        if found and flops < NEAR * found[-1][1]:
            found[-1] = (f"{found[-1][0]}, {name}", flops)
        else:
            found.append((name, flops))
    return dict(found)
