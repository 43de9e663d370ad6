"""Does anything that is sent bring a server down? Damaged files and requests by the hundred thousand, resumable.

usage: python bench/fuzz.py --json bench/results/fuzz.json --media 896000 --pool 5000 --bodies 190000 --wire 12000

Numbers are totals: what the JSON holds already is not run again. A case is its number, so a fault can be run again:
python bench/fuzz.py --again media 12345. Refuses (exit 1) when a case crashed, hung, answered 500 or was otherwise
at fault, or memory grew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import record

PARTS = ("media", "pool", "bodies", "wire")
BATCH = {"media": 2000, "pool": 500, "bodies": 250, "wire": 100}
WARM_SHARE = 0.2  # of a run, before memory is expected to stand still: caches fill
GROWTH = 0.10
SAVE_S = 20.0


@dataclass(slots=True, kw_only=True)
class Part:
    """What one part has come to, over all runs."""

    num_cases: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: list[list[Any]] = field(default_factory=list)  # [number, words]
    mended: list[list[Any]] = field(default_factory=list)  # faults of former runs that are none any more
    over_time: int = 0  # ended by their own limit of computing, as a decoder process would be
    resident_bytes: list[int] = field(default_factory=list)  # at the end of each batch of the longest run

    def count(self, outcomes: Mapping[str, int]) -> None:
        for outcome, number in outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + number


class Target:
    """The child that runs cases, replaced when one kills it."""

    def __init__(self, part: str, folder: Path) -> None:
        self._part = part
        self._place = folder / part
        self._place.write_bytes(bytes(8))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        here = Path(__file__).parent
        paths = [str(here.parent / "src"), str(here), str(here.parent / "tests")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "PYTHONMALLOC": "malloc",  # Python's own keeps what it frees: a leak could not be told from a peak
            "MALLOC_ARENA_MAX": "2",
        }
        command = [sys.executable, "-m", "fuzz.target", self._part, str(self._place)]
        quiet = subprocess.DEVNULL  # libtiff and others write there what they find in a file
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet, text=True, env=environment
        )

    def run(self, first: int, count: int) -> dict[str, Any] | tuple[int, int]:
        """The report of a batch; or the number it died of, and how (a negative signal)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{first} {count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        code = self._process.wait()
        (at,) = struct.unpack("<Q", self._place.read_bytes())
        self._process = self._start()
        return at, code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def fuzz(part: str, state: Part, until: int, save: Any) -> None:
    saved = began = time.monotonic()
    before_s = state.seconds
    resident: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        target = Target(part, Path(folder))
        again(state, target)
        while state.num_cases < until:
            count = min(BATCH[part], until - state.num_cases)
            told = target.run(state.num_cases, count)
            if isinstance(told, tuple):
                died(state, *told)
            else:
                state.num_cases += count
                state.count(told["outcomes"])
                state.faults += told["faults"]
                state.slowest_s = max(state.slowest_s, told["slowest_s"])
                resident.append(told["resident_bytes"])
                state.resident_bytes = max(state.resident_bytes, resident, key=len)
            state.seconds = before_s + time.monotonic() - began
            if time.monotonic() - saved > SAVE_S:
                saved = time.monotonic()
                save()
        target.close()


def again(state: Part, target: Target) -> None:
    """Run the faults of former runs once more: what was mended since is no fault."""
    faults, state.faults = state.faults, []
    for number, words in faults:
        told = target.run(number, 1)
        if isinstance(told, tuple) or told["faults"]:
            state.faults.append([number, words])
        else:
            state.mended.append([number, words])
            state.count({"FAULT": -1} | told["outcomes"])


def died(state: Part, at: int, code: int) -> None:
    """Count the case that ended its process, and go on behind it."""
    if code == -27:  # SIGPROF: too much computing, which costs a server one decoder process
        state.over_time += 1
    else:
        state.faults.append([at, f"FAULT: the process ended with {code}"])
        state.count({"FAULT": 1})
    state.count({"unknown: in a batch that did not end": at - state.num_cases})
    state.num_cases = at + 1


def load(path: Path | None) -> dict[str, Part]:
    if path is None or not path.exists():
        return {part: Part() for part in PARTS}
    held = json.loads(path.read_text())["settings"]
    return {part: Part(**held[part]) for part in PARTS}


def growth(state: Part) -> float:
    """Of resident memory between the first and last tenth after warming up, in per cent."""
    warm = state.resident_bytes[int(len(state.resident_bytes) * WARM_SHARE) :]
    tenth = max(len(warm) // 10, 1)
    return 100 * (statistics.median(warm[-tenth:]) / statistics.median(warm[:tenth]) - 1) if len(warm) > 1 else 0.0


def judge(state: dict[str, Part]) -> list[record.Target]:
    nothing = {"unit": "", "at_most": 0.0}
    return [
        record.Target(
            name="mutated requests and files", value=sum(part.num_cases for part in state.values()), unit="",
            at_least=1_000_000,
        ),
        record.Target(name="faults", value=sum(part.outcomes.get("FAULT", 0) for part in state.values()), **nothing),
        *(
            record.Target(name=f"memory growth of {name}", value=growth(part), unit="%", at_most=100 * GROWTH)
            for name, part in state.items()
            if part.resident_bytes
        ),
    ]  # fmt: skip


def write(path: Path, state: dict[str, Part]) -> None:
    rates = [
        record.measure("cases", name, "cases/s", [part.num_cases / part.seconds])
        for name, part in state.items()
        if part.seconds
    ]
    settings = {name: asdict(part) for name, part in state.items()}
    record.write(path, record.record("fuzz", rates, judge(state), settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for part in PARTS:
        parser.add_argument(f"--{part}", type=int, default=0, metavar="TOTAL")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", nargs=2, metavar=("PART", "NUMBER"))
    asked = parser.parse_args()
    if asked.again:
        from fuzz.target import open_part

        print(open_part(asked.again[0]).run(int(asked.again[1])))
        return
    state = load(asked.json)
    for name in PARTS:
        if state[name].num_cases < getattr(asked, name) or state[name].faults:
            fuzz(name, state[name], getattr(asked, name), lambda: asked.json and write(asked.json, state))
    if asked.json:
        write(asked.json, state)
    aims = judge(state)
    for aim in aims:
        print(f"{'ok  ' if aim.is_met else 'BAD '} {aim.name}: {aim.value:,.6g} {aim.unit}")
    for name, part in state.items():
        for number, words in part.faults[:5]:
            print(f"     {name} {number}: {words}")
    if not all(aim.is_met for aim in aims[1:]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
