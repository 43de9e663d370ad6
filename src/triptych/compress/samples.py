"""Calibration samples: what a file of chat messages holds, and what the model makes of it."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.core.chat import Chat, ImagePart, Message, Part, TextPart
from triptych.core.spec import Modality
from triptych.errors import ConfigError

BUILTIN = "calibration/samples.jsonl"  # in the package's data
HELD_OUT = 4  # one sample in so many is kept for measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation as the decoder sees it, T tokens with the answer.

    token_ids: (T,) int32 global ids (`media/registry`). embeddings: (T, hidden) f32, of the fp32 model. modality: (T,)
    uint8, a `Modality` each. is_answer: (T,) bool. tiles: (N, S, S, 3) uint8 of all its pictures, N may be 0. rows:
    which row of [tile 0's rows, tile 1's rows, …, the projector's extra rows] stands at each media token, in order.
    """

    name: str
    token_ids: NDArray[np.int32]
    embeddings: NDArray[np.float32]
    modality: NDArray[np.uint8]
    is_answer: NDArray[np.bool_]
    tiles: NDArray[np.uint8]
    rows: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def judged(self) -> NDArray[np.int64]:
        """Positions whose logits predict a token of the answer."""
        return np.flatnonzero(self.is_answer[1:])

    @property
    def has_media(self) -> bool:
        return bool((self.modality != Modality.TEXT).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One line of a file. `chat` ends before the answer; `answer`: None asks the model for its own.

    right: a regular expression that is found in a right answer, whatever its case; calibration needs none.
    """

    name: str
    chat: Chat
    answer: str | None = None
    right: str | None = None

    @property
    def has_media(self) -> bool:
        return any(not isinstance(part, TextPart) for message in self.chat.messages for part in message.parts)

    @property
    def digest(self) -> str:
        said = [
            (
                message.role,
                [(part.text, "") if isinstance(part, TextPart) else ("", _seal(part)) for part in message.parts],
            )
            for message in self.chat.messages
        ]
        return hashlib.sha256(msgspec.json.encode((self.name, said, self.answer))).hexdigest()


class _Url(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class _Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="image_url"):
    image_url: str | _Url


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Text | _Image]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: list[_Message]
    id: str | None = None
    right: str | None = None


def read(path: Path) -> list[Conversation]:
    """Read a `samples.jsonl`: OpenAI's chat messages, pictures as paths beside the file or `data:` URIs.

    Raises ConfigError with the number of the line that is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_conversation(line, f"{path}, line {number}", f"{path.stem}-{number}", path.parent))
    if not found:
        raise ConfigError(f"{path} holds no samples", hint='one a line: {"messages": [{"role": "user", "content": …}]}')
    return found


def builtin(*, sees: bool = True) -> list[Conversation]:
    """The small set that comes with the package: everyday questions, drawings and a photograph.

    A model that sees nothing gets the questions alone.
    """
    with as_file(files("triptych") / "data") as folder:
        return [one for one in read(folder / BUILTIN) if sees or not one.has_media]


def split(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """For calibration, and to measure on: one in four is held out, of those with media and of the others alike.

    Of a kind that is too few to be split, under four, all serve for both.
    """
    used: list[Sample] = []
    held: list[Sample] = []
    for has_media in (True, False):
        own = [sample for sample in samples if sample.has_media is has_media]
        are_few = len(own) < HELD_OUT
        held += own if are_few else own[HELD_OUT - 1 :: HELD_OUT]
        used += [sample for place, sample in enumerate(own) if are_few or place % HELD_OUT != HELD_OUT - 1]
    return used, held


def save(sample: Sample, path: Path) -> None:
    """Written whole or not at all."""
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(getattr(sample, name)) for name in _ARRAYS}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    save_file(arrays, scratch, {"name": sample.name})
    scratch.replace(path)


def load(path: Path) -> Sample:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return Sample(name=file.metadata()["name"], **{name: file.get_tensor(name) for name in _ARRAYS})


_ARRAYS = ("token_ids", "embeddings", "modality", "is_answer", "tiles", "rows")


def _conversation(line: bytes, where: str, name: str, folder: Path) -> Conversation:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}", hint=_near(line)) from error
    messages = tuple(_message(message, where, folder) for message in found.messages)
    answer = None
    if messages and messages[-1].role == "assistant":
        answer, messages = (
            "".join(part.text for part in messages[-1].parts if isinstance(part, TextPart)),
            messages[:-1],
        )
    if not messages or messages[-1].role != "user" or answer == "":
        raise ConfigError(
            f"{where}: the messages do not end with a user's, or with an assistant's that is not empty",
            hint="what the model answers, or shall answer, is what calibration measures",
        )
    if found.right is not None:
        try:
            re.compile(found.right)
        except re.error as error:
            raise ConfigError(f"{where}: `right` is no regular expression: {error}") from error
    return Conversation(name=found.id or name, chat=Chat(messages=messages), answer=answer, right=found.right)


def _message(message: _Message, where: str, folder: Path) -> Message:
    if isinstance(message.content, str):
        return Message(role=message.role, parts=(TextPart(text=message.content),))
    return Message(role=message.role, parts=tuple(_part(part, where, folder) for part in message.content))


def _part(part: _Text | _Image, where: str, folder: Path) -> Part:
    if isinstance(part, _Text):
        return TextPart(text=part.text)
    named = part.image_url if isinstance(part.image_url, _Url) else _Url(part.image_url)
    if named.url.startswith("data:"):
        return ImagePart(source=named.url, detail=named.detail)
    if named.url.startswith(("http:", "https:")):
        raise ConfigError(f"{where}: {named.url[:80]} is not fetched", hint="save the picture beside the file")
    try:
        return ImagePart(source=(folder / named.url.removeprefix("file://")).read_bytes(), detail=named.detail)
    except OSError as error:
        raise ConfigError(
            f"{where}: {named.url}: {error.strerror or error}", hint=f"paths start at {folder}"
        ) from error


def _near(line: bytes) -> str | None:
    """The known kind of content that an unknown one resembles."""
    try:
        content: Any = msgspec.json.decode(line)
        kinds = [
            part.get("type") for message in content["messages"] for part in message["content"] if part != str(part)
        ]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return 'one a line: {"messages": [{"role": "user", "content": …}]}'
    strange = next((kind for kind in kinds if kind not in ("text", "image_url")), None)
    if strange is None:
        return None
    close = difflib.get_close_matches(str(strange), ["text", "image_url"], n=1)
    return f"parts are of type `text` or `image_url`, not `{strange}`" + (
        f"; did you mean `{close[0]}`?" if close else ""
    )


def _seal(part: ImagePart) -> str:
    source = part.source if isinstance(part.source, bytes) else part.source.encode()
    return f"{hashlib.sha256(source).hexdigest()} {part.detail}"
