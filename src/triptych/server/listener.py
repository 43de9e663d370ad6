"""A port of this machine, taken before anything slow is begun."""

from __future__ import annotations

import errno
import socket

from triptych.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another --port; 0 takes a free one"
            if error.errno in (errno.EADDRINUSE, errno.EACCES)
            else "is --host an address of this machine?",
        ) from error
    listener.set_inheritable(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where to reach it from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
