"""A plan's first choice simulated whole: every replica, every request, from arrival to last token."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from triptych.core.plan import Plan, Prediction
from triptych.errors import ConfigError
from triptych.plan.choose import late
from triptych.plan.simulate import ASSUMPTIONS, Fleet, arrivals, simulate
from triptych.session.planning import Question, candidates, shown_by

MINUTE_S = 60.0  # of traffic, at least, if that is no more than
MOST = 50_000  # requests


def simulated(asked: Question, plan: Plan) -> Plan:
    """The plan with what a simulation says of its first choice, `fleet_…`; one that misses its targets fits no more.

    Raises ConfigError where the traffic has no rate.
    """
    best = plan.choices[0]
    rate = asked.target.rate(asked.workload)
    if rate is None:
        raise ConfigError(
            "callers that never pause have no rate to simulate", hint="--target-rate, or rate_per_s in it"
        )
    count = min(max(asked.workload.num_requests, round(MINUTE_S * rate)), MOST)
    workload = msgspec.structs.replace(asked.workload, arrivals="poisson", rate_per_s=rate, num_requests=count)
    device = next(device for device in asked.devices if device.name == best.device)
    of = next(one for one in candidates(asked, device)[0] if one.degree == best.tensor_parallel)
    rules = replace(of.rules, max_sequences=best.batch)
    fleet = Fleet(replicas=best.replicas, costs=of.costs, rules=rules)
    found = simulate(arrivals(workload, shown_by(asked.spec)), fleet)
    more = [
        Prediction.within(of.error, f"fleet_{name}_{rank}", "s", getattr(spread, rank))
        for name, spread in (("ttft", found.ttft), ("tpot", found.tpot))
        for rank in ("p50", "p95", "p99")
    ]
    more.append(Prediction.within(of.error, "fleet_answers_at_once", "", found.batch))
    first = msgspec.structs.replace(best, predictions=(*best.predictions, *more))
    missed = late(asked.target, found.ttft.p95, found.tpot.p95)
    if found.saturated is not None:
        missed = f"it does not keep up: {found.saturated}"
    if missed is not None:
        first = msgspec.structs.replace(first, fits=False, reason=f"simulated, {missed}")
    told = (*plan.assumptions, *(f"simulated, {count:,} requests: {one}" for one in ASSUMPTIONS))
    return msgspec.structs.replace(plan, choices=(first, *plan.choices[1:]), assumptions=told)
