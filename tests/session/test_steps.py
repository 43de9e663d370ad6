"""Real steps of a session are seen as what they are: so many answers, so much cached, so long a prompt."""

from __future__ import annotations

import pytest

from triptych.core.traffic import Served, Traffic
from triptych.core.workload import Workload
from triptych.errors import MeasurementError
from triptych.session import Session, steps
from triptych.session.steps import ROUNDS, see
from triptych.testing import plan, tiny_session


def test_steps_of_answers_and_of_prompts_are_seen_with_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CONTEXTS", ((34, (1, 3)),))
    monkeypatch.setattr(steps, "PROMPTS", (8, 32))
    monkeypatch.setattr(steps, "SIDES", ())
    with tiny_session() as session:
        seen = see(session)

    assert [(step.prompt, len(step.seconds)) for step in seen.steps if step.prompt] == [(8, ROUNDS), (32, ROUNDS)]
    answers = [(step.answers, step.cached) for step in seen.steps if step.answers]
    assert answers == [(1, 34 + 8), (3, 3 * (34 + 8))]
    assert all(seconds > 0 for step in seen.steps for seconds in step.seconds)


def test_no_more_is_asked_than_the_cache_and_the_seats_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CONTEXTS", ((34, (1, 2, 8)), (1026, (1,))))
    monkeypatch.setattr(steps, "PROMPTS", (8,))
    monkeypatch.setattr(steps, "SIDES", ())
    with tiny_session(plan(max_num_seqs=2)) as session:
        seen = see(session)

    assert {step.answers for step in seen.steps} <= {0, 1, 2}


@pytest.mark.parametrize("whole_s", [1.0, 1.3])
def test_a_longer_prompt_that_took_hardly_longer_is_refused(whole_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(session: Session, prompts: list[list[int]], *, answer: int) -> Traffic:
        first_s = 1.0 if len(prompts[0]) == session.plan.max_num_batched_tokens else whole_s
        one = Served(kind="wave", asked_s=0.0, first_s=first_s, done_s=first_s)
        workload = Workload(name="", kinds=(), arrivals="closed", num_requests=1)
        return Traffic(workload=workload, served=(one,), wall_s=first_s, cpu_s=first_s, peak_bytes=0, mean_bytes=0)

    monkeypatch.setattr(steps, "CONTEXTS", ())
    monkeypatch.setattr(steps, "_wave", alone)
    monkeypatch.setattr(steps, "TRIES", 1)
    with tiny_session() as session:
        step = session.plan.max_num_batched_tokens
        monkeypatch.setattr(steps, "PROMPTS", (step,))
        with pytest.raises(MeasurementError, match=f"took {whole_s:.3g} s, one of {step} 1 s"):
            see(session)


@pytest.mark.parametrize("words_s", [0.0, 60.0])
def test_a_picture_costs_what_its_prompt_takes_beyond_as_many_words(
    words_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "CONTEXTS", ())
    monkeypatch.setattr(steps, "PROMPTS", (8,))
    with tiny_session() as session:
        found = steps.Steps(session)
        monkeypatch.setattr(found, "_prompt_s", lambda tokens: words_s)
        found._picture((64, 64))
        if words_s:
            with pytest.raises(MeasurementError, match="no longer than without"):
                found.seen()
            return
        nothing, *tiles = found.seen().tiles

    assert (nothing.size, nothing.seconds) == (0, 0.0)
    assert tiles
    assert all(0 < one.lowest_s <= one.seconds <= one.highest_s for one in tiles)


def test_nothing_is_asked_beside_the_answers_that_are_timed() -> None:
    """A prompt beside them makes their steps longer by two fifths, which a fit took for theirs once."""
    with tiny_session() as session:
        before = session.stats().prompt_tokens
        steps._wave(session, [[5, 6, last] for last in (7, 8, 9)], answer=4)
        assert session.stats().prompt_tokens - before == 9
