"""A part that runs aside: on threads that give way to all others, a tile at a time on each of its copies."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from triptych.backends.base import Array, Executable, Placement
from triptych.backends.ov import compile_part, describe
from triptych.errors import BackendError

GIVES_WAY = 19  # of Linux's niceness
COPIES = 4  # at most: each has weights and activations of its own
CONSTANTS = "extra"  # an output without tiles, the same for each


def open_aside(path: Path, placement: Placement) -> Executable:
    """Load one part of a CPU so that it takes from others what they leave; raises as `ov.open_part`.

    Copies of one stream each: OpenVINO makes the graphs of several streams at once, and one in four such openings gave
    every picture numbers of another (docs/journal.md).
    """
    opened: list[Any] = []

    def opening() -> None:  # OpenVINO's own threads inherit this one's priority
        _give_way()
        try:
            threads = placement.num_threads or _num_cores()
            copies = min(COPIES, threads)
            opened.extend(compile_part(path, placement, num_threads=threads // copies) for _ in range(copies))
        except Exception as error:
            opened.append(error)

    thread = threading.Thread(target=opening, name="triptych-opening")
    thread.start()
    thread.join()
    if isinstance(opened[-1], Exception):
        raise opened[-1]
    return _Aside(opened)


class _Aside:
    """For one caller at a time. A tile's numbers are the same whatever is computed with it.

    OpenVINO's workers belong to no model: while they help this one a step of the decoder finds them gone. So a copy
    has one thread where there are few cores. The caller waits at its own priority: it holds Python's lock at times, and
    whoever holds that must not be kept waiting for a processor.
    """

    def __init__(self, copies: Sequence[Any]) -> None:
        self._copies = copies
        (port,) = copies[0].inputs
        self._name, self._dtype = port.get_any_name(), port.get_element_type().to_dtype()
        self._outputs = [(port.get_any_name(), index) for index, port in enumerate(copies[0].outputs)]
        self._requests = [compiled.create_infer_request() for compiled in copies]

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        if arrays.keys() != {self._name}:
            raise BackendError(f"the input is {self._name!r}, got {sorted(arrays)}")
        tiles = np.asarray(arrays[self._name], self._dtype, order="C")
        done: list[dict[str, Array]] = []
        try:
            for start in range(0, len(tiles), len(self._requests)):
                done += self._at_once(tiles[start : start + len(self._requests)])
        except RuntimeError as error:
            raise BackendError(f"{self.place()}: {str(error).strip()[-400:]}") from error
        names = [name for name, _ in self._outputs]
        return {n: done[0][n] if n == CONSTANTS else np.concatenate([one[n] for one in done]) for n in names}

    def place(self) -> str:
        number = len(self._copies)
        return describe(self._copies[0]) + (f", {number} tiles at once" if number > 1 else "")

    def _at_once(self, tiles: Array) -> list[dict[str, Array]]:
        """Outputs of each tile, no more of them than copies."""
        begun = self._requests[: len(tiles)]
        for index, request in enumerate(begun):
            request.set_tensor(self._name, ov.Tensor(tiles[index : index + 1], shared_memory=True))
            request.start_async()
        for request in begun:
            request.wait()
        return [{name: request.get_output_tensor(at).data.copy() for name, at in self._outputs} for request in begun]


def _give_way() -> None:
    """On Linux niceness is a thread's own, and of those it starts; elsewhere they compete as equals."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), GIVES_WAY)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
