"""Carry deltas to their readers on a thread of its own: waking a reader never holds up the next step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from triptych.core.request import Delta

log = logging.getLogger("triptych.engine")

Deliver = Callable[[Delta], None]


class Courier:
    """Delivers in the order of `send`. Until it is started, `send` itself delivers.

    Waking an event loop is a system call that lets go of the interpreter, and a loop that is awake may keep it for
    milliseconds. The engine's thread only queues; the readers run while the device computes.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Deliver, Delta] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._carry, name="triptych-courier", daemon=True)
        self._thread.start()

    def send(self, deliver: Deliver, delta: Delta) -> None:
        if self._thread is None:
            _hand_over(deliver, delta)
        else:
            self._queue.put((deliver, delta))

    def close(self) -> None:
        """Deliver what is queued, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _carry(self) -> None:
        while (sent := self._queue.get()) is not None:
            _hand_over(*sent)


def _hand_over(deliver: Deliver, delta: Delta) -> None:
    try:
        deliver(delta)
    except Exception:  # a reader that is gone must not take the others with it
        log.exception("the reader of %s refused a delta", delta.request_id)
