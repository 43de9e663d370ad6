"""The servers that are compared, each in a fresh process on a free port, at its own best settings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from traffic.served import Served, found, serving

RIVALS = Path(__file__).parents[1] / ".rivals"
MODELS = RIVALS / "models"
LLAMA = RIVALS / "llama-server"
START_S = 300.0
# more answers at once than ever wait here, tokens for all; a thread a core (two); all tiles of a picture at once
LLAMA_FLAGS = ("-np", "16", "-c", "16384", "-fa", "on", "-t", "2", "--mtmd-batch-max-tokens", "1024", "--no-ui")
VLLM = RIVALS / "vllm"
# as in bench/rivals/vllm_cpu.py: its operators as they are, for compiled they answer this decoder wrongly
VLLM_FLAGS = ("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16",
              "--max-num-batched-tokens", "2048", "--kv-cache-memory-bytes", str(1 << 28))  # fmt: skip
VLLM_SETTINGS = {
    "LD_PRELOAD": str(VLLM / "lib" / "libiomp5.so"), "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CACHE_ROOT": str(VLLM / "cache"), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """weights, flags: what it runs, for the record. start: a server for as long as the block runs."""

    name: str
    weights: str
    flags: tuple[str, ...]
    start: Callable[[], AbstractContextManager[Served]]


def ours(name: str, bundle: str, *flags: str) -> Contestant:
    parts = json.loads((MODELS / bundle / "bundle.json").read_text())["parts"]
    weights = ", ".join(f"{part['name']} {part['precision']}" for part in parts)
    start = partial(serving, str(MODELS / bundle), flags, RIVALS / "mixed.triptych.log")
    return Contestant(name=name, weights=weights, flags=flags, start=start)


def in_f32() -> Contestant:
    return ours("f32", "smollm2-eyes-fp32", "--dtype", "float")


def llama(name: str, eyes: str) -> Contestant:
    """Q4_0 words, for which it has its fastest kernels. eyes: the number type of tower and projector."""
    words, projector = MODELS / "smollm2-eyes-q4_0.gguf", MODELS / f"smollm2-eyes-mmproj-{eyes}.gguf"
    command = (str(LLAMA / "llama-server"), "-m", str(words), "--mmproj", str(projector), *LLAMA_FLAGS)
    start = partial(_started, command, {"LD_LIBRARY_PATH": str(LLAMA)})
    return Contestant(name=name, weights=f"{words.name}, {projector.name}", flags=LLAMA_FLAGS, start=start)


def vllm(name: str, kind: str) -> Contestant:
    """kind: of its weights and arithmetic, int8 or bf16."""
    folder = MODELS / f"smollm2-eyes-vllm-{kind}"
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
    start = partial(_started, (str(VLLM / "bin" / "python"), *module, *VLLM_FLAGS), VLLM_SETTINGS)
    return Contestant(name=name, weights=folder.name, flags=VLLM_FLAGS, start=start)


@contextlib.contextmanager
def _started(command: Sequence[str], settings: Mapping[str, str]) -> Iterator[Served]:
    """A rival's server on a free port. settings: of its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", RIVALS / "mixed.rival.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--port", str(port)], stdout=file, stderr=file, env={**os.environ, **settings},
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait(url, server, log)
        yield Served(url=url, model=found(url, None).model, pid=server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # and the processes that it has left
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
    raise SystemExit(f"a rival did not come up in {START_S:.0f} s, see {log}")
