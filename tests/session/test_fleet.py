"""A plan's first choice, simulated whole: what it adds to the plan, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from triptych.core.plan import Target
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError
from triptych.plan.sheets import load
from triptych.plan.simulate import ASSUMPTIONS
from triptych.plan.work import Held
from triptych.session.fleet import simulated
from triptych.session.planning import Question, make_plan
from triptych.testing import tiny_manifest

KIND = RequestKind(name="text", share=1, prompt=Sizes(least=16, most=32), answer=Sizes(least=16, most=32))


def question(rate_per_s: float | None = 20.0, **target: float) -> Question:
    arrivals = (
        {"arrivals": "poisson", "rate_per_s": rate_per_s} if rate_per_s else {"arrivals": "closed", "concurrency": 2}
    )
    return Question(
        name="tiny",
        spec=tiny_manifest().spec,
        held=Held(decoder="int8"),
        devices=(load("epyc"),),
        workload=Workload(name="small", kinds=(KIND,), num_requests=400, **arrivals),
        target=Target(**target),
    )


def test_a_simulated_plan_tells_of_the_whole_fleet_and_of_what_it_assumes():
    asked = question()
    plan = simulated(asked, make_plan(asked))
    best = {one.name: one for one in plan.choices[0].predictions}
    assert best["fleet_tpot_p50"].value > 0
    assert best["fleet_ttft_p99"].value >= best["fleet_ttft_p50"].value
    assert best["fleet_tpot_p50"].lowest < best["fleet_tpot_p50"].value < best["fleet_tpot_p50"].highest
    assert all(any(one in told for told in plan.assumptions) for one in ASSUMPTIONS)
    assert "fleet_ttft_p50" not in {one.name for one in plan.choices[1].predictions}


def test_a_fleet_too_small_for_its_traffic_fits_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("triptych.session.fleet.MOST", 2000)
    most = {one.name: one.value for one in make_plan(question()).choices[0].predictions}["requests_per_s"]
    asked = question(3 * most, num_devices=1)
    found = simulated(asked, make_plan(asked)).choices[0]
    assert not found.fits
    assert "does not keep up" in found.reason


def test_a_fleet_that_misses_its_target_where_a_few_requests_met_it_fits_no_more():
    asked = question()
    plan = make_plan(asked)
    late = msgspec.structs.replace(asked.target, ttft_s=1e-9)
    found = simulated(replace(asked, target=late), plan).choices[0]
    assert plan.choices[0].fits
    assert not found.fits
    assert "simulated, TTFT p95 is" in found.reason


def test_a_rate_beside_callers_that_never_pause_is_none():
    asked = question(None)
    wrong = msgspec.structs.replace(asked.workload, rate_per_s=2.0)
    with pytest.raises(ConfigError, match="no rate to simulate"):
        simulated(replace(asked, workload=wrong), make_plan(asked))


def test_callers_that_never_pause_cannot_be_simulated():
    asked = question(None)
    with pytest.raises(ConfigError, match="no rate to simulate"):
        simulated(asked, make_plan(asked))


def test_a_rate_that_was_asked_for_is_the_one_that_is_simulated():
    asked = question(None, requests_per_s=20.0)
    plan = simulated(asked, make_plan(asked))
    assert plan.choices[0].predictions[-1].name == "fleet_answers_at_once"
    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan
