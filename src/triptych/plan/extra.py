"""Modules of the extra `plan`, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from triptych.errors import ConfigError, install


def extra(module: str) -> Any:
    """scipy or matplotlib, or a part of it. Raises ConfigError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ConfigError(f"this needs {name}: {error}", hint=install("plan")) from error
