"""A dry run: what would become of a chat's pictures, at what cost, or why they would be refused."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from triptych.server.answer import JsonAnswer
from triptych.server.openai.chat import ChatDialect
from triptych.server.refusals import ErrorDetail, body_of
from triptych.server.serving import Serving
from triptych.server.visit import Visit, receive_body
from triptych.session import Inspection, Sight


class MediaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One picture, in the order of the prompt. What could not be found out is null."""

    type: str = "image"
    format: str | None = None  # by the file's own first bytes, whatever it was called
    bytes: int | None = None
    stored_size: tuple[int, int] | None = None  # width and height as the file has them
    size: tuple[int, int] | None = None  # and upright: as the model sees them
    orientation: int | None = None  # EXIF's, which was applied
    tiles: int | None = None  # that go through the encoder
    tokens: int | None = None  # in the prompt, were nothing left out
    kept_tokens: int | None = None
    is_encoded: bool | None = None  # whether this tenant's cache holds it, shown in just this way
    error: ErrorDetail | None = None


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds at this engine's own pace; null before it has any."""

    encode_s: float | None
    prefill_s: float | None


class InspectionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """refusal: what `/v1/chat/completions` would answer instead; `media` says which picture is to blame."""

    object: str = "media.inspection"
    model: str
    media: list[MediaAnswer]
    prompt_tokens: int | None
    max_model_len: int
    predicted: Predicted | None  # of a prompt that is not refused
    refusal: ErrorDetail | None


async def inspect(request: Request) -> Response:
    """`POST /v1/media/inspect`: the body of a chat, and no answer generated."""
    serving: Serving = request.app.state.serving
    visit: Visit = request.scope["triptych.visit"]
    raw = await receive_body(request.scope, request.receive, serving.config)
    ask = await serving.read(raw, ChatDialect().read)
    found = await serving.inspect(ask, visit)
    visit.facts |= {"images": len(found.sights)}
    seconds = msgspec.convert(serving.session.predict(found), Predicted, from_attributes=True)
    answer = InspectionAnswer(
        model=ask.body.model or serving.names[0],
        media=[_media(serving, found, sight) for sight in found.sights],
        prompt_tokens=found.num_tokens,
        max_model_len=serving.session.plan.max_model_len,
        predicted=seconds if found.refusal is None else None,
        refusal=None if found.refusal is None else body_of(found.refusal).error,
    )
    return JsonAnswer(answer)


def _media(serving: Serving, found: Inspection, sight: Sight) -> MediaAnswer:
    facts: dict[str, Any] = {}
    if sight.picture is not None:
        header = sight.picture.header
        facts = {
            "format": header.format,
            "bytes": len(sight.picture.data),
            "stored_size": header.stored_size,
            "size": sight.picture.size,
            "orientation": header.orientation,
            "tokens": sum(sight.picture.runs),
            "kept_tokens": sum(map(found.reduction.count, sight.picture.runs)),
        }
    if sight.item is not None:
        facts |= {"tiles": len(sight.item.tiles), "is_encoded": serving.session.is_encoded(sight.item.digest)}
    return MediaAnswer(**facts, error=None if sight.error is None else body_of(sight.error).error)
