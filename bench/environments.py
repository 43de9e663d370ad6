"""Python environments of programs that are measured beside ours: under bench/.rivals, each made once."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path


def bin_of(folder: Path, *wanted: str) -> Path:
    """Its `bin`, with what pip is asked for; a stamp stands when all of it is in, so what broke off is begun anew."""
    stamp = folder / "installed"
    if not stamp.exists():
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True)
        stamp.touch()
    return folder / "bin"
