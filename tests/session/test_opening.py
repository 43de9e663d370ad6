"""Where a model comes from: a bundle, a checkpoint compiled into the cache, and a cache that is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.compile import assemble, config
from triptych.core.bundle import MANIFEST, write_bundle
from triptych.errors import ConfigError
from triptych.session.opening import Source, find_bundle
from triptych.testing import tiny_manifest


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The targets of what would have been compilations."""
    targets: list[Path] = []

    def compile_checkpoint(source, target, config, progress):
        targets.append(target)
        return write_bundle(target, lambda folder: tiny_manifest())

    monkeypatch.setattr(config, "fingerprint", lambda checkpoint, config: "f" * 64)
    monkeypatch.setattr(assemble, "compile_checkpoint", compile_checkpoint)
    return targets


def checkpoint(folder: Path) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return folder / "model"


def test_a_checkpoint_is_compiled_once(tmp_path: Path, compiled: list[Path]):
    source = Source(model=checkpoint(tmp_path), cache=tmp_path / "cache")
    assert find_bundle(source).path == find_bundle(source).path == compiled[0]
    assert len(compiled) == 1


@pytest.mark.parametrize("content", ['{"schema_version": 0}', '{"schema_version": 2, "age": 7}', '{"sch', ""])
def test_a_cached_bundle_that_cannot_be_read_is_compiled_anew(tmp_path: Path, compiled: list[Path], content: str):
    source = Source(model=checkpoint(tmp_path), cache=tmp_path / "cache")
    (find_bundle(source).path / MANIFEST).write_text(content)
    assert find_bundle(source).manifest.name == "tiny"
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_written_is_named_with_a_way_out(tmp_path: Path, compiled: list[Path]):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME names another place"):
        find_bundle(Source(model=checkpoint(tmp_path), cache=tmp_path / "cache"))
