"""What the conformance tests have in common: files as people send them, and plain ways to ask a server."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Iterable
from typing import Any

import httpx

from asking import see

PATIENT = 60  # seconds: the machine may be busy
UNSEALED = {"timeout": PATIENT, "verify": False}  # no certificates: reading them takes longer than most requests here


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def ask(url: str, *pictures: str, text: str = "What is this?", **body: Any) -> httpx.Response:
    """A chat about pictures, greedy and short unless told."""
    asked = {"messages": see(text, *pictures), "max_tokens": 4, "temperature": 0} | body
    return httpx.post(f"{url}/v1/chat/completions", json=asked, **UNSEALED)


def inspect(url: str, *pictures: str, text: str = "What is this?", **body: Any) -> dict[str, Any]:
    asked = {"messages": see(text, *pictures)} | body
    answer = httpx.post(f"{url}/v1/media/inspect", json=asked, **UNSEALED)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def told(answer: httpx.Response) -> tuple[str, int, int]:
    """An answer's text, its prompt's tokens, and how many pictures were encoded for it."""
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"], answer.json()["usage"]["prompt_tokens"], choice["triptych"]["encoder_misses"]


def refused(answer: httpx.Response, status: int = 400) -> str:
    """The message of a refusal, which has the one form and a hint."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message: str = error["message"]
    assert len(message) < 1000
    return message


def dial(url: str) -> socket.socket:
    where = httpx.URL(url)
    connection = socket.create_connection((where.host, where.port), timeout=PATIENT)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Until the other side closes."""
    said = b""
    try:
        while piece := connection.recv(65536):
            said += piece
    except ConnectionResetError:
        pass
    return said


def is_hung_up(connection: socket.socket, pieces: Iterable[bytes], pause_s: float = 0.0) -> bool:
    """Whether the other side closes while it is sent these."""
    try:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False
