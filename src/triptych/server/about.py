"""What the server says of itself: its models, how it does, and its figures for Prometheus."""

from __future__ import annotations

import importlib.metadata

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from triptych.server.answer import JsonAnswer
from triptych.server.serving import Serving

VERSION = importlib.metadata.version("triptych")


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int  # when the server began, in seconds since 1970
    owned_by: str = "triptych"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    running: int
    waiting: int
    since_progress_s: float


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


async def models(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    return JsonAnswer(ModelList(data=[_card(request, name) for name in serving.names]))


async def model(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    name = request.path_params["name"]
    serving.check_name(name)
    return JsonAnswer(_card(request, name))


async def health(request: Request) -> Response:
    """503 unless the server is `ok`."""
    serving: Serving = request.app.state.serving
    stats = serving.session.stats()
    state = serving.state(stats)
    facts = Health(
        status=state,
        running=stats.num_running,
        waiting=stats.num_waiting,
        since_progress_s=round(stats.since_progress_s, 3),
    )
    return JsonAnswer(facts, 200 if state == "ok" else 503)


async def metrics(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    content = await anyio.to_thread.run_sync(serving.metrics.render)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    return JsonAnswer(Version(version=VERSION))


def _card(request: Request, name: str) -> ModelCard:
    serving: Serving = request.app.state.serving
    return ModelCard(
        id=name,
        created=request.app.state.created_s,
        root=serving.session.name,
        max_model_len=serving.session.plan.max_model_len,
    )
