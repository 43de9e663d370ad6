"""Take the pictures of the page that the guide shows: the demo, served and asked in Chromium.

usage: python docs/screenshots.py        (needs `pip install -e '.[browser]'`, a Chromium, and two minutes alone)
"""

from __future__ import annotations

import base64
import contextlib
import io
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "src/triptych/data/demo"
DESK = {"viewport": {"width": 1280, "height": 800}}
TALL = {"viewport": {"width": 1280, "height": 1000}}
PHONE = {"viewport": {"width": 390, "height": 800}, "device_scale_factor": 1.5, "is_mobile": True, "has_touch": True}
DONE = ".message.assistant:last-child[data-state=done]"
BUSY_S = 75.0
GREEDY = "localStorage.setItem('triptych.settings', JSON.stringify({temperature: 0}))"


def main() -> None:
    with serving() as url, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        def visit(theme: str, size: dict[str, Any], path: str = "/") -> Any:
            page = chromium.new_context(color_scheme=theme, **size).new_page()
            page.add_init_script(GREEDY)
            page.goto(url + path)
            page.wait_for_selector(".offer")
            return page

        talk(visit("light", TALL), "chat")
        talk(visit("dark", PHONE), "phone")
        with load(url):
            page = visit("dark", DESK, "/#dashboard")
            page.click("#panel-wide")
            time.sleep(BUSY_S - 8)
            shoot(page, "dashboard")
        chromium.close()


def talk(page: Any, name: str) -> None:
    page.click(".offer:first-child")
    page.wait_for_selector(".chip")
    page.click("#send")
    page.wait_for_selector(DONE)
    page.fill("#words", "What is the capital of France?")
    page.click("#send")
    page.wait_for_selector(DONE)
    page.click(".message.assistant:last-child .figures")
    page.mouse.move(1, 1)
    time.sleep(1)
    shoot(page, name)


def shoot(page: Any, name: str) -> None:
    target = ROOT / "docs/images" / f"{name}.webp"
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(target, quality=88, method=6)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1024} kB")


@contextlib.contextmanager
def serving() -> Iterator[str]:
    command = [str(Path(sys.executable).with_name("triptych")), "serve", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
        server.terminate()


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Five callers with and without pictures, some of whom leave early or send what cannot be read."""
    pictures = [
        "data:image/jpeg;base64," + base64.b64encode((DEMO / "cat.jpg").read_bytes()).decode(),
        "data:image/png;base64," + base64.b64encode((DEMO / "apple.png").read_bytes()).decode(),
        "data:image/png;base64,AAAA",
    ]
    until = time.monotonic() + BUSY_S

    def call(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < until:
            content: list[dict[str, Any]] = [{"type": "text", "text": f"Tell me about number {chance.randrange(99)}"}]
            if chance.random() < 0.5:
                picture = chance.choices(pictures, (8, 8, 1))[0]
                content.insert(0, {"type": "image_url", "image_url": {"url": picture}})
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 60, "stream": True}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
                for _ in answer.iter_lines():
                    if chance.random() < 0.002:
                        break
            time.sleep(chance.random())

    callers = [threading.Thread(target=call, args=(number,)) for number in range(5)]
    for caller in callers:
        caller.start()
    yield
    for caller in callers:
        caller.join()


if __name__ == "__main__":
    main()
