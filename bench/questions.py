"""Questions whose right answers are known, as `triptych bench saving` reads them: half on pictures, half text alone.

Pictures: the 406 single questions of bench/compression. Text: as many that a model of 135 M parameters can be asked at
all, capitals, opposites and what a short text says, none of them chosen by whether any model answers it rightly.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compression.tasks import COLOURS, FOLDER, Case, cases

OUT = FOLDER / "saving.jsonl"
NUMBERS = ("zero", "one", "two", "three", "four")
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Japan": "Tokyo", "China": "Beijing", "India": "Delhi", "Russia": "Moscow", "Egypt": "Cairo",
    "Greece": "Athens", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Canada": "Ottawa",
    "Australia": "Canberra", "Kenya": "Nairobi", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Turkey": "Ankara", "Iraq": "Baghdad", "Iran": "Tehran", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Belgium": "Brussels", "the Netherlands": "Amsterdam", "Switzerland": "Bern", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Ukraine": "Kyiv|Kiev", "Argentina": "Buenos Aires", "Colombia": "Bogot",
    "Mexico": "Mexico City",
    "South Korea": "Seoul", "Indonesia": "Jakarta", "the Philippines": "Manila", "Nepal": "Kathmandu",
    "Morocco": "Rabat", "Iceland": "Reykjav",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small|little|tiny", "up": "down", "left": "right", "day": "night", "black": "white",
    "happy": "sad|unhappy", "fast": "slow", "early": "late", "open": "closed?|shut", "young": "old", "rich": "poor",
    "strong": "weak", "light": "dark|heavy", "full": "empty", "hard": "soft|easy", "wet": "dry", "high": "low",
    "long": "short", "good": "bad|evil", "clean": "dirty", "near": "far", "love": "hate|hatred", "win": "lose|loss",
    "north": "south", "east": "west", "begin": "end|finish|stop", "true": "false", "loud": "quiet|silent|soft",
    "thick": "thin",
}  # fmt: skip
PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack")
THINGS = ("bike", "kite", "book", "lamp", "boat", "drum", "scarf", "clock", "basket", "guitar")
TOWNS = ("Paris", "London", "Madrid", "Vienna", "Boston", "Dublin", "Oslo", "Rome", "Chicago", "Lisbon")
COLOURED = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink")


def pictures() -> Iterator[dict[str, Any]]:
    for case in cases("single"):
        yield {"id": case.id, "messages": case.messages, "right": right(case)}


def right(case: Case) -> str:
    """The judges of recipes/mini/questions.py as one regular expression."""
    if case.kind == "colour":
        named = [case.truth, "grey"] if case.truth == "gray" else [case.truth]
        return _first(named, [*COLOURS, "grey"])
    if case.kind == "count":
        words = [*NUMBERS, "five", "six", "seven", "eight", "nine", "ten", r"\d+"]
        return _first([NUMBERS[case.truth], str(case.truth)], words)
    names = [_named(name) for name in case.truth]
    return "|".join(names) if case.kind == "photo" else "^" + "".join(f"(?=.*(?:{name}))" for name in names)


def _first(wanted: list[str], known: list[str]) -> str:
    """One of `wanted` is said before any other of `known`."""
    return rf"^(?:(?!\b(?:{'|'.join(known)})\b).)*\b(?:{'|'.join(wanted)})\b"


def _named(name: str) -> str:
    """The name, or its last word, plural or not."""
    last = name.lower().split()[-1].removesuffix("s")
    return rf"{re.escape(name.lower())}|(?<![a-z’'-]){re.escape(last)}s?(?![a-z’'-])"


def texts(total: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    asked = [(f"What is the capital of {land}?", town) for land, town in CAPITALS.items()]
    asked += [(f"What is the opposite of {word}?", rf"\b(?:{other})\b") for word, other in OPPOSITES.items()]
    told = list(itertools.islice(_told(rng), total - len(asked)))
    for number, (question, wanted) in enumerate(asked + told):
        message = {"role": "user", "content": question}
        yield {"id": f"text-{number}", "messages": [message], "right": wanted}


def _told(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Two people, two things, two places, and a question about one of them."""
    while True:
        (one, other), things = rng.sample(PEOPLE, 2), rng.sample(THINGS, 2)
        colours, towns = rng.sample(COLOURED, 2), rng.sample(TOWNS, 2)
        said = (
            f"{one} lives in {towns[0]} and has a {colours[0]} {things[0]}. "
            f"{other} lives in {towns[1]} and has a {colours[1]} {things[1]}."
        )
        yield from rng.sample(
            [
                (f"{said} Where does {one} live?", _first([towns[0]], list(TOWNS))),
                (f"{said} What does {one} have?", _first([things[0]], list(THINGS))),
                (f"{said} What color is {one}'s {things[0]}?", _first([colours[0]], list(COLOURED))),
            ],
            1,
        )


def write(path: Path = OUT) -> Path:
    """Written anew each time; the same each time."""
    shown = list(pictures())
    path.write_text("".join(json.dumps(line) + "\n" for line in [*shown, *texts(len(shown))]))
    return path
