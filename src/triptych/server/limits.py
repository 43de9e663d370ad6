"""What one caller may have: requests at once, requests and tokens a minute, and time."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.engine.pace import Estimate
from triptych.errors import DeadlineError, RateLimitError, RequestError
from triptych.server.config import ServerConfig
from triptych.server.visit import Visit, address_of

ACCOUNTS_KEPT = 10_000  # of callers; those who owe nothing are forgotten first
TIMEOUT_HEADER = "x-request-timeout"


class Bucket:
    """A token bucket: holds a minute's worth, fills evenly. It may be drawn below zero; then one waits."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = -math.inf

    def level(self, now_s: float) -> float:
        self._level = min(self.per_minute, self._level + max(0.0, now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s
        return self._level

    def draw(self, amount: int, now_s: float) -> None:
        self._level = self.level(now_s) - amount

    def until_s(self, level: float, now_s: float) -> float:
        """Seconds until it holds so much."""
        return max(0.0, (level - self.level(now_s)) * 60 / self.per_minute)


class Account:
    """One caller's: what it has under way and what is left of its minute."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float]) -> None:
        self.num_under_way = 0
        self._stays = Estimate()  # seconds from a request's arrival to its answer's end
        self._max_under_way = config.max_requests_per_key
        self._buckets = {
            name: Bucket(per_minute)
            for name, per_minute in (
                ("requests", config.max_requests_per_minute),
                ("tokens", config.max_tokens_per_minute),
            )
            if per_minute is not None
        }
        self._clock = clock

    def enter(self) -> None:
        """Count a request. Raises RateLimitError that says when there will be room."""
        now_s = self._clock()
        if self._max_under_way is not None and self.num_under_way >= self._max_under_way:
            raise RateLimitError(
                f"{self.num_under_way:,} requests of this caller are under way, as many as it may have",
                retry_after_s=self._stays.value / self.num_under_way,
                hint="wait for one of them to end",
            )
        for name, bucket in self._buckets.items():
            wait_s = bucket.until_s(1, now_s)
            if wait_s:
                has = f"this caller has had its {bucket.per_minute:,} {name} a minute"
                raise RateLimitError(has, retry_after_s=wait_s)
        self.num_under_way += 1
        if "requests" in self._buckets:
            self._buckets["requests"].draw(1, now_s)

    def spend(self, num_tokens: int) -> None:
        """Of prompts and answers. What is begun may go on: the next request waits the longer."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].draw(num_tokens, self._clock())

    def leave(self, stayed_s: float) -> None:
        self.num_under_way -= 1
        self._stays.see(stayed_s)

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost if it were forgotten."""
        now_s = self._clock()
        return not self.num_under_way and all(one.level(now_s) >= one.per_minute for one in self._buckets.values())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's, for clients that pace themselves."""
        now_s, found = self._clock(), []
        for name, bucket in self._buckets.items():
            facts = {
                "limit": str(bucket.per_minute),
                "remaining": str(max(0, int(bucket.level(now_s)))),
                "reset": f"{bucket.until_s(bucket.per_minute, now_s):.3f}s",
            }
            found += [(f"x-ratelimit-{fact}-{name}".encode(), value.encode()) for fact, value in facts.items()]
        return found


class Turnstile:
    """ASGI middleware behind `Reception`: opens each caller's account, and says until when it is to be answered."""

    def __init__(self, app: ASGIApp, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._config = config
        self._clock = clock
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # least recently seen first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        visit: Visit = scope["triptych.visit"]
        visit.caller = visit.tenant if self._config.api_keys else _address(scope)
        account = visit.account = self._account(visit.caller)
        visit.within(self._config.request_timeout_s, _asked_s(Headers(scope=scope)))
        account.enter()
        began_s = self._clock()
        try:
            await self._app(scope, receive, send)
        finally:
            account.leave(self._clock() - began_s)

    def _account(self, caller: str) -> Account:
        account = self._accounts.get(caller)
        if account is None:
            if len(self._accounts) >= ACCOUNTS_KEPT:
                self._forget()
            account = self._accounts[caller] = Account(self._config, self._clock)
        self._accounts.move_to_end(caller)
        return account

    def _forget(self) -> None:
        """Those who owe nothing; if there are none, those not under way for longest."""
        idle = [name for name, account in self._accounts.items() if account.is_idle]
        resting = [name for name, account in self._accounts.items() if not account.num_under_way]
        for name in idle or resting[: ACCOUNTS_KEPT // 10]:
            del self._accounts[name]


@contextlib.contextmanager
def in_time(visit: Visit) -> Iterator[None]:
    """Raises DeadlineError where the block is not done by the visit's deadline; a thread is still waited for."""
    with anyio.move_on_after(visit.left_s) as scope:
        yield
    if scope.cancelled_caught or (visit.left_s is not None and visit.left_s <= 0):
        limit_s = visit.limit_s or 0.0
        raise DeadlineError(
            f"the prompt was not ready within {limit_s:g} s",
            hint="allow more time, send smaller pictures, or come back when the server is less busy",
        )


def _asked_s(headers: Headers) -> float | None:
    """What the caller's own header allows. Raises RequestError."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RequestError(f"the header X-Request-Timeout is {given[:40]!r}", hint="send seconds, such as 30")
    return seconds


def _address(scope: Scope) -> str:
    """Whose address it is: of IPv6 the network of 64 bits that one customer has."""
    host = address_of(scope)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
