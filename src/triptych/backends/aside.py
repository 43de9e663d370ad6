"""A part that runs aside: on threads that give way to others, a tile at a time on each copy."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from triptych.backends.base import Array, Executable, Placement
from triptych.backends.ov import compile_part, describe
from triptych.errors import BackendError

GIVES_WAY = 19  # of Linux's niceness
COPIES, COPIES_BYTES = 4, 256 << 20  # at most, and of weights beside the first's: each copy has its own
CONSTANTS = "extra"  # an output without tiles, the same for each

log = logging.getLogger("triptych.backends")
_OPENING = threading.Lock()  # one graph is made at a time


def open_aside(path: Path, placement: Placement) -> Executable:
    """Load one part of a CPU so that it takes from others what they leave; raises as `ov.open_part`.

    Copies of one stream each, the first at once and the others behind it: OpenVINO makes the graphs of several streams
    together, and one in four such openings gave every picture numbers of another (docs/decisions/0021).
    """
    opened: Future[_Aside] = Future()
    copies, threads = num_copies(path, placement), placement.num_threads or _num_cores()

    def opening() -> None:  # OpenVINO's own threads inherit this one's priority
        _give_way()
        try:
            opened.set_result(part := _Aside(_alone(path, placement, threads // copies)))
            for _ in range(copies - 1):
                part.add(_alone(path, placement, threads // copies))
        except Exception as error:
            if opened.done():  # fewer tiles at once
                log.warning("a copy of %s cannot be opened: %s", path.name, error)
            else:
                opened.set_exception(error)

    threading.Thread(target=opening, name="triptych-opening").start()
    return opened.result()


def num_copies(path: Path, placement: Placement) -> int:
    """How many tiles a part computes side by side."""
    weights = path.with_suffix(".bin")
    more = COPIES_BYTES // max(1, weights.stat().st_size if weights.is_file() else 0)
    return min(COPIES, placement.num_threads or _num_cores(), 1 + more)


def _alone(path: Path, placement: Placement, num_threads: int) -> Any:
    with _OPENING:
        return compile_part(path, placement, num_threads=num_threads)


class _Aside:
    """For one caller at a time. A tile's numbers are the same whatever is computed with it.

    OpenVINO's workers belong to no model: while they help this one a step of the decoder finds them gone. So a copy
    has one thread where there are few cores. The caller waits at its own priority: it holds Python's lock at times, and
    whoever holds that must not be kept waiting for a processor.
    """

    def __init__(self, first: Any) -> None:
        self._first = first
        (port,) = first.inputs
        self._name, self._dtype = port.get_any_name(), port.get_element_type().to_dtype()
        self._outputs = [(port.get_any_name(), index) for index, port in enumerate(first.outputs)]
        self._requests = [first.create_infer_request()]

    def add(self, copy: Any) -> None:
        """One tile more at once, from the next call on."""
        self._requests.append(copy.create_infer_request())

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        if arrays.keys() != {self._name}:
            raise BackendError(f"the input is {self._name!r}, got {sorted(arrays)}")
        tiles = np.asarray(arrays[self._name], self._dtype, order="C")
        done: list[dict[str, Array]] = []
        try:
            while len(done) < len(tiles):
                done += self._at_once(tiles[len(done) :])
        except RuntimeError as error:
            raise BackendError(f"{self.place()}: {str(error).strip()[-400:]}") from error
        names = [name for name, _ in self._outputs]
        return {n: done[0][n] if n == CONSTANTS else np.concatenate([one[n] for one in done]) for n in names}

    def place(self) -> str:
        return describe(self._first)

    def _at_once(self, tiles: Array) -> list[dict[str, Array]]:
        """Outputs of the first tiles, no more of them than there are copies."""
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
