"""`triptych bench ranks`: the ladder of this machine, and a model cut between devices of a data sheet."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from triptych.cli.verbs import main
from triptych.core.device import Figure
from triptych.plan.pareto import AllReduce
from triptych.plan.work import Held
from triptych.testing import tiny_manifest


def test_the_fastest_way_of_each_size_and_where_it_changes_are_told(monkeypatch: pytest.MonkeyPatch):
    lines = {"push": (4e-6, 3e-10), "ring": (19e-6, 1e-10)}
    samples = tuple(
        AllReduce(
            topology="gloo", num_ranks=2, algorithm=name, num_bytes=size, seconds=Figure.exact(alpha + beta * size)
        )
        for name, (alpha, beta) in lines.items()
        for size in (1024, 65_536, 1_048_576)
    )
    monkeypatch.setattr("triptych.plan.ranks.measure_ladder", lambda num_ranks: samples)
    shown = CliRunner().invoke(main, ["bench", "ranks"])
    assert shown.exit_code == 0, shown.output
    assert "from 75,000 bytes on ring is faster than push" in shown.output


def test_a_model_is_cut_between_devices_of_a_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = tiny_manifest().spec
    spec = msgspec.structs.replace(
        spec, decoder=msgspec.structs.replace(spec.decoder, num_heads=8, intermediate=64, hidden=64)
    )
    monkeypatch.setattr("triptych.session.planning.read_model", lambda *asked: (spec, Held(decoder="int8"), None))
    shown = CliRunner().invoke(main, ["bench", "ranks", str(tmp_path), "--hardware", "h200"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("│ 8       │") == 4
    assert "yes" in shown.output


def test_a_degree_that_is_left_out_is_told_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = tiny_manifest().spec
    spec = msgspec.structs.replace(spec, decoder=msgspec.structs.replace(spec.decoder, num_heads=6, intermediate=64))
    monkeypatch.setattr("triptych.session.planning.read_model", lambda *asked: (spec, Held(decoder="int8"), None))
    shown = CliRunner().invoke(main, ["bench", "ranks", str(tmp_path), "--hardware", "l40s"])
    assert "6 heads and 64 columns of the MLP are not cut evenly in 4" in shown.output
    assert "a machine has 4 of NVIDIA L40S" in shown.output


def test_a_model_without_a_device_is_refused(tmp_path: Path):
    shown = CliRunner().invoke(main, ["bench", "ranks", str(tmp_path)])
    assert shown.exit_code == 2
    assert "belong together" in shown.output
