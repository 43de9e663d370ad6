"""The page at `/`: vendored files, read once, under a policy that runs nothing but them."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDERS = ("data/page", "data/demo")  # the second has the pictures that the empty page offers
INDEX = "index.html"
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpg": "image/jpeg",
}
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data: blob:",
    "media-src 'self' blob:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # text of a model never becomes markup
    "trusted-types 'none'",
)
HEADERS = {
    "content-security-policy": "; ".join(POLICY),
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # kept, and asked about: an upgrade never leaves half of an old page
}


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of the page, as it is and packed. tag: what it is known by, a digest of its content."""

    content: bytes
    packed: bytes
    kind: str
    tag: str

    def answer(self, request: Request) -> Response:
        headers = HEADERS | {"etag": self.tag, "vary": "accept-encoding"}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if len(self.packed) < len(self.content) and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.packed, headers=headers | {"content-encoding": "gzip"}, media_type=self.kind)
        return Response(self.content, headers=headers, media_type=self.kind)


def routes() -> list[Route]:
    """`/`, and each of its files at `/page/NAME`. All are open: there is no secret in them."""
    files = {name: _read(path) for name, path in _found()}

    async def index(request: Request) -> Response:
        return files[INDEX].answer(request)

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    return [Route("/", index), Route("/page/{name}", file)]


def _found() -> Iterator[tuple[str, Traversable]]:
    for folder in FOLDERS:
        for path in (resources.files("triptych") / folder).iterdir():
            if path.name.rpartition(".")[2] in KINDS:
                yield path.name, path


def _read(path: Traversable) -> File:
    content = path.read_bytes()
    return File(
        content=content,
        packed=gzip.compress(content, mtime=0),
        kind=KINDS[path.name.rpartition(".")[2]],
        tag=f'W/"{hashlib.sha256(content).hexdigest()[:20]}"',
    )
