"""Traffic: a workload's requests are exact in length, all accounted for, and alike from seed to seed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from triptych.core.policy import Compression
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError, RequestError
from triptych.session import Session, jobs, traffic
from triptych.testing import TinyEngine, plain_answer, plan, tiny_session, tiny_session_over

TEXT = RequestKind(name="text", share=3, prompt=Sizes(least=8, most=40), answer=Sizes(least=2, most=9), shared_prefix=4)
PICTURE = RequestKind(
    name="picture", share=1, prompt=Sizes(least=48, most=60), answer=Sizes(least=1, most=4), images=1, image_side=(9, 7)
)
CLOSED = Workload(name="both", kinds=(TEXT, PICTURE), arrivals="closed", concurrency=3, num_requests=8)


@pytest.fixture
def session() -> Iterator[Session]:
    with tiny_session() as made:
        yield made


def changed(workload: Workload = CLOSED, **changes: object) -> Workload:
    return msgspec.structs.replace(workload, **changes)


def test_every_request_of_a_workload_is_served_in_its_exact_length(session: Session):
    todo = jobs.jobs(session, CLOSED)
    found = traffic.serve(session, CLOSED)
    assert [one.error for one in found.served] == [None] * 8
    assert sorted(one.kind for one in found.served) == ["picture"] * 2 + ["text"] * 6
    assert any(one.text for one in found.served)
    assert sorted(one.answer_tokens for one in found.served) == sorted(job.sampling.max_tokens for job in todo)
    assert sorted(one.prompt_tokens for one in found.served) == sorted(job.prepare().num_tokens for job in todo)
    for one in found.served:
        rows = 4 if one.kind == "picture" else 0
        least, most = (48, 60) if one.kind == "picture" else (8, 40)
        assert least <= one.prompt_tokens - rows <= most
        assert (one.image_tokens, one.tiles) == (rows, rows // 4)
        assert one.asked_s <= one.first_s <= one.done_s <= found.wall_s


def test_closed_callers_ask_when_they_were_answered(session: Session):
    found = traffic.serve(session, changed(num_requests=12))
    for one in found.served:
        under_way = sum(other.asked_s <= one.asked_s < other.done_s for other in found.served)
        assert under_way <= 3


def test_poisson_requests_are_due_when_they_are_due(session: Session):
    workload = changed(arrivals="poisson", rate_per_s=200.0, num_requests=40)
    found = traffic.serve(session, workload)
    due = [one.asked_s for one in found.served]
    again = [one.asked_s for one in traffic.serve(session, workload).served]
    assert due == again
    assert due[0] == 0.0
    assert 0.1 < due[-1] < 0.4


def test_what_a_run_takes_is_counted(session: Session):
    began_s = time.perf_counter()
    found = traffic.serve(session, CLOSED)
    assert 0 < found.wall_s < time.perf_counter() - began_s
    assert 0 < found.mean_bytes <= found.peak_bytes
    assert found.cpu_s > 0
    assert found.tokens_per_s == pytest.approx(sum(one.answer_tokens for one in found.served) / found.wall_s)
    assert found.requests_per_s == pytest.approx(8 / found.wall_s)


def test_a_request_knows_its_times():
    one = traffic.Served(kind="a", asked_s=1.0, first_s=1.5, done_s=3.5, answer_tokens=5)
    assert (one.latency_s, one.ttft_s, one.tpot_s) == (2.5, 0.5, 0.5)
    assert msgspec.structs.replace(one, answer_tokens=1).tpot_s is None
    assert msgspec.structs.replace(one, first_s=None).ttft_s is None


def test_a_failed_request_is_counted_and_says_why():
    engine = TinyEngine()
    with tiny_session_over(engine) as session:
        todo = jobs.jobs(session, changed(kinds=(TEXT,)))

        def refused() -> jobs.Prompt:
            raise RequestError("too strange", hint="ask something else")

        todo[2] = dataclasses.replace(todo[2], prepare=refused)
        found = traffic.run(session, CLOSED, todo)
    (failed,) = [one for one in found.served if one.error is not None]
    assert "too strange" in failed.error
    assert len(found.answered) == 7


def test_the_same_workload_has_the_same_requests_and_another_seed_other_words_but_the_same_sizes(session: Session):
    def asked(seed: int) -> list[tuple[str, tuple[int, ...], int]]:
        made = jobs.jobs(session, changed(seed=seed))
        return [(job.kind, tuple(job.prepare().token_ids), job.sampling.max_tokens) for job in made]

    def sizes(seed: int) -> list[tuple[str, int]]:
        return sorted((kind, len(ids)) for kind, ids, _ in asked(seed))

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)
    assert sizes(1) == sizes(2)


def test_requests_of_a_kind_share_what_they_should_and_nothing_more(session: Session):
    prompts = [job.prepare().token_ids for job in jobs.jobs(session, changed(kinds=(TEXT,), num_requests=20))]
    assert len({tuple(ids[:4]) for ids in prompts}) == 1
    assert len({tuple(ids[4:8]) for ids in prompts}) == 20


def test_half_the_sizes_lie_below_the_geometric_mean():
    sizes = jobs.quantiles(Sizes(least=10, most=1000), 100, np.random.default_rng(0))
    assert sum(size < 100 for size in sizes) == 50
    assert min(sizes) >= 10
    assert max(sizes) <= 1000


def test_shares_are_kept_to_the_request():
    assert jobs.counts([1, 1, 1], 10) == [4, 3, 3]
    assert jobs.counts([0.5, 0.0, 0.25], 9) == [6, 0, 3]


def test_a_padded_prompt_is_answered_as_the_plain_twin_does():
    reduced = Compression(keep_visual=0.5)
    with tiny_session(plan(min_keep=0.25)) as session:
        chat = jobs._chat([jobs.random_png(np.random.default_rng(0), (5, 5))])
        prompt = jobs.padded(session.prepare_chat(chat, compression=reduced), [5, 6], [7, 8, 9])
        sampling = jobs.exactly(5)
        stream = session.start(prompt, sampling, request_id="padded")
        assert list(stream.answer().token_ids) == plain_answer(prompt.request("twin", sampling), 5)


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (changed(kinds=()), "no kind has a share"),
        (changed(concurrency=None), "need `concurrency`"),
        (changed(arrivals="poisson"), "need `rate_per_s`"),
        (changed(kinds=(msgspec.structs.replace(TEXT, shared_prefix=8),)), "shared_prefix is 8"),
        (changed(kinds=(msgspec.structs.replace(TEXT, prompt=Sizes(least=9, most=8)),)), "from 9 to 8 tokens"),
        (changed(kinds=(msgspec.structs.replace(TEXT, prompt=Sizes(least=9, most=510)),)), "up to 519 tokens.*512"),
        (changed(kinds=(msgspec.structs.replace(PICTURE, prompt=Sizes(least=3, most=8)),)), "3 text tokens cannot be"),
    ],
)
def test_a_workload_that_cannot_be_is_refused_with_the_reason(session: Session, workload: Workload, reason: str):
    with pytest.raises(ConfigError, match=reason):
        traffic.serve(session, workload)
