"""From what was measured to rows: each cell against fp32 and against itself uncompressed, and what was promised."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from record import Target

from compression.cells import BASELINES, EVICTIONS, NEVER, PLAIN, REFERENCE, THIRD, WHOLE, Cell
from compression.figures import Held, held, spread

BLOCK_TOKENS = 32
FAIR = 0.5  # share of a kind that fp32 must answer rightly, or the kind says nothing about compression
SETS = ("single", "long")
Had = Mapping[Cell, dict[str, Any]]
Times = Mapping[Cell, Sequence[dict[str, Any]]]


def rows(
    had: Had, speeds: Times, room: Times, bundles: Mapping[str, Path], text: list[dict[str, Any]]
) -> dict[str, Any]:
    """`cells`, `kinds`, `decoders`, `capacity`: lists of plain records."""
    fair = _fair_kinds(had[REFERENCE]["answers"])
    table = []
    for cell, found in had.items():
        plain = replace(cell, reduce=WHOLE, evict=NEVER)
        row: dict[str, Any] = cell.facts() | _bytes(bundles[cell.recipe])
        row["kld"] = _divergences(found["rows"])
        row["accuracy"] = _accuracies(found["answers"], had[REFERENCE]["answers"], fair)
        row["of_plain"] = _accuracies(found["answers"], had[plain]["answers"], fair) if plain in had else None
        row["prompt_tokens"] = _prompt_tokens(found["answers"])
        row["token_bytes"] = found["block_bytes"] / BLOCK_TOKENS
        row["speed"] = _speed(speeds.get(cell, ()))
        table.append(row)
    return {
        "cells": table,
        "kinds": _kinds(had, fair),
        "decoders": [_decoder(each) for each in text],
        "capacity": [_capacity(cell, found) for cell, found in room.items()],
    }


def _key(answer: Mapping[str, Any]) -> tuple[str, str, str]:
    return answer["set"], answer["split"], answer["kind"]


def _fair_kinds(reference: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    rights = defaultdict(list)
    for answer in reference:
        if answer["set"] in SETS:
            rights[_key(answer)].append(answer["right"])
    return {key for key, values in rights.items() if statistics.mean(values) >= FAIR}


def _kinds(had: Had, fair: set[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Right answers by kind, of each cell; kinds that are not fair are listed too."""
    found = []
    for cell, each in had.items():
        rights = defaultdict(list)
        for answer in each["answers"]:
            if answer["set"] in SETS:
                rights[_key(answer)].append(answer["right"])
        for key, values in rights.items():
            counts = {"right": sum(values), "of": len(values), "counts": key in fair}
            found.append({"cell": cell.name, "set": key[0], "split": key[1], "kind": key[2], **counts})
    return found


def _accuracies(
    ours: list[dict[str, Any]], reference: list[dict[str, Any]], fair: set[tuple[str, str, str]]
) -> dict[str, dict[str, Any]]:
    by_id = {answer["id"]: answer for answer in reference}
    found = {}
    for name in (*SETS, "all"):
        chosen = [each for each in ours if each["set"] in SETS and name in (each["set"], "all") and _key(each) in fair]
        if chosen:
            pairs = [(each["right"], by_id[each["id"]]["right"], f"{each['set']} {each['cluster']}") for each in chosen]
            verdict: Held = held(*zip(*pairs, strict=True))  # type: ignore[arg-type]
            found[name] = asdict(verdict)
    return found


def _divergences(forced: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in ("text", *SETS):
        own = [each for each in forced if each["set"] == name]
        klds, tops = ([value for each in own for value in each[column]] for column in ("kld", "same"))
        if klds:
            found[name] = asdict(spread(klds, tops))
    return found


def _prompt_tokens(answers: list[dict[str, Any]]) -> dict[str, float]:
    counts = {name: [each["prompt_tokens"] for each in answers if each["set"] == name] for name in SETS}
    return {name: statistics.mean(numbers) for name, numbers in counts.items() if numbers}


def _bytes(bundle: Path) -> dict[str, Any]:
    """On disk by part, and bits a parameter, all told (scales, zero points, what is held more precisely)."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    sizes = {file["path"]: file["num_bytes"] for file in manifest["files"]}
    parts = {}
    for part in manifest["parts"]:
        num_bytes = sum(sizes[path] for path in part["files"] if not path.endswith(".xml"))
        parts[part["name"]] = {"bytes": num_bytes, "bits": 8 * num_bytes / max(part["num_parameters"], 1)}
    return {"disk_bytes": sum(sizes.values()), "parts": parts}


def _speed(rounds: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Median and extremes over the rounds' own medians."""
    if not rounds:
        return None
    names = rounds[0]["figures"]
    medians = {name: [statistics.median(each["figures"][name]) for each in rounds] for name in names}
    figures = {
        name: {"value": statistics.median(values), "lowest": min(values), "highest": max(values), "rounds": values}
        for name, values in medians.items()
    }
    return {
        "figures": figures,
        "memory_bytes": statistics.median(each["memory_bytes"] for each in rounds),
    }


def _decoder(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("name", "bits", "layer_bits", "remark")} | asdict(
        spread(found["kld"], found["same"])
    )


def _capacity(cell: Cell, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    middle = {
        name: statistics.median(each[name] for each in rounds)
        for name in ("at_once", "mean_at_once", "tokens_per_s", "decode_tokens_per_s", "cache_bytes", "preemptions")
    }
    return cell.facts() | middle | {"rounds": list(rounds)}


# ── what was promised ──────────────────────────────────────────────────────────────────────────────────────────────


def targets(table: dict[str, Any]) -> list[Target]:
    """Issue 3's figures; those whose cells were measured."""
    by_name = {row["cell"]: row for row in table["cells"]}
    return [*_weights(by_name, table["decoders"]), *_visual(by_name), *_cache(by_name, table["capacity"])]


def _weights(by_name: dict[str, Any], found: list[dict[str, Any]]) -> list[Target]:
    aims = []
    by_decoder = {each["name"]: each for each in found}
    alone = ", weights alone"
    ours = by_decoder.get(f"triptych w4{alone}")
    if ours:
        aims.append(Target(name="bits a weight of w4's layers", value=ours["layer_bits"], unit="bits", at_most=4.6))
        for rival in ("NNCF int4", "llama.cpp Q4_K_M"):
            if f"{rival}{alone}" in by_decoder:
                other = by_decoder[f"{rival}{alone}"]
                name = f"w4's divergence at {ours['bits']:.1f} bits, over {rival}'s at {other['bits']:.1f}"
                aims.append(Target(name=name, value=ours["mean"] / other["mean"], unit="×", at_most=1.0))
    modality = by_name.get(Cell(recipe="modality").name)
    if modality:
        aims.append(_kept("modality with u8 keeps of fp32's accuracy", modality["accuracy"]["all"], 0.98))
    return aims


def _kept(name: str, verdict: dict[str, Any], bound: float) -> Target:
    return Target(
        name=name,
        value=100 * verdict["retention"],
        unit="%",
        at_least=100 * bound,
        lowest=100 * verdict["retention_low"],
        highest=100 * verdict["retention_high"],
    )


def _visual(by_name: dict[str, Any]) -> list[Target]:
    aims = []
    for keep, bound in ((0.5, 0.97), (0.33, 0.93)):
        row = by_name.get(Cell(recipe=PLAIN, reduce=f"cenprune:{keep}").name)
        if row is None or row["of_plain"] is None:
            continue
        aims.append(_kept(f"{keep:.0%} of the visual tokens keep of the accuracy", row["of_plain"]["single"], bound))
        others = [by_name.get(Cell(recipe=PLAIN, reduce=f"{method}:{keep}").name) for method in BASELINES]
        best = max((other["accuracy"]["single"]["right"] for other in others if other), default=0)
        ahead = row["accuracy"]["single"]["right"] - best
        name = f"right answers beyond the best of pool, grid and random at {keep:.0%}"
        aims.append(Target(name=name, value=ahead, unit="answers", at_least=1))
    return aims


def _cache(by_name: dict[str, Any], room: list[dict[str, Any]]) -> list[Target]:
    aims = []
    row = by_name.get(Cell(recipe=PLAIN, evict=f"{EVICTIONS[0]}:{THIRD}").name)
    if row is not None and row["of_plain"] is not None:
        base = by_name.get(Cell(recipe=PLAIN, cache="bf16").name)
        verdict = row["of_plain"]["long"]
        aims.append(_kept("a third of bf16's cache bytes keeps of the long conversations' accuracy", verdict, 0.95))
        if base:
            share = THIRD * row["token_bytes"] / base["token_bytes"]
            aims.append(Target(name="its bytes", value=100 * share, unit="%", at_most=34.0))
    by_cell = {each["cell"]: each for each in room}
    base, small = (
        by_cell.get(Cell(recipe="int8", **more).name)
        for more in ({"cache": "bf16"}, {"evict": f"{EVICTIONS[0]}:{THIRD}"})
    )
    if base and small:
        ratio = small["mean_at_once"] / base["mean_at_once"]
        aims.append(Target(name="sequences in the same memory", value=ratio, unit="×", at_least=2.0))
        for figure, words in (("decode_tokens_per_s", "while decoding"), ("tokens_per_s", "prompts and all")):
            ratio, name = small[figure] / base[figure], f"throughput where memory was the limit, {words}"
            aims.append(Target(name=name, value=ratio, unit="×", at_least=1.5))
    return aims
