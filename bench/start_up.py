"""From starting `triptych serve` to the end of its first answer, and to the end of its first answer about a picture.

usage: python bench/start_up.py [BUNDLE|demo] --json OUT
"""

from __future__ import annotations

import argparse
import base64
import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import record
from PIL import Image, ImageDraw

LOG = Path(__file__).parent / ".rivals" / "start_up.log"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
TRIPTYCH = Path(sys.executable).with_name("triptych")


def picture_question() -> dict[str, Any]:
    image = Image.new("RGB", (320, 240), (40, 90, 200))
    ImageDraw.Draw(image).ellipse((110, 70, 210, 170), fill=(220, 40, 40))
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the picture?"}]
    return {"role": "user", "content": parts}


def ask(client: httpx.Client, url: str, message: dict[str, Any]) -> httpx.Response:
    body = {"messages": [message], "max_tokens": 16, "temperature": 0}
    return client.post(f"{url}/v1/chat/completions", json=body)


def start(model: str) -> dict[str, float]:
    """Seconds and bytes of one server's life."""
    client, picture = httpx.Client(timeout=60), picture_question()  # before: their time is the caller's
    started = time.perf_counter()
    with LOG.open("w") as log:
        command = [TRIPTYCH, "serve", model, "--port", "0", "--num-threads", "2"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = _url(server)
        had = {"listening": time.perf_counter() - started}
        ask(client, url, QUESTION).raise_for_status()
        had["first answer"] = time.perf_counter() - started
        asked = time.perf_counter()
        if ask(client, url, picture).is_success:  # a language model alone refuses
            had["first picture, once it runs"] = time.perf_counter() - asked
        status = Path(f"/proc/{server.pid}/status").read_text()
        had["peak"] = int(status.split("VmHWM:")[1].split()[0]) * 1024
        return had
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if " on http" in line:
            return line.rsplit(" on ", 1)[1].strip()
    raise SystemExit(f"the server ended before it listened, see {LOG}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--count", type=int, default=3, help="servers started")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    lives = [start(asked.model) for _ in range(asked.count)]
    names = [name for name in lives[0] if all(name in life for life in lives)]
    found = [
        record.measure(
            f"server: {name}", "triptych serve", "B" if name == "peak" else "s", [life[name] for life in lives]
        )
        for name in names
    ]
    first = next(entry for entry in found if entry.name == "server: first answer")
    aim = record.Target(
        name="server start to first answer", unit="s", value=first.value,
        at_most=2.0, lowest=first.lowest, highest=first.highest,
    )  # fmt: skip
    record.write(asked.json, record.record("start_up", found, [aim], {"model": asked.model, "starts": asked.count}))
    print(f"server start to first answer: {first.value:.2f} s ({first.lowest:.2f} to {first.highest:.2f})")


if __name__ == "__main__":
    main()
