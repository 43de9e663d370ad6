"""Get a picture's bytes: from the request, from the web, or from under one local folder."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from triptych.errors import MediaError
from triptych.media.fetch.policy import MediaPolicy, named, too_big
from triptych.media.fetch.web import Lookup, download, look_up

MAX_PATH = 3 * 4096  # percent-encoded: Linux opens none longer, and each step of one is looked up
MAX_ESCAPES = 1 << 20  # more than a picture's base64 has; each takes sixty bytes while it is read
_TO_STANDARD = str.maketrans("-_", "+/", " \t\r\n\f\v")  # blanks go: a list of the pieces between may fill the memory


def resolve(source: bytes | str, policy: MediaPolicy, *, lookup: Lookup = look_up) -> bytes:
    """The bytes of a picture, at most `policy.max_bytes` of them. Blocks. Raises MediaError.

    lookup: host and port → addresses; tests bring their own.
    """
    if isinstance(source, bytes):
        if len(source) > policy.max_bytes:
            raise too_big("the picture", len(source), policy)
        return source
    source = source.strip()
    scheme = source[:8].split(":", 1)[0].lower()
    if scheme == "data":
        return _read_data_uri(source, policy)
    if scheme == "file":
        return _read_file(source, policy)
    if scheme in ("http", "https"):
        return download(source, policy, lookup)
    raise MediaError(
        f"{named(source)} is no picture that can be fetched",
        hint="send data:image/png;base64,…, or an https: URL of an allowed domain",
    )


def _read_data_uri(source: str, policy: MediaPolicy) -> bytes:
    """RFC 2397, and what clients make of it: any media type, line breaks, no padding, the URL-safe alphabet."""
    head, comma, body = source.partition(",")
    if not comma:
        raise MediaError(f"{named(source)} has no comma before its data", hint="data:image/png;base64,…")
    is_base64 = any(parameter.strip().lower() == "base64" for parameter in head.split(";")[1:])
    if len(body) * (3 if is_base64 else 4) // 4 // (3 if "%" in body else 1) > policy.max_bytes:
        raise too_big("the data URL", len(body) * 3 // 4, policy)
    if (num_escapes := body.count("%")) > MAX_ESCAPES:
        raise MediaError(f"{named(source)} has {num_escapes:,} percent signs", hint="send the picture as base64")
    data = _from_base64(body, source) if is_base64 else unquote_to_bytes(body)
    if not data:
        raise MediaError(f"{named(source)} holds no data")
    if len(data) > policy.max_bytes:
        raise too_big("the data URL", len(data), policy)
    return data


def _from_base64(body: str, source: str) -> bytes:
    if "%" in body:
        body = unquote(body)
    text = body.translate(_TO_STANDARD).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        reason = "not ASCII" if not text.isascii() else str(error)
        raise MediaError(f"{named(source)} is not base64: {reason}", hint="is it cut short?") from None


def _read_file(source: str, policy: MediaPolicy) -> bytes:
    root = policy.allowed_local_root
    if root is None:
        raise MediaError("file: URLs are off", hint="the operator may allow one folder with --allowed-local-media-path")
    try:
        parts = urlsplit(source)
    except ValueError:
        raise MediaError(f"{named(source)} is malformed") from None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or len(parts.path) > MAX_PATH:
        raise MediaError(f"{named(source)} does not name a local file", hint="file:///folder/picture.png")
    try:
        path, top = Path(unquote(parts.path)).resolve(), root.resolve(strict=True)  # what is outside is not looked at
        if not path.is_relative_to(top):
            raise MediaError(f"{named(source)} lies outside the folder that the operator allowed")
        return _read_regular(top, path.relative_to(top), policy)
    except (OSError, ValueError, RuntimeError) as error:  # a link loop is a RuntimeError
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise MediaError(f"{named(source)} cannot be read: {reason}") from None


def _read_regular(top: Path, below: Path, policy: MediaPolicy) -> bytes:
    """Never waits for a pipe, never follows a link that appeared, in any place, after the path was resolved."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(top, flags | os.O_DIRECTORY)
    try:
        for at, name in enumerate(below.parts, 1):
            is_folder = at < len(below.parts)
            inner = os.open(name, flags | (os.O_DIRECTORY if is_folder else 0), dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MediaError("the file: URL names something that is not a plain file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(policy.max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > policy.max_bytes:
        raise too_big("the file", len(data), policy)
    return data
