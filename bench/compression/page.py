"""The report: one self-contained page with the verdicts, the plots and every row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from compression.cells import BASELINES, EVICTIONS, NEVER, PLAIN, RECIPES, REDUCTIONS, REFERENCE, WHOLE, Cell
from compression.plots import Axis, Point, Series, chart

STYLE = """
:root{color-scheme:light dark;--fore:#1f2328;--back:#fff;--soft:#57606a;--line:#d8dee4;--band:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--fore:#e6edf3;--back:#0d1117;--soft:#9198a1;--line:#30363d;--band:#161b22}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fore);background:var(--back);margin:2rem auto;
max-width:1320px;padding:0 1rem}
h1{font-size:1.7rem;margin:0 0 .2rem}h2{font-size:1.15rem;margin:2.2rem 0 .4rem}p{max-width:76ch;margin:.4rem 0}
.about{color:var(--soft)}.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(500px,1fr));gap:1.2rem 2rem}
figure{margin:0}figcaption{font-weight:600;margin:.4rem 0}.chart svg{width:100%;height:auto}
.grid{stroke:var(--line)}.whisker{stroke-width:1.5;opacity:.55}text{fill:var(--fore);font:11px system-ui,sans-serif}
text.title{fill:var(--soft);font-size:12px}
.keys span{display:inline-block;margin-right:1rem;font-size:13px;color:var(--soft)}
.keys i{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.4em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600;vertical-align:bottom}th:first-child,td:first-child{text-align:left}
tr:nth-child(even) td{background:var(--band)}.met{color:#1a7f37;font-weight:600}.missed{color:#d1242f;font-weight:600}
small{color:var(--soft)}
"""
Rows = Iterable[Iterable[str]]


def page(content: Mapping[str, Any]) -> str:
    """The whole page as HTML."""
    machine, settings = content["machine"], content["settings"]
    about = (
        f"{escape(machine['cpu'])}, {machine['cores']} cores · {content['when'][:16].replace('T', ' ')} UTC · commit "
        f"{content['commit'][:10]} · questions {settings['tasks']} · {settings['rounds']} interleaved rounds of times, "
        f"the machine {settings['busy_before']:.0%} busy before"
    )
    by_name = {row["cell"]: row for row in content["cells"]}
    sections = [
        ("What was promised", _verdicts(content["targets"])),
        ("At a glance", f'<div class="charts">{_charts(content, by_name)}</div>'),
        ("Right answers of every cell", HOW + _cells(content["cells"])),
        ("Divergence from fp32", LOSSES + _losses(content["cells"])),
        ("Times", TIMES + _speeds(content["cells"])),
        ("The bare decoder, off its 4-bit grid", DECODERS + _decoders(content["decoders"])),
        ("How many conversations fit", CAPACITY + _capacity(content["capacity"])),
        ("By kind of question", KINDS + _kinds(content["kinds"])),
        ("Left out", _missing(settings["missing"])),
    ]
    body = "".join(f"<h2>{title}</h2>{text}" for title, text in sections)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Triptych: compression</title><style>{STYLE}</style><h1>Compression, measured</h1>"
        f'<p class="about">{about}</p><p>{escape(settings.get("remark", ""))}</p>{body}</html>\n'
    )


HOW = """<p>Recipe · visual tokens · KV cache · eviction. Answers are greedy, shares stand with Wilson's 95 % interval;
<em>kept</em> is the ratio to fp32's right answers with a paired bootstrap over pictures and whole conversations;
<em>flips</em> is the share of verdicts that changed either way; <em>kept of itself</em> is the ratio to the same recipe
and cache with nothing left out.</p>"""
LOSSES = """<p>KL(fp32 ‖ cell) in nats a token, mean and 99th percentile, and how often both have the same top token: on
fp32's own greedy answers, forced through the served path (scheduler, paged cache, reduction and eviction as in
service).</p>"""
TIMES = """<p>Medians over the rounds, each round a process of its own, on pictures that no cache has seen: time to
the first token of a prompt with one picture and of a long conversation, split into encoder, selector and prefill;
then tokens a second.</p>"""
DECODERS = """<p>SmolLM2-135M with one quantization step of noise on every weight, since the published file already
lies on a 4-bit grid. The same held-out text and the same function for all. Bits are of the whole file (scales, zero
points, embedding and head) over the parameters, and of the layers alone where the head is known to be int8.
llama.cpp's K-quants need widths that 256 divides; at 576 they fall back to larger types.</p>"""
CAPACITY = """<p>Thirty long conversations sent at once into one fixed cache, 96 tokens of answer each.</p>"""
KINDS = """<p>Right answers of all. Kinds in grey are those that fp32 itself answers less than half rightly: they
count for nothing above.</p>"""


# ── plots ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _charts(content: Mapping[str, Any], by_name: Mapping[str, Any]) -> str:
    figures = [
        ("Accuracy against bytes on disk", _by_bytes(by_name)),
        ("Divergence against bits a weight: the dithered decoder", _by_bits(content["decoders"])),
        ("Accuracy against kept visual tokens", _by_kept(by_name)),
        ("Long conversations: accuracy against bytes of KV cache", _by_cache(by_name)),
    ]
    return "".join(f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in figures)


def _point(x: float, verdict: Mapping[str, Any], label: str = "") -> Point:
    share = 100 * verdict["right"] / verdict["total"]
    return Point(x=x, y=share, low=100 * verdict["low"], high=100 * verdict["high"], label=label)


def _by_bytes(by_name: Mapping[str, Any]) -> str:
    points = []
    for recipe in RECIPES:
        row = by_name.get((REFERENCE if recipe == REFERENCE.recipe else Cell(recipe=recipe)).name)
        if row:
            points.append(_point(row["disk_bytes"] / 1e6, row["accuracy"]["all"], recipe))
    return chart(
        [Series(name="recipes", points=points)], Axis(title="MB on disk"), Axis(title="right answers", unit=" %")
    )


def _by_bits(found: list[Mapping[str, Any]]) -> str:
    by_maker: dict[str, list[Point]] = {}
    for each in found:
        if each["mean"] < 1e-5:  # unrounded
            continue
        maker, _, kind = each["name"].partition(" ")
        kind, _, is_alone = kind.partition(", ")
        name = f"{maker}, weights alone" if is_alone else f"{maker} as it runs"
        by_maker.setdefault(name, []).append(Point(x=each["bits"], y=each["mean"], label=kind))
    series = [Series(name=maker, points=points) for maker, points in by_maker.items()]
    return chart(series, Axis(title="bits a weight, all told"), Axis(title="mean KL divergence, nats", is_log=True))


def _by_kept(by_name: Mapping[str, Any]) -> str:
    series = []
    for method in REDUCTIONS:
        points = []
        for keep in ("0.33", "0.5"):
            row = by_name.get(Cell(recipe=PLAIN, reduce=f"{method}:{keep}").name)
            if row:
                share = 100 * row["accuracy"]["single"]["right"] / row["accuracy"]["single"]["total"]
                points.append(Point(x=100 * float(keep), y=share))
        whole = by_name.get(Cell(recipe=PLAIN).name)
        if whole and points:
            verdict = whole["accuracy"]["single"]
            points.append(Point(x=100.0, y=100 * verdict["right"] / verdict["total"]))
        series.append(Series(name=method + (" (baseline)" if method in BASELINES else ""), points=points, is_line=True))
    return chart(
        series, Axis(title="visual tokens kept", unit=" %", high=105.0), Axis(title="right answers", unit=" %")
    )


def _by_cache(by_name: Mapping[str, Any]) -> str:
    series: dict[str, list[Point]] = {"no eviction": []}
    for row in by_name.values():
        if row["recipe"] != PLAIN or row["reduce"] != WHOLE or "long" not in row["accuracy"]:
            continue
        method, _, budget = row["evict"].partition(":")
        size = row["token_bytes"] * (float(budget) if budget else 1.0) / 1e3
        name = "no eviction" if row["evict"] == NEVER else method
        label = row["cache"] if row["evict"] == NEVER or row["cache"] != "u8" else ""
        series.setdefault(name, []).append(_point(size, row["accuracy"]["long"], label))
    order = ["no eviction", *EVICTIONS]
    listed = [Series(name=name, points=series[name], is_line=name != order[0]) for name in order if name in series]
    return chart(listed, Axis(title="kB of cache for each token of a prompt"), Axis(title="right answers", unit=" %"))


# ── tables ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(head: Iterable[str], rows: Rows) -> str:
    first = "".join(f"<th>{cell}" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}" for row in rows)
    return f'<div class="wide"><table><tr>{first}{body}</table></div>'


def _verdicts(aims: list[Mapping[str, Any]]) -> str:
    rows = []
    for aim in aims:
        bound = f"≥ {aim['at_least']:g}" if aim["at_least"] is not None else f"≤ {aim['at_most']:g}"
        spread = f" <small>({aim['lowest']:.1f}–{aim['highest']:.1f})</small>" if aim["lowest"] is not None else ""
        word = '<span class="met">met</span>' if aim["is_met"] else '<span class="missed">missed</span>'
        rows.append([escape(aim["name"]), bound, f"{aim['value']:.3g} {aim['unit']}{spread}", word])
    return _table(["", "wanted", "measured", ""], rows)


def _share(verdict: Mapping[str, Any] | None) -> list[str]:
    if not verdict:
        return ["–"] * 3
    share = f"{verdict['right'] / verdict['total']:.1%} <small>{verdict['low']:.0%}–{verdict['high']:.0%}</small>"
    kept = f"{verdict['retention']:.1%} <small>{verdict['retention_low']:.0%}–{verdict['retention_high']:.0%}</small>"
    return [share, kept, f"{verdict['flips']:.1%}"]


def _loss(spread: Mapping[str, Any] | None) -> list[str]:
    return ["–"] * 3 if not spread else [f"{spread['mean']:.4f}", f"{spread['p99']:.3f}", f"{spread['same_top']:.1%}"]


def _cells(rows: list[Mapping[str, Any]]) -> str:
    names = {"single": "one picture", "long": "long talk"}
    head = ["cell", "MB on disk", "decoder bits"]
    head += [f"{each}<br><small>{words}</small>" for words in names.values() for each in ("right", "kept", "flips")]
    head += ["kept of itself<br><small>one picture</small>", "kept of itself<br><small>long talk</small>"]
    body = []
    for row in rows:
        cells = [escape(row["cell"]), f"{row['disk_bytes'] / 1e6:,.0f}", f"{row['parts']['decoder']['bits']:.2f}"]
        cells += [cell for name in names for cell in _share(row["accuracy"].get(name))]
        body.append(cells + [_share((row["of_plain"] or {}).get(name))[1] for name in names])
    return _table(head, body)


def _losses(rows: list[Mapping[str, Any]]) -> str:
    names = {"single": "one picture", "long": "long talk", "text": "text alone"}
    head = [f"{each}<br><small>{words}</small>" for words in names.values() for each in ("KLD", "99 %", "same top")]
    body = [[escape(row["cell"]), *(cell for name in names for cell in _loss(row["kld"].get(name)))] for row in rows]
    return _table(["cell", *head], body)


def _speeds(rows: list[Mapping[str, Any]]) -> str:
    stages = ("TTFT", "encode", "reduce", "prefill")
    head = ["cell", *(f"{stage}<br><small>{what}, ms</small>" for what in ("1 picture", "many") for stage in stages)]
    head += ["1 answer<br><small>tokens/s</small>", "8 answers<br><small>tokens/s</small>", "peak<br><small>MB</small>"]
    body = []
    for row in rows:
        if not row["speed"]:
            continue
        figures = row["speed"]["figures"]
        cells = [escape(row["cell"])]
        cells += [_ms(figures[f"{what}, {stage}"]) for what in ("1 picture", "many") for stage in stages]
        cells += [f"{figures[f'decode {batch}']['value']:,.0f}" for batch in (1, 8)]
        body.append([*cells, f"{row['speed']['memory_bytes'] / 1e6:,.0f}"])
    return _table(head, body) if body else "<p>Not measured.</p>"


def _ms(figure: Mapping[str, Any]) -> str:
    scale = 1000.0
    low, value, high = (figure[name] * scale for name in ("lowest", "value", "highest"))
    return f"{value:,.1f} <small>{low:,.0f}–{high:,.0f}</small>" if value >= 10 else f"{value:,.2f}"


def _decoders(found: list[Mapping[str, Any]]) -> str:
    rows = [
        [
            escape(each["name"]),
            f"{each['bits']:.2f}",
            _bits(each["layer_bits"]),
            *_loss(each),
            f"{each['median']:.4f}",
            escape(each["remark"]),
        ]
        for each in sorted(found, key=lambda each: each["bits"])
    ]
    return (
        _table(["", "bits", "of layers", "KLD", "99 %", "same top", "median", ""], rows)
        if rows
        else "<p>Not measured.</p>"
    )


def _bits(bits: float | None) -> str:
    return "–" if bits is None else f"{bits:.2f}"


def _capacity(found: list[Mapping[str, Any]]) -> str:
    rows = [
        [escape(each["cell"]), f"{each['cache_bytes'] / 1e6:,.0f}", f"{each['at_once']:.0f}",
         f"{each['mean_at_once']:.1f}",
         f"{each['tokens_per_s']:,.0f}", f"{each['decode_tokens_per_s']:,.0f}", f"{each['preemptions']:.0f}"]
        for each in found
    ]  # fmt: skip
    head = ["cell", "MB of cache", "at once, most", "mean", "tokens/s, prompts and all", "while decoding", "preempted"]
    return _table(head, rows) if rows else "<p>Not measured.</p>"


def _kinds(found: list[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys((each["set"], each["split"], each["kind"], each["counts"]) for each in found))
    cells: dict[str, dict[Any, str]] = {}
    for each in found:
        key = (each["set"], each["split"], each["kind"], each["counts"])
        cells.setdefault(each["cell"], {})[key] = f"{each['right']}/{each['of']}"
    head = [
        "cell",
        *(
            f"{kind}<br><small>{split}</small>" if counts else f"<small>{kind}<br>{split}</small>"
            for _, split, kind, counts in columns
        ),
    ]
    body = [
        [escape(cell), *(had.get(key, "–") if key[3] else f"<small>{had.get(key, '–')}</small>" for key in columns)]
        for cell, had in cells.items()
    ]
    return _table(head, body)


def _missing(missing: Mapping[str, str]) -> str:
    if not missing:
        return "<p>Nothing.</p>"
    return _table(["", "reason"], [[escape(name), escape(reason)] for name, reason in missing.items()])
