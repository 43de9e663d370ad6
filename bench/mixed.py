"""Texts and pictures mixed, open loop: the most requests a second at kept promises, and what a request costs.

usage: python bench/mixed.py --json bench/results/mixed.json [--within 420] [--rounds 1] [--rates 0.1,0.2,0.4]

Half of the requests have one picture of 512 by 256 pixels, by SmolVLM's rules three tiles; every prompt has about 128
tokens of text, every answer 32 to 64. Arrivals are Poisson and the same for all servers: ours with a decoder of four
bits beside llama.cpp's, ours with one of eight beside vLLM's.
A trial is a fresh process, warmed up; the servers take turns, rate by rate; llama.cpp has the fastest of three
projector files, vLLM of two kinds of weights. A promise is kept at a rate where 95 % of the requests, both kinds
together, had their first token and their pace in time. A run ends after --within seconds and goes on where it stopped
when started again within two hours; `--fresh` starts anew. Making models and servers: rivals/install.py mixed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import record
from mixed import likeness
from mixed.servers import RIVALS, Contestant, in_f32, llama, ours, vllm
from mixed.trial import NUM_ALONE, Trial, run
from record import Measure, Target

PARTS = RIVALS / "mixed.samples.jsonl"
RESUME_S = 7200.0
RATES = (0.14, 0.2, 0.28, 0.4, 0.56, 0.8)  # requests a second
COUNT = 24  # requests of a trial
HOPELESS = 3.0  # times the promised first token: higher rates are not tried
TIMES = 2.0  # the promised first token, over the slower server's unloaded 95th percentile
TPOT_S = 0.1  # promised: ten tokens a second are more than people read
PROMISED = 0.95
AT_LEAST, SAVED = 1.5, 47
EYES = ("q8_0", "bf16", "f16")  # number types that llama.cpp's projector file may have: the fastest takes part
PAIRS = (("triptych", "llama.cpp"), ("triptych int8", "vLLM"))  # ours with about as many bits, and the rival
KINDS = ("int8", "bf16")  # of vLLM's weights and arithmetic, likewise
SETTINGS_COUNT = 4


class Stopped(Exception):
    """The time given is up; what was done is kept."""


class Progress:
    """Finished pieces, each with its key, on disk."""

    def __init__(self, settings: dict[str, Any], *, fresh: bool, within_s: float) -> None:
        self._ends_s = time.monotonic() + within_s
        self._done: dict[str, Any] = {}
        if not fresh and PARTS.is_file() and time.time() - PARTS.stat().st_mtime < RESUME_S:
            first, *lines = (json.loads(line) for line in PARTS.read_text().splitlines())
            if first == settings:
                self._done = {line["key"]: line["value"] for line in lines}
        if not self._done:
            PARTS.parent.mkdir(parents=True, exist_ok=True)
            PARTS.write_text(json.dumps(settings) + "\n")

    def get(self, key: str, expected_s: float, make: Callable[[], Any]) -> Any:
        """What was made under `key`, now or earlier. Raises Stopped where it would not end in time."""
        if key not in self._done:
            if time.monotonic() + expected_s > self._ends_s:
                raise Stopped(key)
            self._done[key] = make()
            with PARTS.open("a") as file:
                file.write(json.dumps({"key": key, "value": self._done[key]}) + "\n")
        return self._done[key]


def trial(progress: Progress, who: Contestant, rate: float, count: int, seed: int) -> Trial:
    expected_s = count / rate * 1.4 + 25 if rate else 60.0
    key = f"{who.name} {rate:g} {count} {seed}"
    made = Trial.read(progress.get(key, expected_s, lambda: run(who, rate, count, seed).saved()))
    print(line(made), flush=True)
    return made


def line(made: Trial) -> str:
    kinds = "  ".join(
        f"{name} TTFT {made.share('ttft_s', 0.5, kind):6.2f} {made.share('ttft_s', PROMISED, kind):6.2f} s, "
        f"TPOT {1e3 * made.share('tpot_s', 0.5, kind):5.0f} {1e3 * made.share('tpot_s', PROMISED, kind):5.0f} ms"
        for name, kind in (("text", False), ("picture", True))
    )
    failed = [one.error for one in made.answers if one.error]
    return f"{made.server:10} {made.rate:5.2f}/s  {kinds}  {made.wall_s:5.0f} s  {failed[:1] or ''}"


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def promise(alone: Sequence[Trial]) -> float:
    """Seconds to the first token: a multiple of what the slower server needs unloaded, so that both can keep it."""
    by_server: dict[str, list[float]] = {}
    for one in alone:
        by_server.setdefault(one.server, []).append(one.share("ttft_s", PROMISED))
    return TIMES * max(statistics.median(values) for values in by_server.values())


def fastest(progress: Progress, name: str, make: Callable[[str, str], Contestant], ways: Sequence[str]) -> Contestant:
    """A rival at the best of its ways: that which answers two texts and two pictures soonest, one by one."""

    def took(way: str) -> float:
        return trial(progress, make(f"{name}, {way}", way), 0.0, SETTINGS_COUNT, 7).wall_s

    return make(name, min(ways, key=took))


def climb(progress: Progress, who: Sequence[Contestant], asked: argparse.Namespace, most_s: float) -> list[Trial]:
    """Each round's trials: rates from low to high, servers in turn, each until it is hopelessly late."""
    made: list[Trial] = []
    for number in range(asked.rounds):
        climbing = list(who)
        for rate in asked.rates:
            for one in list(climbing):
                had = trial(progress, one, rate, asked.count, 1000 + number)
                made.append(had)
                if had.share("ttft_s", PROMISED) > HOPELESS * most_s:
                    climbing.remove(one)
    return made


def accuracy(progress: Progress, who: Sequence[Contestant]) -> list[Measure]:
    exact, *others = (
        likeness.Said(**progress.get(f"{one.name} said", 120.0, lambda one=one: _said(one))) for one in (in_f32(), *who)
    )
    return [entry for one, said in zip(who, others, strict=True) for entry in likeness.measures(one.name, exact, said)]


def _said(who: Contestant) -> dict[str, Any]:
    with who.start() as served:
        said = likeness.asked(served)
    return {"answers": said.answers, "first": said.first}


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def keeps(one: Trial, ttft_s: float) -> bool:
    return one.share("ttft_s", PROMISED) <= ttft_s and one.share("tpot_s", PROMISED) <= TPOT_S


def highest(made: Sequence[Trial], server: str, ttft_s: float) -> list[float]:
    """Of each round the highest rate that was kept, all lower ones being kept as well; 0 where none was."""
    rounds: dict[int, list[Trial]] = {}
    for one in made:
        if one.server == server:
            rounds.setdefault(one.seed, []).append(one)
    return [
        max((one.rate for one in itertools.takewhile(lambda one: keeps(one, ttft_s), trials)), default=0.0)
        for trials in rounds.values()
    ]


def measures(alone: Sequence[Trial], made: Sequence[Trial], ttft_s: float) -> Iterator[Measure]:
    for server in dict.fromkeys(one.server for one in made):
        yield record.measure("highest rate at both promises", server, "1/s", highest(made, server, ttft_s))
        for rate in dict.fromkeys((0.0, *(one.rate for one in made if one.server == server))):
            trials = [one for one in (*alone, *made) if one.server == server and one.rate == rate]
            where = f"at {rate:g}/s" if rate else "alone"
            for kind, has_picture in (("text", False), ("picture", True)):
                for name, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
                    values = [one.share(field, PROMISED, has_picture) for one in trials]
                    yield record.measure(f"{name} p95, {kind}, {where}", server, "s", values)
            if rate:
                yield record.measure(f"goodput {where}", server, "1/s", [one.goodput(ttft_s, TPOT_S) for one in trials])
        peak = [one.peak_bytes for one in made if one.server == server]
        yield record.measure("peak memory", server, "B", [float(value) for value in peak])
        spent = [one.processor_s / len(one.answers) for one in made if one.server == server]
        yield record.measure("processor time a request", server, "s", spent)
        costs = [one.cost for one in made if one.server == server]
        yield record.measure("core-seconds × GB a request", server, "s·GB", costs)


def targets(made: Sequence[Trial], ttft_s: float) -> list[Target]:
    """A server that kept no rate is taken to have kept the lowest one that was tried."""
    lowest, found = min(one.rate for one in made), []
    for us, other in PAIRS:
        rates = zip(highest(made, us, ttft_s), highest(made, other, ttft_s), strict=False)
        ratios = [rate / (theirs or lowest) for rate, theirs in rates]
        name = f"mixed requests a second at both promises, {us} over {other}"
        found.append(Target(name=name, value=statistics.median(ratios), unit="×", at_least=AT_LEAST,
                            lowest=min(ratios), highest=max(ratios)))  # fmt: skip
    for us, other in PAIRS:
        saved = [100 * (1 - cost / theirs) for cost, theirs in shared_costs(made, us, other)]
        name = f"core-seconds × GB a request saved by {us} of {other}'s, at the rates that both were asked"
        found.append(Target(name=name, value=statistics.median(saved), unit="%", at_least=SAVED,
                            lowest=min(saved), highest=max(saved)))  # fmt: skip
    return found


def shared_costs(made: Sequence[Trial], us: str, other: str) -> list[tuple[float, float]]:
    """Core-seconds × GB a request of two servers, for each rate and round that both were asked at."""
    ours = {(one.rate, one.seed): one.cost for one in made if one.server == us}
    return [(ours[one.rate, one.seed], one.cost) for one in made if one.server == other]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--within", type=float, default=1e9, help="seconds; what is left is done by the next run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--count", type=int, default=COUNT, help="requests of a trial")
    parser.add_argument("--rates", type=lambda text: tuple(map(float, text.split(","))), default=RATES)
    parser.add_argument("--fresh", action="store_true")
    return parser.parse_args()


def main() -> None:
    asked = parse()
    settings = {"rounds": asked.rounds, "count": asked.count, "rates": list(asked.rates)}
    progress = Progress(settings, fresh=asked.fresh, within_s=asked.within)
    try:
        who = [
            ours("triptych", "smollm2-eyes-triptych"), fastest(progress, "llama.cpp", llama, EYES),
            ours("triptych int8", "smollm2-eyes-triptych-int8"), fastest(progress, "vLLM", vllm, KINDS),
        ]  # fmt: skip
        alone = [trial(progress, one, 0.0, 2 * NUM_ALONE, 1 + number) for number in range(asked.rounds) for one in who]
        ttft_s = promise(alone)
        print(f"promises: first token in {ttft_s:.2f} s, then {1e3 * TPOT_S:.0f} ms a token")
        made = climb(progress, who, asked, ttft_s)
        found = [*measures(alone, made, ttft_s), *accuracy(progress, who)]
    except Stopped as left:
        raise SystemExit(f"time is up before «{left}»; the same command goes on from there") from None
    aims = targets(made, ttft_s)
    for one in (*found, *aims):
        print(one)
    if not aims:
        print("nobody beside: no target can be told")
    facts = {
        **settings, "ttft_s": ttft_s, "tpot_s": TPOT_S, "share_in_time": PROMISED, "times_unloaded": TIMES,
        "flags": {one.name: one.flags for one in who},
        "weights": {one.name: one.weights for one in who},
        "busy_before": max(one.busy_before for one in made),
    }  # fmt: skip
    if asked.json:
        record.write(asked.json, record.record("mixed", found, aims, facts))


if __name__ == "__main__":
    main()
