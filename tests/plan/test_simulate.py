"""The simulation agrees with queues that have a closed form, and says when no queue could keep up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError
from triptych.plan.simulate import Fleet, arrivals, simulate
from triptych.plan.timeline import Ask, Costs, Rules, play
from triptych.plan.work import Step

STEP_S = 0.01


def costs(decode: Callable[[int], float], **more: float) -> Costs:
    """decode: seconds by answers. The others: seconds of a cached token, a prompt's token, a chunk, a tile."""

    def step_s(step: Step) -> float:
        prompt_s = step.prompt_tokens * more.get("prompt_s", 0.0) + len(step.chunks) * more.get("chunk_s", 0.0)
        return decode(max(step.answers, 1)) + step.cached * more.get("token_s", 0.0) + prompt_s

    return Costs(step_s=step_s, tiles_s=lambda tiles: tiles * more.get("tile_s", 0.0))


def fleet(seats: int, made: Costs, replicas: int = 1, **rules: float) -> Fleet:
    return Fleet(replicas=replicas, costs=made, rules=Rules(max_sequences=seats, **rules))


ALONE = fleet(1, costs(lambda n: STEP_S))  # one at a time
SHARED = fleet(64, costs(lambda n: n * STEP_S))  # n at once are n times slower


def asked(rate_per_s: float, *, answer: int = 10, num_requests: int = 4000, **changes: object) -> list[Ask]:
    kind = RequestKind(name="text", share=1, prompt=Sizes(least=8, most=8), answer=Sizes(least=answer, most=answer))
    plain = Workload(name="alike", kinds=(kind,), rate_per_s=rate_per_s, num_requests=num_requests)
    return arrivals(msgspec.structs.replace(plain, **changes), lambda kind: (4 * kind.images, 2 * kind.images))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_one_at_a_time_waits_as_m_d_1_does(share: float):
    """Pollaczek and Khinchine: of a constant time S the mean wait is ρS / 2(1-ρ)."""
    service_s = 2 * STEP_S
    found = simulate(asked(share / service_s, answer=2, num_requests=15_000), ALONE)
    assert found.mean_latency_s == pytest.approx(service_s + share * service_s / 2 / (1 - share), rel=0.08)
    assert found.busy == pytest.approx(share, rel=0.03)
    assert found.batch == pytest.approx(1)
    assert found.saturated is None


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_answers_that_share_a_machine_take_as_long_as_processor_sharing_says(share: float):
    """M/G/1-PS: the mean time is S / (1-ρ), whatever the distribution."""
    service_s = 50 * STEP_S
    found = simulate(asked(share / service_s, answer=50, num_requests=4000), SHARED)
    assert found.mean_latency_s == pytest.approx(service_s / (1 - share), rel=0.08)


def test_a_queue_that_cannot_keep_up_is_called_saturated():
    found = simulate(asked(15.0, num_requests=400), ALONE)
    assert "latency grew" in (found.saturated or "")
    assert found.busy > 0.99


def test_a_full_batch_answers_as_the_steps_cost():
    """Sixty requests at once on one replica of batch 4: steps of 10 to 20 ms, prompts of 8 tokens 0.1 s more."""
    slow = fleet(4, costs(lambda n: 0.02 if n > 1 else 0.01, chunk_s=0.1))
    found = simulate(asked(1e6, num_requests=60, answer=101), slow)
    prefills = 60 * (0.1 + 0.02)
    steps = 60 * 100 / 4 * 0.02
    assert 60 / found.requests_per_s == pytest.approx(prefills + steps, rel=0.15)
    assert found.tpot.p50 > 0.02


def test_a_long_context_slows_a_step():
    slow = replace(SHARED, costs=costs(lambda n: n * STEP_S, token_s=1e-4))
    assert simulate(asked(0.5, num_requests=50), slow).tpot.p50 == pytest.approx(STEP_S + 13e-4, rel=0.01)


def test_pictures_wait_for_the_encoder_and_texts_do_not():
    seeing = fleet(8, costs(lambda n: 0.001, tile_s=0.5))
    sizes = {"prompt": Sizes(least=8, most=8), "answer": Sizes(least=2, most=2)}
    picture = RequestKind(name="picture", share=1, images=1, **sizes)
    assert simulate(asked(0.2, num_requests=100, kinds=(picture,)), seeing).ttft.p50 == pytest.approx(1.001, rel=0.05)
    assert simulate(asked(0.2, num_requests=100), seeing).ttft.p50 == pytest.approx(0.001)


def test_a_prompt_longer_than_any_step_is_computed_in_several():
    cut = fleet(4, costs(lambda n: 0.001, prompt_s=0.01, chunk_s=0.1), max_step_tokens=4)
    found = simulate(asked(0.01, num_requests=20, answer=1), cut)
    assert found.ttft.p50 == pytest.approx(2 * (0.1 + 0.001) + 8 * 0.01)


@pytest.mark.parametrize(("rate", "images"), [(0.5, 0), (2.5, 0), (1.0, 1)])
def test_one_replica_goes_as_its_engine_is_played(rate: float, images: int):
    """Requests that come one by one are as those that were known from the beginning."""
    real = costs(lambda n: 0.012 + 0.001 * n, prompt_s=0.0006, chunk_s=0.002, token_s=1e-6, tile_s=0.05)
    sizes = {"prompt": Sizes(least=32, most=256), "answer": Sizes(least=16, most=96)}
    kind = RequestKind(name="text", share=1, images=images, **sizes)
    asks, one = asked(rate, num_requests=150, kinds=(kind,)), fleet(16, real)
    told, found = play(asks, real, one.rules), simulate(asks, one)
    assert found.ttft.p95 == pytest.approx(np.percentile([each.ttft_s for each in told], 95))
    assert found.mean_latency_s == pytest.approx(np.mean([each.done_s - each.asked_s for each in told]))


def test_a_thousand_replicas_are_planned_as_one_is():
    found = simulate(asked(1000.0, num_requests=5000, answer=50), fleet(16, SHARED.costs, replicas=1000))
    assert found.saturated is None
    assert found.requests_per_s == pytest.approx(1000, rel=0.2)


def test_the_same_requests_give_the_same_figures():
    assert simulate(asked(5.0, num_requests=200), ALONE) == simulate(asked(5.0, num_requests=200), ALONE)


def test_requests_that_were_seen_are_played_again():
    seen = [Ask(prompt_tokens=8, answer_tokens=10 + turn, at_s=2.0 * turn) for turn in range(3)]
    found = simulate(seen, ALONE)
    assert found.mean_latency_s == pytest.approx(11 * STEP_S)
    assert found.tokens_per_s == pytest.approx(33 / (4 + 12 * STEP_S))


def test_a_closed_workload_is_refused():
    with pytest.raises(ConfigError, match="needs Poisson arrivals"):
        asked(1.0, arrivals="closed", concurrency=2)
