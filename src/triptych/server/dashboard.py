"""What the page's dashboard shows: one small record, asked for each second."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from triptych.backends.base import BLOCK_TOKENS
from triptych.server.about import VERSION
from triptych.server.answer import JsonAnswer
from triptych.server.recent import WINDOW_S, Percentiles
from triptych.server.serving import Serving


class StageTotal(msgspec.Struct, frozen=True, kw_only=True):
    stage: str
    modality: str
    seconds: float
    calls: int


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """The server at one moment. What is counted only grows; percentiles are of the last `window_s` seconds."""

    at: float  # seconds since 1970
    model: str
    version: str
    state: str
    running: int
    waiting: int
    most_running: int
    backlog_s: float  # of work that is unfinished, as predicted
    kv_usage: float  # 0 to 1
    kv_tokens: int
    encoder_bytes: int
    encoder_cache_bytes: int
    counted: dict[str, int]
    finished: dict[str, int]  # answers, by reason
    refused: dict[str, int]  # requests, by code
    window_s: float
    percentiles: dict[str, Percentiles]
    stages: list[StageTotal]
    placements: dict[str, str]


COUNTED = (
    "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "encoder_queries", "encoder_hits",
    "preemptions", "corrupted", "recomputed", "late", "restarts", "evicted_tokens",
)  # fmt: skip


async def glance(request: Request) -> Response:
    """`GET /stats`."""
    serving: Serving = request.app.state.serving
    session, metrics = serving.session, serving.metrics
    stats, plan = session.stats(), session.plan
    found = Glance(
        at=time.time(),
        model=serving.names[0],
        version=VERSION,
        state=serving.state(stats),
        running=stats.num_running,
        waiting=stats.num_waiting,
        most_running=plan.max_num_seqs,
        backlog_s=stats.backlog_s,
        kv_usage=stats.kv_usage,
        kv_tokens=plan.num_blocks * BLOCK_TOKENS,
        encoder_bytes=stats.encoder_bytes,
        encoder_cache_bytes=plan.encoder_cache_bytes,
        counted={name: getattr(stats, name) for name in COUNTED} | {"images": metrics.num_images},
        finished=metrics.num_finished(),
        refused=metrics.num_refused(),
        window_s=WINDOW_S,
        percentiles={name: recent.percentiles() for name, recent in metrics.recent.items()},
        stages=[
            StageTotal(stage=stage, modality=modality, seconds=seconds, calls=sum(buckets))
            for (stage, modality), seconds, buckets in metrics.stages(stats)
        ],
        placements=session.placements(),
    )
    return JsonAnswer(found)
