"""Changed requests to every endpoint of the real application, over the arithmetic model."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from pathlib import Path
from random import Random
from typing import Any

from fuzz import grown
from fuzz.files import corpus
from fuzz.mutate import changed, damaged, deep
from triptych.server.app import create_app
from triptych.server.config import ServerConfig
from triptych.testing import plan, tiny_session

DEADLINE_S = 60.0  # of a request: answers here have at most a hundred tokens, but the machine may be busy
CLEAN_S = 30.0  # for all blocks and pictures to come back
CHECK_EVERY = 250

PICTURE = "PICTURE"  # stands for a picture, which may be damaged
SEEDS: list[tuple[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("requests.json").read_text())
NAMES = sorted({name for _, body in SEEDS for name in body} | {"content", "role", "type", "url", "text", "best_of"})


class Bodies:
    """A case is one changed body; the outcome is its path and status."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self._corpus = corpus()
        self._session = tiny_session(plan(max_multimodal_tokens=128, max_images=4))
        config = ServerConfig(max_choices=4, max_body_bytes=8 << 20, page=False)
        self._app = create_app(self._session, config)
        self._loop = asyncio.new_event_loop()

    def run(self, number: int) -> str:
        path, body = self.case(number)
        try:
            outcome = self._loop.run_until_complete(asyncio.wait_for(self._ask(path, body), DEADLINE_S))
        except TimeoutError:
            return f"FAULT: {path} was not answered in {DEADLINE_S:g} s"
        if number % CHECK_EVERY == 0 and not self._loop.run_until_complete(self._is_clean()):
            return f"FAULT: not all came back: {self._session.stats()}"
        return outcome

    def case(self, number: int) -> tuple[str, bytes]:
        rng = Random(f"bodies {number}")
        path, body = rng.choice(SEEDS)
        if rng.random() < 0.02:
            return path, deep(rng)
        if rng.random() < 0.01:
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, **grown.form(rng)}
            return "/v1/chat/completions", json.dumps(chat).encode()
        content = body if rng.random() < 0.2 else changed(body, rng, NAMES)
        raw = json.dumps(content).encode()
        raw = raw.replace(PICTURE.encode(), self._picture(rng, is_bare=path == "/v1/messages"))
        return path, damaged(raw, rng, [raw]) if rng.random() < 0.15 else raw

    def _picture(self, rng: Random, *, is_bare: bool) -> bytes:
        data = rng.choice(self._corpus)
        if rng.random() < 0.7:
            data = damaged(data, rng, self._corpus)
        head = rng.choice((b"data:image/png;base64,", b"data:;base64,", b"data:x/y;q=1;base64,", b"data:,"))
        return (b"" if is_bare else head) + base64.b64encode(data)

    async def _ask(self, path: str, body: bytes) -> str:
        sent: list[dict[str, Any]] = []
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await asyncio.sleep(2 * DEADLINE_S)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "server": ("test", 80),
            "client": ("test", 1), "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
        }  # fmt: skip
        await self._app(scope, receive, send)
        return judged(path, sent)

    async def _is_clean(self) -> bool:
        for _ in range(int(CLEAN_S / 0.01)):
            stats = self._session.stats()
            if (
                stats.num_running == stats.num_waiting == stats.held_features == 0
                and stats.free_blocks == stats.num_blocks
            ):
                return True
            await asyncio.sleep(0.01)
        return False

    def close(self) -> None:
        self._loop.close()
        self._session.close()


def judged(path: str, sent: list[dict[str, Any]]) -> str:
    """A whole answer with a status below 500, or one that says what is the matter and is counted by its cause."""
    if not sent or sent[0]["type"] != "http.response.start" or sent[-1].get("more_body", False):
        return f"FAULT: {path}: an answer of {len(sent)} messages"
    status = sent[0]["status"]
    whole = b"".join(message["body"] for message in sent[1:])
    is_stream = any(b"event-stream" in value for name, value in sent[0]["headers"] if name == b"content-type")
    if status >= 500 or b"internal_error" in whole or b"api_error" in whole:
        return f"FAULT: {path}: {status} {whole[-300:]!r}"
    if is_stream:
        return f"{path}: stream" if whole.endswith(b"\n\n") else f"FAULT: {path}: {whole[-300:]!r}"
    try:
        content = json.loads(whole)
    except ValueError:
        return f"FAULT: {path}: {status} {whole[-300:]!r}"
    if status >= 400 and not content["error"]["message"]:
        return f"FAULT: {path}: {status} says nothing"
    return f"{path}: {status}"
