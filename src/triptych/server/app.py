"""The web application: routes, and the endpoints that are a few lines each."""

from __future__ import annotations

import importlib.metadata
import time

import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triptych.errors import RequestError
from triptych.server import page, tokens
from triptych.server.anthropic.messages import MessagesDialect
from triptych.server.config import ServerConfig
from triptych.server.dashboard import glance
from triptych.server.endpoint import Endpoint
from triptych.server.inspect import inspect
from triptych.server.openai.chat import ChatDialect
from triptych.server.openai.completions import CompletionDialect
from triptych.server.props import props
from triptych.server.refusals import on_http_exception, on_request_error
from triptych.server.responses.responses import ResponsesDialect
from triptych.server.serving import Serving
from triptych.server.traces import Traces
from triptych.server.visit import Reception
from triptych.session import Session


def create_app(session: Session, config: ServerConfig | None = None, traces: Traces | None = None) -> Starlette:
    """An ASGI application over an open session, which stays the caller's to close."""
    config = config or ServerConfig()
    serving = Serving(session, config)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Endpoint(serving, ChatDialect()), methods=["POST"]),
            Route("/v1/completions", Endpoint(serving, CompletionDialect()), methods=["POST"]),
            Route("/v1/responses", Endpoint(serving, ResponsesDialect()), methods=["POST"]),
            Route("/v1/messages", Endpoint(serving, MessagesDialect()), methods=["POST"]),
            Route("/v1/messages/count_tokens", tokens.count_tokens, methods=["POST"]),
            Route("/v1/embeddings", tokens.embeddings, methods=["POST"]),
            Route("/v1/media/inspect", inspect, methods=["POST"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/props", props),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/version", version),
            *([Route("/stats", glance), *page.routes()] if config.page else ()),
        ],
        middleware=[Middleware(Reception, config=config, metrics=serving.metrics, traces=traces)],
        exception_handlers={HTTPException: on_http_exception, RequestError: on_request_error},
    )
    app.state.serving = serving
    app.state.created_s = int(time.time())
    return app


async def models(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    return _json({"object": "list", "data": [_card(request, name) for name in serving.names]})


async def model(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    name = request.path_params["name"]
    serving.check_name(name)
    return _json(_card(request, name))


async def health(request: Request) -> Response:
    """503 unless the server is `ok`."""
    serving: Serving = request.app.state.serving
    stats = serving.session.stats()
    state = serving.state(stats)
    facts = {
        "status": state,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "since_progress_s": round(stats.since_progress_s, 3),
    }
    return _json(facts, status=200 if state == "ok" else 503)


async def metrics(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    content = await anyio.to_thread.run_sync(serving.metrics.render)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    return _json({"version": importlib.metadata.version("triptych")})


def _card(request: Request, name: str) -> dict[str, object]:
    serving: Serving = request.app.state.serving
    return {
        "id": name,
        "object": "model",
        "created": request.app.state.created_s,
        "owned_by": "triptych",
        "root": serving.session.name,
        "parent": None,
        "max_model_len": serving.session.plan.max_model_len,
    }


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
