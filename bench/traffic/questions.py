"""Questions that know whether an answer is theirs: each carries a secret, or its answer was written down before.

A secret is bound into the answer whatever the model says: by a regular expression, a JSON schema, a tool's schema, or
a bias that leaves one token to choose. `recorded` questions carry none: their greedy answer was had while the server
was alone, and must come again, byte for byte.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

NUM_PICTURES = 24  # seen again and again: hits, misses and evictions
WORDS = ("river", "bridge", "bread", "winter", "music", "garden", "train", "moon", "stone", "paper", "window", "horse")
NUM_WORDS = (3, 12, 60, 200)  # of a prompt
BIASED_IDS = range(300, 308)  # ordinary tokens of any vocabulary
BIASED_TOKENS = 24  # of an answer, at most
NUM_RECORDED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came back: the text, and the tool calls as (name, arguments)."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """key: names a question whose answer is compared with the one recorded. status: what must be said to a bad one."""

    kind: str
    body: dict[str, Any]  # of /v1/chat/completions, without model and stream
    has_picture: bool = False
    holds: Callable[[Answered], bool] = lambda answered: True
    key: str | None = None
    statuses: tuple[int, ...] = (200,)


@functools.lru_cache(NUM_PICTURES)
def picture(seed: int) -> str:
    """A small picture as a data URI."""
    rng = random.Random(seed)
    image = Image.new("RGB", (rng.randint(60, 700), rng.randint(60, 700)), tuple(rng.choices(range(256), k=3)))
    box = (10, 10, image.width // 2, image.height // 2)
    ImageDraw.Draw(image).ellipse(box, fill=tuple(rng.choices(range(256), k=3)))
    file, kind = io.BytesIO(), rng.choice(["PNG", "JPEG"])
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def messages(rng: random.Random, text: str, num_pictures: int) -> list[dict[str, Any]]:
    """Some begin alike, so that cached blocks are shared; some are long."""
    words = " ".join(rng.choices(WORDS, k=rng.choice(NUM_WORDS)))
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"Here are some words: {words}. {text}"}]
    for _ in range(num_pictures):
        url = picture(rng.randrange(NUM_PICTURES))
        parts.insert(0, {"type": "image_url", "image_url": {"url": url} if rng.random() < 0.7 else url})
    system = {"role": "system", "content": "You answer briefly. " * rng.choice([1, 1, 8])}
    return [system, {"role": "user", "content": parts}]


# ── kinds of question: (random numbers, number of pictures) → Question ───────────────────────────────────────────────


def regex(rng: random.Random, num_pictures: int) -> Question:
    secret = f"{rng.getrandbits(48):012x}"
    pattern = f"Secret {secret}: [a-z ]{{4,40}}\\."
    body = {
        "messages": messages(rng, "What are they about?", num_pictures),
        "structured_outputs": {"regex": pattern},
        "max_tokens": 120,
    }
    return Question(
        kind="regex", body=body, has_picture=num_pictures > 0,
        holds=lambda answered: re.fullmatch(pattern, answered.text) is not None,
    )  # fmt: skip


def schema(rng: random.Random, num_pictures: int) -> Question:
    secret = f"{rng.getrandbits(48):012x}"
    wanted = {
        "type": "object",
        "properties": {
            "secret": {"const": secret},
            "words": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
            "number": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["secret", "words", "number"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "note", "schema": wanted, "strict": True}}
    body = {
        "messages": messages(rng, "Sort them.", num_pictures), "response_format": form, "max_tokens": 160,
        "temperature": rng.choice([0.0, 0.8]), "seed": rng.getrandbits(30),
    }  # fmt: skip
    return Question(
        kind="schema", body=body, has_picture=num_pictures > 0,
        holds=lambda answered: _secret_of(answered.text) == secret,
    )  # fmt: skip


def tool(rng: random.Random, num_pictures: int) -> Question:
    secret = f"{rng.getrandbits(48):012x}"
    parameters = {
        "type": "object",
        "properties": {"secret": {"enum": [secret]}, "word": {"enum": list(WORDS)}},
        "required": ["secret", "word"],
        "additionalProperties": False,
    }
    name = f"note_{secret[:4]}"
    function = {"name": name, "description": "Write one of the words down.", "parameters": parameters}
    body = {
        "messages": messages(rng, "Note one.", num_pictures),
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 160,
    }

    def holds(answered: Answered) -> bool:
        return [one for one, _ in answered.calls] == [name] and _secret_of(answered.calls[0][1]) == secret

    return Question(kind="tool", body=body, has_picture=num_pictures > 0, holds=holds)


def biased(rng: random.Random, num_pictures: int) -> Question:
    """One token over and over: which one is the secret. What it looks like over and over is recorded."""
    token, num_tokens = rng.choice(BIASED_IDS), rng.choice([4, 4, BIASED_TOKENS])
    body = {
        "messages": messages(rng, "Say more.", num_pictures), "logit_bias": {str(token): 100},
        "max_tokens": num_tokens, "ignore_eos": True,
        "temperature": rng.choice([0.0, 1.0]), "seed": rng.getrandbits(30),
    }  # fmt: skip
    return Question(
        kind="biased", body=body, has_picture=num_pictures > 0,
        key=f"token {token}", holds=lambda answered: answered.finish == "length" and answered.text != "",
    )  # fmt: skip


def recorded(rng: random.Random, num_pictures: int) -> Question:
    """One of a few, greedy: the answer depends on every token and every pixel of the prompt."""
    return numbered(rng.randrange(NUM_RECORDED), num_pictures)


def numbered(number: int, num_pictures: int) -> Question:
    own = random.Random(number * 4 + num_pictures)
    body = {
        "messages": messages(own, "What are they about?", num_pictures),
        "temperature": 0,
        "max_tokens": own.choice([8, 16, 32]),
        "ignore_eos": True,
    }
    key = f"question {number} with {num_pictures} pictures"
    return Question(kind="recorded", body=body, has_picture=num_pictures > 0, key=key)


def to_record(has_eyes: bool) -> list[Question]:
    """What is asked while the server is alone: every key that `recorded` and `biased` may use."""
    found = [numbered(number, count) for number in range(NUM_RECORDED) for count in range(3 if has_eyes else 1)]
    for token in BIASED_IDS:
        body = {
            "messages": [{"role": "user", "content": "Say more."}], "logit_bias": {str(token): 100},
            "max_tokens": BIASED_TOKENS, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        found.append(Question(kind="biased", body=body, key=f"token {token}"))
    return found


KINDS: dict[str, Callable[[random.Random, int], Question]] = {
    "recorded": recorded, "biased": biased, "regex": regex, "schema": schema, "tool": tool,
}  # fmt: skip


def bad(rng: random.Random) -> Question:
    """A request that must be refused, and hurt nobody."""
    whole = picture(rng.randrange(NUM_PICTURES))
    head, _, data = whole.partition(",")
    raw = base64.b64decode(data)
    pictures = {
        "cut short": f"{head},{base64.b64encode(raw[: len(raw) // 2]).decode()}",
        "no picture": "data:image/png;base64," + base64.b64encode(rng.randbytes(200)).decode(),
        "no base64": head + ",%%%" + data[:50],
        "bomb": _bomb(50_000),
        "from the network": "http://169.254.169.254/latest/meta-data",
        "from the disk": "file:///etc/passwd",
        "empty": "data:image/png;base64,",
    }
    name = rng.choice([*pictures, "unknown field", "too long"])
    body: dict[str, Any] = {"messages": messages(rng, "What is this?", 0), "max_tokens": 8}
    if name in pictures:
        body["messages"][1]["content"].insert(0, {"type": "image_url", "image_url": {"url": pictures[name]}})
    elif name == "unknown field":
        body["max_token"] = 8
    else:
        body["messages"][1]["content"][0]["text"] = "word " * 40_000
    return Question(kind="bad", body=body, has_picture=name in pictures, key=name, statuses=(400, 413))


def _bomb(side: int) -> str:
    """A PNG of a few hundred bytes whose header claims side × side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(5000)))
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _secret_of(text: str) -> str | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content.get("secret") if isinstance(content, dict) else None
