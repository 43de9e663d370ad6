"""A decoder process: pictures in on stdin, tiles out on stdout, until stdin ends.

A frame is the length of a JSON header and of a body, the header, the body. Nothing is ever unpickled. The process
bounds itself: memory beyond its start, computing time a picture, and no files written.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import warnings
from typing import Any, BinaryIO

import msgspec
import numpy as np

from triptych.core.spec import ImageSpec
from triptych.errors import MediaError
from triptych.media.image.decode import PreparedImage, read
from triptych.media.image.header import ImageLimits

_LENGTHS = struct.Struct("<II")
SAME = ("content_sha256", "size", "unpack_s", "preprocess_s")  # in a result and a prepared image


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker's first word."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Body: the picture's bytes."""

    limits: ImageLimits
    spec: ImageSpec


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Body: `take` as int32, then the tiles."""

    content_sha256: str
    size: tuple[int, int]
    num_tokens: int
    shape: tuple[int, int, int, int]
    unpack_s: float
    preprocess_s: float

    @staticmethod
    def of(image: PreparedImage) -> Result:
        shape: Any = image.tiles.shape
        return Result(num_tokens=len(image.take), shape=shape, **{name: getattr(image, name) for name in SAME})

    def unpack(self, body: bytearray) -> PreparedImage:
        take = np.frombuffer(body, np.int32, self.num_tokens)
        tiles = np.frombuffer(body, np.uint8, offset=take.nbytes).reshape(self.shape)
        return PreparedImage(tiles=tiles, take=take, **{name: getattr(self, name) for name in SAME})


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What to tell the caller. No body."""

    message: str
    hint: str | None


def send(stream: BinaryIO, header: msgspec.Struct, *bodies: Any) -> None:
    """bodies: bytes or arrays, in C order. Raises OSError if the other side is gone."""
    encoded = msgspec.json.encode(header)
    views = [memoryview(body).cast("B") for body in bodies]
    stream.write(_LENGTHS.pack(len(encoded), sum(view.nbytes for view in views)))
    stream.write(encoded)
    for view in views:
        stream.write(view)
    stream.flush()


def receive(stream: BinaryIO, kind: Any) -> tuple[Any, bytearray]:
    """A header of this type, and its body. Raises EOFError if the other side is gone, DecodeError on nonsense."""
    header_bytes, body_bytes = _LENGTHS.unpack(_read(stream, _LENGTHS.size))
    header = msgspec.json.decode(_read(stream, header_bytes), type=kind)
    return header, _read(stream, body_bytes)


def _read(stream: BinaryIO, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    view, filled = memoryview(buffer), 0
    while filled < num_bytes:
        count = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the pipe ended")
        filled += count
    return buffer


def main(max_memory_bytes: int, cpu_s: float) -> None:
    """Serve until stdin ends."""
    jobs, answers = _take_pipes()
    warnings.simplefilter("ignore")
    _bound(max_memory_bytes)
    send(answers, Ready())
    while True:
        try:
            job, data = receive(jobs, Job)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
        try:
            image = read(bytes(data), job.limits, job.spec)
            send(answers, Result.of(image), image.take, image.tiles)
        except MediaError as error:
            send(answers, Failure(message=error.message, hint=error.hint))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep stdin and stdout for frames; what libraries print goes to stderr."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return jobs, answers


def _bound(max_memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
    except OSError:  # no such count on this system, and no working limit either
        return
    limit = pages * resource.getpagesize() + max_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
