"""What a soak has seen so far: outcomes, gaps between pieces, memory; and the judgement on it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import record

from traffic.visits import Visit

WARM_SHARE = 0.3  # of a life, before memory is expected to stand still
GROWTH = 5.0  # percent of the resident size after that
SLOWER = 2.0  # times the gap between pieces while as many answer text and nobody comes
MAX_FAULTS = 40
# back to nothing once all is answered; those that a server does not have are not judged
ZEROES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "triptych:held_pictures",
    "triptych:backlog_seconds",
)
FAULTS = ("crossed", "differs", "lost", "let in", "rejected without Retry-After")


class Tally(msgspec.Struct, kw_only=True):
    """The one thing of a soak that changes. `lives`: one list of resident bytes for each server started."""

    seconds: float = 0.0
    capacity: list[float] = msgspec.field(default_factory=list)  # answers a second
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    kinds: Counter[str] = msgspec.field(default_factory=Counter)  # answered, by kind of question
    faults: list[str] = msgspec.field(default_factory=list)
    alone_s: list[float] = msgspec.field(default_factory=list)  # gaps of text answers while nobody else was there
    crowd_s: list[float] = msgspec.field(default_factory=list)  # the same, all seats taken, nobody coming
    loaded_s: list[float] = msgspec.field(default_factory=list)
    kills: int = 0
    lives: list[list[int]] = msgspec.field(default_factory=list)
    heaps: list[dict[str, int]] = msgspec.field(default_factory=list)
    left_over: dict[str, float] = msgspec.field(default_factory=dict)

    def count(self, made: Visit, recorded: Mapping[str, str]) -> None:
        """Under load."""
        what = outcome(made, recorded)
        self.outcomes[what] += 1
        question = made.question
        if what == "answered":
            self.kinds[question.kind + (" with pictures" if question.has_picture else "")] += 1
            if made.manner.is_stream and not made.manner.pause_s and not question.has_picture:
                self.loaded_s += made.gaps_s
        elif (what in FAULTS or what == "hurt") and len(self.faults) < MAX_FAULTS:
            expected = f", expected {recorded[question.key]!r}" if what == "differs" and question.key else ""
            self.faults.append(
                f"{what}: {question.kind} {question.key or ''} status {made.status} {made.code or ''} "
                f"{made.error or ''} finish {made.finish} {made.text[:200]!r} {made.answered.calls}{expected}"
            )

    def save(self, path: Path) -> None:
        scratch = path.with_suffix(".part")
        scratch.write_bytes(msgspec.json.encode(self))
        scratch.rename(path)


def outcome(made: Visit, recorded: Mapping[str, str]) -> str:
    """One word for a visit. `recorded`: answers had alone; a key that is missing is not compared."""
    question = made.question
    if made.has_left:
        return "left"
    if made.status == 429:
        return "rejected" if made.retry_after else "rejected without Retry-After"
    if 200 not in question.statuses:
        return "refused" if made.status in question.statuses else "let in" if made.status == 200 else "lost"
    if made.error is not None or made.status != 200 or not made.is_whole or made.finish is None:
        return "hurt" if question.has_picture and made.status != 200 else "lost"
    if not question.holds(made.answered):
        return "crossed"
    expected = recorded.get(question.key or "")
    if expected is not None and not _is_same(made, expected):
        return "differs"
    return "answered"


def _is_same(made: Visit, expected: str) -> bool:
    return expected.startswith(made.text) if made.question.kind == "biased" else made.text == expected


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def growth(life: list[int]) -> float:
    """Percent that memory grew after warm-up, from the first tenth of it to the last."""
    warm = life[int(len(life) * WARM_SHARE) :]
    tenth = max(len(warm) // 10, 1)
    return 100 * (statistics.median(warm[-tenth:]) / statistics.median(warm[:tenth]) - 1) if warm else 0.0


def judge(tally: Tally) -> list[record.Target]:
    """One target for each promise."""
    zero = {"at_most": 0.0, "unit": ""}
    aims = [record.Target(name=f"answers {name}", value=tally.outcomes[name], **zero) for name in FAULTS]
    aims.append(
        record.Target(
            name="requests hurt by a killed decoder", value=tally.outcomes["hurt"], unit="", at_most=float(tally.kills)
        )
    )
    aims += [record.Target(name=f"left over: {name}", value=value, **zero) for name, value in tally.left_over.items()]
    life = max(tally.lives, key=len, default=[])
    aims.append(record.Target(name="memory growth after warm-up", value=growth(life), unit="%", at_most=GROWTH))
    crowd, loaded = percentile(tally.crowd_s, 0.99), percentile(tally.loaded_s, 0.99)
    if crowd and loaded:
        name = "p99 between pieces of text, times that of text alone on all seats"
        aims.append(record.Target(name=name, value=loaded / crowd, unit="", at_most=SLOWER))
    return aims
