"""One load for our own client and for others', what each says it saw, and what the server counted meanwhile."""

from __future__ import annotations

import base64
import io
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import record
from PIL import Image
from tokenizers import Tokenizer

from traffic.questions import WORDS, Question
from traffic.tally import percentile
from traffic.visits import Visit

SIZE = (320, 240)  # of a picture of noise, as PNG: no two are alike, so no cache has one
OUTPUT_TOKENS = 32
# how far apart means may be: a client waits for its connection too, sends the body, and shares the processor
AT_MOST = {"TTFT": 1.25, "TPOT": 1.05, "whole answer": 1.1}


@dataclass(frozen=True)
class Plan:
    """Chat requests that arrive by chance. tokenizer: a folder. rate: requests a second."""

    tokenizer: Path
    rate: float
    num_requests: int
    has_pictures: bool

    @property
    def prompt_tokens(self) -> int:
        """Of words. GuideLLM sends its pictures alone."""
        return 0 if self.has_pictures else 128

    def subject(self, client: str) -> str:
        return f"{client}, {'pictures' if self.has_pictures else 'text'}, {self.rate:.3g} requests/s"

    def question(self, rng: random.Random) -> Question:
        """As the other clients ask."""
        part = {"type": "image_url", "image_url": {"url": noise(rng)}} if self.has_pictures else self._words(rng)
        body = {
            "messages": [{"role": "user", "content": [part]}],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
        }
        return Question(kind="load", body=body, has_picture=self.has_pictures)

    def _words(self, rng: random.Random) -> dict[str, str]:
        tokenizer = self._tokens
        ids = tokenizer.encode(" ".join(rng.choices(WORDS, k=self.prompt_tokens)), add_special_tokens=False).ids
        return {"type": "text", "text": tokenizer.decode(ids[: self.prompt_tokens])}

    @cached_property
    def _tokens(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))


def noise(rng: random.Random) -> str:
    """A picture as a data URI."""
    pixels = np.frombuffer(rng.randbytes(SIZE[0] * SIZE[1] * 3), np.uint8).reshape(SIZE[1], SIZE[0], 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Seconds, of the requests that were answered."""

    mean: float
    p50: float
    p99: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a client says of its requests. figures: TTFT, TPOT (a token after the first), whole answer."""

    figures: Mapping[str, Figure]
    num_answered: int
    num_failed: int
    num_tokens: float  # of all answers

    def measures(self, subject: str) -> list[record.Measure]:
        found = [
            record.Measure(
                name=f"{name} {which}", subject=subject, unit="s", value=getattr(one, which),
                lowest=one.lowest, highest=one.highest, num_samples=self.num_answered,
            )
            for name, one in self.figures.items()
            for which in ("mean", "p50", "p99")
        ]  # fmt: skip
        counts = {"answered": self.num_answered, "failed": self.num_failed, "tokens": self.num_tokens}
        return found + [record.measure(name, subject, "", [value]) for name, value in counts.items()]


def ours(made: Sequence[Visit]) -> Seen:
    """What our own client saw."""
    answered = [one for one in made if one.is_whole]
    values = {
        "TTFT": [one.ttft_s for one in answered if one.ttft_s is not None],
        "TPOT": [one.tpot_s for one in answered if one.tpot_s is not None],
        "whole answer": [one.ended_s - one.sent_s for one in answered],
    }
    return Seen(
        figures={name: _figure(some) for name, some in values.items()},
        num_answered=len(answered),
        num_failed=len(made) - len(answered),
        num_tokens=sum(one.num_tokens for one in answered),
    )


def _figure(values: list[float]) -> Figure:
    return Figure(
        mean=statistics.fmean(values), p50=percentile(values, 0.5), p99=percentile(values, 0.99),
        lowest=min(values), highest=max(values),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the server counted between two moments: seconds are means of an answer."""

    num_answered: float
    num_tokens: float
    seconds: Mapping[str, float]


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> Counted:
    """From `Served.counters`."""

    def more(name: str) -> float:
        return after.get(f"vllm:{name}", 0.0) - before.get(f"vllm:{name}", 0.0)

    answers, tokens = more("e2e_request_latency_seconds_count"), more("request_generation_tokens_sum")
    first_s, whole_s = more("time_to_first_token_seconds_sum"), more("e2e_request_latency_seconds_sum")
    pairs = {
        "TTFT": (first_s, answers),
        "TPOT": (whole_s - first_s, tokens - answers),
        "whole answer": (whole_s, answers),
    }
    return Counted(
        num_answered=answers,
        num_tokens=tokens,
        seconds={name: seconds / max(number, 1.0) for name, (seconds, number) in pairs.items()},
    )


def agreement(subject: str, seen: Seen, own: Counted) -> list[record.Target]:
    """The same requests, from outside and from within."""
    found = []
    for name, most in AT_MOST.items():
        less, more = sorted((seen.figures[name].mean, own.seconds[name]))
        found.append(record.Target(name=f"{name}, apart: {subject}", value=more / less, unit="×", at_most=most))
    for name, theirs, here in (
        ("answers", seen.num_answered + seen.num_failed, own.num_answered),
        ("tokens", seen.num_tokens, own.num_tokens),
    ):
        off = abs(theirs - here) / max(here, 1.0)
        found.append(record.Target(name=f"{name}, off: {subject}", value=off, unit="share", at_most=0.0))
    return found


def run(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """Raises SystemExit when it failed."""
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        print("\n".join(log.read_text().splitlines()[-20:]), file=sys.stderr)
        raise SystemExit(f"{Path(command[0]).name} ended with {done.returncode}, see {log}")
