"""`triptych bench saving`: what it prints, what it asks for before it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from triptych.cli import main
from triptych.core.bundle import Bundle, write_bundle
from triptych.core.policy import Reduction
from triptych.plan.saving import Run, Saving, plan_runs, saving_of
from triptych.session import saving
from triptych.testing import tiny_manifest

FACTORS = ("decoder weights", "caches")


def measured(ours: Bundle, plain: Bundle, config: saving.SavingConfig, progress: object) -> Saving:
    """Each factor saves half of the core-seconds; nobody was asked anything."""
    assert config.reduction == Reduction(method="tome", keep=0.5)
    runs = [
        Run(on=on, cpu_s=8 / 2 ** len(on), wall_s=5, peak_bytes=10**9, ttft_p95_s=0.5, latency_p95_s=1.0,
            num_requests=8, answer_tokens=80)
        for on in plan_runs(FACTORS)
    ]  # fmt: skip
    before, now, saved, effects = saving_of(runs, FACTORS)
    return Saving(
        name="tiny", workload=config.workload, about=(), baseline=before, ours=now, saved=saved, effects=effects
    )


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(saving, "measure_saving", measured)
    return str(write_bundle(tmp_path / "bundle", lambda folder: tiny_manifest()).path)


def test_both_ends_each_factor_and_what_speaks_against_it_are_printed(bundle: str, tmp_path: Path):
    page = tmp_path / "saving.html"
    asked = ["bench", "saving", bundle, "--plain", bundle, "--workload", "mixed", "--reduce", "tome:0.5"]
    done = CliRunner().invoke(main, [*asked, "--html", str(page)])
    assert done.exit_code == 0, done.output
    for said in ("8 s·GB", "2 s·GB", "75.0%", "decoder weights", "+100.0%", "But: no questions were asked"):
        assert said in done.output
    assert "What tiny saves" in page.read_text()


def test_a_bundles_baseline_has_to_be_named(bundle: str):
    done = CliRunner().invoke(main, ["bench", "saving", bundle, "--workload", "mixed"])
    assert done.exit_code == 2
    assert "--plain CHECKPOINT" in done.output
