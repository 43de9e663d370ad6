"""Values that flags take besides text and numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from triptych.core.policy import Speculation

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class Count(click.ParamType[int]):
    """A number as vLLM takes it: 8192, 8k (8,000), 8K (8,192), 1.5G."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", value.strip())
        number = float(match[1]) * UNITS[match[2]] if match else 0.5
        if not number.is_integer() or number < 1:
            self.fail(f"{value!r} is not a number such as 8192, 8k (8,000) or 8K (8,192)", param, ctx)
        return int(number)


class NewFile(click.Path):
    """A file to be written, in a folder that is there: or it would be found out at the end."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is not a folder", param, ctx)
        return path


class Seconds(click.FloatRange):
    """A time that ends: nan and inf are numbers to Python, and no time."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


class Text(click.ParamType[str]):
    """Text that can be what it is meant for. Its value is never repeated: it may be a key."""

    name = "text"

    def __init__(self, pattern: str, otherwise: str) -> None:
        self._pattern = pattern
        self._otherwise = otherwise

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(self._pattern, value):
            self.fail(self._otherwise, param, ctx)
        return str(value)


KEY = Text(r"[!-~]+", "a key is one or more visible ASCII characters without spaces: a header must carry it")
NAME = Text(r".*\S.*", "a name is more than spaces")
ORIGINS = Text(
    r"\*|https?://[^/,\s]+(,https?://[^/,\s]+)*", "name origins as browsers do, such as https://chat.example.org, or *"
)
HOSTS = Text(r"[^/:@]+|[\da-fA-F:]+", "name hosts alone, such as example.org,images.example.org")


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            content = json.loads(value)
        except json.JSONDecodeError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(content, dict):
            self.fail(f'{value!r} is not a JSON object such as {{"image": 4}}', param, ctx)
        return content


class Guesses(click.ParamType["Speculation"]):
    """How next tokens are guessed: vLLM's JSON object, or the method's name alone."""

    name = "guesses"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Speculation:
        import msgspec

        from triptych.core.policy import Speculation
        from triptych.errors import ConfigError

        if isinstance(value, Speculation):
            return value
        try:
            return msgspec.json.decode(value, type=Speculation) if "{" in value else Speculation(method=value)
        except (msgspec.DecodeError, ConfigError) as error:
            known = ", ".join(Speculation.__struct_fields__)
            self.fail(f"{value!r}: {error}; ngram, or a JSON object with any of {known}", param, ctx)


class Pairs(click.ParamType[dict[str, str]]):
    """name=value,name=value"""

    name = "name=value,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        if isinstance(value, dict):
            return value
        pairs = [pair.partition("=") for pair in value.split(",")]
        if not all(name and middle and worth for name, middle, worth in pairs):
            self.fail(f"{value!r} is not of the form vision=int8,decoder=int4", param, ctx)
        return {name.strip(): worth.strip() for name, _, worth in pairs}


class Limits(click.ParamType[dict[str, int]]):
    """Items of each modality in one request: `{"image": 4}`, vLLM's `{"image": {"count": 4}}`, or `image=4`."""

    name = "limits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            pairs = Pairs().convert(value, param, ctx)
            value = {name: int(text) if text.isdecimal() else text for name, text in pairs.items()}
        limits = {}
        for modality, limit in JsonObject().convert(value, param, ctx).items():
            count = limit.get("count") if isinstance(limit, dict) and len(limit) == 1 else limit
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                self.fail(f"{modality}: {limit!r} is not a number of items", param, ctx)
            if modality not in ("image", "video", "audio"):
                self.fail(f"`{modality}` is no modality; they are image, video and audio", param, ctx)
            if modality != "image" and count > 0:
                self.fail(f"{modality}={count}: no {modality} is served yet, only 0 can be met", param, ctx)
            limits[modality] = count
        return limits
