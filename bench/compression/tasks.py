"""The questions with their judges: single pictures, and long conversations about several (`scenes.py` makes them)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych-bench" / "tasks"
COLOURS = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "gray", "black", "white"]
MAX_TOKENS = 24
"""Of an answer: enough for every right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question. `messages` are OpenAI's, with pictures by absolute path."""

    id: str
    kind: str
    split: str
    messages: list[dict[str, Any]]
    truth: Any
    cluster: str  # questions of one conversation stand or fall together: intervals are drawn over clusters

    def is_right(self, text: str) -> bool:
        """As recipes/mini/evaluate.py judges."""
        from recipes.mini.questions import named, right_colour, right_count

        if self.kind == "colour":
            return right_colour(text, self.truth, COLOURS)
        if self.kind == "count":
            return right_count(text, self.truth)
        if self.kind == "photo":
            return any(named(text, word) for word in self.truth)
        return all(named(text, name) for name in self.truth)

    def chat(self) -> Any:
        """What `Session.prepare_chat` takes."""
        from triptych.core.chat import Chat, ImagePart, Message, TextPart

        def parts(content: Any) -> tuple[Any, ...]:
            if isinstance(content, str):
                return (TextPart(text=content),)
            return tuple(
                TextPart(text=part["text"])
                if part["type"] == "text"
                else ImagePart(source=Path(part["image_url"]["url"]).read_bytes())
                for part in content
            )

        return Chat(messages=tuple(Message(role=each["role"], parts=parts(each["content"])) for each in self.messages))


def cases(name: str) -> list[Case]:
    """`single`, `long` or `calibrate`. Raises SystemExit when they were not made yet."""
    path = FOLDER / f"{name}.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} is missing: run .venv-mini/bin/python bench/compression/scenes.py")
    return [_case(json.loads(line)) for line in path.read_text().splitlines()]


def digest() -> str:
    return (FOLDER / "digest").read_text().strip()


def _case(row: dict[str, Any]) -> Case:
    for message in row["messages"]:
        if not isinstance(message["content"], str):
            for part in message["content"]:
                if part["type"] == "image_url":
                    part["image_url"]["url"] = str(FOLDER / part["image_url"]["url"])
    return Case(
        id=row["id"], kind=row.get("kind", ""), split=row.get("split", ""), messages=row["messages"],
        truth=row.get("truth"), cluster=str(row.get("conversation", row["id"])),
    )  # fmt: skip
