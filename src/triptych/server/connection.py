"""One TCP connection, which no caller can hold open, fill or keep us busy with for nothing.

uvicorn's own, and deadlines: for a head to arrive, for the next one, for a reader to read. What the application
answers and how fast a body comes is not decided here (`server/visit`).
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from triptych.server.config import ServerConfig
from triptych.server.refusals import ErrorBody, ErrorDetail

FREE_PIECES = 1000  # of a chunked body; beyond them each must hold this much, as a mean
PIECE_BYTES = 256
MAX_HEADERS = 100
FILES_BESIDE = 512  # being accepted or closed, downloads, decoder processes, a model's parts
PIPELINED_BYTES = 65_536  # of later requests, while one is answered


class Parser(h11.Connection):
    """h11's, but a body in crumbs is refused: each costs the event loop 20 µs, whatever it holds."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self._num_pieces = self._num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = self._num_bytes = 0
            self._check_head(event)
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > FREE_PIECES + self._num_bytes // PIECE_BYTES:
                raise h11.RemoteProtocolError(f"the body comes in chunks of less than {PIECE_BYTES} bytes")
        return event

    def _check_head(self, head: h11.Request) -> None:
        names = [name for name, _ in head.headers]
        size = len(head.target) + sum(len(name) + len(value) for name, value in head.headers)
        if size > self._max_head_bytes:  # h11 looks at heads that come in pieces alone
            raise h11.RemoteProtocolError(
                f"a head of {size:,} bytes, the limit is {self._max_head_bytes:,}", error_status_hint=431
            )
        if len(names) > MAX_HEADERS:
            raise h11.RemoteProtocolError(f"more than {MAX_HEADERS} headers", error_status_hint=431)
        if b"content-length" in names and b"transfer-encoding" in names:
            raise h11.RemoteProtocolError("two lengths of one body")  # a proxy before us may believe the other one


class Connection(H11Protocol):
    """Waits `head_s` for a head, `write_s` for a reader who takes nothing, and makes room when all is full."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits: ServerConfig = config.app.state.serving.config  # type: ignore[union-attr]
        self.conn = Parser(self._limits.max_head_bytes)
        self._head: asyncio.TimerHandle | None = None  # while one is waited for
        self._reader: asyncio.TimerHandle | None = None  # while one takes nothing
        self.access_log = False  # queries are a caller's words; our one line is in `server/visit`
        self._num_early = 0  # bytes that came while an answer was under way
        self._idle_since_s = self.loop.time()

    @property
    def is_idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    # ── asyncio calls ──────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        wire = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_USER_TIMEOUT") and wire.family != socket.AF_UNIX:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._limits.write_s * 1000))
        self._wait_for_head()
        if len(self.connections) > min(self._limits.max_connections, most_connections()):
            self._make_room()

    def data_received(self, data: bytes) -> None:
        is_early = not self.is_idle and self.conn.their_state is h11.DONE
        self._num_early = self._num_early + len(data) if is_early else 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.is_idle:
            self._wait_for_head()
            return
        _cancel(self._head)
        self._head = None
        if self.conn.their_state is h11.DONE and self._num_early < PIPELINED_BYTES:
            self.flow.resume_reading()  # or nobody would notice that the caller hung up

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head)
        _cancel(self._reader)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._reader)
        self._reader = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._reader)
        super().resume_writing()

    # ── uvicorn calls ──────────────────────────────────────────────────────────────────────────────────────────

    def on_response_complete(self) -> None:
        self._idle_since_s, self._num_early = self.loop.time(), 0
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What h11 could not read, in the form of every other refusal."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(status, f"this is no HTTP/1.1 request: {str(error)[:100]}" if status == 400 else str(error)[:100])

    def _unsupported_upgrade_warning(self) -> None:
        """Whoever asks for HTTP/2 or a web socket gets HTTP/1.1, and the log is spared."""

    # ── ours ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _wait_for_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self._limits.head_s, self._give_up)

    def _give_up(self) -> None:
        self._head = None
        if self.transport.is_closing() or not self.is_idle:
            return
        if self.conn.trailing_data[0] == b"":  # nothing was asked: browsers open connections to have them
            self.transport.close()
        else:
            self._refuse(408, f"the request's head took longer than {self._limits.head_s:g} s to arrive")

    def _make_room(self) -> None:
        """Hang up on who has been idle longest; if all are busy, refuse this one."""
        idle = [
            other
            for other in self.connections
            if isinstance(other, Connection)
            and other.is_idle
            and not other.transport.is_closing()
            and other is not self
        ]
        if idle:
            min(idle, key=lambda other: other._idle_since_s).transport.abort()
        else:
            self._refuse(503, f"{self._limits.max_connections:,} connections are open and busy")

    def _refuse(self, status: int, message: str) -> None:
        """Say so if that can still be said, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        error = ErrorDetail(message=message, type="invalid_request_error", param=None, code=None)
        body = msgspec.json.encode(ErrorBody(error=error))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        answer = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


@lru_cache(maxsize=1)
def most_connections() -> int:
    """That the system lets this process have, with files left for other things."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft - FILES_BESIDE, soft // 4)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
