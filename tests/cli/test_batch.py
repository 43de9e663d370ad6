"""`triptych bench batch`: a curve, a batch that keeps what was asked, one more run of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from triptych.cli import batch
from triptych.cli.verbs import main
from triptych.errors import MeasurementError
from triptych.plan.points import Point, Spread
from triptych.plan.sheets import load
from triptych.session import Session
from triptych.testing import plan, tiny_session

SHORT = "arrivals: closed\nconcurrency: 1\nkinds:\n  short: {prompt: 8-12, answer: 6-10}\n"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs the verb over the arithmetic model, whose steps of microseconds scatter as they like."""
    for name in ("plan.points.SCATTER", "session.curves.SCATTER", "plan.points.LITTLE"):
        monkeypatch.setattr(f"triptych.{name}", 1e9)
    monkeypatch.setattr(Session, "open", lambda model, *, config: tiny_session(plan(max_num_seqs=config.max_num_seqs)))
    (tmp_path / "short.yaml").write_text(SHORT)

    def run(*flags: str) -> Result:
        return CliRunner().invoke(main, ["bench", "batch", "demo", "--workload", f"{tmp_path}/short.yaml", *flags])

    return run


def test_the_curve_is_shown_and_the_batch_found_is_run_again(ask, tmp_path: Path):
    shown = ask("--callers", "1,2,4", "--tpot", "60", "-o", f"{tmp_path}/out.json",
                "--html", f"{tmp_path}/out.html")  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "callers at once" in (tmp_path / "out.html").read_text()
    assert "9 runs" in shown.output
    assert "measured" in shown.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["points"]) == 9
    assert written["found"]["bounds"] == [{"metric": "tpot_p95", "value": 60.0}]


def test_what_cannot_be_is_refused_after_the_curve_was_shown(ask, tmp_path: Path):
    shown = ask("--callers", "1,2,4", "--tokens-per-s", "1e12", "-o", f"{tmp_path}/out.json")
    assert shown.exit_code == 2
    assert "comes nearest" in shown.output
    assert len(json.loads((tmp_path / "out.json").read_text())["points"]) == 9


def test_a_machine_file_that_steps_contradict_is_refused():
    """A data sheet's H200 reads 4.8 TB/s; a step that takes 10 ms for 1 GB was not measured there."""
    spread = Spread(p50=0.01, p95=0.01, p99=0.01)
    run = Point(
        concurrency=1, requests_per_s=1, tokens_per_s=100, latency_s=1, ttft=spread, tpot=spread, latency=spread,
        num_requests=9,
    )  # fmt: skip
    manifest = SimpleNamespace(part=lambda name: name, num_bytes=lambda part: 10**9)
    with pytest.raises(MeasurementError, match="100 GB/s: NVIDIA H200.* not a fifth of it"):
        batch._check(SimpleNamespace(runs={1: [run]}), manifest, load("h200"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-o", "/nowhere/out.json"), "/nowhere is not a folder"),
        (("--machine", "h2000"), "no data sheet of 'h2000'"),
        (("--tpot", "-1"), "not in the range"),
    ],
)
def test_what_is_wrong_with_flags_is_said_before_anything_is_measured(ask, flags: tuple[str, ...], said: str):
    shown = ask("--callers", "1,2,4", *flags)
    assert shown.exit_code == 2
    assert said in shown.output
    assert "runs, medians" not in shown.output


@pytest.mark.parametrize("callers", ["1,x,3", "1,2", "0,1,2"])
def test_callers_that_make_no_curve_are_refused(ask, callers: str):
    shown = ask("--callers", callers)
    assert shown.exit_code == 2
    assert "three numbers or more" in shown.output
