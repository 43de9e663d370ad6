"""What guessing next tokens gives: the same questions with prompt look-up and without, by turns, on two open sessions.

usage: python bench/speculation.py demo --json bench/results/speculation.json [--rounds 3] [--dtype auto]

Repeats: edits, lists, forms, what goes round by itself. Does not: stories at temperature 1, words drawn at random.
A figure is tokens a second of one answer from its first token on, or of several answers together. What does not repeat
is asked three times as often: little is guessed there, and the machine's moods are larger than what that costs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import record
from record import Measure, Target

from triptych.core.chat import Chat, Form, Message, TextPart
from triptych.core.policy import Speculation
from triptych.core.request import Sampling
from triptych.engine.config import EngineConfig
from triptych.session import Session
from triptych.session.prompt import Prompt

PARAGRAPH = (
    "The old bridge over the river was built in 1874 by two brothers from the village. It has seven arches of grey "
    "stone, and each arch bears the name of a family that paid for it. In spring the water rises to the third course."
)
ROWS = {
    "type": "array", "minItems": 8, "maxItems": 8,
    "items": {
        "type": "object", "required": ["station_name", "opening_year", "is_staffed"], "additionalProperties": False,
        "properties": {
            "station_name": {"enum": ["North", "South", "East", "West"]},
            "opening_year": {"enum": [1901, 1922, 1950]},
            "is_staffed": {"type": "boolean"},
        },
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    repeats: bool
    ask: Callable[[Session], Prompt]
    temperature: float = 0.0
    together: int = 1


def chat(text: str, form: Form | None = None) -> Callable[[Session], Prompt]:
    message = Message(role="user", parts=(TextPart(text=text),))
    return lambda session: session.prepare_chat(Chat(messages=(message,)), form=form)


def words(session: Session) -> Prompt:
    return session.prepare_text([int(token) for token in np.random.default_rng(5).integers(100, 49_000, 128)])


STORY = chat("Write a story about a lighthouse keeper.")
EDIT = chat(f"Repeat this text word for word, but write «tower» instead of «bridge»:\n\n{PARAGRAPH}")
CASES = (
    Case(name="edit", repeats=True, ask=EDIT),
    Case(name="list", repeats=True, ask=chat("Write the numbers from one to forty as a numbered list.")),
    Case(name="form", repeats=True, ask=chat("List eight railway stations as JSON.", Form(kind="schema", value=ROWS))),
    Case(name="summary", repeats=True, ask=chat(f"Summarise this text:\n\n{PARAGRAPH}\n\n{PARAGRAPH}")),
    Case(name="story, temperature 1", repeats=False, ask=STORY, temperature=1.0),
    Case(name="words at random, temperature 1", repeats=False, ask=words, temperature=1.0),
    Case(name="eight stories, temperature 1", repeats=False, ask=STORY, temperature=1.0, together=8),
)


class Asker:
    def __init__(self, model: str, dtype: str, speculation: Speculation | None) -> None:
        config = EngineConfig(dtype=dtype, num_threads=2, speculation=speculation, enable_prefix_caching=False)  # type: ignore[arg-type]
        self.session = Session.open(model, config=config)
        self._names = itertools.count()

    def ask(self, case: Case, num_tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        """Tokens a second, and the tokens."""
        prompt = case.ask(self.session)
        room = num_tokens if prompt.guide is None else 4 * num_tokens  # a form ends by itself
        samplings = [
            Sampling(max_tokens=room, temperature=case.temperature, seed=seed, ignore_eos=prompt.guide is None)
            for seed in range(case.together)
        ]
        began = time.perf_counter()
        streams = [self.session.start(prompt, one, request_id=f"{next(self._names)}") for one in samplings]
        answers = [stream.answer() for stream in streams]
        seconds = time.perf_counter() - began if case.together > 1 else answers[0].timing.decode_s
        return sum(len(answer.token_ids) for answer in answers) / seconds, [answer.token_ids for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    plain, fast = Asker(asked.model, asked.dtype, None), Asker(asked.model, asked.dtype, Speculation())
    found: list[Measure] = []
    gains: dict[bool, list[float]] = {True: [], False: []}
    for case in CASES:
        rates: dict[str, list[float]] = {"plain": [], "guessed": []}
        same, before = [], fast.session.stats().drafts
        num_rounds = asked.rounds * (1 if case.repeats else 3)
        for number in range(num_rounds + 1):  # the first is not counted: shapes are compiled in it
            turn = [("plain", plain), ("guessed", fast)][:: 1 if number % 2 else -1]
            said = {name: asker.ask(case, asked.tokens) for name, asker in turn}
            if number:
                for name, (rate, _) in said.items():
                    rates[name].append(rate)
            same += [one == other for one, other in zip(said["plain"][1], said["guessed"][1], strict=True)]
        found += [record.measure(case.name, name, "tokens/s", values) for name, values in rates.items()]
        ratios = [fast_rate / rate for fast_rate, rate in zip(rates["guessed"], rates["plain"], strict=True)]
        found.append(record.measure(case.name, "gain", "×", ratios))
        drafts = (fast.session.stats().drafts - before) / len(same)
        found.append(record.measure(case.name, "guesses an answer", "", [drafts]))
        found.append(record.measure(case.name, "same tokens", "%", [100.0 * sum(same) / len(same)]))
        gains[case.repeats].append(statistics.median(ratios))
        plainly, guessed, gain, _, share = found[-5:]
        spread = (
            f"{gain.value:.2f} × ({gain.lowest:.2f}–{gain.highest:.2f}), {drafts:.1f} guesses, same {share.value:.0f} %"
        )
        print(f"{case.name:32} {plainly.value:6.0f} {guessed.value:6.0f} tokens/s {spread}", flush=True)
    stats = fast.session.stats()
    print(f"{stats.drafts:,} guesses, {stats.drafted_tokens:,} tokens, {stats.accepted_tokens:,} of them came")
    plain.session.close(), fast.session.close()
    targets = [
        Target(name="gain where text repeats, median", unit="×", value=statistics.median(gains[True]), at_least=1.3),
        Target(name="gain where it does not, least", unit="×", value=min(gains[False]), at_least=0.98),
    ]
    if asked.json:
        facts = {name: getattr(stats, name) for name in ("drafts", "drafted_tokens", "accepted_tokens")}
        settings = {"model": asked.model, "dtype": asked.dtype, "tokens": asked.tokens, "rounds": asked.rounds, **facts}
        record.write(asked.json, record.record("speculation", found, targets, settings))


if __name__ == "__main__":
    main()
