"""One request over HTTP, timed: streamed or whole, read slowly, or left in the middle."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from traffic.questions import Answered, Question
from traffic.served import Served

SMALL_BUFFER = 8192  # bytes: a slow reader's socket, so that the server feels it


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How an answer is read. leave_after: pieces of it; leave_s: seconds, answered or not; pause_s: between pieces."""

    is_stream: bool = True
    leave_after: int | None = None
    leave_s: float | None = None
    pause_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Visit:
    """What came of one request. Times are seconds of one clock."""

    question: Question
    manner: Manner
    sent_s: float = 0.0
    ended_s: float = 0.0
    piece_s: list[float] = field(default_factory=list)  # when each piece of the answer came
    status: int = 0
    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish: str | None = None
    num_tokens: int = 0
    error: str | None = None
    code: str | None = None
    retry_after: str | None = None
    has_left: bool = False
    is_whole: bool = False  # a stream's [DONE], or a body that was read to its end

    @property
    def answered(self) -> Answered:
        calls = tuple((name, arguments) for name, arguments in self.calls.values())
        return Answered(text=self.text, calls=calls, finish=self.finish)

    @property
    def ttft_s(self) -> float | None:
        return self.piece_s[0] - self.sent_s if self.piece_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first."""
        if len(self.piece_s) < 2 or self.num_tokens < 2:
            return None
        return (self.piece_s[-1] - self.piece_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.piece_s, self.piece_s[1:], strict=False)]


def client(served: Served, *, is_slow: bool = False) -> httpx.AsyncClient:
    """For many visits at once. A slow one's sockets hold little, so that unread answers wait at the server."""
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)] if is_slow else None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=options)
    return httpx.AsyncClient(base_url=served.url, timeout=httpx.Timeout(600, connect=60), transport=transport)


async def visit(http: httpx.AsyncClient, model: str, question: Question, manner: Manner) -> Visit:
    """Ask, and read as `manner` says. Nothing is raised for what a server does: it is written down."""
    made = Visit(question=question, manner=manner, sent_s=time.perf_counter())
    body: dict[str, Any] = {"model": model, **question.body}
    if manner.is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with asyncio.timeout(manner.leave_s), http.stream("POST", "/v1/chat/completions", json=body) as answer:
            made.status, made.retry_after = answer.status_code, answer.headers.get("retry-after")
            if manner.is_stream and answer.is_success:
                await _read_stream(made, answer.aiter_lines())
            else:
                _read_whole(made, await answer.aread())
    except TimeoutError:
        made.has_left = True
    except (httpx.HTTPError, msgspec.DecodeError, KeyError, IndexError) as error:
        made.error = f"{type(error).__name__}: {error}"
    made.ended_s = time.perf_counter()
    return made


async def _read_stream(made: Visit, lines: AsyncIterator[str]) -> None:
    leave_after = made.manner.leave_after
    async for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            made.is_whole = True
            continue
        if _take(made, msgspec.json.decode(line[6:])):
            made.piece_s.append(time.perf_counter())
            if made.manner.pause_s:
                await asyncio.sleep(made.manner.pause_s)
        if leave_after and len(made.piece_s) >= leave_after:
            made.has_left = True
            return


def _take(made: Visit, event: dict[str, Any]) -> bool:
    """Whether a piece of the answer was in it."""
    if "error" in event:
        made.error, made.code = event["error"]["message"], event["error"].get("code")
    if event.get("usage"):
        made.num_tokens = event["usage"]["completion_tokens"]
    has_piece = False
    for choice in event.get("choices", ()):
        made.finish = choice.get("finish_reason") or made.finish
        delta = choice["delta"]
        made.text += delta.get("content") or ""
        has_piece = has_piece or bool(delta.get("content"))
        for call in delta.get("tool_calls") or ():
            has_piece = True
            _take_call(made, call["index"], call.get("function") or {})
    return has_piece


def _take_call(made: Visit, index: int, function: dict[str, Any]) -> None:
    own = made.calls.setdefault(index, ["", ""])
    own[0] += function.get("name") or ""
    own[1] += function.get("arguments") or ""


def _read_whole(made: Visit, raw: bytes) -> None:
    content = msgspec.json.decode(raw)
    if "error" in content:
        made.error, made.code = content["error"]["message"], content["error"].get("code")
        return
    choice = content["choices"][0]
    made.text, made.finish = choice["message"].get("content") or "", choice["finish_reason"]
    for index, call in enumerate(choice["message"].get("tool_calls") or ()):
        _take_call(made, index, call["function"])
    made.num_tokens, made.is_whole = content["usage"]["completion_tokens"], True
