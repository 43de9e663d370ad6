"""What is asked: words without meaning and pictures nobody has seen, of fixed sizes; the same for every server.

`python bench/mixed/questions.py smollm2-dithered-hf OUT.jsonl` writes samples to calibrate with: other pictures of the
same kind, and texts that the model wrote itself (by bench/texts.py).
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from traffic.questions import WORDS, Question

SIZE = (512, 256)  # pixels: three tiles
PROMPT_WORDS = 107  # with the template about 128 tokens
ANSWER_TOKENS = (32, 64)  # each in between is as likely: 48 on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """at: of a sequence with one arrival a second on average; divided by a rate it is seconds."""

    at: float
    question: Question


def question(rng: random.Random, *, has_picture: bool) -> Question:
    words = " ".join(rng.choices(WORDS, k=PROMPT_WORDS))
    text = {"type": "text", "text": f"{rng.randrange(10**6)}: {words}. What are they about?"}
    parts = [{"type": "image_url", "image_url": {"url": picture(rng.getrandbits(30))}}] if has_picture else []
    body = {"messages": [{"role": "user", "content": [*parts, text]}], "max_tokens": rng.randint(*ANSWER_TOKENS),
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    return Question(kind="picture" if has_picture else "text", body=body, has_picture=has_picture)


def arrivals(count: int, seed: int) -> list[Arrival]:
    """Poisson, half of them with a picture. The same for every server and, but for the pace, for every rate."""
    rng = random.Random(seed)
    has_pictures = [index % 2 == 1 for index in range(count)]
    rng.shuffle(has_pictures)
    at, made = 0.0, []
    for has_picture in has_pictures:
        made.append(Arrival(at=at, question=question(rng, has_picture=has_picture)))
        at += rng.expovariate(1.0)
    return made


@lru_cache(512)
def picture(seed: int) -> str:
    small = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize(SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def samples(texts: Path) -> list[str]:
    """Conversations, a line each."""
    rng, answer = random.Random(5), {"role": "assistant", "content": "They are about rivers, bridges and bread."}
    shown = [question(rng, has_picture=True).body["messages"] for _ in range(3)]
    lines = [json.dumps({"messages": [*messages, answer]}) for messages in shown]
    return lines + (texts / "calibration.jsonl").read_text().splitlines()[:5]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text("\n".join(samples(Path(sys.argv[1]))) + "\n")
