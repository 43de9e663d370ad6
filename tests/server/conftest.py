"""What most tests of the server ask: a real session that computes by arithmetic, behind real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripted import serving
from triptych.session import Session
from triptych.testing import tiny_session


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with tiny_session() as session:
        yield session


@pytest.fixture(scope="module")
def url(session: Session) -> Iterator[str]:
    with serving(session) as url:
        yield url
