"""What this server can do and where it does it, for a client that wants to know beforehand."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from triptych.backends.base import BLOCK_TOKENS
from triptych.server.about import VERSION
from triptych.server.answer import JsonAnswer
from triptych.server.serving import Serving


class Modalities(msgspec.Struct, frozen=True, kw_only=True):
    """Besides text; llama.cpp's names."""

    vision: bool
    audio: bool = False


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask for at most, and how many may ask at once."""

    max_model_len: int  # tokens of prompt and answer
    max_images: int
    max_multimodal_tokens: int
    max_body_bytes: int
    max_choices: int
    max_num_seqs: int
    max_num_queued: int
    max_requests_per_key: int | None  # null, as in the next: unlimited
    max_requests_per_minute: int | None
    max_tokens_per_minute: int | None


class Caches(msgspec.Struct, frozen=True, kw_only=True):
    """kv_budget: the share of keys and values that stays unless a request says more; null: all."""

    cache_type: str  # of keys and values
    kv_tokens: int
    kv_budget: float | None
    share_prefixes: bool
    encoder_cache_bytes: int


class ReductionProps(msgspec.Struct, frozen=True, kw_only=True):
    """What stays of a picture's tokens unless a request says otherwise, and the least that it may say."""

    method: str
    keep: float
    min_keep: float


class Props(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    model_names: list[str]
    family: str
    build_info: str
    fingerprint: str
    modalities: Modalities
    placements: dict[str, str]  # of each part that is open
    limits: Limits
    reduction: ReductionProps
    caches: Caches
    default_generation_settings: dict[str, float]


async def props(request: Request) -> Response:
    """`GET /props`."""
    serving: Serving = request.app.state.serving
    session, config = serving.session, serving.config
    plan, manifest = session.plan, session.manifest
    found = Props(
        model=serving.names[0],
        model_names=list(serving.names),
        family=manifest.spec.family,
        build_info=f"triptych {VERSION}",
        fingerprint=serving.fingerprint,
        modalities=Modalities(vision=manifest.spec.image is not None),
        placements=session.placements(),
        limits=Limits(**_taken(Limits, plan, config)),
        reduction=ReductionProps(method=plan.reduction.method, keep=plan.reduction.keep, min_keep=plan.min_keep),
        caches=Caches(kv_tokens=plan.num_blocks * BLOCK_TOKENS, **_taken(Caches, plan)),
        default_generation_settings=dict(manifest.generation),
    )
    return JsonAnswer(found)


def _taken(record: type[msgspec.Struct], *sources: object) -> dict[str, Any]:
    """The record's fields that one of the sources has under the same name."""
    return {name: getattr(one, name) for name in record.__struct_fields__ for one in sources if hasattr(one, name)}
