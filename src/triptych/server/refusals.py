"""Errors as OpenAI and Anthropic write them: a status, a body, and the hint in the message."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from triptych.errors import MediaError, OverloadError, RequestError, TriptychError
from triptych.server.answer import JsonAnswer

PICTURE_HINT = "send the whole file, as PNG or JPEG"
REFUSAL = "triptych.refusal"
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable", 504: "timeout_error"}
MESSAGES_PATH = "/v1/messages"
MESSAGES_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "error"
    error: MessagesError


def status_of(error: Exception) -> int:
    if isinstance(error, RequestError):
        return error.status
    return error.status_code if isinstance(error, HTTPException) else 500


def code_of(error: Exception) -> str | None:
    if isinstance(error, HTTPException):
        return None
    return error.code if isinstance(error, RequestError) else "internal_error"


def told(error: Exception) -> str:
    """What is said of an error. One that we cannot explain tells nothing of our insides: the log has it."""
    if isinstance(error, TriptychError):
        hint = error.hint or (PICTURE_HINT if isinstance(error, MediaError) else None)
        return error.message if hint is None else f"{error.message.rstrip('.')}. Hint: {hint}"
    if isinstance(error, HTTPException):
        return error.detail
    return "something went wrong in the server; its log has the request id"


def body_of(error: Exception) -> ErrorBody:
    """As OpenAI writes it."""
    kind = KINDS.get(status_of(error), "invalid_request_error")
    param = error.param if isinstance(error, RequestError) else None
    return ErrorBody(error=ErrorDetail(message=told(error), type=kind, param=param, code=code_of(error)))


def messages_body_of(error: Exception) -> MessagesErrorBody:
    """As Anthropic writes it."""
    kind = MESSAGES_KINDS.get(status_of(error), "invalid_request_error")
    return MessagesErrorBody(error=MessagesError(type=kind, message=told(error)))


def response_of(error: Exception, scope: Scope) -> Response:
    """A refusal in the words of the dialect that is spoken at the path."""
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, OverloadError):
        headers["Retry-After"] = f"{error.retry_after_s:.0f}"
    if status_of(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    is_messages = scope["path"].startswith(MESSAGES_PATH)
    scope[REFUSAL] = code_of(error)  # `visit.Reception` counts it
    return JsonAnswer(messages_body_of(error) if is_messages else body_of(error), status_of(error), headers)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """No such path, or not this method."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"][:100], request.method[:20]
    if error.status_code == 404:
        error.detail = f"{method} {path} is not served. Hint: /openapi.json lists what is"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        error.detail = f"{method} is not allowed at {path}. Hint: use {allowed}"
    return response_of(error, request.scope)
