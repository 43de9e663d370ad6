"""The artefact on disk that stages hand to one another.

BUNDLE/
├── bundle.json            this module's `Manifest`
├── vision.xml .bin        one OpenVINO model a part
├── projector.xml .bin
├── decoder.xml .bin       plain causal attention; `backends/ov` pages it when it opens it
├── embedding.npy          the decoder's token table, memory-mapped (bf16 tables as uint16)
├── tokenizer.json
└── chat_template.jinja
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from triptych.core.device import StepCost
from triptych.core.policy import KVPolicy
from triptych.core.spec import Fact, Modality, ModelSpec, pretty_json
from triptych.errors import BundleError

T = TypeVar("T")

SCHEMA_VERSION = 2
MANIFEST = "bundle.json"
COMPRESSION = "compression.json"  # in a compressed checkpoint's folder: a `Compression`
QUICK_BYTES = 64 << 20  # a file up to this size is digested at every opening: a few hundredths of a second

Precision = Literal["fp32", "bf16", "fp16", "int8", "int4"]


class File(Fact, frozen=True, kw_only=True):
    """One file of the bundle, by its path inside it."""

    path: str
    num_bytes: int
    sha256: str


class Part(Fact, frozen=True, kw_only=True):
    """One model that a device can run, or the table of token embeddings."""

    name: Literal["vision", "projector", "decoder", "embedding"]
    modality: Modality
    precision: Precision  # of the weights, where they could be held in it
    fallbacks: tuple[str, ...] = ()  # weights that could not, each with its reason
    files: tuple[str, ...]  # the first one opens the part
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_parameters: int


class Measure(Fact, frozen=True, kw_only=True):
    """One figure and the gate it passed. `at_least`/`at_most` are the gate, None where it only informs."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)


class Evidence(Fact, frozen=True, kw_only=True):
    """How one part, or the whole, was held against its twin."""

    subject: str  # a part's name, or "whole"
    twin: str  # e.g. "fp32 graph", "transformers 5.24.0"
    inputs: str  # what was fed, in words
    measures: tuple[Measure, ...]


class Step(Fact, frozen=True, kw_only=True):
    """One stage's entry in the bundle's history."""

    stage: str
    version: str
    inputs_digest: str
    outputs_digest: str
    metrics: dict[str, float] = {}


class Compression(Fact, frozen=True, kw_only=True):
    """What `compress` did to a checkpoint: `compression.json` beside its weights, read when it is compiled."""

    recipe: str
    step: Step
    evidence: tuple[Evidence, ...] = ()
    kv_policy: KVPolicy | None = None
    digests: dict[str, str] = {}  # of each tensor as it is read, by the checkpoint's name; older folders have none


class Manifest(Fact, frozen=True, kw_only=True):
    schema_version: int
    name: str
    spec: ModelSpec
    parts: tuple[Part, ...]
    files: tuple[File, ...]
    weights_digest: str  # of every weight file: part of each cache key
    evidence: tuple[Evidence, ...] = ()
    history: tuple[Step, ...] = ()
    kv_policy: KVPolicy | None = None  # what `compress` proposes to forget; nothing is forgotten unless asked
    step_costs: tuple[StepCost, ...] = ()  # what steps cost on machines where `triptych plan --fit` measured them
    generation: dict[str, float] = {}  # the checkpoint's default sampling, as generation_config.json has it

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts if part.name == name), None)

    def num_bytes(self, part: Part) -> int:
        sizes = {file.path: file.num_bytes for file in self.files}
        return sum(sizes[path] for path in part.files)


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest and the folder it describes."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        return self.path / name


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(path: Path, *, root: Path) -> File:
    """The `File` entry of something already written under `root`."""
    return File(path=path.relative_to(root).as_posix(), num_bytes=path.stat().st_size, sha256=digest_file(path))


def write_bundle(target: Path, fill: Callable[[Path], Manifest]) -> Bundle:
    """Let `fill` write the files of a bundle, then put it in place in one rename; see `write_folder`."""

    def whole(scratch: Path) -> Manifest:
        manifest = fill(scratch)
        (scratch / MANIFEST).write_bytes(pretty_json(manifest))
        return manifest

    return Bundle(path=target.absolute(), manifest=write_folder(target, MANIFEST, "bundle", whole))


def replace_manifest(bundle: Path, manifest: Manifest) -> None:
    """In one rename."""
    descriptor, name = tempfile.mkstemp(dir=bundle, prefix=f".{MANIFEST}-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(pretty_json(manifest))
    Path(name).chmod(0o644)
    os.replace(name, bundle / MANIFEST)


def check_target(target: Path, marker: str, kind: str) -> None:
    """Raises BundleError where something else stands than what `write_folder` may replace."""
    if target.exists() and not (target / marker).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise BundleError(f"{target} exists and is not a {kind}", hint="choose another output folder")


def write_folder(target: Path, marker: str, kind: str, fill: Callable[[Path], T]) -> T:
    """Let `fill` write into a folder beside `target`, then put it in place in one rename; gives what `fill` gave.

    An older folder of the same kind, known by its file `marker`, is replaced; one that is being read keeps its open
    files. Anything else that stands at `target` is left alone and refused with BundleError.
    """
    target = target.absolute()
    check_target(target, marker, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        made = fill(scratch)
        scratch.chmod(0o755)
        _sync(scratch)
        _put(scratch, target)
        _sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return made


def _put(scratch: Path, target: Path) -> None:
    """Where several processes write the same bundle at once, the last one's stays."""
    while True:
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        with contextlib.suppress(FileNotFoundError):  # there was none, or another process has just moved it
            os.replace(target, old)
        try:
            os.replace(scratch, target)
            return
        except OSError as error:  # another process has just put its own there
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def open_bundle(path: Path, *, verify: Callable[[Bundle], None] | None = None) -> Bundle:
    """Read a bundle and hold every file against the manifest's size, and all but large ones against its digest.

    `verify` may check more: `check_digests` reads the large ones too. Raises BundleError.
    """
    source = path / MANIFEST
    if not source.is_file():
        raise BundleError(f"{path} holds no {MANIFEST}", hint="`triptych compile CHECKPOINT -o BUNDLE` writes one")
    raw = source.read_bytes()
    _check_version(raw, source)
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"{source}: {error}", hint="compile the checkpoint again") from error
    bundle = Bundle(path=path, manifest=manifest)
    for entry in manifest.files:
        _check_entry(bundle, entry)
    if verify is not None:
        verify(bundle)
    return bundle


def check_digests(bundle: Bundle) -> None:
    """Read every file and compare its SHA-256 with the manifest's. Raises BundleError."""
    for entry in bundle.manifest.files:
        _check_digest(bundle, entry)


def _check_digest(bundle: Bundle, entry: File) -> None:
    found = digest_file(bundle.file(entry.path))
    if found != entry.sha256:
        raise BundleError(
            f"{bundle.file(entry.path)}: sha256 is {found[:16]}…, the manifest says {entry.sha256[:16]}…",
            hint="the file changed after it was compiled; compile the checkpoint again",
        )


def _check_version(raw: bytes, source: Path) -> None:
    try:
        content: Any = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BundleError(f"{source} is not JSON: {error}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{source} has schema version {version}, this triptych reads {SCHEMA_VERSION} only",
            hint="compile the checkpoint again with this version",
        )


def _check_entry(bundle: Bundle, entry: File) -> None:
    inside = Path(entry.path)
    if inside.is_absolute() or ".." in inside.parts:
        raise BundleError(f"{bundle.path}: the manifest names {entry.path}, outside the bundle")
    path = bundle.file(entry.path)
    if not path.is_file():
        raise BundleError(f"{path} is missing", hint="compile the checkpoint again")
    if path.stat().st_size != entry.num_bytes:
        raise BundleError(f"{path} has {path.stat().st_size:,} bytes, the manifest says {entry.num_bytes:,}")
    if entry.num_bytes <= QUICK_BYTES:
        _check_digest(bundle, entry)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
