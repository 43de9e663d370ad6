"""The servers that are compared, each in a fresh process on a free port, at its own best settings."""

from __future__ import annotations

import contextlib
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
# -np: answers at once, as ours; -c: for all of them together; threads: the machine's cores
SEATS = ("-np", "16", "-c", "16384", "--no-ui")
BEST = ("-fa", "on", "-t", "2", "--mtmd-batch-max-tokens", "1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """files: what it reads, for the record. start: a server for as long as the block runs."""

    name: str
    files: tuple[Path, ...]
    flags: tuple[str, ...]
    start: Callable[[], AbstractContextManager[Served]]


def ours(bundle: Path = MODELS / "smollm2-eyes-triptych") -> Contestant:
    files = tuple(sorted(bundle.glob("*.bin"))) + tuple(sorted(bundle.glob("*.npy")))
    start = partial(serving, str(bundle), (), RIVALS / "mixed.triptych.log")
    return Contestant(name="triptych", files=files, flags=(), start=start)


def llama(name: str = "llama.cpp", words: str = "q4_0", eyes: str = "f16", more: tuple[str, ...] = BEST) -> Contestant:
    """words, eyes: number types of the decoder's weights and of the rest's."""
    weights, projector = MODELS / f"smollm2-eyes-{words}.gguf", MODELS / f"smollm2-eyes-mmproj-{eyes}.gguf"
    flags = ("-m", str(weights), "--mmproj", str(projector), *SEATS, *more)
    shown = (weights.name, projector.name, *SEATS, *more)
    return Contestant(name=name, files=(weights, projector), flags=shown, start=partial(_llama, flags))


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
