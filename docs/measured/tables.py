"""Tables out of what a bench wrote, `bench/results/NAME.json` in the shape of `bench/record.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
Found = dict[str, Any]


def read(name: str) -> Found:
    found: Found = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def by_name(found: Found) -> dict[tuple[str, str], dict[str, Any]]:
    """Measures by subject and name."""
    return {(entry["subject"], entry["name"]): entry for entry in found["measures"]}


def subjects(found: Found) -> list[str]:
    return list(dict.fromkeys(entry["subject"] for entry in found["measures"]))


def when(found: Found) -> str:
    return f"{found['when'][:10]}, commit {found['commit'][:9]}."


def where(found: Found, how: str = "") -> str:
    machine = found["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores{how}, {when(found)}"


def targets(found: Found) -> list[str]:
    """What was promised of those figures, and whether it was kept."""
    return table(["", "wanted", "measured", "kept"], [[aim["name"], *verdict(aim)] for aim in found["targets"]])


def verdict(aim: dict[str, Any]) -> tuple[str, str, str]:
    """Wanted, measured, kept."""
    wanted = f"≥ {_short(aim['at_least'])}" if aim["at_least"] is not None else f"≤ {_short(aim['at_most'])}"
    return wanted, f"{_short(aim['value'])} {aim['unit']}".rstrip(), "yes" if aim["is_met"] else "**no**"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def figure(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    small = {
        "B": (1e-6, 0), "s": (1, 2 if entry["value"] >= 0.1 else 3), "1/s": (1, 2), "nat": (1, 2),
        "s·GB": (1, 1 if entry["value"] >= 5 else 2),
    }  # fmt: skip
    scale, digits = small.get(entry["unit"], (1, 0))
    value, low, high = (f"{entry[key] * scale:,.{digits}f}" for key in ("value", "lowest", "highest"))
    is_one = low == high or entry["unit"] == "%"  # a share's samples are ones and zeroes
    return value if is_one else f"{value} ({low}–{high})"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
