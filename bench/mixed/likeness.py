"""How like the exact model a server answers: facts it should know, greedy words, the first token after a picture.

`python bench/mixed/likeness.py FOLDER OUT` writes what transformers says in f32 (needs torch). The tower is random, so
no picture has a right answer: there the first token's distribution is compared instead.
"""

from __future__ import annotations

import base64
import io
import json
import random
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import record
from traffic.served import Served

from mixed.questions import question

NUM_WORDS = 24  # tokens of an answer
NUM_PICTURES = 16
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
    weights = [2.718281828**value for value in both.values()]
    return sum(w * abs(value - other[token]) for w, (token, value) in zip(weights, both.items(), strict=True)) / (
        sum(weights) or 1.0
    )


def _top(first: Mapping[str, float]) -> str:
    return max(first, key=lambda token: first[token])


# ── f32, by transformers ─────────────────────────────────────────────────────────────────────────────────────────────


def exact(folder: Path) -> Said:
    import numpy as np
    import torch
    from PIL import Image
    from tokenizers import Tokenizer
    from transformers import SmolVLMForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    model = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    prepare = Idefics3ImageProcessorPil(**{key: value for key, value in settings.items() if not key.endswith("type")})

    def ids(text: str) -> torch.Tensor:
        return torch.tensor([words.encode(text, add_special_tokens=False).ids])

    def chat(text: str) -> str:
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    answers, first = [], []
    with torch.inference_mode():
        for fact, _ in FACTS:
            prompt = ids(chat(fact))
            made = model.generate(input_ids=prompt, max_new_tokens=NUM_WORDS, do_sample=False)
            answers.append(words.decode(made[0, prompt.shape[1] :].tolist(), skip_special_tokens=True))
        for body in bodies():
            shown, text = body["messages"][0]["content"]
            file = io.BytesIO(base64.b64decode(shown["image_url"]["url"].partition(",")[2]))
            pixels = prepare([[Image.open(file)]], return_tensors="pt", return_row_col_info=True)
            grid = (pixels["rows"][0][0], pixels["cols"][0][0])
            prompt = ids(chat(_tiles(*grid) + text["text"]))
            values = torch.as_tensor(np.asarray(pixels["pixel_values"]))
            logits = model(input_ids=prompt, pixel_values=values).logits[0, -1]
            top = torch.log_softmax(logits, -1).topk(TOP)
            first.append({words.decode([i]): float(v) for v, i in zip(top.values, top.indices.tolist(), strict=True)})
    return Said(answers=answers, first=first)


def _tiles(rows: int, columns: int) -> str:
    """The marks around a picture's tokens, as SmolVLM's processor writes them."""
    image = "<image>" * 64
    text = "".join(
        "".join(f"<fake_token_around_image><row_{y}_col_{x}>{image}" for x in range(1, columns + 1)) + "\n"
        for y in range(1, rows + 1)
    )
    return f"{text}\n<fake_token_around_image><global-img>{image}<fake_token_around_image>"


if __name__ == "__main__":
    said = exact(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps({"answers": said.answers, "first": said.first}, ensure_ascii=False))
