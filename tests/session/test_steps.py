"""Real steps of a session are seen as what they are: so many answers, so much cached, so long a prompt."""

from __future__ import annotations

import pytest

from triptych.errors import MeasurementError
from triptych.session import steps
from triptych.session.steps import see
from triptych.testing import plan, tiny_session


def test_steps_of_answers_and_of_prompts_are_seen_with_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CONTEXTS", ((34, (1, 3)),))
    monkeypatch.setattr(steps, "PROMPTS", (8, 32))
    with tiny_session() as session:
        seen = see(session)

    assert [(step.prompt, len(step.seconds)) for step in seen.steps if step.prompt] == [(8, 3), (32, 3)]
    answers = [(step.answers, step.cached) for step in seen.steps if step.answers]
    assert answers == [(1, 34 + 8), (3, 3 * (34 + 8))]
    assert all(seconds > 0 for step in seen.steps for seconds in step.seconds)


def test_no_more_is_asked_than_the_cache_and_the_seats_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CONTEXTS", ((34, (1, 2, 8)), (1026, (1,))))
    monkeypatch.setattr(steps, "PROMPTS", (8,))
    with tiny_session(plan(max_num_seqs=2)) as session:
        seen = see(session)

    assert {step.answers for step in seen.steps} <= {0, 1, 2}


@pytest.mark.parametrize("whole_s", [1.0, 1.3])
def test_a_longer_prompt_that_took_hardly_longer_is_refused(whole_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CONTEXTS", ())
    with tiny_session() as session:
        step = session.plan.max_num_batched_tokens
        monkeypatch.setattr(steps, "PROMPTS", (step,))
        monkeypatch.setattr(steps, "_prompt", lambda session, tokens: (1.0 if tokens == step else whole_s,) * 3)
        with pytest.raises(MeasurementError, match=f"took {whole_s:.3g} s, one of {step} 1 s"):
            see(session)
