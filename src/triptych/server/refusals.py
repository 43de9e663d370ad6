"""Errors as OpenAI writes them: a status, a body, and the hint in the message."""

from __future__ import annotations

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from triptych.errors import MediaError, OverloadError, RequestError, TriptychError

SERVED = "/v1/chat/completions, /v1/completions, /v1/models, /health, /metrics and /version"
PICTURE_HINT = "send the whole file, as PNG or JPEG"
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


def status_of(error: Exception) -> int:
    if isinstance(error, RequestError):
        return error.status
    return error.status_code if isinstance(error, HTTPException) else 500


def body_of(error: Exception) -> ErrorBody:
    """What is told about an error. One that we cannot explain tells nothing of our insides: the log has it."""
    status = status_of(error)
    kind = KINDS.get(status, "invalid_request_error")
    if isinstance(error, TriptychError):
        hint = error.hint or (PICTURE_HINT if isinstance(error, MediaError) else None)
        message = error.message if hint is None else f"{error.message.rstrip('.')}. Hint: {hint}"
        code = error.code if isinstance(error, RequestError) else "internal_error"
        param = error.param if isinstance(error, RequestError) else None
    elif isinstance(error, HTTPException):
        message, code, param = error.detail, None, None
    else:
        message, code, param = "something went wrong in the server; its log has the request id", "internal_error", None
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def response_of(error: Exception) -> Response:
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, OverloadError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if status_of(error) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(body_of(error))
    return Response(content, status_of(error), headers=headers, media_type="application/json")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """No such path, or not this method."""
    path, method = request.url.path[:100], request.method
    headers = error.headers if isinstance(error, HTTPException) else None
    if status_of(error) == 404:
        return response_of(HTTPException(404, f"{method} {path} is not served. Hint: {SERVED} are"))
    if status_of(error) == 405:
        allowed = (headers or {}).get("Allow", "another method")
        return response_of(HTTPException(405, f"{method} is not allowed at {path}. Hint: use {allowed}", headers))
    return response_of(error)


async def on_request_error(request: Request, error: Exception) -> Response:
    return response_of(error)
