"""The web application: which path is served by what."""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from triptych.server import about, page, tokens
from triptych.server.anthropic.messages import MessagesDialect
from triptych.server.config import ServerConfig
from triptych.server.dashboard import glance
from triptych.server.endpoint import Endpoint
from triptych.server.inspect import inspect
from triptych.server.limits import Turnstile
from triptych.server.openai.chat import ChatDialect
from triptych.server.openai.completions import CompletionDialect
from triptych.server.openapi import openapi
from triptych.server.props import props
from triptych.server.refusals import on_http_exception
from triptych.server.responses.responses import ResponsesDialect
from triptych.server.serving import Serving
from triptych.server.traces import Traces
from triptych.server.visit import Reception
from triptych.session import Session

RATE_HEADERS = [
    f"x-ratelimit-{fact}-{what}" for fact in ("limit", "remaining", "reset") for what in ("requests", "tokens")
]


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
            Route("/v1/models", about.models),
            Route("/v1/models/{name:path}", about.model),
            Route("/health", about.health),
            Route("/metrics", about.metrics),
            Route("/version", about.version),
            Route("/openapi.json", openapi),
            *([Route("/stats", glance), *page.routes()] if config.page else ()),
        ],
        middleware=[
            *_cross_origin(config),
            Middleware(Reception, config=config, metrics=serving.metrics, traces=traces),
            Middleware(Turnstile, config=config),
        ],
        exception_handlers={HTTPException: on_http_exception},
    )
    app.router.redirect_slashes = False  # to http://, behind a proxy too: the next request would show its key
    app.state.serving = serving
    app.state.created_s = int(time.time())
    return app


def _cross_origin(config: ServerConfig) -> list[Middleware]:
    """Outermost, so that a browser may ask beforehand, and read refusals too. No cookie is ever looked at."""
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", *RATE_HEADERS],
        )
    ]
