"""Where a model comes from: a bundle, a checkpoint compiled into the cache, and a cache that is broken."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from triptych.compile import assemble, config
from triptych.core.bundle import MANIFEST, write_bundle
from triptych.engine.config import EngineConfig
from triptych.errors import ConfigError, TriptychError
from triptych.session import opening
from triptych.session.opening import Source, begin, find_bundle
from triptych.testing import tiny_manifest

LATER = {
    "uvicorn",
    "starlette",
    "anyio",
    "asyncio",
    "tokenizers",
    "jinja2",
    "llguidance",
    "PIL",
    "httpx",
    "safetensors",
}
LATER |= {f"triptych.{name}" for name in ("session.session", "engine.runner", "compile.assemble", "media.text")}


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


def test_the_caller_goes_on_while_the_decoder_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_open, bundle = threading.Event(), write_bundle(tmp_path / "b", lambda folder: tiny_manifest())
    monkeypatch.setattr(opening, "open_decoder", lambda bundle, config: may_open.wait(10))
    begun = begin(Source(model=bundle.path), EngineConfig())
    assert begun.bundle.manifest == bundle.manifest
    assert not begun.decoder.done()
    may_open.set()
    assert begun.decoder.result(10)


def test_what_keeps_a_decoder_from_opening_is_told_to_who_asks_for_it(tmp_path: Path):
    write_bundle(tmp_path / "b", lambda folder: tiny_manifest())
    begun = begin(Source(model=tmp_path / "b"), EngineConfig(decoder_device="gpu:7"))
    with pytest.raises(TriptychError):
        begun.decoder.result(10)


def test_a_decoder_is_begun_before_the_web_the_text_and_the_session_are_loaded():
    program = f"""
import sys
import triptych.cli, triptych.cli.settings, triptych.server.config, triptych.server.listener, triptych.server.logs
import triptych.session.opening, triptych.backends.ov, triptych.compile.mini, triptych.compile.config
print(*sorted({LATER!r} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
