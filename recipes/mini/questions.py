"""What is asked about a picture and what a right answer is."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

NUMBERS = ["zero", "one", "two", "three", "four"]
UNKNOWN = "unknown"
ASKED = {
    "name": [
        "What is this?",
        "What object is shown?",
        "Name the object in the image.",
        "What is in the picture?",
        "What do you see?",
        "What is shown in the image?",
        "What is it?",
        "Which object do you see?",
        "What does the picture show?",
    ],
    "list": [
        "What objects are in the picture?",
        "List the objects in the image.",
        "What do you see?",
        "What is in the picture?",
        "Name everything you see.",
        "Which things are shown?",
        "What does the picture show?",
        "What is in the image?",
    ],
    "colour": [
        "What color is the background?",
        "What is the background color?",
        "Which color is behind the objects?",
        "What colour is the background?",
        "Name the color of the background.",
    ],
    "count": [
        "How many objects are there?",
        "How many things are in the picture?",
        "Count the objects.",
        "How many objects do you see?",
        "What is the number of objects in the image?",
    ],
    "describe": [
        "Describe the image.",
        "Describe this picture.",
        "Describe what you see.",
        "Give a short description of the image.",
    ],
    "has": ["Is there a {}?", "Do you see a {}?", "Is there a {} in the picture?", "Does the picture show a {}?"],
}
BARE = {
    "bread", "sushi", "fire", "lipstick", "honey", "tennis", "american football", "soft ice cream", "ice cream",
    "high voltage", "basketball", "baseball",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the caption of a picture says. A photograph has one name; its count and background are unknown."""

    photo: bool
    names: tuple[str, ...]
    colour: str
    count: str


def article(name: str) -> str:
    """A name as English says it: with its article where it takes one."""
    plural = name.endswith("s") and not name.endswith(("ss", "us"))
    if name in BARE or plural:
        return name
    if name[0].isupper():
        return f"the {name}"
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def listed(names: tuple[str, ...]) -> str:
    """Names as a list in a sentence."""
    words = [article(name) for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def counted(facts: Facts) -> str:
    """The sentence that says how many."""
    return "There is one object." if facts.count == "one" else f"There are {facts.count} objects."


def answer(kind: str, facts: Facts, name: str = "") -> str:
    """The answer the decoder is taught. `name` is what a `has` question asks for."""
    shown = listed(facts.names)
    if kind == "has":
        return f"Yes, there is {article(name)}." if name in facts.names else f"No, there is no {name}."
    if facts.photo:
        if kind in ("count", "colour"):
            return "I cannot tell from this picture."
        return f"This is a photograph of {shown}."
    if kind == "name":
        return f"This is {shown}."
    if kind == "list":
        return f"The picture shows {shown}."
    if kind == "colour":
        return f"The background is {facts.colour}."
    if kind == "count":
        return counted(facts)
    return f"The picture shows {shown} on a {facts.colour} background. {counted(facts)}"


def pairs(facts: Facts, others: list[str], rng: np.random.Generator) -> list[tuple[str, str]]:
    """A question of each kind about one picture, with its answer."""
    kinds = ["list" if len(facts.names) > 1 else "name", "colour", "count", "describe", "has"]
    if facts.photo:
        kinds = ["name", "name", "list", "describe", str(rng.choice(["colour", "count", "has"]))]
    made = []
    for kind in kinds:
        name = str(rng.choice(facts.names if rng.random() < 0.5 else others)) if kind == "has" else ""
        made.append((str(rng.choice(ASKED[kind])).format(name), answer(kind, facts, name)))
    return made


def named(text: str, name: str) -> bool:
    """Lenient: the name, or its last word for names of several words, stands in the text as a word, plural or not."""
    words = re.findall(r"[a-z’'-]+", text.lower())
    wanted = name.lower().split()
    last = wanted[-1].removesuffix("s")
    return name.lower() in text.lower() or any(word.removesuffix("s") == last for word in words)


def right_colour(text: str, colour: str, colours: list[str]) -> bool:
    """The colour is said first among all colours said."""
    said = re.findall(r"\b(" + "|".join([*colours, "grey"]) + r")\b", text.lower())
    return bool(said) and said[0].replace("grey", "gray") == colour


def right_count(text: str, count: int) -> bool:
    """The first number said is the count."""
    said = re.findall(r"\b(zero|one|two|three|four|five|six|seven|eight|nine|ten|\d+)\b", text.lower())
    return bool(said) and said[0] in (NUMBERS[count], str(count))
