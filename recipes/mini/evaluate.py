"""Stage 7: ask, and count right answers (`python -m recipes.mini.evaluate [--through triptych BUNDLE] --json FILE`).

Greedy free generation, lenient match (`questions.named`), Wilson 95 % intervals. Scenes are new: no seed of theirs was
trained on.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from recipes.mini import photos
from recipes.mini.questions import ASKED, named, right_colour, right_count
from recipes.mini.scenes import COLOUR_NAMES, Scene, Stage

MAX_TOKENS = 40
SEED = 2026
Ask = Callable[[Sequence[bytes], Sequence[str]], list[str]]  # encoded pictures, a question about each


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question: what it measures, and the judge of an answer."""

    measure: str
    picture: bytes
    question: str
    truth: str
    right: Callable[[str], bool]


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    share, n = right / total, total
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def png(scene: Scene) -> bytes:
    """A scene as a file."""
    file = io.BytesIO()
    Image.fromarray(scene.pixels).save(file, "PNG")
    return file.getvalue()


def judged(kind: str, stage: Stage, scene: Scene, name: str) -> tuple[str, Callable[[str], bool]]:
    """The truth about a scene in words, and who judges an answer."""
    shown = [stage.names[i] for i in scene.concept_ids]
    colour = COLOUR_NAMES[scene.colour]
    if kind == "colour":
        return colour, lambda text: right_colour(text, colour, COLOUR_NAMES)
    if kind == "count":
        return str(len(shown)), lambda text: right_count(text, len(shown))
    if kind == "has":
        yes = name in shown
        return "yes" if yes else "no", lambda text: text.lower().startswith("yes" if yes else "no")
    if kind == "describe":
        return (
            f"{shown} on {colour}",
            lambda text: right_colour(text, colour, COLOUR_NAMES) and any(named(text, n) for n in shown),
        )
    return ", ".join(shown), lambda text: all(named(text, n) for n in shown)


def scene_cases(number: int) -> list[Case]:
    """`number` scenes for each question type and style."""
    stage, cases = Stage(), []
    for split, styles in (("seen", stage.training), ("unseen", stage.held_out)):
        rng = np.random.default_rng([SEED, split == "seen"])
        for kind, asked in ASKED.items():
            for i in range(number):
                count = 1 if kind == "name" else 2 + i % 3 if kind == "list" else 1 + i % 4
                scene = stage.scene(rng, styles, count, False)
                pool = [stage.names[c] for c in scene.concept_ids] if i // 4 % 2 else stage.names
                name = str(rng.choice(pool)) if kind == "has" else ""
                truth, right = judged(kind, stage, scene, name)
                question = asked[i % len(asked)].format(name)
                cases.append(
                    Case(measure=f"{kind} · {split}", picture=png(scene), question=question, truth=truth, right=right)
                )
    return cases


def photo_cases() -> list[Case]:
    """The six photographs."""
    cases = []
    for name, words in photos.ASKED.items():

        def right(text: str, words: list[str] = words) -> bool:
            return any(named(text, word) for word in words)

        picture = photos.path_of(name).read_bytes()
        cases.append(
            Case(
                measure="photo",
                picture=picture,
                question="What is in the picture?",
                truth=f"{name}: {words}",
                right=right,
            )
        )
    return cases


def through_torch() -> Ask:
    """The reference: torch panel, transformers decoder in bf16."""
    import torch

    from recipes.mini import decoder, tower
    from recipes.mini.caption import words
    from recipes.mini.export import panel
    from recipes.mini.features import published_tower

    model, weights = decoder.load(), published_tower()
    made = panel(model.get_input_embeddings().weight.detach(), words())

    def ask(pictures: Sequence[bytes], questions: Sequence[str]) -> list[str]:
        pixels = [photos.squashed(Image.open(io.BytesIO(p))) for p in pictures]
        with torch.no_grad():
            visual = made(tower.features(torch.from_numpy(np.stack(pixels)), weights))
        return decoder.reply(model, visual, list(questions), MAX_TOKENS)

    return ask


def through_triptych(bundle: str) -> Ask:
    """The product itself."""
    from triptych import Session

    session = Session.open(bundle)

    def one(picture: bytes, question: str) -> str:
        text: str = session.ask(question, images=[picture], max_tokens=MAX_TOKENS, temperature=0.0).text
        return text

    def ask(pictures: Sequence[bytes], questions: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(len(pictures)) as pool:  # the engine makes batches of them
            return list(pool.map(one, pictures, questions))

    return ask


def run(ask: Ask, cases: list[Case], batch: int) -> list[tuple[Case, str, bool]]:
    """Every case with its answer and whether that is right."""
    done = []
    for start in tqdm(range(0, len(cases), batch), desc="asking", mininterval=5):
        part = cases[start : start + batch]
        said = ask([c.picture for c in part], [c.question for c in part])
        done += [(case, text, case.right(text)) for case, text in zip(part, said, strict=True)]
    return done


def summary(done: list[tuple[Case, str, bool]]) -> dict[str, Any]:
    """Shares with their intervals, by measure."""
    table = {}
    for measure in dict.fromkeys(case.measure for case, _, _ in done):
        rights = [right for case, _, right in done if case.measure == measure]
        low, high = wilson(sum(rights), len(rights))
        table[measure] = {
            "right": sum(rights),
            "of": len(rights),
            "share": sum(rights) / len(rights),
            "low": low,
            "high": high,
        }
    return table


def main() -> None:
    """Ask, print the table, write the JSON with every question and answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--through", choices=["torch", "triptych"], default="torch")
    parser.add_argument("--bundle", default="demo")
    parser.add_argument("--scenes", type=int, default=200, help="of each question type and style")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ask = through_torch() if arguments.through == "torch" else through_triptych(arguments.bundle)
    done = run(ask, photo_cases() + scene_cases(arguments.scenes), arguments.batch)
    table = summary(done)
    for measure, row in table.items():
        print(
            f"{measure:20} {row['right']:4} of {row['of']:4} {row['share']:6.1%}  {row['low']:.1%} … {row['high']:.1%}"
        )
    if arguments.json:
        said = [
            {"measure": c.measure, "question": c.question, "truth": c.truth, "answer": t, "right": r}
            for c, t, r in done
        ]
        content = {"through": arguments.through, "max_tokens": MAX_TOKENS, "measures": table, "answers": said}
        arguments.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
