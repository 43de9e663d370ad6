"""What tests ask a server: messages, pictures, and files that mean harm."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from typing import Any

import httpx
from PIL import Image

from triptych.session import Session


def uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def png(brightness: int, size: tuple[int, int] = (5, 3)) -> str:
    return uri(Image.new("L", size, brightness))


def bomb(side: int) -> str:
    """A PNG whose header claims side × side pixels, a few hundred bytes long."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 5000)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def see(text: str, *pictures: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """A chat's whole text, read as it comes."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    return text


def is_clean(session: Session) -> bool:
    stats = session.stats()
    return stats.free_blocks == stats.num_blocks and stats.held_features == 0
