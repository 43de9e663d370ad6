"""Ways to serve a model: as many devices as were asked for, and no more."""

from __future__ import annotations

import pytest

from triptych.core.plan import Choice, Target
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.plan.choose import Candidate, choices
from triptych.plan.sheets import load
from triptych.plan.timeline import Costs, Rules

KIND = RequestKind(name="text", share=1, prompt=Sizes(least=16, most=32), answer=Sizes(least=8, most=8))
WORKLOAD = Workload(name="small", kinds=(KIND,), arrivals="closed", concurrency=1)
STEP_S = 0.010  # of one device; two together take half of it


def found(**target: float) -> tuple[Choice, ...]:
    ways = [
        Candidate(
            device=load("h200"), costs=Costs(step_s=lambda step, degree=degree: STEP_S / degree), resident_bytes=1e9,
            token_bytes=1e3, error=0.1, rules=Rules(), degree=degree,
        )
        for degree in (1, 2, 4)
    ]  # fmt: skip
    return choices(ways, WORKLOAD, lambda kind: (0, 0), Target(**target))


def test_devices_are_together_where_one_misses_the_target() -> None:
    best = found(tpot_s=0.006)[0]

    assert (best.fits, best.tensor_parallel, best.num_devices) == (True, 2, 2)


def test_a_target_that_only_more_devices_meet_is_missed_by_those_there_are() -> None:
    told = found(tpot_s=0.006, num_devices=1)

    assert {choice.num_devices for choice in told} == {1}
    assert not any(choice.fits for choice in told)
    assert "TPOT p95 is 0.01 s, 0.006 s are the target" in told[0].reason


def test_more_requests_than_are_answered_are_the_reason_before_the_times_of_a_queue_that_grows() -> None:
    told = found(ttft_s=0.5, requests_per_s=1e5, num_devices=1)

    assert "requests/s are more than 80% of" in told[0].reason


@pytest.mark.parametrize("num_devices", range(1, 10))
def test_no_choice_has_more_devices_than_there_are(num_devices: int) -> None:
    assert max(choice.num_devices for choice in found(tpot_s=0.001, num_devices=num_devices)) <= num_devices
