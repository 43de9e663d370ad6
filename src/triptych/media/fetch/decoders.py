"""Decode pictures in processes that may hang, crash or be killed at the cost of one request.

A worker is this Python running `triptych.media.image.worker`: it loads Pillow and numpy and nothing of a server's.
Jobs and answers go over its pipes as a length, a JSON header and raw bytes. A worker that misses its deadline is
killed; the next job starts another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from triptych.core.spec import ImageSpec
from triptych.errors import BackendError, MediaError, OverloadError
from triptych.media.image import ImageLimits, PreparedImage
from triptych.media.image.worker import Failure, Job, Ready, Result, receive, send

T = TypeVar("T")
log = logging.getLogger("triptych.media")

STARTS = 2
START_SECONDS = 60.0  # a fresh worker imports Pillow and numpy
GIVES_WAY = 10  # of niceness, from its first import on: answers are not to be held up by somebody's picture
PIPE_BYTES = 1 << 20  # tiles are megabytes: fewer turns between the processes
COMMAND = (sys.executable, "-m", "triptych.media.image.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """max_memory_bytes: what a worker may take beyond what it has when it starts."""

    num_workers: int = max(2, (os.cpu_count() or 2) // 4)  # at most; each is started when it is needed
    cpu_s: float = 10.0  # of computing, for one picture: a busy machine takes nothing from it
    deadline_s: float = 60.0  # by the clock, for one picture, from the moment a worker has it
    max_wait_s: float = 30.0  # for a free worker
    max_memory_bytes: int = 1536 * 2**20
    command: Sequence[str] = COMMAND


class Decoders:
    """A pool of decoder processes, started when they are needed. Its methods may be called from any thread."""

    def __init__(self, config: DecoderConfig | None = None) -> None:
        self._config = config or DecoderConfig()
        self._free = threading.BoundedSemaphore(self._config.num_workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._is_closed = False

    def start(self) -> None:
        """Start one worker in the background, so that the first picture finds it ready."""
        with self._lock:
            if not (self._is_closed or self._idle or self._busy):
                self._idle.append(_Worker(self._config))

    def prepare(self, data: bytes, limits: ImageLimits, spec: ImageSpec) -> PreparedImage:
        """As `media.image.read`, elsewhere. Blocks. Raises MediaError, or OverloadError when no worker is free."""
        if not self._free.acquire(timeout=self._config.max_wait_s):
            raise OverloadError(
                f"{self._config.num_workers} picture decoders were busy for {self._config.max_wait_s:.0f} s",
                retry_after_s=self._config.deadline_s,
            )
        try:
            worker = self._ready()
            try:
                return worker.run(data, limits, spec)
            finally:
                self._give_back(worker)
        finally:
            self._free.release()

    def close(self) -> None:
        """Kill all workers. Jobs that are running fail with MediaError."""
        with self._lock:
            self._is_closed = True
            workers = [*self._idle, *self._busy]
            self._idle.clear()
        for worker in workers:
            worker.kill()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the workers that are alive."""
        with self._lock:
            return tuple(worker.process.pid for worker in [*self._idle, *self._busy] if worker.is_alive)

    def _ready(self) -> _Worker:
        """A worker that has started; one that was killed before it had seen a picture costs nobody anything."""
        for _ in range(STARTS):
            worker = self._borrow()
            if worker.wait_until_ready():
                return worker
            self._give_back(worker)
        code = worker.process.returncode
        log.error("no decoder starts: see what `%s -m triptych.media.image.worker 1000000000 10` says", sys.executable)
        raise BackendError(f"no decoder process started; the last ended with code {code}", hint="the server's log says")

    def _borrow(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise MediaError("the server is closing")
            worker = self._idle.pop() if self._idle else _Worker(self._config)
            if not worker.is_alive:  # killed from outside while it waited
                worker.kill()
                worker = _Worker(self._config)
            self._busy.add(worker)
            return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
            if worker.is_alive and not self._is_closed:
                self._idle.append(worker)
            else:
                worker.kill()


class _Worker:
    """One process, used by one thread at a time; `kill` may come from any."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self._is_ready = False
        self.process = subprocess.Popen(
            [*config.command, str(config.max_memory_bytes), str(config.cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            stderr=subprocess.DEVNULL,  # libtiff and others write there what they find in a file
            env=_environment(),
            # a terminal's Ctrl-C is for the server, which ends its workers itself; in a session of its own niceness
            # would count for nothing: Linux shares processors between sessions first
            process_group=0,
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + GIVES_WAY)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self._stdout: BinaryIO = self.process.stdout  # type: ignore[assignment]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def run(self, data: bytes, limits: ImageLimits, spec: ImageSpec) -> PreparedImage:
        """Raises MediaError; the worker is dead afterwards where it was the worker that failed."""

        def work() -> tuple[Result | Failure, bytearray]:
            send(self._stdin, Job(limits=limits, spec=spec), data)
            return receive(self._stdout, Result | Failure)

        answer, body = self._exchange(work, self._config.deadline_s)
        if isinstance(answer, Failure):
            raise MediaError(answer.message, hint=answer.hint)
        return answer.unpack(body)

    def wait_until_ready(self) -> bool:
        """Whether it has started; it is dead where it has not."""
        if not self._is_ready:
            with contextlib.suppress(MediaError):
                self._exchange(lambda: receive(self._stdout, Ready), START_SECONDS)
                self._is_ready = True
        return self._is_ready

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # what was still to be written is lost with its reader
                pipe.close()

    def _exchange(self, work: Callable[[], T], seconds: float) -> T:
        """Do it before the deadline, at which the process is killed and its pipes end."""
        began = time.monotonic()
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            return work()
        except (OSError, EOFError, ValueError, msgspec.DecodeError):
            is_late = time.monotonic() - began >= seconds
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # its pipes end a moment before it has
            ended = self.process.returncode
            self.kill()
            hint = "is it a valid file? Send it smaller, or as JPEG"
            if ended == -signal.SIGPROF:
                reason = f"took more than {self._config.cpu_s:g} s of computing"
            elif is_late:
                reason = f"was not decoded within {seconds:g} s"
            elif ended == -signal.SIGKILL:  # by the system, for want of memory, or by a person
                reason, hint = "lost its decoder, which was killed from outside", "send it again"
            else:
                reason = "ended its decoder"
            raise MediaError(f"the picture {reason}", hint=hint) from None
        finally:
            timer.cancel()


def _environment() -> dict[str, str]:
    """The child finds this package where its parent did, and needs no threads of its own."""
    package = str(Path(__file__).parents[3])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
