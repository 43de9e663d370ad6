"""What was measured of speed, memory and steadiness, as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from docs.measured.tables import Found, by_name, figure, read, subjects, table, targets, when, where

SHOWN_PACKAGES = 6


def install_size() -> str:
    """What `pip install .` puts on a disk, as `bench/install_size.py` counted it."""
    found = read("install_size")
    total, *packages = found["measures"]
    shown, rest = packages[:SHOWN_PACKAGES], packages[SHOWN_PACKAGES:]
    numbers = found["settings"]["packages"]
    rows = [[f"{each['subject']} {numbers[each['subject']]}", each["value"]] for each in shown]
    rows.append([f"{len(rest)} more", sum(each["value"] for each in rest)])
    head = (
        f"{len(packages)} packages, {total['value'] / 1e6:,.0f} MB on disk ({found['machine']['system'].split()[0]}, "
        f"Python {found['versions']['python']}, {found['when'][:10]}); neither torch nor transformers is among them."
    )
    sizes = [[name, f"{num_bytes / 1e6:,.1f} MB"] for name, num_bytes in rows]
    return "\n".join([head, "", *table(["package", "on disk"], sizes)])


SPEED_COLUMNS = {
    "prefill": "prompt of 512",
    "decode 1": "1 answer",
    "decode 8": "8 answers",
    "decode 16": "16 answers",
    "load": "load, s",
    "peak": "peak memory, MB",
}


def speed() -> str:
    """Each runtime's figures as `bench/engine.py` measured them: medians, with the extremes of the rounds."""
    found = read("engine")
    own = by_name(found)
    names = [name for name in subjects(found) if (name, "prefill") in own]
    rows = [[name, *(figure(own.get((name, column))) for column in SPEED_COLUMNS)] for name in names]
    head = ["tokens a second", *SPEED_COLUMNS.values()]
    settings = found["settings"]
    rounds = {name: own[name, "load"]["num_samples"] for name in names}
    fewer = ", ".join(f"{name} {number}" for name, number in rounds.items() if number < settings["rounds"])
    how = f"; medians (least–most) of {settings['rounds']} interleaved rounds{f' ({fewer})' if fewer else ''}"
    about = f"{where(found, how)} {_how_asked(settings['runtimes'])}"
    return "\n".join([*table(head, rows), "", about, "", *targets(found)])


def _how_asked(runtimes: dict[str, Any]) -> str:
    """What a reader would not expect: weights that are not in four bits, a flag of ours that is not its default."""
    weights = {name: one["settings"]["weights"] for name, one in runtimes.items()}
    wider = [f"{name} is in {held}" for name, held in weights.items() if isinstance(held, str) and "4" not in held]
    choices = runtimes["triptych"]["settings"]["choices"]
    flags = [f"`--{one.split(' (')[0].replace(' = ', ' ')}`" for one in choices if one.startswith("prompt-stretch")]
    return " ".join(
        [*(f"{one}." for one in wider), f"triptych runs with {' '.join(flags)}: prompts first, as the others do."]
        + ["Prompts are words at random; greedy answers to those soon repeat themselves, and look-up gains by that."]
    )


SIGNS = (
    "Positive: ours would cost that much more without it. Negative, or less than runs of the same differ by: noise, "
    "nothing that this traffic shows."
)
SAVED = ("core-seconds × GB", "core-seconds", "memory", "TTFT p95", "latency p95")


def saving() -> str:
    """What `bench/saving.py` found: both ends, each factor switched off, what was promised."""
    found = read("saving")
    own = by_name(found)
    rows = [[name, *(figure(own.get((name, column))) for column in SAVED)] for name in subjects(found)]
    head = ["", "core-seconds × GB", "core-seconds", "memory, MB", "first token p95, s", "whole answer p95, s"]
    shares = [
        [one["name"], *(f"{100 * one[key]:+.1f} %" for key in ("cost_off", "cpu_off", "memory_off"))]
        + [f"{100 * (one['step'] - 1):+.1f} %"]
        for one in found["effects"]
    ]
    factors = table(["switched off alone", "cost", "core-seconds", "memory", "its step of the whole"], shares)
    about = " ".join([where(found), *found["settings"]["about"][-2:]])  # what ours is, and what is noise
    return "\n".join([*table(head, rows), "", about, "", *factors, "", SIGNS, "", *targets(found)])


def soak() -> str:
    """What `bench/soak.py` did to the server, and whether every promise was kept."""
    found = read("soak")
    settings = found["settings"]
    ends = ", ".join(f"{number:,} {what}" for what, number in sorted(settings["outcomes"].items()))
    about = f"{settings['requests']:,} requests in {settings['seconds'] / 60:.0f} minutes ({ends}), "
    about += f"{settings['decoders_killed']} picture decoders killed, {found['when'][:10]}. "
    about += f"The server ran with `{settings['flags']}`."
    return "\n".join([about, "", *targets(found)])


MIXED = (
    "peak memory",
    "processor time a request",
    "core-seconds × GB a request",
    "facts right, of those f32 has right",
)
BY_RATE = ("TTFT p95, text, {}", "TPOT p95, text, {}", "TTFT p95, picture, {}", "TPOT p95, picture, {}", "goodput {}")


def mixed() -> str:
    """What `bench/mixed.py` found of texts and pictures together, in short: `mixed_rates` has the rest."""
    found = read("mixed")
    own = by_name(found)
    shared = [rate for rate in _rates(found) if all((one, f"goodput {rate}") in own for one in subjects(found))]
    middle = shared[(len(shared) - 1) // 2]
    names = ["highest rate at both promises", *(f"TTFT p95, {kind}, {middle}" for kind in ("text", "picture")), *MIXED]
    return "\n".join([*_mixed_table(found, names), "", f"{_tried(found)} {when(found)}", "", *targets(found)])


def mixed_rates() -> str:
    """All that `bench/mixed.py` found: each server at each rate, and whether its answers are the exact model's."""
    found = read("mixed")
    own = by_name(found)
    rows = [
        [one, rate.removeprefix("at "), *(figure(own.get((one, name.format(rate)))) for name in BY_RATE)]
        for rate in ("alone", *_rates(found))
        for one in subjects(found)
        if (one, f"TTFT p95, text, {rate}") in own
    ]
    head = ["", "rate", *(name.partition(", {}")[0] + ", s" for name in BY_RATE[:-1]), "goodput, 1/s"]
    named = {entry["name"] for entry in found["measures"] if entry["unit"] in ("%", "nat")}
    names = [name for name in dict.fromkeys(entry["name"] for entry in found["measures"]) if name in named]
    return "\n".join([*table(head, rows), "", _tried(found), "", *_mixed_table(found, names)])


def _rates(found: Found) -> list[str]:
    return [f"at {rate:g}/s" for rate in found["settings"]["rates"]]


def _mixed_table(found: Found, names: list[str]) -> list[str]:
    own, who = by_name(found), subjects(found)
    units = {entry["name"]: "MB" if entry["unit"] == "B" else entry["unit"] for entry in found["measures"]}
    rows = [
        [f"{name}, {units[name]}", *(figure(own.get((subject, name))) for subject in who)]
        for name in names
        if name in units
    ]
    return table(["", *who], rows)


def _tried(found: Found) -> str:
    """Which rates there were, who kept which, and what was promised."""
    settings, own = found["settings"], by_name(found)
    rates = ", ".join(f"{rate:g}" for rate in settings["rates"])
    best = {one: own[one, "highest rate at both promises"]["value"] for one in subjects(found)}
    kept = ", ".join(f"{one} all up to {rate:g}" if rate else f"{one} none" for one, rate in best.items())
    if not all(best.values()):
        kept += f" (which counts as {min(settings['rates']):g})"
    rounds = f"{settings['rounds']} round{'s' if settings['rounds'] > 1 else ''}"
    busy = f" Just before a trial, others had up to {100 * settings['busy_before']:.0f} % of the processors."
    return (
        f"Requests a second that were tried: {rates}, {settings['count']} requests each, {rounds}. Kept: {kept}. "
        f"Promised to {100 * settings['share_in_time']:.0f} % of them: the first token within "
        f"{settings['ttft_s']:.1f} s, {settings['times_unloaded']:g} times what the slowest server needs unloaded, "
        f"then one every {1e3 * settings['tpot_s']:.0f} ms. Goodput counts the answers that kept both."
        f"{busy if settings['busy_before'] > 0.1 else ''}"
    )


def simulated() -> str:
    """How far off `bench/simulated.py` found the simulation of one replica."""
    found = read("simulated")
    return "\n".join([*targets(found), "", f"Errors are shares of what was measured; {when(found)}"])


def guesses() -> str:
    """What `bench/speculation.py` found of guessing next tokens."""
    found = read("speculation")
    by_case = {(entry["name"], entry["subject"]): entry for entry in found["measures"]}
    rows = []
    for name in dict.fromkeys(name for name, _ in by_case):
        speeds = [figure(by_case[name, subject]) for subject in ("plain", "guessed")]
        gain, same = by_case[name, "gain"]["value"], by_case[name, "same tokens"]["value"]
        rows.append([name, *speeds, f"{gain:.2f} ×", f"{same:.0f} %"])
    return "\n".join(
        [*table(["tokens a second", "plain", "guessed", "gain", "same answers"], rows), "", *targets(found)]
    )


def beside() -> str:
    """What `bench/fairness.py` found of texts beside a flood of pictures."""
    found = read("fairness")
    own, names = by_name(found), ("gap p50", "gap p99", "first piece")
    rows = [[f"{name}, ms", *(figure(own[who, name]) for who in ("alone", "beside"))] for name in names]
    alone, beside = (figure(own[who, "pictures answered"]) for who in ("pictures", "beside"))
    about = f"Pictures answered meanwhile, a second: {beside}; without texts {alone}. "
    about += f"{found['settings']['rounds']} rounds of each, {found['when'][:10]}."
    return "\n".join([*table(["texts", "alone", "beside pictures"], rows), "", about, "", *targets(found)])


def clients() -> str:
    """How many of each client's cases work, as `bench/clients.py` found; and how llama.cpp's own tests fared."""
    found, peer = read("clients"), read("peer_suite")
    had, settings = Counter(case["client"] for case in found["settings"]["cases"]), found["settings"]["clients"]
    rows = [[one["subject"], f"{one['value']:g} of {had[one['subject']]}"] for one in found["measures"]]
    named = ", ".join(f"{name} {number}" for name, number in sorted(settings.items()))
    passed, meant, _ = (f"{one['value']:g}" for one in peer["measures"])
    tests = f"llama.cpp's server tests ({peer['settings']['source']}): {passed} pass, {meant} differ by design."
    return "\n".join([*table(["client", "cases that work"], rows), "", f"{named}.", "", tests])


LOAD_COLUMNS = (
    "TTFT, text p50",
    "TTFT, text p99",
    "TTFT, pictures p50",
    "TTFT, pictures p99",
    "TPOT, text p50",
    "goodput",
)
SEEN = ("TTFT", "TPOT", "whole answer")


def load() -> str:
    """What `bench/serve.py` found: the server by rate, and what three clients saw beside what it counted itself."""
    found = read("serve")
    values: dict[str, dict[str, float]] = {}
    for one in found["measures"]:
        values.setdefault(one["subject"], {})[one["name"]] = one["value"]
    rates = [(name, own) for name, own in values.items() if "goodput" in own]
    rows = [[name, *(f"{own[column]:.3g}" if column in own else "–" for column in LOAD_COLUMNS)] for name, own in rates]
    head = ["seconds", *LOAD_COLUMNS[:-1], "in time, answers/s"]
    seen = [
        [
            name,
            *(
                f"{1e3 * own[f'{one} mean']:.1f} ({1e3 * own[f'{one} mean, counted by the server']:.1f})"
                for one in SEEN
            ),
        ]
        + [f"{own['answered']:.0f}", f"{own['tokens']:,.0f}"]
        for name, own in values.items()
        if "tokens" in own and "goodput" not in own
    ]
    missed = [f"{aim['name']} {aim['value']:.3g}" for aim in found["targets"] if not aim["is_met"]]
    kept = f"{len(found['targets']) - len(missed)} of {len(found['targets'])} promises of agreement are kept"
    about = f"{kept}{'; not ' + ', '.join(missed) if missed else ''}. {where(found)}"
    clients = table(["mean, ms (counted by the server)", *SEEN, "answers", "tokens"], seen)
    runs = (
        f"One run of {found['settings']['seconds']:.0f} s a rate, on a machine that drifts: rows differ by their "
        "minute as well as by their rate. In time: within "
        f"{found['settings']['ttft_s']:g} s to the first token, {found['settings']['tpot_s']:g} s for each further one."
    )
    return "\n".join([*table(head, rows), "", runs, "", *clients, "", about])


def machine() -> str:
    """What `bench/machine.py` found of its machine, and what the demo does there."""
    found = read("machine")
    scales = {"B/s": (1e-9, "GB/s"), "operations/s": (1e-9, "G operations/s"), "s": (1e6, "µs")}
    rows = []
    for one in found["measures"]:
        scale, unit = scales.get(one["unit"], (1, one["unit"]))
        ends = [one[key] * scale for key in ("value", "lowest", "highest")]
        value, low, high = (f"{end:,.0f}" if end >= 100 else f"{end:.3g}" for end in ends)
        name = re.sub(r" together$", " together, prompts' time included", one["name"])
        rows.append([f"{one['subject']}: {name}", value if low == high else f"{value} ({low}–{high})", unit])
    about, notes = where(found, "; medians (least–most)"), (f"- {note}" for note in found["settings"]["notes"])
    return "\n".join([*table(["", "measured", "unit"], rows), "", about, "", *notes])


ERRORS = {"tokens_per_s": "tokens a second", "tpot_s": "TPOT", "ttft_s": "TTFT"}


def plan_error() -> str:
    """How far off `bench/plan_error.py` found predictions: at the median, and for nine of ten."""
    found = read("plan_error")
    own, kinds = by_name(found), subjects(found)
    aims = {aim["name"]: aim for aim in found["targets"]}

    def cell(kind: str, name: str) -> str:
        text, aim = f"{own[kind, name]['value']:.1f} %", aims.get(f"{kind}: {name}")
        if aim is None:
            return text
        text = f"{text} (≤ {aim['at_most']:g})"
        return text if aim["is_met"] else f"**{text}**"

    shares = {"median": "median", "p90": "nine of ten"}
    head = ["error", *(f"{kind}, {words}" for kind in kinds for words in shares.values())]
    rows = [
        [words, *(cell(kind, f"{name} error, {share}") for kind in kinds for share in shares)]
        for name, words in ERRORS.items()
    ]
    about = f"{found['settings']['combinations']} combinations, each run {found['settings']['runs']} times. "
    about += f"In brackets what is wanted; bold: missed. {where(found)}"
    return "\n".join([*table(head, rows), "", about])


def inverse_batch() -> str:
    """Whether the batches that were named reached their targets, as `bench/inverse_batch.py` found."""
    found = read("inverse_batch")
    return "\n".join([*targets(found), "", where(found)])


MAKERS: dict[str, Callable[[], str]] = {
    "install size": install_size,
    "speed": speed,
    "saving": saving,
    "soak": soak,
    "mixed": mixed,
    "mixed rates": mixed_rates,
    "simulated": simulated,
    "guesses": guesses,
    "beside": beside,
    "clients": clients,
    "load": load,
    "machine": machine,
    "plan error": plan_error,
    "inverse batch": inverse_batch,
}
