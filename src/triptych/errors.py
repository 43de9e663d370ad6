"""Every error we can explain, drawn as one tree.

TriptychError               exit code 1
├── ConfigError             2  a flag, a YAML key or a device that cannot be what was asked
├── CheckpointError         3  a model folder we cannot read: unknown family, missing tensor
├── BundleError             4  a bundle that is not what its manifest says
├── GateError               5  a part that is not equal enough to its twin
├── BackendError            6  a device or its runtime refused
├── AssetError              7  the demo's model could not be fetched
├── MeasurementError        8  a measurement that contradicts itself, or was disturbed
└── RequestError            HTTP 400, the caller's to mend
    ├── MediaError          400  an image we cannot or will not read
    ├── ContextError        400  more tokens than the context or the cache can ever hold
    ├── AuthError           401
    ├── OriginError         403  a web page that is not ours
    ├── ModelNotFoundError  404  a model name that is not served here
    ├── PayloadError        413  a body over its limit
    ├── EncodingError       415  a body that is packed
    ├── OverloadError       429  come back later
    │   └── RateLimitError  429  this caller has had its share
    ├── UnavailableError    503  the server is stopping
    └── DeadlineError       504  not answered in the time that the caller or the operator set
"""

from __future__ import annotations

import math
from typing import ClassVar, TypeVar

RETRY_S = 2.0  # where nothing tells when there will be room
MAX_RETRY_S = 3600.0
Raised = TypeVar("Raised", bound=BaseException)


def install(extra: str) -> str:
    """A hint: how what belongs to one of our extras is had."""
    return f"pip install '.[{extra}]' in Triptych's folder"


def unwound(error: Raised) -> Raised:
    """The same without the frames that it came through: where one holds it, all of them stay until Python collects."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__context__
    return error


class TriptychError(Exception):
    """Something a person can mend: what happened, with numbers, and what to do next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class ConfigError(TriptychError):
    """A flag, a YAML key or a device that cannot be what was asked."""

    exit_code = 2


class CheckpointError(TriptychError):
    """A model folder we cannot read."""

    exit_code = 3


class BundleError(TriptychError):
    """A bundle that is not what its manifest says."""

    exit_code = 4


class GateError(TriptychError):
    """A part that is not equal enough to its twin."""

    exit_code = 5


class BackendError(TriptychError):
    """A device or its runtime refused."""

    exit_code = 6


class AssetError(TriptychError):
    """The demo's model could not be fetched."""

    exit_code = 7


class MeasurementError(TriptychError):
    """A measurement that contradicts itself, or that something disturbed: no plan may stand on it."""

    exit_code = 8


class RequestError(TriptychError):
    """A request its caller must change. `param` names the field, in the API's own words."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_value"

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class MediaError(RequestError):
    """An image we cannot or will not read."""

    code = "invalid_media"


class ContextError(RequestError):
    """More tokens than the context or the cache can ever hold."""

    code = "context_length_exceeded"


class AuthError(RequestError):
    """No key, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class OriginError(RequestError):
    """A web page that the operator did not allow, in the browser of somebody who can reach this server."""

    status = 403
    code = "origin_not_allowed"


class ModelNotFoundError(RequestError):
    """A model name that is not served here."""

    status = 404
    code = "model_not_found"


class PayloadError(RequestError):
    """A body over its limit."""

    status = 413
    code = "payload_too_large"


class EncodingError(RequestError):
    """A body that is packed: what it unpacks to has no limit that could be known before."""

    status = 415
    code = "unsupported_encoding"


class OverloadError(RequestError):
    """Too much asked at once; `retry_after_s` says when to come back, in whole seconds up to an hour."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None) -> None:
        """retry_after_s: until there is room, as predicted; 0: nothing is known of it."""
        self.retry_after_s = float(math.ceil(min(retry_after_s or RETRY_S, MAX_RETRY_S)))
        super().__init__(message, hint=hint or f"try again in {self.retry_after_s:.0f} s")


class UnavailableError(RequestError):
    """The server is stopping; ask another, or ask again."""

    status = 503
    code = "unavailable"


class RateLimitError(OverloadError):
    """This caller has had its share for now; others are served."""

    code = "rate_limit_exceeded"


class DeadlineError(RequestError):
    """Not answered within the time that the caller or the operator set."""

    status = 504
    code = "deadline_exceeded"
