"""All-reduces between real ranks of this machine, over gloo, as a ladder of sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triptych.core.device import Figure
from triptych.errors import ConfigError, MeasurementError, install
from triptych.plan.pareto import AllReduce

SIZES = tuple(1 << power for power in range(10, 24, 2))  # 1 KiB to 4 MiB
REPEATS = 9
DEADLINE_S = 120.0


def measure_ladder(num_ranks: int, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> tuple[AllReduce, ...]:
    """Each algorithm at each size, between so many processes. Raises ConfigError without torch, MeasurementError."""
    if num_ranks < 2:
        raise ConfigError(f"{num_ranks} rank has nothing to reduce", hint="2 or more")
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps({"store": f"{folder}/store", "ranks": num_ranks, "sizes": list(sizes), "repeats": repeats})
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        files = [Path(folder) / f"{rank}.json" for rank in range(num_ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, asked, str(rank), str(file)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, file in enumerate(files)
        ]
        _wait(processes)
        taken = [json.loads(file.read_text()) for file in files]
    return tuple(
        AllReduce(
            topology="gloo",
            num_ranks=num_ranks,
            algorithm=algorithm,
            num_bytes=int(size),
            seconds=Figure.of(
                [max(together) for together in zip(*(one[algorithm][size] for one in taken), strict=True)]
            ),
        )
        for algorithm in taken[0]
        for size in taken[0][algorithm]
    )


def _wait(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Until all have ended; one that fails ends the others."""
    until = time.monotonic() + DEADLINE_S
    try:
        for process in processes:
            _, said = process.communicate(timeout=max(until - time.monotonic(), 0.1))
            if process.returncode == ConfigError.exit_code:
                raise ConfigError("ranks are measured over torch's gloo", hint=install("compress"))
            if process.returncode:
                raise MeasurementError(f"a rank ended with code {process.returncode}: {said.strip()[-300:]}")
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"the ranks were not done after {DEADLINE_S:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# ── in a rank's own process ──────────────────────────────────────────────────────────────────────────────────────


def _rank(asked: dict[str, Any], rank: int, file: Path) -> None:
    """Seconds of every repeat of every algorithm and size, to `file`."""
    try:
        import torch.distributed as dist
    except ImportError:
        sys.exit(ConfigError.exit_code)
    store = dist.FileStore(asked["store"], asked["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=asked["ranks"])
    taken = {
        name: {size: _times(reduce, size // 4, asked["repeats"]) for size in asked["sizes"]}
        for name, reduce in _algorithms(dist, asked["ranks"]).items()
    }
    file.write_text(json.dumps(taken))
    dist.destroy_process_group()


def _algorithms(dist: Any, num_ranks: int) -> dict[str, Callable[[Any], object]]:
    """Three ways to the same sum, in place."""
    import torch

    def one_shot(values: Any) -> None:
        """Everybody sends everybody all of it: one step, most bytes."""
        parts = [torch.empty_like(values) for _ in range(num_ranks)]
        dist.all_gather(parts, values)
        values.copy_(torch.stack(parts).sum(dim=0))

    def tree(values: Any) -> None:
        dist.reduce(values, 0)
        dist.broadcast(values, 0)

    return {"ring": dist.all_reduce, "one shot": one_shot, "tree": tree}


def _times(reduce: Callable[[Any], object], num_values: int, repeats: int) -> list[float]:
    import torch
    import torch.distributed as dist

    taken: list[float] = []
    for repeat in range(-2, repeats):  # two to warm up
        values = torch.full((num_values,), float(dist.get_rank() + 1))
        dist.barrier()
        began = time.perf_counter()
        reduce(values)
        seconds = time.perf_counter() - began
        ranks = dist.get_world_size()
        assert values[-1].item() == ranks * (ranks + 1) / 2
        taken += [seconds] * (repeat >= 0)
    return taken


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
