"""Make the questions, once: scenes of recipes/mini that nobody trained on, alone and in long conversations.

usage: .venv-mini/bin/python bench/compression/scenes.py      (needs what recipes/mini needs; half a minute)

Only kinds that the model card says it can answer. Writes pictures, `single.jsonl`, `long.jsonl`, `calibrate.jsonl` and
`digest` under `tasks.FOLDER`; the three files share no picture.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "bench")]

from recipes.mini import photos  # noqa: E402
from recipes.mini.evaluate import png  # noqa: E402
from recipes.mini.questions import ASKED, NUMBERS, Facts, answer  # noqa: E402
from recipes.mini.scenes import COLOUR_NAMES, Scene, Stage  # noqa: E402
from tqdm import tqdm  # noqa: E402

from compression.filler import HELD_OUT, TURNS  # noqa: E402
from compression.tasks import FOLDER  # noqa: E402

SEED = 61_130
SINGLE = {("name", "seen"): 120, ("name", "unseen"): 90, ("colour", "seen"): 45, ("colour", "unseen"): 45,
          ("count", "seen"): 50, ("count", "unseen"): 50}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A scene on disk, and what is true of it."""

    path: str
    facts: Facts

    def truth(self, kind: str) -> Any:
        return {"name": list(self.facts.names), "colour": self.facts.colour, "count": len(self.facts.names)}[kind]


class Maker:
    """Draws scenes and writes them down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stage = Stage()
        self.rng = np.random.default_rng(SEED)
        (folder / "pictures").mkdir(parents=True)

    def scene(self, split: str, count: int) -> Shown:
        styles = self.stage.training if split == "seen" else self.stage.held_out
        scene: Scene = self.stage.scene(self.rng, styles, count, False)
        names = tuple(self.stage.names[i] for i in scene.concept_ids)
        facts = Facts(photo=False, names=names, colour=COLOUR_NAMES[scene.colour], count=NUMBERS[len(names)])
        return Shown(path=self.write(png(scene), ".png"), facts=facts)

    def write(self, data: bytes, suffix: str) -> str:
        path = f"pictures/{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
        (self.folder / path).write_bytes(data)
        return path

    def count_for(self, kind: str, i: int) -> int:
        return 1 if kind == "name" else 1 + i % 4

    def asked(self, kind: str) -> str:
        return str(self.rng.choice(ASKED[kind]))

    # ── one picture, one question ──────────────────────────────────────────────────────────────────────────────

    def single(self) -> Iterator[dict[str, Any]]:
        for (kind, split), number in SINGLE.items():
            for i in range(number):
                shown = self.scene(split, self.count_for(kind, i))
                yield row(kind, split, [said("user", self.asked(kind), shown.path)], shown.truth(kind))
        for name, words in photos.ASKED.items():
            source = photos.path_of(name)
            path = self.write(source.read_bytes(), source.suffix)
            yield row("photo", "photo", [said("user", "What is in the picture?", path)], words)

    # ── long conversations ─────────────────────────────────────────────────────────────────────────────────────

    def long(self, number: int) -> Iterator[dict[str, Any]]:
        """Several questions at the end of each conversation; they share all that was said before.

        `split`: latest (the picture comes with the question) or earlier (other talk lies between). Of what came
        earlier only the colour is asked: fp32 loses counts and names there, and pictures before the last one.
        """
        for i in range(number):
            num_pictures = 4 + i % 5
            shown = [self.scene("seen", int(self.rng.integers(1, 5))) for _ in range(num_pictures)]
            for j in (0, -2, -1):
                shown[j] = self.scene("seen", 1 if self.rng.random() < 0.5 else int(self.rng.integers(2, 5)))
            known = [str(self.rng.choice(["colour", "count"])) for _ in shown]  # what is told of each in the talk
            talk, unused = self.talk(shown[:-1], known)
            last = shown[-1]
            for kind in ("colour", "count", "name")[: 3 if len(last.facts.names) == 1 else 2]:
                asked = said("user", self.asked(kind), last.path)
                yield row(kind, "latest", [*talk, asked], last.truth(kind), conversation=i)
            look = [said("user", "Look at this picture.", last.path), said("assistant", "I see the picture.")]
            for question in (ASKED["colour"][i % 2], ASKED["colour"][2 + i % 3]):
                messages = [*talk, *look, *small_talk(unused), said("user", question)]
                yield row("colour", "earlier", messages, last.truth("colour"), conversation=i)

    def talk(self, shown: list[Shown], known: list[str]) -> tuple[list[dict[str, Any]], int]:
        """Pictures, each with a question and its true answer, small talk between them, and a turn not used."""
        turns = [int(turn) for turn in self.rng.permutation(HELD_OUT)]
        messages, each = [], 1 if len(shown) > 3 else 2
        for j, (picture, kind) in enumerate(zip(shown, known, strict=False)):
            messages += [said("user", self.asked(kind), picture.path), said("assistant", answer(kind, picture.facts))]
            for turn in turns[j * each : (j + 1) * each]:
                messages += small_talk(turn)
        return messages, turns[-1]

    # ── for calibration: with answers, as users would send them ────────────────────────────────────────────────

    def calibrate(self, number: int) -> Iterator[dict[str, Any]]:
        for i in range(number):
            if i % 4 == 3:
                turns = self.rng.permutation(np.arange(HELD_OUT, len(TURNS)))[:3]
                yield {"messages": [message for turn in turns for message in small_talk(int(turn))]}
                continue
            kind = ("name", "colour", "count")[i % 4]
            yield {"messages": [said("user", self.asked(kind), self.scene("seen", self.count_for(kind, i)).path)]}


def said(role: str, text: str, picture: str | None = None) -> dict[str, Any]:
    """One message as OpenAI's API has it."""
    if picture is None:
        return {"role": role, "content": text}
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
    return {"role": role, "content": parts}


def small_talk(turn: int) -> list[dict[str, Any]]:
    question, reply = TURNS[turn]
    return [said("user", question), said("assistant", reply)]


def row(kind: str, split: str, messages: list[dict[str, Any]], truth: Any, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "split": split, "messages": messages, "truth": truth, **more}


def main() -> None:
    scratch = FOLDER.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)
    maker = Maker(scratch)
    files = {"single": maker.single(), "long": maker.long(30), "calibrate": maker.calibrate(96)}
    whole = hashlib.sha256()
    for name, rows in files.items():
        lines = [
            json.dumps({"id": f"{name}-{i}", **each}, ensure_ascii=False)
            for i, each in enumerate(tqdm(rows, desc=name, mininterval=5))
        ]
        (scratch / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        whole.update("\n".join(lines).encode())
    (scratch / "digest").write_text(whole.hexdigest()[:16] + "\n")
    shutil.rmtree(FOLDER, ignore_errors=True)
    scratch.rename(FOLDER)
    print(FOLDER, whole.hexdigest()[:16])


if __name__ == "__main__":
    main()
