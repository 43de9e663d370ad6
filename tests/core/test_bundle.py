"""The bundle on disk: exact, atomic, strict."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from triptych.core import bundle
from triptych.core.bundle import (
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    Part,
    check_digests,
    describe,
    open_bundle,
    write_bundle,
)
from triptych.core.spec import DecoderSpec, Modality, ModelSpec, RopeSpec
from triptych.errors import BundleError

SPEC = ModelSpec(
    family="llava",
    decoder=DecoderSpec(
        num_layers=1, hidden=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate=16, vocab_size=32,
        max_positions=64, norm_eps=1e-5, rope=RopeSpec(theta=1e4),
    ),
    eos_ids=(2,),
)  # fmt: skip


def fill(folder: Path) -> Manifest:
    (folder / "decoder.xml").write_text("<net/>")
    (folder / "decoder.bin").write_bytes(b"weights")
    files = tuple(describe(folder / name, root=folder) for name in ("decoder.xml", "decoder.bin"))
    part = Part(
        name="decoder", modality=Modality.TEXT, precision="int4", files=tuple(file.path for file in files),
        inputs=("embeddings",), outputs=("logits",), num_parameters=3,
    )  # fmt: skip
    return Manifest(
        schema_version=SCHEMA_VERSION, name="tiny", spec=SPEC, parts=(part,), files=files, weights_digest="ab"
    )


def test_what_is_written_is_what_is_read(tmp_path: Path):
    written = write_bundle(tmp_path / "bundle", fill)
    read = open_bundle(tmp_path / "bundle", verify=check_digests)
    assert read.manifest == written.manifest
    assert read.manifest.num_bytes(read.manifest.parts[0]) == 13


def test_a_failed_write_leaves_nothing_and_an_old_bundle_as_it_was(tmp_path: Path):
    target = tmp_path / "bundle"
    write_bundle(target, fill)

    def fail(folder: Path) -> Manifest:
        (folder / "half").write_text("x")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError):
        write_bundle(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert open_bundle(target).manifest.name == "tiny"


def test_writing_again_replaces_the_bundle_and_nothing_else(tmp_path: Path):
    write_bundle(tmp_path / "bundle", fill)
    write_bundle(tmp_path / "bundle", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("mine")
    with pytest.raises(BundleError, match="is not a bundle"):
        write_bundle(tmp_path / "precious", fill)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "mine"


def test_processes_that_write_the_same_bundle_at_once_leave_one_that_is_whole(tmp_path: Path):
    ready = threading.Barrier(6)

    def meet(folder: Path) -> Manifest:
        manifest = fill(folder)
        ready.wait()
        return manifest

    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            list(pool.map(lambda _: write_bundle(tmp_path / "bundle", meet), range(6)))
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    open_bundle(tmp_path / "bundle", verify=check_digests)


def edit(path: Path, change) -> None:
    content = json.loads((path / MANIFEST).read_text())
    change(content)
    (path / MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema_version=99), "schema version 99, this triptych reads 2 only"),
        (lambda m: m.pop("schema_version"), "schema version None"),
        (lambda m: m.update(surprise=1), "unknown field `surprise`"),
        (lambda m: m["spec"]["decoder"].update(heads=3), "unknown field `heads`"),
        (lambda m: m["spec"]["decoder"].update(num_heads="2"), "Expected `int`, got `str`"),
        (lambda m: m["spec"].pop("eos_ids"), "missing required field `eos_ids`"),
        (lambda m: m["files"][0].update(path="../../etc/passwd"), "outside the bundle"),
        (lambda m: m["files"][0].update(path="gone.xml"), "is missing"),
        (lambda m: m["files"][0].update(num_bytes=7), "has 6 bytes, the manifest says 7"),
    ],
)
def test_a_manifest_that_is_not_exactly_ours_is_refused(tmp_path: Path, change, message: str):
    write_bundle(tmp_path / "bundle", fill)
    edit(tmp_path / "bundle", change)
    with pytest.raises(BundleError, match=message):
        open_bundle(tmp_path / "bundle")


def test_a_changed_byte_is_found_at_opening_and_in_a_large_file_by_the_digests(tmp_path: Path, monkeypatch):
    write_bundle(tmp_path / "bundle", fill)
    (tmp_path / "bundle" / "decoder.bin").write_bytes(b"weightz")
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(tmp_path / "bundle")
    monkeypatch.setattr(bundle, "QUICK_BYTES", 6)
    open_bundle(tmp_path / "bundle")
    with pytest.raises(BundleError, match="sha256"):
        open_bundle(tmp_path / "bundle", verify=check_digests)


def test_a_folder_without_a_manifest_says_what_to_do(tmp_path: Path):
    with pytest.raises(BundleError, match=r"holds no bundle\.json\n  hint: .triptych compile"):
        open_bundle(tmp_path)
