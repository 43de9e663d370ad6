"""A port is taken at once, and answers nobody before the model can."""

from __future__ import annotations

import contextlib
import socket

import pytest

from triptych.errors import ConfigError
from triptych.server.listener import listen


def test_a_taken_port_refuses_callers_until_the_server_listens_and_no_other_server_has_it():
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        listener.listen()
        socket.create_connection(address, timeout=5).close()
        with pytest.raises(ConfigError, match="0 takes a free one"):
            listen(*address)
