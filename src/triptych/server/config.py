"""What the operator decides about the HTTP side; what the engine does is `engine/config`."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Limits and names of one server.

    Without a flag, for they fit everywhere: `max_head_bytes`, `head_s`, `write_s`, `ping_s` (proxies wait longer),
    `text_threads` (a text takes milliseconds) and `max_preparing` (what waits is bounded by `max_bodies_bytes`).
    """

    model_names: tuple[str, ...] = ()  # the first one answers; none: the session's own name
    api_keys: tuple[str, ...] = ()  # none: no key is asked for
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call; `*`: of all
    max_body_bytes: int = 64 << 20
    body_s: float = 60.0  # a body that takes longer to arrive is refused
    max_bodies_bytes: int = 512 << 20  # of all requests at once, from their arrival to their answer's end
    max_head_bytes: int = 32 << 10  # of the request line and headers
    head_s: float = 10.0  # for them to arrive
    write_s: float = 60.0  # a caller who takes nothing of an answer for so long has left
    max_connections: int = 2048
    max_requests_per_key: int | None = None  # at once, of one caller: an API key, or an address where there are none
    max_requests_per_minute: int | None = None  # likewise
    max_tokens_per_minute: int | None = None  # likewise, of prompts and answers
    request_timeout_s: float | None = 600.0  # a request not answered by then ends with an error; callers may say less
    min_priority: int = 0  # the most urgent `priority` that a request may have
    max_choices: int = 128  # answers to one request: prompts times `n`
    text_threads: int = 4  # prompts without media that are prepared at once
    media_threads: int = 32  # and with media; each may wait for a download
    max_preparing: int = 256  # that wait for a thread, of either kind
    ping_s: float = 15.0  # a comment keeps a silent stream open
    stall_s: float = 120.0  # work without progress for so long is a dead engine
    page: bool = True  # the chat page and its dashboard, at `/`
    drain_s: float = 30.0  # answers may go on for so long after SIGTERM

    def __post_init__(self) -> None:
        if self.max_body_bytes > self.max_bodies_bytes:
            raise ConfigError(
                f"one body may have {self.max_body_bytes:,} bytes, all together {self.max_bodies_bytes:,}",
                hint="give --max-bodies-bytes at least as much as --max-body-bytes, better some times as much",
            )
