"""The shape of every measured figure: value, unit, spread, and on which machine, commit and versions it was had."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A median with its extremes. `subject` is who was measured."""

    name: str
    subject: str
    unit: str
    value: float
    lowest: float
    highest: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure that was promised. Exactly one of the bounds is set."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    lowest: float | None = None
    highest: float | None = None

    @property
    def is_met(self) -> bool:
        return self.value >= self.at_least if self.at_least is not None else self.value <= (self.at_most or 0.0)


def measure(name: str, subject: str, unit: str, samples: Sequence[float]) -> Measure:
    return Measure(
        name=name,
        subject=subject,
        unit=unit,
        value=statistics.median(samples),
        lowest=min(samples),
        highest=max(samples),
        num_samples=len(samples),
    )


def record(
    bench: str, measures: Sequence[Measure], targets: Sequence[Target] = (), settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All that a reader needs to believe the figures, as JSON takes it."""
    return {
        "bench": bench,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings or {}),
        "measures": [_rounded(asdict(entry)) for entry in measures],
        "targets": [_rounded(asdict(target) | {"is_met": target.is_met}) for target in targets],
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def commit() -> str:
    """The commit, with `+` when the measured code differs from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--", "src"], capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed.strip() else "")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("triptych", "openvino", "numpy", "tokenizers", "msgspec"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, caches, memory, system, and how busy it was when asked."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "features": _features(),
        "caches": _caches(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1min": os.getloadavg()[0],
    }


def busy_share(seconds: float = 1.0) -> float:
    """Share of all processor time in use by anyone, 0 to 1, over the next `seconds`."""
    before = _ticks()
    time.sleep(seconds)
    idle, total = (after - earlier for after, earlier in zip(_ticks(), before, strict=True))
    return 1 - idle / max(total, 1)


def _ticks() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo").read_text()
    facts = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    return f"{facts.get('model name')}, family {facts.get('cpu family')} model {facts.get('model')}"


def _features() -> list[str]:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "amx_tile")
    return [flag for flag in wanted if flag in flags]


def _caches() -> dict[str, str]:
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    return caches


def _rounded(facts: dict[str, Any]) -> dict[str, Any]:
    """Six digits are more than any clock here gives."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in facts.items()}
