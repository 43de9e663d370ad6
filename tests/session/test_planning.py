"""Plans held against what is then measured, over the arithmetic model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from triptych.core.bundle import MANIFEST
from triptych.core.device import CostPoint, StepCost
from triptych.core.plan import Plan, Target
from triptych.core.spec import ModelSpec
from triptych.core.traffic import Served, Traffic
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.engine.config import EngineConfig
from triptych.errors import ConfigError, MeasurementError
from triptych.plan.sheets import load
from triptych.plan.system import Cache, System
from triptych.plan.work import Held
from triptych.session import planning
from triptych.session.planning import Question, check, make_plan, shown_by
from triptych.session.session import Session
from triptych.testing import tiny_manifest, tiny_session

KIND = RequestKind(name="text", share=1, prompt=Sizes(least=16, most=32), answer=Sizes(least=4, most=8))
WORKLOAD = Workload(name="small", kinds=(KIND,), arrivals="closed", concurrency=2, num_requests=8)
HERE = System(cpu="as the data sheet has it", cpus=tuple(range(96)), caches=(Cache(level=3, num_bytes=384 << 20),),
              memory_bytes=768 * 10**9, nodes=(), cards=(), links=())  # fmt: skip


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
    """A manifest alone, sessions over the arithmetic model in its place, on the machine that is planned for."""
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(tiny_manifest()))

    def opened(path: Path, *, config: EngineConfig) -> Session:
        return tiny_session()

    monkeypatch.setattr(planning.Session, "open", opened)
    monkeypatch.setattr(planning, "read_system", lambda: HERE)
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


def open_traffic(monkeypatch: pytest.MonkeyPatch, latency_s: list[float], num_failed: int = 0) -> Plan:
    """A plan for a request each second, whose check sees these latencies; the last ones are refusals."""

    def served(session: Session, workload: Workload, **rest: object) -> Traffic:
        every = [
            Served(kind="text", asked_s=float(at), first_s=at + 0.1, done_s=at + one, answer_tokens=5)
            for at, one in enumerate(latency_s)
        ]
        first = len(every) - num_failed
        failed = [msgspec.structs.replace(one, error="the queue is full") for one in every[first:]]
        return Traffic(workload=workload, served=(*every[:first], *failed), wall_s=30.0, cpu_s=1.0, peak_bytes=1,
                       mean_bytes=1)  # fmt: skip

    monkeypatch.setattr(planning, "serve", served)
    workload = msgspec.structs.replace(WORKLOAD, arrivals="poisson", rate_per_s=1.0, concurrency=None)
    return make_plan(question(workload))


def test_a_run_whose_requests_failed_measures_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = open_traffic(monkeypatch, [0.5] * 24, num_failed=3)

    with pytest.raises(MeasurementError, match="3 of 24 requests failed, the first: the queue is full"):
        check(plan, bundle, EngineConfig())


def test_traffic_that_is_not_kept_up_with_measures_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = open_traffic(monkeypatch, [0.5 + 0.8 * turn for turn in range(24)])

    with pytest.raises(MeasurementError, match="1 requests/s are more than was kept up with: latency grew"):
        check(plan, bundle, EngineConfig())


def test_traffic_that_is_kept_up_with_is_measured(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = check(open_traffic(monkeypatch, [0.5] * 24), bundle, EngineConfig())

    assert {one.name: one.measured for one in checked.choices[0].predictions}["tpot_p50"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["h200", "xeon"])
def test_a_plan_for_another_machine_is_not_checked(bundle: Path, name: str) -> None:
    plan = make_plan(planning.replace(question(), devices=(load(name),)))

    with pytest.raises(ConfigError, match=r"is for .*; this is as the data sheet has it, 96 cores and 402,653,184 B"):
        check(plan, bundle, EngineConfig())


def test_a_plan_is_a_file(bundle: Path) -> None:
    plan = make_plan(question())

    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_devices_beyond_the_heads_of_keys_need_memory_for_the_same_ones() -> None:
    """Two heads on eight devices: each holds one of them, half of the cache."""
    spec: ModelSpec = tiny_manifest().spec
    decoder = msgspec.structs.replace(spec.decoder, num_heads=8, num_kv_heads=2, intermediate=64)
    asked = planning.replace(question(), spec=msgspec.structs.replace(spec, decoder=decoder))

    ways = {one.degree: one.token_bytes for one in planning.candidates(asked, load("h200"))[0]}

    assert ways[2] == ways[4] == ways[8] == ways[1] / 2


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
