"""Are answers the same alone and under load, bit for bit, in every mixture of cached and uncached prefixes?

usage: python bench/steady.py demo --json bench/results/steady.json [--dtype float --dtype auto]

Each question is asked alone first. Then again: alone, from the cache, beside others that come and go, uncached and
cached, and with beginnings that the questions share. Compared are the tokens and the logits' own bits, by the
log-probabilities of the three likeliest tokens at each place.
"""

from __future__ import annotations

import argparse
import io
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import record
from PIL import Image
from record import Measure, Target
from traffic.questions import WORDS

from triptych.core.chat import Chat, ImagePart, Message, Part, TextPart
from triptych.core.request import Sampling
from triptych.engine.config import EngineConfig
from triptych.session import Session

LENGTHS = (1, 3, 20, 40, 90, 150)  # words of a question
TOKENS = 16
NUM_OTHERS = 3

Said = tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]  # tokens, log-probabilities


class Asker:
    """One session and its questions; each tenant has a cache of its own."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names = itertools.count()
        self._random = np.random.default_rng(0)
        self.questions = [self._question(at, length) for at, length in enumerate(LENGTHS)]

    def _words(self, count: int) -> str:
        return " ".join(self._random.choice(WORDS, count))

    def _question(self, at: int, length: int) -> Chat:
        parts: list[Part] = [TextPart(text=self._words(length))]
        if at % 2:
            small = self._random.integers(0, 256, (8, 8, 3), np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((224, 224)).save(file, "PNG")
            parts.insert(0, ImagePart(source=file.getvalue()))
        system = Message(role="system", parts=(TextPart(text="You answer briefly. " * 12),))
        return Chat(messages=(system, Message(role="user", parts=tuple(parts))))

    def ask(self, chat: Chat, tenant: str, *, max_tokens: int = TOKENS) -> Said:
        prompt = self._session.prepare_chat(chat, tenant=tenant)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, num_logprobs=3)
        deltas = list(self._session.start(prompt, sampling, request_id=str(next(self._names))))
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        bits = tuple(tuple(one.logprob for one in place.top) for delta in deltas for place in delta.logprobs)
        return tokens, bits

    def alone(self, tenant: Callable[[int], str]) -> list[Said]:
        return [self.ask(chat, tenant(at)) for at, chat in enumerate(self.questions)]

    def loaded(self, tenant: Callable[[int], str]) -> list[Said]:
        """All questions at once, beside others that come and go."""
        is_over = threading.Event()

        def others(number: int) -> None:
            random = np.random.default_rng(number)
            while not is_over.is_set():
                words = " ".join(random.choice(WORDS, int(random.integers(1, 80))))
                chat = Chat(messages=(Message(role="user", parts=(TextPart(text=words),)),))
                self.ask(chat, f"other {number}", max_tokens=int(random.integers(1, 12)))

        said: dict[int, Said] = {}

        def one(at: int) -> None:
            said[at] = self.ask(self.questions[at], tenant(at))

        beside = [threading.Thread(target=others, args=(number,)) for number in range(NUM_OTHERS)]
        asking = [threading.Thread(target=one, args=(at,)) for at in range(len(self.questions))]
        for thread in (*beside, *asking):
            thread.start()
        for thread in asking:
            thread.join()
        is_over.set()
        for thread in beside:
            thread.join()
        return [said[at] for at in range(len(self.questions))]


def compare(asker: Asker, rounds: int) -> dict[str, list[tuple[bool, bool]]]:
    """By mixture: for each question, whether its tokens and its bits are those it had alone at first."""
    first = asker.alone(lambda at: f"first {at}")
    found: dict[str, list[tuple[bool, bool]]] = {}
    for number in range(rounds):
        said = {
            "alone, uncached": asker.alone(lambda at, number=number: f"alone {number} {at}"),
            "alone, cached": asker.alone(lambda at: f"first {at}"),
            "loaded, uncached": asker.loaded(lambda at, number=number: f"loaded {number} {at}"),
            "loaded, cached": asker.loaded(lambda at: f"first {at}"),
            "loaded, sharing": asker.loaded(lambda at, number=number: f"shared {number}"),
            "loaded, shared": asker.loaded(lambda at, number=number: f"shared {number}"),
        }
        for name, answers in said.items():
            pairs = zip(answers, first, strict=True)
            found.setdefault(name, []).extend((had[0] == was[0], had == was) for had, was in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", action="append", choices=["float", "auto"])
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    found: list[Measure] = []
    targets: list[Target] = []
    for dtype in asked.dtype or ["float", "auto"]:
        with Session.open(asked.model, config=EngineConfig(dtype=dtype)) as session:
            mixtures = compare(Asker(session), asked.rounds)
        for name, answers in mixtures.items():
            for kind, place in (("tokens", 0), ("bits", 1)):
                share = [100.0 * answer[place] for answer in answers]
                mean = sum(share) / len(share)
                entry = Measure(
                    name=f"same {kind}, {name}", subject=f"--dtype {dtype}", unit="%", value=mean,
                    lowest=min(share), highest=max(share), num_samples=len(share),
                )  # fmt: skip
                found.append(entry)
                print(f"{entry.subject:14} {entry.name:30} {entry.value:6.1f} % of {entry.num_samples}", flush=True)
        least = min(entry.value for entry in found if entry.subject == f"--dtype {dtype}")
        targets.append(Target(name=f"same bits in every mixture, --dtype {dtype}", value=least, unit="%", at_least=100))
    if asked.json:
        settings = {"model": asked.model, "rounds": asked.rounds, "others": NUM_OTHERS, "tokens": TOKENS}
        record.write(asked.json, record.record("steady", found, targets, settings))


if __name__ == "__main__":
    main()
