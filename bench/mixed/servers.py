"""The servers that are compared, each in a fresh process on a free port, at its own best settings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from traffic.served import Served, found, serving

RIVALS = Path(__file__).parents[1] / ".rivals"
MODELS = RIVALS / "models"
LLAMA = RIVALS / "llama-server"
START_S = 120.0
# more answers at once than ever wait here, tokens for all; a thread a core (two); all tiles of a picture at once
LLAMA_FLAGS = ("-np", "16", "-c", "16384", "-fa", "on", "-t", "2", "--mtmd-batch-max-tokens", "1024", "--no-ui")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """weights, flags: what it runs, for the record. start: a server for as long as the block runs."""

    name: str
    weights: str
    flags: tuple[str, ...]
    start: Callable[[], AbstractContextManager[Served]]


def ours(name: str = "triptych", bundle: str = "smollm2-eyes-triptych", *flags: str) -> Contestant:
    parts = json.loads((MODELS / bundle / "bundle.json").read_text())["parts"]
    weights = ", ".join(f"{part['name']} {part['precision']}" for part in parts)
    start = partial(serving, str(MODELS / bundle), flags, RIVALS / "mixed.triptych.log")
    return Contestant(name=name, weights=weights, flags=flags, start=start)


def in_f32() -> Contestant:
    return ours("f32", "smollm2-eyes-fp32", "--dtype", "float")


def llama(name: str, eyes: str) -> Contestant:
    """Q4_0 words, for which it has its fastest kernels. eyes: the number type of tower and projector."""
    words, projector = MODELS / "smollm2-eyes-q4_0.gguf", MODELS / f"smollm2-eyes-mmproj-{eyes}.gguf"
    start = partial(_llama, ("-m", str(words), "--mmproj", str(projector), *LLAMA_FLAGS))
    return Contestant(name=name, weights=f"{words.name}, {projector.name}", flags=LLAMA_FLAGS, start=start)


@contextlib.contextmanager
def _llama(flags: tuple[str, ...]) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", RIVALS / "mixed.llama.log"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(LLAMA)}
    with log.open("w") as file:
        command = [str(LLAMA / "llama-server"), *flags, "--port", str(port)]
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        _wait(url, server, log)
        yield Served(url=url, model=found(url, None).model, pid=server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"llama-server did not come up in {START_S:.0f} s, see {log}")
