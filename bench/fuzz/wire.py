"""Damaged HTTP over real sockets: heads, lengths, chunks, requests sent ahead, connections half closed or dropped."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from random import Random

import httpx

from fuzz.mutate import damaged
from triptych.server.app import create_app
from triptych.server.config import ServerConfig
from triptych.server.run import background
from triptych.testing import plan, tiny_session

DEADLINE_S = 60.0
ALIVE_EVERY = 50
BODY = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": true}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
SEEDS = (
    POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    POST
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    + b"0\r\nX: y\r\n\r\n",
    POST + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n" * 3,
    b"GET /v1/models/%74iny HTTP/1.0\r\nX-Request-Id: a\r\nTraceparent: 00-0af7651916cd43dd8448eb211c80319c-1\r\n\r\n",
    b"HEAD /version HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer \xff\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: test\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
)
LAST = b"GET /version HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"


class Wire:
    """A case is what one connection sends, and how it ends; the outcome is the first answer's status."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self._stack = contextlib.ExitStack()
        session = self._stack.enter_context(tiny_session(plan(max_model_len=64)))
        config = ServerConfig(head_s=0.2, body_s=0.2, write_s=5.0, max_body_bytes=1 << 20, drain_s=1.0)
        url = httpx.URL(self._stack.enter_context(background(create_app(session, config))))
        self._where = (url.host, url.port)

    def run(self, number: int) -> str:
        data, ending = self.case(number)
        try:
            outcome = judged(self._said(data, ending))
            if number % ALIVE_EVERY == 0 and not self._said(LAST, "waits").startswith(b"HTTP/1.1 200"):
                return "FAULT: the next caller was not served"
        except TimeoutError:
            return f"FAULT: no answer and no end in {DEADLINE_S:g} s"
        return outcome

    def case(self, number: int) -> tuple[bytes, str]:
        """ending: what the caller does once all is sent."""
        rng = Random(f"wire {number}")
        data = rng.choice(SEEDS)
        if rng.random() < 0.9:
            data = damaged(data, rng, SEEDS)
        ending = rng.choice(("waits", "waits", "closes half", "leaves" if rng.random() < 0.2 else "waits"))
        return data + (LAST if ending == "waits" else b""), ending

    def _said(self, data: bytes, ending: str) -> bytes:
        said = b""
        with (
            socket.create_connection(self._where, timeout=DEADLINE_S) as connection,
            contextlib.suppress(ConnectionResetError, BrokenPipeError),
        ):
            connection.sendall(data)
            if ending == "closes half":
                connection.shutdown(socket.SHUT_WR)
            while ending != "leaves" and (piece := connection.recv(65536)):
                said += piece
        return said

    def close(self) -> None:
        self._stack.close()


def judged(said: bytes) -> str:
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]
    if any(status in (500, 502) or status >= 505 for status in statuses):
        return f"FAULT: {said[:500]!r}"
    return f"first {statuses[0]}" if statuses else "no answer"
