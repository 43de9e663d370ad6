"""How like the exact model a server answers: facts it should know, greedy words, the first token after a picture.

Exact is our server with fp32 weights and `--dtype float`, which the tests hold to transformers' f32. The tower is
random, so no picture has a right answer: there the first token's distribution is compared instead.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import record
from traffic.served import Served

from mixed.questions import question

NUM_WORDS = 24  # tokens of an answer
NUM_PICTURES = 8
TOP = 20
FACTS: tuple[tuple[str, str], ...] = (  # a question, what a right answer has in it
    ("What is the capital of France?", "paris"), ("What is the capital of Italy?", "rome"),
    ("What is the capital of Japan?", "tokyo"), ("What is the capital of Germany?", "berlin"),
    ("What is the capital of Spain?", "madrid"), ("What is the capital of England?", "london"),
    ("What is the capital of Egypt?", "cairo"), ("What is the capital of Russia?", "moscow"),
    ("What is the capital of China?", "beijing"), ("What is the capital of Greece?", "athens"),
    ("What is the capital of Austria?", "vienna"), ("What is the capital of Canada?", "ottawa"),
    ("What color is the sky on a clear day?", "blue"), ("What color is grass?", "green"),
    ("What color is a ripe banana?", "yellow"), ("What color is snow?", "white"), ("What color is blood?", "red"),
    ("Which planet do we live on?", "earth"), ("Which planet is closest to the sun?", "mercury"),
    ("Which is the largest planet of the solar system?", "jupiter"),
    ("Which planet is known as the red planet?", "mars"),
    ("What is the chemical formula of water?", "h2o"), ("What gas do plants take in from the air?", "carbon"),
    ("What gas do humans need to breathe?", "oxygen"), ("What is the chemical symbol of gold?", "au"),
    ("Who wrote Romeo and Juliet?", "shakespeare"), ("Who painted the Mona Lisa?", "vinci"),
    ("Who developed the theory of relativity?", "einstein"),
    ("Who was the first president of the United States?", "washington"),
    ("Which is the largest ocean on Earth?", "pacific"), ("Which is the tallest mountain on Earth?", "everest"),
    ("Which is the longest river in Africa?", "nile"), ("On which continent is Brazil?", "south america"),
    ("On which continent is Egypt?", "africa"), ("On which continent is India?", "asia"),
    ("How many days are in a week?", "seven|7"), ("How many months are in a year?", "twelve|12"),
    ("How many legs does a spider have?", "eight|8"), ("What is 2 + 2?", "four|4"), ("What is 5 + 3?", "eight|8"),
    ("What is the opposite of hot?", "cold"), ("What is the opposite of up?", "down"),
    ("What is frozen water called?", "ice"), ("Which animal says meow?", "cat"), ("Which animal barks?", "dog"),
    ("Which insect makes honey?", "bee"), ("What do cows drink and give?", "milk|water"),
    ("Which organ pumps blood through the body?", "heart"),
    ("What is the star at the center of the solar system?", "sun"),
    ("Which language is spoken in Brazil?", "portuguese"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """answers: to each fact, greedily. first: of each picture, the likeliest first tokens' log-probabilities."""

    answers: list[str]
    first: list[dict[str, float]]


def bodies() -> list[dict[str, Any]]:
    """Of the pictures' questions, without what each way of asking adds."""
    rng = random.Random(77)
    return [dict(question(rng, has_picture=True).body) for _ in range(NUM_PICTURES)]


def asked(served: Served) -> Said:
    with httpx.Client(base_url=served.url, timeout=300) as http:

        def ask(body: Mapping[str, Any]) -> dict[str, Any]:
            answer = http.post("/v1/chat/completions", json={"model": served.model, "temperature": 0, **body})
            answer.raise_for_status()
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        answers = [ask({"messages": user(fact), "max_tokens": NUM_WORDS})["message"]["content"] for fact, _ in FACTS]
        first = []
        for body in bodies():
            choice = ask({**body, "max_tokens": 1, "logprobs": True, "top_logprobs": TOP})
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            first.append({one["token"]: one["logprob"] for one in top})
    return Said(answers=answers, first=first)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def is_right(answer: str, wanted: str) -> bool:
    return re.search(rf"\b({wanted})", answer.lower().replace("₂", "2")) is not None


def measures(who: str, exact: Said, said: Said) -> list[record.Measure]:
    """A fact that f32 answers wrongly counts for nothing."""
    known = [index for index, (_, wanted) in enumerate(FACTS) if is_right(exact.answers[index], wanted)]
    right = [float(is_right(said.answers[index], FACTS[index][1])) for index in known]
    words = [_alike(one, other) for one, other in zip(exact.answers, said.answers, strict=True)]
    apart = [_apart(one, other) for one, other in zip(exact.first, said.first, strict=True)]
    same = [float(_top(one) == _top(other)) for one, other in zip(exact.first, said.first, strict=True)]
    return [
        _mean("facts right, of those f32 has right", who, right, 100.0, "%"),
        _mean("words of an answer that are f32's", who, words, 100.0, "%"),
        _mean("first token after a picture: f32's", who, same, 100.0, "%"),
        _mean("first token after a picture: log-probability apart", who, apart, 1.0, "nat"),
    ]


def _mean(name: str, who: str, values: Sequence[float], times: float, unit: str) -> record.Measure:
    return record.Measure(
        name=name, subject=who, unit=unit, value=times * statistics.mean(values), lowest=times * min(values),
        highest=times * max(values), num_samples=len(values),
    )  # fmt: skip


def _alike(one: str, other: str) -> float:
    """Share of the words before the first that differs."""
    pairs = list(zip(one.split(), other.split(), strict=False))
    same = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return same / max(len(one.split()), 1)


def _apart(exact: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Mean distance over f32's likeliest tokens, each as heavy as it is likely, where both name them."""
    both = {token: value for token, value in exact.items() if token in other}
    weights = [math.exp(value) for value in both.values()]
    apart = [abs(value - other[token]) for token, value in both.items()]
    return sum(w * far for w, far in zip(weights, apart, strict=True)) / (sum(weights) or 1.0)


def _top(first: Mapping[str, float]) -> str:
    return max(first, key=lambda token: first[token])
