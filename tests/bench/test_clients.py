"""The official `openai` and `anthropic` clients, unmodified, over real sockets: the cases of `bench/clients.py`.

The model answers by arithmetic, so what comes out right comes from the server alone: schemas, tools, streams, errors.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peers.clients import anthropic_cases, openai_cases
from peers.clients.case import Case, Server

from scripted import serving
from triptych.testing import plan, tiny_session


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    big = plan(max_model_len=4096, num_blocks=600, max_num_batched_tokens=256)
    with tiny_session(big) as session, serving(session) as url:
        yield Server(url=url, model="tiny")


@pytest.mark.parametrize("case", openai_cases.CASES, ids=lambda case: case.__name__)
def test_openai(server: Server, case: Case):
    case(server)


@pytest.mark.parametrize("case", anthropic_cases.CASES, ids=lambda case: case.__name__)
def test_anthropic(server: Server, case: Case):
    case(server)
