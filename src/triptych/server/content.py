"""Kinds of content: a text or a picture; anything else is refused by the name of what it is."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.errors import RequestError

MAX_PARTS = 16_384  # of a request together
OTHER_MODALITY = {
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
    "document": "document",
}


def check_kinds(lists: Iterable[tuple[str, object]], served: tuple[str, ...]) -> None:
    """Name what is not served of lists of parts, which a type error would not. lists: each with its field's name.

    A part is an object whose `type` says what it is; what is no object, or has no type, is left to the types.
    """
    num_parts = 0
    for where, parts in lists:
        if not isinstance(parts, list):
            continue
        num_parts += len(parts)
        if num_parts > MAX_PARTS:
            hint = "join texts that follow one another"
            param = where.partition("[")[0]
            raise RequestError(f"there are more than {MAX_PARTS:,} parts of content", hint=hint, param=param)
        for place, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in served:
                raise _not_served(kind, f"{where}[{place}].type", served)


def _not_served(kind: str, param: str, served: tuple[str, ...]) -> RequestError:
    if kind in OTHER_MODALITY:
        told = f"`{param}` is `{kind}`: this model takes text and images, no {OTHER_MODALITY[kind]}"
    else:
        told = f"`{param}` is `{kind[:40]}`, which is not a kind that is served"
    kinds = " or ".join(f"`{one}`" for one in served)
    return RequestError(told, hint=f"send only {kinds}", param=param)
