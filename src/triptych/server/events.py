"""Server-sent events: begun by the first of them, so that an early failure keeps its status."""

from __future__ import annotations

import time

import anyio
import msgspec
from starlette.types import Send

from triptych.server.dialect import Event

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx: pass each event on at once
]


class EventStream:
    """Writes events to one caller. Several tasks may send; each event is whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._encoder = msgspec.json.Encoder()
        self._last_s = time.monotonic()
        self.has_begun = False

    async def send(self, event: Event) -> None:
        name = b"" if event.name is None else b"event: " + event.name.encode() + b"\n"
        data = event.data.encode() if isinstance(event.data, str) else self._encoder.encode(event.data)
        await self._write(name + b"data: " + data + b"\n\n")

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def keep_open(self, every_s: float) -> None:
        """Send a comment whenever nothing else was sent for `every_s`: proxies close silent connections."""
        while True:
            silent_s = time.monotonic() - self._last_s
            if silent_s >= every_s:
                await self._write(b": ping\n\n")
                silent_s = 0.0
            await anyio.sleep(every_s - silent_s)

    async def _write(self, content: bytes, *, more: bool = True) -> None:
        self._last_s = time.monotonic()
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": content, "more_body": more})
