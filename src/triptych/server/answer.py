"""A record as the JSON of an answer."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


class JsonAnswer(Response):
    """Made of a record."""

    media_type = "application/json"

    def render(self, content: msgspec.Struct | dict[str, object]) -> bytes:
        return msgspec.json.encode(content)
