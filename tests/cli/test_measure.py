"""`triptych measure` and `triptych bench hardware`: what they print, what they write, what they refuse first."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

from triptych.cli.verbs import main
from triptych.core.device import DeviceSpec, Figure, Link, Worth
from triptych.errors import MeasurementError
from triptych.plan import sheets
from triptych.session import hardware
from triptych.session.hardware import Platform, Row

FIGURE = Figure(value=30e9, lowest=28e9, highest=31e9, num_samples=9)


def run(*arguments: object):
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture
def machine(monkeypatch) -> DeviceSpec:
    link = Link(source="node:0", target="node:0", kind="memory", bytes_per_s=FIGURE, latency_s=FIGURE,
                worth=Worth(alpha=0.93, beta=0.51, error=0.042, num_observations=20))  # fmt: skip
    found = sheets.load("epyc")
    found = msgspec.structs.replace(found, links=(link,))
    monkeypatch.setattr(hardware, "measure_machine", lambda name, progress: found)
    return found


def test_the_machine_goes_into_the_file_and_the_tables_to_stderr(machine, tmp_path):
    target = tmp_path / "machine.json"

    found = run("measure", "-o", target)

    assert found.exit_code == 0, found.output
    assert msgspec.json.decode(target.read_bytes(), type=DeviceSpec) == machine
    assert found.stdout == ""
    for words in (
        "AMD EPYC 9654",
        "DRAM",
        "460.8",
        "node:0 → node:0",
        "0.93 · 0.51",
        "0.04",
        "int4",
        "Slices from node:0",
    ):
        assert words in found.stderr


def test_without_a_file_the_machine_goes_to_stdout(machine):
    found = run("measure")

    assert msgspec.json.decode(found.stdout, type=DeviceSpec) == machine


def test_a_folder_that_is_not_there_is_found_out_before_the_measurement(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "measure_machine", lambda name, progress: pytest.fail("measured"))

    found = run("measure", "-o", tmp_path / "nowhere" / "machine.json")

    assert found.exit_code == 2
    assert "is not a folder" in found.stderr


def test_a_measurement_that_was_disturbed_ends_with_its_reason(monkeypatch):
    def disturbed(name, progress):
        raise MeasurementError("others used 40% of the processors", hint="end them")

    monkeypatch.setattr(hardware, "measure_machine", disturbed)

    found = run("measure")

    assert found.exit_code == 8
    assert "others used 40%" in found.stderr
    assert "end them" in found.stderr


def test_the_platform_table_is_printed_or_given_as_json(monkeypatch):
    row = Row(
        name="vision encode", unit="images/s", figure=Figure(value=40.0, lowest=38.0, highest=41.0, num_samples=9)
    )
    platform = Platform(bundle="tiny", weights_digest="0", place="CPU, bf16", rows=(row,), notes=("one at a time",))
    monkeypatch.setattr(hardware, "bench_bundle", lambda model, config, progress: platform)

    table, content = run("bench", "hardware", "demo"), run("bench", "hardware", "demo", "--json")

    for words in ("tiny on CPU, bf16", "vision encode", "40.0", "38.0 to 41.0", "one at a time"):
        assert words in table.stdout
    assert json.loads(content.stdout)["rows"][0]["figure"]["value"] == 40.0
