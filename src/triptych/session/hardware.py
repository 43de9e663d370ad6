"""This machine, measured; and what a bundle does on it."""

from __future__ import annotations

import psutil

from triptych.backends.base import Placement
from triptych.core.device import DeviceSpec
from triptych.core.progress import Progress, silent
from triptych.plan.measure import describe, stream_bytes, tiles, working_sets
from triptych.plan.system import System, read_system

NUM_ROUNDS = 9


def measure_machine(name: str | None = None, progress: Progress = silent, num_rounds: int = NUM_ROUNDS) -> DeviceSpec:
    """Time this machine, about a minute. Raises MeasurementError where it was disturbed, BackendError."""
    from triptych.backends import ov
    from triptych.backends.probe import Asked, probe

    system = read_system()
    asked = Asked(
        tiers=working_sets(system),
        nodes={f"node:{node.number}": node.cpus for node in system.nodes},
        stream_bytes=stream_bytes(system),
        tiles=tiles(system),
        devices=tuple(device for device in ov.devices() if device != "cpu:0"),
    )
    others = Others()
    probed = probe(asked, Placement(), num_rounds, progress)
    return describe(probed, system, name=name or _name(system), busy=others.share())


class Others:
    """What share of the processors others have, from when this was made."""

    def __init__(self) -> None:
        self._began = self._ticks()

    def share(self) -> float:
        total, busy, own = (after - before for after, before in zip(self._ticks(), self._began, strict=True))
        return max(0.0, busy - own) / max(total, 1e-9)

    def _ticks(self) -> tuple[float, float, float]:
        """Seconds of all processors, of those in use, and of those that this process used."""
        all_of, mine = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = all_of.idle + getattr(all_of, "iowait", 0.0)
        inside = getattr(all_of, "guest", 0.0) + getattr(all_of, "guest_nice", 0.0)  # counted in user already
        total = sum(all_of) - inside
        return total, total - idle, mine.user + mine.system


def _name(system: System) -> str:
    return f"{system.cpu}, {len(system.cpus)} cores"
