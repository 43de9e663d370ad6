"""A pytest plugin: llama.cpp's own server tests start and ask our server instead, with a few stated concessions.

Runs inside the peer's environment: `TRIPTYCH=… pytest -p llama_server`. Where a test starts `llama-server`, `triptych
serve` starts with the flags that mean the same; servers of the same flags are started once. Conceded, because it is the
model and not the server that they test: the words of their story model, the number of tokens of its tokenizer, the
`b` that their fingerprints begin with, paths without /v1, model names that are looked at by nobody there, a default of
`n_predict`, and `null` for the empty text of a stream's first chunk (OpenAI sends the empty text).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path.cwd()))
import requests  # noqa: E402
import utils  # noqa: E402  the peer's own

NAMES = (
    "test", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "davinci-002", "codellama70b", "tinyllama-2",
    "tinygemma3", "llama-test-model",
)  # fmt: skip
OURS = {"/chat/completions": "/v1/chat/completions", "/models": "/v1/models", "/responses": "/v1/responses"}
STORY = (
    "Suddenly", "Aside", "But she", "going|bed", "princesses", "Whillicter", "^ blue", "cat)+", "frog)+",
    "(\\{|John)+", "Sure, here's one",
)  # fmt: skip
# attributes of their server that ask for something which has no counterpart here
FOREIGN = (
    "lora_files", "spec_type", "models_dir", "models_preset", "server_reranking", "server_slots", "slot_save_path",
    "enable_ctx_shift", "kv_unified", "sleep_idle_seconds", "mcp_servers_config", "mcp_servers_json", "ui_mcp_proxy",
    "gcp_compat", "server_tools", "cors_origins", "model_tags", "reasoning_format",
)  # fmt: skip
Server = utils.ServerProcess
_plain_request, _plain_stream, _plain_get = Server.make_request, Server.make_stream_request, requests.get


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def pixels(side: int = 32) -> bytes:
    """A PNG that shows a slope of gray."""
    rows = b"".join(b"\0" + bytes(8 * row % 256 for _ in range(side)) for row in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class Anything:
    """Equal to whatever a tokenizer counts."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@functools.lru_cache
def started(flags: tuple[str, ...]) -> int:
    """The port of a server with these flags, which lives as long as the tests."""
    command = [*shlex.split(os.environ["TRIPTYCH"]), "--port", "0", *flags]
    with open(os.environ["TRIPTYCH_LOG"], "a") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    atexit.register(server.send_signal, signal.SIGTERM)
    assert server.stdout is not None
    for line in server.stdout:
        if " on http" in line:
            return int(line.rsplit(":", 1)[1])
    raise RuntimeError(f"the server did not start with {' '.join(flags)}")


def flags_of(server: Any) -> tuple[str, ...]:
    """What of their settings has a meaning here. Skips a test whose settings have none."""
    for name in FOREIGN:
        if getattr(server, name, None):
            pytest.skip(f"starts llama-server with {name}")
    context = (server.n_ctx or 4096) // (server.n_slots or 1)
    names = [server.model_alias] if server.model_alias else []
    flags = ["--max-model-len", str(context), "--max-num-seqs", str(server.n_slots or 4), "--max-num-queued-reqs", "64"]
    for name in dict.fromkeys([*names, *NAMES]):
        flags += ["--served-model-name", name]
    if server.api_key:
        flags += ["--api-key", server.api_key]
    if server.media_path:
        folder = Path("media").absolute()  # instead of their source tree's
        (folder / "mtmd").mkdir(parents=True, exist_ok=True)
        (folder / "mtmd" / "test-1.jpeg").write_bytes(pixels())
        flags += ["--allowed-local-media-path", str(folder)]
    if server.no_ui:
        flags += ["--no-page"]
    return tuple(flags)


def start(self: Any, timeout_seconds: int = 0) -> None:
    self.server_port = started(flags_of(self))


def body_of(server: Any, path: str, data: Any) -> Any:
    if isinstance(data, dict) and path.endswith(("/completions", "/responses")):
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        if server.n_predict and not any(name in data for name in names):
            data = data | {names[-1] if path.endswith("responses") else "max_tokens": server.n_predict}
    return data


def make_request(self: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Any:
    path = OURS.get(path, path)
    answer = _plain_request(self, method, path, body_of(self, path, data), *rest, **more)
    if isinstance(answer.body, dict) and "system_fingerprint" in answer.body:
        answer.body["system_fingerprint"] = "b" + answer.body["system_fingerprint"]
    if path == "/v1/models" and isinstance(answer.body, dict) and answer.body.get("data"):
        del answer.body["data"][1:]  # the other names are ours, see NAMES
    return answer


def make_stream_request(self: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Iterator[Any]:
    path = OURS.get(path, path)
    for event in _plain_stream(self, method, path, body_of(self, path, data), *rest, **more):
        if "system_fingerprint" in event:
            event["system_fingerprint"] = "b" + event["system_fingerprint"]
        for choice in event.get("choices", ()):
            if "delta" in choice and choice["delta"].get("content") == "":
                choice["delta"]["content"] = None
        yield event


def get(url: str, *args: Any, **more: Any) -> Any:
    """Their test pictures lie on the network: a small one instead."""
    if url.startswith("http://127.0.0.1") or url.startswith("http://localhost"):
        return _plain_get(url, *args, **more)
    return SimpleNamespace(content=pixels(), status_code=200, raise_for_status=lambda: None)


Server.start, Server.stop = start, lambda self: None
Server.make_request, Server.make_stream_request = make_request, make_stream_request
utils.ServerPreset.load_all = staticmethod(lambda: None)
requests.get = get
plain_match = utils.match_regex
utils.match_regex = lambda regex, text: bool(text) if any(w in regex for w in STORY) else plain_match(regex, text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is not None and "n_prompt" in spec.params:
            spec.params["n_prompt"] = Anything()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line of JSON for each test."""
    if report.when != "call" and report.outcome == "passed":
        return
    text = report.longreprtext if report.outcome == "failed" else ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    name = report.nodeid.removeprefix("unit/")
    with open(os.environ["TRIPTYCH_CASES"], "a") as file:
        file.write(
            json.dumps({"name": name, "outcome": report.outcome, "seconds": report.duration, "said": text}) + "\n"
        )
