"""One HTML page for a plan, a curve or a saving: figures, plots, assumptions, all on the page itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from triptych.core.device import DeviceSpec, Figure
from triptych.core.plan import Choice, Plan, Prediction, Target
from triptych.core.workload import Workload
from triptych.plan.batch import Found
from triptych.plan.plots import Mark, front, knee, roofline, waterfall
from triptych.plan.points import Point
from triptych.plan.saving import FACTORS, Saving

PAGE = "plan/report.html"  # in the package's data
Rows = Iterable[Sequence[str]]
NAMES = {
    "ttft": "first token", "tpot": "each token after it", "latency": "whole answer", "requests_per_s": "requests",
    "tokens_per_s": "answer tokens", "memory_bytes": "memory", "answers_at_once": "answers at once",
}  # fmt: skip
SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plan_page(plan: Plan, marks: Sequence[Mark] = ()) -> str:
    """marks: a step's parts on the roofline of the first choice's device."""
    best = plan.choices[0]
    parts = [
        _lead(_verdict(plan, best)),
        _facts([_fact(p) for p in best.predictions[:7]]),
        _section("Predicted", _predictions(best.predictions), "Nine of ten measurements should lie between."),
        _section("Which part goes where", _placements(plan)),
    ]
    if len(plan.choices) > 1:
        parts.append(_section("All choices", _choices(plan.choices)))
        options = [mark for mark in map(_option, plan.choices) if mark is not None]
        if len(options) > 1:
            drawing = front(options, "milliseconds a token, of one answer (TPOT)", "tokens a second of a device")
            parts.append(_section("Speed of one answer against all", drawing, "Nothing beats those that are joined."))
    for device in plan.devices:
        own = marks if device.name == best.device else ()
        parts.append(_section(f"The device: {device.name}", _device(device, own)))
    parts.append(_section("The traffic", _traffic(plan.workload, plan.target)))
    parts.append(_section("What this stands on", _list(plan.assumptions)))
    return _page(f"Plan for {plan.model}", parts)


def curve_page(name: str, points: Sequence[Point], found: Found | None) -> str:
    """Runs at rising numbers of callers, and the batch that was found among them."""
    said = "Nothing was asked of it." if found is None else f"{found.batch} at once: {found.reason}."
    likely = [] if found is None else [(f"{found.batch}", f"answers at once, likely {found.least} to {found.most}")]
    parts = [
        _lead(escape(said)),
        _facts(likely),
        _section("By callers", knee(points, None if found is None else found.batch)),
    ]
    if found is not None:
        note = "Nine of ten runs at it should lie between; measured is one run more."
        parts.append(_section("Predicted there", _predictions(found.predictions), note))
    return _page(f"{name}: how many at once", parts)


def saving_page(saving: Saving) -> str:
    """The one number, whether it holds, and where it comes from."""
    complaints = saving.complaints()
    word = "At the same quality and no worse p95." if not complaints else "But: " + "; ".join(complaints) + "."
    plain, ours = saving.baseline, saving.ours
    facts = [
        (
            f"{saving.saved.value:.1%}",
            f"less core-seconds × GB ({saving.saved.lowest:.1%} to {saving.saved.highest:.1%})",
        ),
        (f"{1 - ours.cpu_s.value / plain.cpu_s.value:.1%}", "less core-seconds"),
        (f"{1 - ours.peak_bytes.value / plain.peak_bytes.value:.1%}", "less memory"),
    ]
    if saving.kept is not None:
        between = f"{saving.kept.lowest:.1%} to {saving.kept.highest:.1%}"
        facts.append(
            (f"{saving.kept.value:.1%}", f"of the right answers kept, {saving.num_questions} asked ({between})")
        )
    steps = "Each bar: the factor switched on after those above it, so that together they are the whole saving."
    alone = "What it takes more with this one alone switched off, beside its step in the drawing: factors meet."
    return _page(
        f"What {saving.name} saves",
        [
            _lead(f'<span class="{"bad" if complaints else "good"}">{escape(word)}</span>'),
            _facts(facts),
            _section("Before and after", _table(ENDS, ends(saving))),
            _section("Factor by factor", waterfall(saving.effects, "core-seconds × GB", plain.cost.value), steps),
            _section("Each switched off alone", _table(OFF, switched_off(saving), words=5), alone),
            _section("The traffic", _traffic(saving.workload)),
            _section("What was measured", _list(saving.about)),
        ],
    )


def label(name: str) -> str:
    """A prediction's name as a person says it."""
    of, (stem, _, rank) = name.removeprefix("fleet_"), name.removeprefix("fleet_").rpartition("_")
    said = NAMES.get(of) or (f"{NAMES[stem]}, {rank}" if stem in NAMES else of)
    return f"{said}, simulated" if name.startswith("fleet_") else said


def number(value: float, unit: str) -> str:
    """As a person says it: `1.2 GB`, `35 ms`, `120 tokens/s`."""
    if unit == "s" and value < 1:
        return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"
    if unit in ("B", "bytes", "bytes/s", "B/s", "FLOP/s", "flops"):
        scale, prefix = next(((size, name) for size, name in SCALES if value >= size), (1.0, ""))
        return f"{value / scale:.3g} {prefix}{ {'bytes': 'B', 'bytes/s': 'B/s', 'flops': 'FLOP/s'}.get(unit, unit) }"
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


# ── a plan's parts ─────────────────────────────────────────────────────────────────────────────────────────────────


def _verdict(plan: Plan, best: Choice) -> str:
    where = f"{best.num_devices} × {escape(best.device)}, {best.replicas} × {best.batch} answers at once"
    if best.tensor_parallel > 1:
        where += f", each on {best.tensor_parallel} devices"
    word, kind = ("It fits", "good") if best.fits else ("It does not fit", "bad")
    checked = "" if plan.checked is None else f" Checked: {escape(plan.checked)}."
    return f'<span class="{kind}">{word}</span>: {where}; {escape(best.reason)}.{checked}'


def _fact(one: Prediction) -> tuple[str, str]:
    between = f"{number(one.lowest, one.unit)} to {number(one.highest, one.unit)}"
    return number(one.value, one.unit), f"{label(one.name)} ({between})"


def _predictions(predictions: Sequence[Prediction]) -> str:
    rows = [
        (
            escape(label(one.name)),
            *(number(value, one.unit) for value in (one.value, one.lowest, one.highest)),
            "" if one.measured is None else number(one.measured, one.unit),
            "" if one.error is None else f"{one.error:+.1%}",
        )
        for one in predictions
    ]  # fmt: skip
    shown = 6 if any(one.measured is not None for one in predictions) else 4
    return _table(("", "predicted", "least", "most", "measured", "error")[:shown], (row[:shown] for row in rows))


def _choices(choices: Sequence[Choice]) -> str:
    names = list(dict.fromkeys(p.name for choice in choices for p in choice.predictions))[:5]
    rows = []
    for choice in choices:
        said = {p.name: number(p.value, p.unit) for p in choice.predictions}
        mark = '<b class="good">yes</b>' if choice.fits else '<b class="bad">no</b>'
        together = f" ({choice.tensor_parallel} together)" if choice.tensor_parallel > 1 else ""
        size = f"{choice.num_devices}{together}"
        rows.append((escape(choice.device), size, f"{choice.batch}", *(said.get(name, "–") for name in names), mark,
                     escape(choice.reason)))  # fmt: skip
    head = ("device", "devices", "batch", *(escape(label(name)) for name in names), "fits", "why")
    return _table(head, rows, words=len(head) - 1)


def _placements(plan: Plan) -> str:
    """Of each device's best choice."""
    each = [next((one for one in plan.choices if one.device == device.name), None) for device in plan.devices]
    shown = [choice for choice in each if choice is not None]
    names = list(dict.fromkeys(part for choice in shown for part in choice.placement))
    rows = [
        (escape(choice.device), *(choice.placement.get(name, "–") for name in names), escape(choice.placed))
        for choice in shown
    ]
    return _table(("device", *names, "why"), rows, words=1 + len(names))


def _option(choice: Choice) -> Mark | None:
    values = {one.name: one.value for one in choice.predictions}
    if not {"tpot_p50", "tokens_per_s"} <= values.keys():
        return None
    each = values["tokens_per_s"] / max(choice.num_devices, 1)
    return Mark(name=f"{choice.device}, {choice.batch}", x=1e3 * values["tpot_p50"], y=each)


def _device(device: DeviceSpec, marks: Sequence[Mark]) -> str:
    rows = [(f"{tier.name}, {number(tier.num_bytes, 'B')}", *_spread(tier.bytes_per_s, "B/s")) for tier in device.tiers]
    for name in dict.fromkeys(rate.precision for rate in device.rates):
        own = [rate for rate in device.rates if rate.precision == name]
        few, best = min(own, key=lambda rate: rate.rows), max(own, key=lambda rate: rate.flops.value)
        rows.append((f"{name} weights read, {few.rows} row at once", *_spread(few.weight_bytes_per_s, "B/s")))
        rows.append((f"{name} products, {best.rows} rows at once", *_spread(best.flops, "FLOP/s")))
    rows.append(("launch of an operator", *_spread(device.launch_s, "s")))
    drawing = roofline(device, marks) if device.rates and device.tiers else ""
    about = _list((f"{device.source}, {device.num_cores} cores, {number(device.memory_bytes, 'B')}", *device.notes))
    table = _table(("", "median", "least", "most"), rows)
    return f"{drawing}{about}<details><summary>Its figures</summary>{table}</details>"


def _traffic(workload: Workload, target: Target | None = None) -> str:
    """target: of a plan, which is played at the rate that it asks for, or with every seat taken."""
    rate = (target or Target()).rate(workload)
    callers = f"{workload.concurrency} callers" if target is None else "As many callers as are answered at once"
    by_chance = f"{rate} requests a second, at random (Poisson)"
    how = f"{callers}, each asking again when it was answered" if rate is None else by_chance
    many = f"; {workload.num_requests} requests" if target is None else ""
    rows = [
        (
            escape(kind.name), f"{kind.share:g}", f"{kind.prompt.least}–{kind.prompt.most}",
            f"{kind.answer.least}–{kind.answer.most}", f"{kind.images}",
            "×".join(map(str, kind.image_side)) if kind.images else "", f"{kind.shared_prefix}",
        )
        for kind in workload.kinds
    ]  # fmt: skip
    head = ("kind", "share", "prompt tokens", "answer tokens", "pictures", "pixels", "shared beginning")
    return f"<p>{how}{many}.</p>{_table(head, rows)}"


# ── a saving's parts ───────────────────────────────────────────────────────────────────────────────────────────────


ENDS = ("median (least – most)", "baseline", "ours", "less")
OFF = ("switched off alone", "cost", "core-seconds", "memory", "its step", "switched on")
FIGURES = (
    ("core-seconds × GB", "cost", "s·GB"), ("core-seconds", "cpu_s", "core-s"), ("memory", "peak_bytes", "B"),
    ("wall", "wall_s", "s"), ("p95 to the first token", "ttft_p95_s", "s"),
    ("p95 to the whole answer", "latency_p95_s", "s"),
)  # fmt: skip


def ends(saving: Saving) -> Rows:
    """Rows of `ENDS`: what the two took."""
    for name, key, unit in FIGURES:
        before, now = getattr(saving.baseline, key), getattr(saving.ours, key)
        yield name, _ranged(before, unit), _ranged(now, unit), f"{1 - now.value / before.value:.1%}"


def switched_off(saving: Saving) -> Rows:
    """Rows of `OFF`: each factor."""
    for one in saving.effects:
        shares = (one.cost_off, one.cpu_off, one.memory_off, one.step - 1)
        yield one.name, *(f"{share:+.1%}" for share in shares), FACTORS[one.name]


def _ranged(one: Figure, unit: str) -> str:
    low, high = (number(value, unit) for value in (one.lowest, one.highest))
    return number(one.value, unit) + (f" ({low} – {high})" if one.num_samples > 1 else "")


def _spread(one: Figure, unit: str) -> tuple[str, str, str]:
    return number(one.value, unit), number(one.lowest, unit), number(one.highest, unit)


# ── HTML ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _page(title: str, parts: Sequence[str]) -> str:
    template = Template(files("triptych").joinpath("data", PAGE).read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body="\n".join(parts))


def _lead(html: str) -> str:
    return f'<p class="lead">{html}</p>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return '<div class="facts">' + "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in facts
    ) + "</div>"  # fmt: skip


def _section(title: str, html: str, note: str = "") -> str:
    html = html.replace("<svg", '<div class="wide"><svg', 1).replace("</svg>", "</svg></div>", 1)  # phones scroll it
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(note)}</p>' if note else ''}{html}</section>"


def _table(head: Sequence[str], rows: Rows, *, words: int = -1) -> str:
    """words: the column that holds sentences."""
    heads = "".join(f"<th{' class=words' if i == words else ''}>{name}</th>" for i, name in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=words' if i == words else ''}>{cell}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _list(sentences: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(one)}</li>" for one in sentences) + "</ul>"
