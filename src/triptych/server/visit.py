"""One HTTP request on its way: its name, tenant, body, and its one line in the log."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.stages import Spent
from triptych.errors import (
    AuthError,
    EncodingError,
    OriginError,
    PayloadError,
    RequestError,
    TriptychError,
    unwound,
)
from triptych.server.config import ServerConfig
from triptych.server.metrics import Metrics
from triptych.server.refusals import REFUSAL, response_of
from triptych.server.traces import Traces, trace_id_of
from triptych.session.room import Room

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from triptych.server.limits import Account

log = logging.getLogger("triptych.server")

OPEN_PATHS = frozenset({"/", "/health", "/version"})
OPEN_FOLDER = "/page/"  # the page's own files: there is no secret in them, and it asks for the key itself
QUIET_PATHS = frozenset({"/health", "/metrics", "/stats"})  # asked every few seconds: logged only when they fail
LOOPBACK = frozenset({"127.0.0.1", "::1", ""})
LINGER_S = 1.0  # reading on after a refusal
SHORT_BYTES = 1 << 16  # of a body, that uvicorn takes in whether they are read or not


@dataclass(slots=True, kw_only=True)
class Visit:
    """facts: what the log line will say besides path, status and time; never anything the caller wrote.

    stages: where its time went, for its trace.
    """

    request_id: str
    tenant: str = ""
    caller: str = ""  # who is served as one: a key, or an address
    account: Account | None = None
    started_s: float = field(default_factory=time.perf_counter)
    limit_s: float | None = None  # from then on; not answered by it, the request ends
    facts: dict[str, object] = field(default_factory=dict)
    stages: list[Spent] = field(default_factory=list)

    def within(self, *limits_s: float | None) -> None:
        """It is to be answered within the least of these, None being no limit, and what was said before."""
        self.limit_s = min((limit for limit in (self.limit_s, *limits_s) if limit is not None), default=None)

    @property
    def left_s(self) -> float | None:
        return None if self.limit_s is None else self.started_s + self.limit_s - time.perf_counter()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Its name, as OpenAI and Anthropic spell that, and what is left to its caller."""
        id = self.request_id.encode()
        return [(b"x-request-id", id), (b"request-id", id), *(self.account.headers() if self.account else ())]

    def spend(self, num_tokens: int) -> None:
        if self.account is not None:
            self.account.spend(num_tokens)


class Reception:
    """ASGI middleware: names each request, asks for its key, logs how it went, and lets no exception through."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics, traces: Traces | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces
        self._room = Room("bodies", config.max_bodies_bytes)
        self._keys = [(_digest(key), key) for key in config.api_keys]
        self._origins = frozenset(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(request_id=_request_id(Headers(scope=scope).get("x-request-id")))
        scope["triptych.visit"] = visit
        span = None if self._traces is None or _is_quiet(scope) else self._begin(self._traces, scope, visit)
        status = 499  # nginx's, for a caller who left before the answer began

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:
                    self._count(scope, visit, status)
                message["headers"] = [*message["headers"], *visit.headers()]
            await send(message)

        counted = _Counted(scope, receive, self._room)
        try:
            self._welcome(scope, visit)
            await self._app(scope, counted, send_named)
        except ClientDisconnect:
            pass
        except Exception as error:
            if not isinstance(error, TriptychError):
                log.exception("unexpected error", extra={"facts": {"request": visit.request_id}})
            unwound(error)
            if status == 499 and counted.is_pending:
                await _refuse_early(response_of(error, scope), receive, send_named)
            elif status == 499:
                await response_of(error, scope)(scope, receive, send_named)
        finally:
            counted.leave()
            _log(scope, visit, status)
            if self._traces is not None and span is not None:
                self._traces.end(span, status, visit.facts, visit.stages)

    def _count(self, scope: Scope, visit: Visit, status: int) -> None:
        code = scope.get(REFUSAL)
        self._metrics.refused(status, code)
        if code is not None:
            visit.facts["error"] = code

    def _begin(self, traces: Traces, scope: Scope, visit: Visit) -> Span:
        span = traces.begin(scope["method"], scope["path"][:100], Headers(scope=scope).get("traceparent"))
        visit.facts["trace"] = trace_id_of(span)
        return span

    def _welcome(self, scope: Scope, visit: Visit) -> None:
        """Raises AuthError or OriginError. With several keys each is a tenant, and tenants share no cache."""
        if not self._keys:
            self._check_page(scope)  # else no page could know the key
        if not self._keys or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER):
            return
        given = _key(Headers(scope=scope))
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, known) for known, _ in self._keys]  # all of them, always
        if not (given and any(matches)):
            raise AuthError(
                "the API key is wrong" if given else "this server asks for an API key",
                hint="send it as `Authorization: Bearer KEY` or `x-api-key: KEY`; the operator set it with `--api-key`",
            )
        visit.tenant = digest.hex()[:16] if len(self._keys) > 1 else ""

    def _check_page(self, scope: Scope) -> None:
        """Browsers name the page that asks: another site's may not, nor one whose name was made to lead here.

        The latter (DNS rebinding) is a caller on this machine who calls it by a foreign name. Raises OriginError.
        """
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        is_ours = origin.partition("://")[2] == host
        if is_ours and (_is_plain(host) or address_of(scope) not in LOOPBACK):
            return
        raise OriginError(
            f"web pages of {origin[:100]} may not ask this server",
            hint="the operator may allow them with --allowed-origins, or set an --api-key",
        )


class _Counted:
    """A request's `receive`, whose bytes take room until it leaves. Raises OverloadError when there is none."""

    def __init__(self, scope: Scope, receive: Receive, room: Room) -> None:
        headers = Headers(scope=scope)
        self._declared = _declared(headers)
        self._is_long = "transfer-encoding" in headers or self._declared > SHORT_BYTES
        self._began_s = time.perf_counter()
        self._is_begun = False
        self._is_whole = False
        self._receive = receive
        self._room = room
        self._num_bytes = 0

    async def __call__(self) -> Message:
        self._is_begun = True
        message = await self._receive()
        self._is_whole = self._is_whole or not message.get("more_body", False)
        size = len(message.get("body", b""))
        self._room.take(size, of=self._declared)
        self._num_bytes += size
        return message

    @property
    def is_pending(self) -> bool:
        """More of the body is to come than is taken in without being asked for."""
        return not self._is_whole and (self._is_begun or self._is_long)

    def leave(self) -> None:
        self._room.give(self._num_bytes, self._began_s if self._num_bytes > SHORT_BYTES else None)
        self._num_bytes = 0


async def receive_body(scope: Scope, receive: Receive, config: ServerConfig) -> bytes:
    """The whole body. Raises PayloadError before more than the limit was read, ClientDisconnect when it ends early."""
    headers = Headers(scope=scope)
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("identity", ""):
        raise EncodingError(f"the body is packed ({packed[:20]!r})", hint="send it plain, without Content-Encoding")
    if _declared(headers) > config.max_body_bytes:
        raise _too_large(_declared(headers), config.max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    with anyio.move_on_after(config.body_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > config.max_body_bytes:
                raise _too_large(size, config.max_body_bytes)
            if not message.get("more_body", False):
                return b"".join(chunks)
    raise RequestError(f"the body took longer than {config.body_s:g} s to arrive", hint="send it again")


async def _refuse_early(response: Response, receive: Receive, send: Send) -> None:
    """Answer before the body is read, then read on for a moment: a socket closed at once would lose the answer."""
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
    with anyio.move_on_after(LINGER_S):
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass
    with contextlib.suppress(OSError):
        await send({"type": "http.response.body", "body": b""})


def _declared(headers: Headers) -> int:
    """Bytes of the body, as far as its head says."""
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isdecimal() else 0


def _too_large(size: int, limit: int) -> PayloadError:
    return PayloadError(
        f"the body has {size:,} bytes or more, the limit is {limit:,}",
        hint="send smaller pictures, or raise the server's --max-body-bytes",
    )


def _request_id(given: str | None) -> str:
    if given is not None and re.fullmatch(r"[A-Za-z0-9._:\-]{1,128}", given):
        return given
    return uuid.uuid4().hex


def _key(headers: Headers) -> str:
    """What `Authorization` bears, else Anthropic's `x-api-key`."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()


def address_of(scope: Scope) -> str:
    """The caller's; of IPv4 in its own form, also where it came to a socket of IPv6. Empty for a Unix socket's."""
    return str((scope.get("client") or ("", 0))[0]).removeprefix("::ffff:")


def _is_plain(host: str) -> bool:
    """Whether a host, with or without a port, is an address or `localhost`, which nobody can make lead here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_quiet(scope: Scope) -> bool:
    return scope["path"] in QUIET_PATHS or scope["path"].startswith(OPEN_FOLDER)


def _log(scope: Scope, visit: Visit, status: int) -> None:
    if _is_quiet(scope) and status < 400:
        return
    facts = {
        "request": visit.request_id,
        "method": scope["method"][:20],
        "path": scope["path"][:100],
        "status": status,
        "seconds": round(time.perf_counter() - visit.started_s, 4),
        **visit.facts,
    }
    log.log(logging.ERROR if status >= 500 else logging.INFO, "request", extra={"facts": facts})
