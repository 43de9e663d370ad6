"""`triptych plan`: what it prints and writes, what it refuses, and how it compares with what is measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from triptych.cli.verbs import main
from triptych.core.bundle import MANIFEST, Part, open_bundle
from triptych.core.device import CostPoint, Figure, StepCost
from triptych.core.plan import Plan
from triptych.core.spec import Modality
from triptych.plan.sheets import load
from triptych.session.planning import keep
from triptych.testing import tiny_manifest

WORKLOAD = "arrivals: closed\nconcurrency: 2\nkinds:\n  chat: {prompt: 16-64, answer: 8-16}\n"


def points(*pairs: tuple[float, float]) -> tuple[CostPoint, ...]:
    return tuple(CostPoint(size=size, seconds=s, lowest_s=s, highest_s=s) for size, s in pairs)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A manifest with no files behind it: a plan reads nothing else."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    decoder = Part(
        name="decoder", modality=Modality.TEXT, precision="int8", files=(), inputs=(), outputs=(), num_parameters=9
    )
    manifest = msgspec.structs.replace(tiny_manifest(), parts=(decoder,))
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return folder


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "work.yaml"
    path.write_text(WORKLOAD)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def cost(bundle: Path, device: str) -> StepCost:
    return StepCost(
        device=device,
        weights_digest=open_bundle(bundle).manifest.weights_digest,
        settings="auto, u8 cache",
        decode=points((1, 0.01), (4, 0.02)),
        cached_token_s=0.0,
        prefill=points((8, 0.01), (512, 0.1)),
        error=0.03,
    )


def test_data_sheets_are_compared_and_the_plan_is_a_file(bundle: Path, workload: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"

    found = run(bundle, "--workload", workload, "--hardware", "h200,epyc", "--tpot", "1", "-o", target)

    assert found.exit_code == 0, found.output
    plan = msgspec.json.decode(target.read_bytes(), type=Plan)
    assert {device.name for device in plan.devices} == {"NVIDIA H200 SXM", "AMD EPYC 9654"}
    assert plan.choices[0].fits
    assert "by its figures alone (data sheet)" in found.output


def test_what_the_bundles_own_steps_cost_is_preferred_and_never_gone_beyond(
    bundle: Path, workload: Path, tmp_path: Path
) -> None:
    machine, target = tmp_path / "machine.json", tmp_path / "plan.json"
    here = load("epyc")
    machine.write_bytes(msgspec.json.encode(here))
    keep(open_bundle(bundle), cost(bundle, here.name), 1.0)

    found = run(bundle, "--workload", workload, "--machine", machine, "-o", target)

    assert found.exit_code == 0, found.output
    plan = msgspec.json.decode(target.read_bytes(), type=Plan)
    assert {choice.batch for choice in plan.choices} == {1, 2, 4}  # of 8 nothing was measured
    values = {one.name: one.value for choice in plan.choices if choice.batch == 1 for one in choice.predictions}
    assert values["tpot_p50"] == pytest.approx(0.01)
    assert "the bundle's own steps" in found.output


def test_a_cost_replaces_that_of_the_same_device_and_history_tells_of_it(bundle: Path) -> None:
    for _ in range(2):
        keep(open_bundle(bundle), cost(bundle, "here"), 1.0)
    keep(open_bundle(bundle), cost(bundle, "there"), 1.0)

    manifest = open_bundle(bundle).manifest
    assert [one.device for one in manifest.step_costs] == ["here", "there"]
    assert [step.stage for step in manifest.history][-3:] == ["plan"] * 3


def test_what_does_not_meet_its_target_says_by_how_much(bundle: Path, workload: Path) -> None:
    found = run(bundle, "--workload", workload, "--hardware", "orin", "--tpot", "0.000001")

    assert found.exit_code == 0
    assert "1e-06 s are the target" in found.output.replace("\n", " ")


def test_a_machine_whose_bandwidth_was_written_by_hand_is_found_out(bundle: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    here = load("epyc")
    cache, memory = here.tiers
    wrong = Figure(value=9e13, lowest=9e13, highest=9e13)
    machine.write_bytes(
        msgspec.json.encode(
            msgspec.structs.replace(here, tiers=(cache, msgspec.structs.replace(memory, bytes_per_s=wrong)))
        )
    )

    found = run(bundle, "--machine", machine)

    assert found.exit_code == 8, found.output
    assert "DRAM" in found.output


def test_a_model_that_is_no_folder_is_told_what_may_be_one() -> None:
    found = run("nowhere", "--hardware", "h200")

    assert found.exit_code == 2
    assert "`demo`" in found.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no machine was named"),
        (("--hardware", "h2000"), "h2000"),
        (("--hardware", "h200,l4", "--machine", "h200"), "two machines are named NVIDIA H200"),
        (("--hardware", "h200", "--workload", "nothing"), "mixed, pictures"),
        (("--machine", "missing.json"), "triptych measure -o"),
        (("--hardware", "h200", "--target-rate", "1", "--devices", "2"), "one follows from the other"),
        (("--hardware", "h200", "--fit"), "--machine machine.json of here"),
        (("--hardware", "h200", "--ttft", "0"), "0"),
        (("--hardware", "h200", "-o", "no/where.json"), "not a folder"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(bundle: Path, arguments: tuple[str, ...], said: str) -> None:
    found = run(bundle, *arguments)

    assert found.exit_code == 2
    assert said in found.output.replace("\n", " ")


def test_a_plan_says_which_part_goes_where(bundle: Path, workload: Path, tmp_path: Path):
    result = run(bundle, "--hardware", "l4,epyc", "--workload", workload, "-o", tmp_path / "plan.json")

    assert result.exit_code == 0
    assert "every part on gpu:0" in result.output
    assert "one device: every part is on it" in result.output
    choices = msgspec.json.decode((tmp_path / "plan.json").read_bytes(), type=Plan).choices
    assert all(choice.placement["decoder"] in ("gpu:0", "cpu:0") for choice in choices)


def test_targets_that_nothing_meets_are_said_to_be_missed(bundle: Path, workload: Path):
    assert (
        "Nothing meets the targets" in run(bundle, "--hardware", "l4", "--workload", workload, "--tpot", "1e-9").output
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hardware", "l4", "--weights", "int4"), "this bundle's decoder is in int8"),
        (("--hardware", "l4", "--num-threads", 2), "--num-threads is for --fit and --check"),
        (("--check", __file__, "--ttft", 1, "--fit"), "--ttft, --fit was given too"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(bundle: Path, arguments: tuple[object, ...], said: str):
    result = run(bundle, *arguments)

    assert result.exit_code == 2
    assert said in result.output
