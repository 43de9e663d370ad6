"""A curve measured over the arithmetic model: every concurrency repeated, a choice confirmed by a run."""

from __future__ import annotations

import pytest

from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError, MeasurementError
from triptych.plan.batch import METRICS, Bound, inverse_batch_search
from triptych.session import curves
from triptych.session.curves import Grid
from triptych.testing import TinyEngine, plan, tiny_session, tiny_session_over

TEXT = RequestKind(name="text", share=1, prompt=Sizes(least=8, most=12), answer=Sizes(least=6, most=10))
WORKLOAD = Workload(name="short", kinds=(TEXT,), arrivals="closed", concurrency=1)
GRID = Grid(concurrencies=(1, 2, 4), rounds=4)


def test_every_concurrency_is_measured_as_often_as_asked_and_a_choice_is_run(monkeypatch: pytest.MonkeyPatch):
    for where in ("plan.points", "session.curves"):
        monkeypatch.setattr(f"triptych.{where}.SCATTER", 1e9)  # steps of microseconds
    monkeypatch.setattr("triptych.plan.points.LITTLE", 1e9)
    seen: list[tuple[str, float]] = []
    with tiny_session() as session:
        curve = curves.measure_curve(session, WORKLOAD, GRID, lambda what, share: seen.append((what, share)))
        found = inverse_batch_search(curve, [Bound(metric="tpot_p95", value=60.0)])
        ran = curves.confirm(session, WORKLOAD, found, GRID)
    assert {size: len(runs) for size, runs in curve.runs.items()} == {1: 3, 2: 3, 4: 3}
    assert found.batch <= 4
    assert [one.name for one in ran.predictions] == list(METRICS)
    assert all(one.measured for one in ran.predictions)
    assert {what for what, _ in seen} == {"1 callers", "2 callers", "4 callers"}
    shares = [share for _, share in seen]
    assert shares == sorted(shares)


def test_runs_that_scatter_are_repeated_before_they_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("triptych.session.curves.SCATTER", 0.0)
    monkeypatch.setattr("triptych.plan.points.SCATTER", 1e9)
    monkeypatch.setattr("triptych.plan.points.LITTLE", 1e9)
    with tiny_session() as session:
        curve = curves.measure_curve(session, WORKLOAD, GRID)
    assert {size: len(runs) for size, runs in curve.runs.items()} == {1: 6, 2: 6, 4: 6}


def test_more_callers_than_the_engine_answers_are_refused():
    with tiny_session(plan(max_num_seqs=3)) as session, pytest.raises(ConfigError, match="4 callers.*answers 3"):
        curves.measure_curve(session, WORKLOAD, GRID)


def test_a_run_that_fails_makes_no_curve():
    engine = TinyEngine()
    with tiny_session_over(engine) as session:
        engine.decoder.fail_when = lambda arrays: len(arrays["block_indices_begins"]) > 2
        with pytest.raises(MeasurementError, match="requests failed"):
            curves.measure_curve(session, WORKLOAD, GRID)
