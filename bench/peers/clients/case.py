"""A case: one thing that a client does, which raises when the server did not do its part."""

from __future__ import annotations

import base64
import struct
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where it is. key: what it asks for; clients will not start without one."""

    url: str
    model: str
    key: str = "none"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


Case = Callable[[Server], None]


def run(client: str, cases: Sequence[Case], server: Server) -> list[dict[str, Any]]:
    """One record for each case; an error keeps its last words."""
    found = []
    for case in cases:
        started, error = time.perf_counter(), None
        try:
            case(server)
        except Exception as raised:  # noqa: BLE001  whatever a client makes of it
            where = traceback.extract_tb(raised.__traceback__)
            own = next((one for one in reversed(where) if one.filename.endswith("_cases.py")), where[-1])
            error = f"{type(raised).__name__} at «{own.line}»: {str(raised)[:600]}"
        seconds = round(time.perf_counter() - started, 3)
        found.append({"client": client, "case": case.__name__, "ok": error is None, "seconds": seconds, "error": error})
    return found


def png(side: int = 32, brightness: int = 128) -> bytes:
    """A gray picture."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = (b"\0" + bytes([brightness]) * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def picture_base64(brightness: int = 128) -> str:
    return base64.b64encode(png(brightness=brightness)).decode()


def picture_uri(brightness: int = 128) -> str:
    return "data:image/png;base64," + picture_base64(brightness)


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
