"""What media a server may touch; by default what the request itself carries, nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from triptych.errors import MediaError
from triptych.media.image import ImageLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """Where pictures may come from.

    allowed_local_root: `file://` URLs below this folder, links resolved. None: none.
    allowed_domains: host names whose http(s) URLs are fetched; `*` allows every public host.
    allows_private: fetch from loopback, private and other internal addresses too; only for one's own network.
    """

    allowed_local_root: Path | None = None
    allowed_domains: frozenset[str] = frozenset()
    allows_private: bool = False
    timeout_s: float = 5.0  # for a whole download: look-ups, redirects and all
    max_redirects: int = 3
    image: ImageLimits = field(default_factory=ImageLimits)
    max_tiles_bytes: int = 2 << 30  # of all prompts, to the answer's end; of pictures' files until they are tiles

    @property
    def max_bytes(self) -> int:
        return self.image.max_bytes


def too_big(what: str, num_bytes: int, policy: MediaPolicy) -> MediaError:
    return MediaError(
        f"{what} has {num_bytes:,} bytes or more, the limit is {policy.max_bytes:,}", hint="send it smaller"
    )


def named(source: str) -> str:
    """A source's kind, length and digest: never its content, which may be private or very long."""
    digest = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()[:16]
    kind = source.split(":", 1)[0][:8].lower() if ":" in source[:16] else "text"
    return f"{kind if kind.isalpha() else 'text'} URL of {len(source):,} characters (sha256 {digest}…)"
