"""A server under load: started for the occasion or found at a URL, with its counters, memory and decoder children."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

LAUNCH = Path(__file__).with_name("launch.py")
DECODER = "triptych.media.image.worker"
STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """pid: None where the server is not on this machine. report: where it writes what its heaps hold, if it does."""

    url: str
    model: str
    pid: int | None = None
    report: Path | None = None

    def counters(self) -> dict[str, float]:
        """Every sample of /metrics by name, summed over its labels. Raises httpx.HTTPStatusError."""
        answer = httpx.get(f"{self.url}/metrics", timeout=30)
        answer.raise_for_status()
        found: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found[sample.name] += sample.value
        return dict(found)

    def resident(self) -> int:
        """Bytes of the server's own process."""
        return 0 if self.pid is None else int(psutil.Process(self.pid).memory_info().rss)

    def decoders(self) -> list[psutil.Process]:
        """Its picture decoders that are alive."""
        found = []
        for child in psutil.Process(self.pid).children(recursive=True) if self.pid else []:
            with contextlib.suppress(psutil.Error):
                if DECODER in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    def heaps(self) -> dict[str, Any]:
        """What its heaps hold now, before and after malloc gave back what is free; empty unless it can tell."""
        if self.report is None or self.pid is None:
            return {}
        self.report.unlink(missing_ok=True)
        psutil.Process(self.pid).send_signal(signal.SIGUSR1)
        deadline_s = time.monotonic() + 30
        while not self.report.exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return dict(json.loads(self.report.read_text())) if self.report.exists() else {}


def found(url: str, model: str | None) -> Served:
    """A server that runs already. Its first model, unless one is named."""
    base = url.rstrip("/").removesuffix("/v1")
    name = model or httpx.get(f"{base}/v1/models", timeout=30).json()["data"][0]["id"]
    return Served(url=base, model=name)


@contextlib.contextmanager
def serving(model: str, flags: Sequence[str], log: Path) -> Iterator[Served]:
    """`triptych serve MODEL` on a free port for as long as the block runs; its log goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    report = log.with_suffix(".heaps.json")
    with log.open("w") as file:
        command = [sys.executable, str(LAUNCH), str(report), "serve", model, "--port", "0", *flags]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        url = _url(server, log)
        yield Served(url=url, model=found(url, None).model, pid=server.pid, report=report)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=STOP_S)


def _url(server: subprocess.Popen[str], log: Path) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if " on http" in line:
            return line.rsplit(" on ", 1)[1].strip()
    raise SystemExit(f"the server ended before it listened, see {log}")
