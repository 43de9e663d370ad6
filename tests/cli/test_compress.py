"""`triptych compress`: what it asks for, what it refuses, what it prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from triptych.cli.verbs import main
from triptych.core.bundle import Evidence, Measure
from triptych.session import compression
from triptych.session.compression import PartReport, Report


def run(*arguments: object):
    return CliRunner().invoke(main, ["compress", *map(str, arguments)])


def evidence(subject: str, divergence: float) -> Evidence:
    names = ("KL divergence, mean", "median", "99 %", "same likeliest token, %")
    values = (divergence, 0.0, 0.1, 98.5)
    measures = tuple(Measure(name=name, value=value) for name, value in zip(names, values, strict=True))
    return Evidence(subject=subject, twin="fp32", inputs="9 samples held out", measures=measures)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_the_path_goes_to_stdout_and_the_table_to_stderr(folder, tmp_path, monkeypatch):
    asked = {}

    def compress(source, target, config, progress):
        asked.update(source=source, config=config)
        part = PartReport(
            part="decoder",
            became="int4",
            bits=4.5,
            bytes_before=1600,
            bytes_after=450,
            evidence=evidence("decoder", 0.02),
        )
        return Report(path=target, parts=(part,), whole=evidence("whole", 0.03), remarks=("x: a scale a row",))

    monkeypatch.setattr(compression, "compress_checkpoint", compress)

    found = run(folder, "-o", tmp_path / "out", "--recipe", "w4", "--budget-bytes", "90M", "--max-kld", "0.1")

    assert found.exit_code == 0, found.output
    assert found.stdout.strip() == str(tmp_path / "out")
    for words in ("int4", "4.50", "1,600", "450", "0.02", "98.5 %", "9 samples held out", "note: x: a scale a row"):
        assert words in found.stderr
    assert asked["source"] == folder
    assert (asked["config"].recipe, asked["config"].budget_bytes, asked["config"].max_kld) == ("w4", 90 << 20, 0.1)


def test_without_torch_it_says_how_to_get_it(folder, monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else plain(name, *rest)
    )

    found = run(folder, "-o", folder / "out")

    assert found.exit_code == 2
    assert "pip install '.[compress]'" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere", "-o", "out"), "'nowhere' is not a checkpoint's folder"),
        (("{folder}", "-o", "out", "--recipe", "w5"), "no recipe is called 'w5'"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(arguments, told, folder):
    found = run(*(str(each).format(folder=folder) for each in arguments))

    assert found.exit_code == 2
    assert told in found.stderr
