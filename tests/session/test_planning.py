"""Plans held against what is then measured, over the arithmetic model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from triptych.core.bundle import MANIFEST
from triptych.core.device import CostPoint, StepCost
from triptych.core.plan import Plan, Target
from triptych.core.spec import ModelSpec
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.engine.config import EngineConfig
from triptych.errors import ConfigError
from triptych.plan.sheets import load
from triptych.plan.work import Held
from triptych.session import planning
from triptych.session.planning import Question, check, make_plan, shown_by
from triptych.session.session import Session
from triptych.testing import tiny_manifest, tiny_session

KIND = RequestKind(name="text", share=1, prompt=Sizes(least=16, most=32), answer=Sizes(least=4, most=8))
WORKLOAD = Workload(name="small", kinds=(KIND,), arrivals="closed", concurrency=2, num_requests=8)


def points(*pairs: tuple[float, float]) -> tuple[CostPoint, ...]:
    return tuple(CostPoint(size=size, seconds=s, lowest_s=s, highest_s=s) for size, s in pairs)


def question(workload: Workload = WORKLOAD) -> Question:
    return Question(
        name="tiny",
        spec=tiny_manifest().spec,
        held=Held(decoder="int8"),
        devices=(load("epyc"),),
        workload=workload,
        target=Target(),
    )


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest alone, and sessions over the arithmetic model in its place."""
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(tiny_manifest()))

    def opened(path: Path, *, config: EngineConfig) -> Session:
        return tiny_session()

    monkeypatch.setattr(planning.Session, "open", opened)
    return tmp_path


def test_a_checked_plan_has_every_figure_measured(bundle: Path) -> None:
    checked = check(make_plan(question()), bundle, EngineConfig())

    assert checked.checked is not None
    assert all(one.measured for one in checked.choices[0].predictions)
    assert all(one.measured is None for choice in checked.choices[1:] for one in choice.predictions)


def test_a_plan_for_other_weights_is_not_checked(bundle: Path) -> None:
    plan: Plan = msgspec.structs.replace(make_plan(question()), weights_digest="another")

    with pytest.raises(ConfigError, match="other weights"):
        check(plan, bundle, EngineConfig())


def test_a_plan_is_a_file(bundle: Path) -> None:
    plan = make_plan(question())

    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_pictures_count_with_the_tokens_and_tiles_that_the_family_makes_of_them() -> None:
    spec: ModelSpec = tiny_manifest().spec
    tokens, tiles = shown_by(spec)(msgspec.structs.replace(KIND, images=3))

    assert spec.image is not None
    assert (tokens, tiles) == (3 * spec.image.tokens_per_tile, 3)


def test_pictures_for_a_model_that_sees_none_are_refused() -> None:
    spec = msgspec.structs.replace(tiny_manifest().spec, image=None)

    with pytest.raises(ConfigError, match="sees none"):
        shown_by(spec)(msgspec.structs.replace(KIND, images=1))


def test_a_workload_beyond_everything_that_was_measured_is_refused() -> None:
    cost = StepCost(
        device="AMD EPYC 9654",
        weights_digest="tiny",
        settings="",
        decode=points((1, 0.01)),
        cached=points((0, 0.0), (8, 0.001)),
        cached_token_s=0.0,
        prefill=points((8, 0.01), (512, 0.1)),
        error=0.03,
    )
    asked = question()
    bundle = planning.Bundle(path=Path(), manifest=msgspec.structs.replace(tiny_manifest(), step_costs=(cost,)))

    with pytest.raises(ConfigError, match="measured up to a size of"):
        make_plan(planning.replace(asked, bundle=bundle))
