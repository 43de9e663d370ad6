"""A server under open-loop load: requests arrive by chance, text and pictures, whether or not the last one is done.

usage: python bench/serve.py [BUNDLE|demo] --outside --json bench/results/serve.json [--rates 0.5,1,2] [-- FLAGS]
       python bench/serve.py --url http://HOST:PORT [--name MODEL] --json OUT       (any OpenAI-compatible server)

Without --rates, the capacity is measured first (a closed loop) and half of it, four fifths, all and twice are asked.
Goodput counts the answers that kept both promises, --ttft and --tpot. With --outside, our own client, GuideLLM and
aiperf then ask the same (texts, then pictures, at half the capacity), and what each saw is held against what the server
counted meanwhile (environments: bench/.rivals). --quick: a few seconds of everything; no figure counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import record
from environments import bin_of
from traffic import aiperf, guidellm, outside
from traffic.outside import Plan, Seen
from traffic.questions import Question, messages
from traffic.served import Served, found, serving
from traffic.tally import percentile
from traffic.visits import Manner, Visit, client, visit

RIVALS = Path(__file__).parent / ".rivals"
OUTSIDE = {"guidellm": guidellm, "aiperf": aiperf}
SHARES = (0.5, 0.8, 1.0, 2.0)  # of the capacity
Ask = Callable[[random.Random], Question]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What is asked. pictures: share of the requests that have one; max_tokens: drawn from these."""

    pictures: float = 0.4
    max_tokens: tuple[int, ...] = (8, 32, 64)
    is_plain: bool = False  # OpenAI's own fields alone
    ttft_s: float = 2.0  # what an answer must keep to count as good
    tpot_s: float = 0.2

    def question(self, rng: random.Random) -> Question:
        num_pictures = int(rng.random() < self.pictures)
        body = {
            "messages": messages(rng, "What are they about?", num_pictures),
            "max_tokens": rng.choice(self.max_tokens), "temperature": 0,
        }  # fmt: skip
        if not self.is_plain:
            body["ignore_eos"] = True
        return Question(kind="load", body=body, has_picture=num_pictures > 0)

    def is_good(self, made: Visit) -> bool:
        ttft_s, tpot_s = made.ttft_s, made.tpot_s
        return made.is_whole and (ttft_s or 0) <= self.ttft_s and (tpot_s or 0) <= self.tpot_s


async def open_loop(served: Served, ask: Ask, rate: float, number: int) -> list[Visit]:
    """So many, who come by chance; waited for to their end."""
    rng = random.Random(f"{rate}")
    questions = [ask(rng) for _ in range(number)]
    async with client(served) as http:
        under_way, due_s = [], time.perf_counter()
        for question in questions:
            under_way.append(asyncio.create_task(visit(http, served.model, question, Manner())))
            due_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return list(await asyncio.gather(*under_way))


async def capacity(served: Served, mix: Mix, seats: int, seconds: float) -> float:
    """Answers a second of a closed loop that keeps every seat taken."""
    rng, made, started = random.Random(0), 0, time.perf_counter()

    async def sit() -> None:
        nonlocal made
        while time.perf_counter() - started < seconds:
            await visit(http, served.model, mix.question(rng), Manner())
            made += 1

    async with client(served) as http:
        await asyncio.gather(*(sit() for _ in range(seats)))
    return made / (time.perf_counter() - started)


def measures(made: Sequence[Visit], mix: Mix, rate: float) -> list[record.Measure]:
    """Of one rate: percentiles over those answered, by modality; shares and rates over all."""
    subject = f"{rate:.3g} requests/s"
    answered = [one for one in made if one.is_whole]
    found: list[record.Measure] = []
    for what, some in (
        ("text", [one for one in answered if not one.question.has_picture]),
        ("pictures", [one for one in answered if one.question.has_picture]),
    ):
        samples = {
            "TTFT": [one.ttft_s for one in some if one.ttft_s is not None],
            "TPOT": [one.tpot_s for one in some if one.tpot_s is not None],
            "between pieces": [gap for one in some for gap in one.gaps_s],
            "whole answer": [one.ended_s - one.sent_s for one in some],
        }
        for name, values in samples.items():
            found += _percentiles(f"{name}, {what}", subject, values)
    good = sum(mix.is_good(one) for one in answered)
    spent = max((one.ended_s for one in made), default=0.0) - min((one.sent_s for one in made), default=0.0)
    rejected = sum(one.status == 429 for one in made)
    figures = {
        "goodput": ("answers/s", good / len(made) * rate),
        "answered": ("", len(answered)),
        "rejected": ("", rejected),
        "failed": ("", len(made) - len(answered) - rejected),
        "tokens": ("tokens/s", sum(one.num_tokens for one in answered) / max(spent, 1e-9)),
    }
    return found + [record.measure(name, subject, unit, [value]) for name, (unit, value) in figures.items()]


def _percentiles(name: str, subject: str, values: Sequence[float]) -> Iterator[record.Measure]:
    for share in (0.5, 0.99) if values else ():
        yield record.Measure(
            name=f"{name} p{100 * share:.0f}", subject=subject, unit="s", value=percentile(list(values), share),
            lowest=min(values), highest=max(values), num_samples=len(values),
        )  # fmt: skip


def tokenizer_of(model: str) -> Path:
    from triptych.session.opening import Source, find_bundle

    return find_bundle(Source(model=model)).path


def watchers(served: Served, plan: Plan) -> Iterator[tuple[str, Callable[[], Seen]]]:
    """Who asks what `plan` says, one after another: by name, and what does it."""

    def ask() -> Seen:
        return outside.ours(asyncio.run(open_loop(served, plan.question, plan.rate, plan.num_requests)))

    yield "ours", ask
    for name, theirs in OUTSIDE.items():
        program = bin_of(RIVALS / name, *theirs.PACKAGES) / name
        yield name, functools.partial(theirs.run, program, served, plan, RIVALS / f"{name}-runs")


def compare(served: Served, plan: Plan) -> tuple[list[record.Measure], list[record.Target]]:
    """What each client saw, and whether the server counted the same."""
    made: list[record.Measure] = []
    targets: list[record.Target] = []
    for name, ask in watchers(served, plan):
        before = served.counters()
        seen = ask()
        own, subject = outside.counted(before, served.counters()), plan.subject(name)
        if not own.num_answered:
            raise SystemExit(f"{served.url}/metrics counted no answer in vLLM's names: nothing to hold {name} against")
        made += seen.measures(subject)
        made += [
            record.measure(f"{what} mean, counted by the server", subject, "s", [s]) for what, s in own.seconds.items()
        ]
        targets += outside.agreement(subject, seen, own)
    return made, targets


@contextlib.contextmanager
def served_by(asked: argparse.Namespace) -> Iterator[Served]:
    if asked.url:
        yield found(asked.url, asked.name)
    else:
        with serving(asked.model, asked.flags, RIVALS / "serve.log") as served:
            yield served


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--name", help="the model's name there; its first one if not given")
    parser.add_argument("--rates", help="requests a second, such as 0.5,1,2")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each rate")
    parser.add_argument("--seats", type=int, default=8, help="of the closed loop")
    parser.add_argument("--pictures", type=float, default=0.4)
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.2)
    parser.add_argument("--plain", action="store_true", help="OpenAI's own fields alone")
    parser.add_argument("--outside", action="store_true", help="GuideLLM and aiperf, too")
    parser.add_argument("--quick", action="store_true", help="two seconds of each rate")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="after --, for triptych serve")
    asked = parser.parse_args()
    asked.seconds = 2.0 if asked.quick else asked.seconds
    return asked


def main() -> None:
    asked = parse()
    mix = Mix(pictures=asked.pictures, is_plain=asked.plain, ttft_s=asked.ttft, tpot_s=asked.tpot)
    made: list[record.Measure] = []
    targets: list[record.Target] = []
    busy_before = record.busy_share()
    with served_by(asked) as served:
        asyncio.run(open_loop(served, mix.question, 4.0, 12))  # every part opens with its first request
        best = asyncio.run(capacity(served, mix, asked.seats, asked.seconds / 2))
        made.append(record.measure("capacity", "closed loop", "answers/s", [best]))
        rates = [float(one) for one in asked.rates.split(",")] if asked.rates else [best * share for share in SHARES]
        for rate in rates:
            number = max(1, round(rate * asked.seconds))
            made += measures(asyncio.run(open_loop(served, mix.question, rate, number)), mix, rate)
        for has_pictures in (False, True) if asked.outside else ():
            number = max(2, round(best / 2 * asked.seconds))
            plan = Plan(tokenizer_of(asked.model), rate=best / 2, num_requests=number, has_pictures=has_pictures)
            found, agreed = compare(served, plan)
            made += found
            targets += agreed
    facts = {
        "seconds": asked.seconds, "pictures": mix.pictures, "max_tokens": mix.max_tokens, "ttft_s": mix.ttft_s,
        "tpot_s": mix.tpot_s, "flags": " ".join(asked.flags), "busy_before": busy_before,
    }  # fmt: skip
    for one in made:
        print(f"{one.subject:42} {one.name:38} {one.value:10.4g} {one.unit}")
    for target in targets:
        print(f"{'met' if target.is_met else 'MISSED':8} {target.name:80} {target.value:8.3f} {target.unit}")
    if asked.json:
        record.write(asked.json, record.record("serve", made, targets, facts))


if __name__ == "__main__":
    main()
