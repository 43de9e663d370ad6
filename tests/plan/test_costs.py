"""What steps cost is found again from steps; what contradicts itself is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.curve import step_s
from triptych.errors import ConfigError, MeasurementError
from triptych.plan.costs import Fitted, SeenStep, fit_costs, relative_nnls

HERE = Fitted(device="here", weights_digest="w", settings="auto, u8")


def truth(answers: int, cached: int, prompt: int, earlier: int) -> float:
    return 2e-3 + 3e-4 * max(answers, 1) + 1e-6 * cached + 2e-4 * prompt + 1e-9 * prompt * earlier


def steps(noise: float = 0.0, seed: int = 0) -> list[SeenStep]:
    rng = np.random.default_rng(seed)
    shapes = [(n, n * 46, 0, 0) for n in (1, 2, 4, 8, 16, 32)] + [(n, n * 1038, 0, 0) for n in (1, 4)]
    shapes += [(0, 0, prompt, 0) for prompt in (8, 64, 512)] + [(0, 0, 512, 512)]
    return [
        SeenStep(
            answers=n,
            cached=cached,
            prompt=prompt,
            earlier=earlier,
            seconds=tuple((truth(n, cached, prompt, earlier) * (1 + noise * rng.standard_normal(3))).tolist()),
        )
        for n, cached, prompt, earlier in shapes
    ]


def test_the_fit_finds_again_what_steps_were_made_of() -> None:
    cost = fit_costs(steps(), (), HERE)

    assert cost.error < 0.01
    for shape in ((6, 6 * 300, 0, 0), (12, 600, 0, 0), (4, 400, 100, 0), (0, 0, 256, 512)):
        assert step_s(cost, *shape) == pytest.approx(truth(*shape), rel=0.08)


@given(noise=st.floats(0, 0.1), seed=st.integers(0, 99))
def test_no_curve_falls_however_noisy_the_steps(noise: float, seed: int) -> None:
    cost = fit_costs(steps(noise, seed), (), HERE)

    for curve in (cost.decode, cost.cached, cost.prefill):
        seconds = [point.seconds for point in curve]
        assert seconds == sorted(seconds)


def test_the_error_is_that_of_single_steps_on_a_machine_that_is_now_slower_now_faster() -> None:
    moods = (0.8, 1.0, 1.2)
    moody = [msgspec.structs.replace(step, seconds=tuple(mood * step.seconds[0] for mood in moods)) for step in steps()]

    assert fit_costs(moody, (), HERE).error == pytest.approx(0.2, abs=0.06)


def test_steps_of_answers_alone_are_too_few() -> None:
    with pytest.raises(MeasurementError, match="of prompts and of answers"):
        fit_costs([step for step in steps() if not step.prompt], (), HERE)


def test_steps_that_contradict_one_another_are_refused() -> None:
    planted = [step for step in steps() if step.answers] + [SeenStep(prompt=64, seconds=(1e-4,))] * 12
    planted += [SeenStep(prompt=64, seconds=(1.0,))] * 12

    with pytest.raises(MeasurementError, match="what the others say"):
        fit_costs(planted, (), HERE)


def test_nothing_is_said_beyond_the_largest_step() -> None:
    with pytest.raises(ConfigError, match="up to a size of 32"):
        step_s(fit_costs(steps(), (), HERE), 33)


def test_relative_errors_count_alike_for_short_and_long_steps() -> None:
    found = relative_nnls(np.array([[1.0], [1000.0]]), np.array([1.0, 2000.0]))

    assert 1 < found[0] < 2
