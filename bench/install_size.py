"""What `pip install .` brings: bytes by package, and proof that neither torch nor transformers is among them.

usage: python bench/install_size.py --json bench/results/install_size.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import venv
from pathlib import Path

import record
from rich.console import Console
from rich.table import Table

UNWANTED = {"torch", "transformers"}
TOOLS = {"pip", "setuptools"}  # the environment's own
LIST = """
import json, sys
from importlib.metadata import distributions
sizes = {}
for found in distributions():
    files = [file.locate() for file in found.files or ()]
    sizes[found.name.lower()] = [found.version, sum(file.stat().st_size for file in files if file.is_file())]
import triptych
early = sorted({"torch", "openvino"} & set(sys.modules))
print(json.dumps({"sizes": sizes, "early": early}))
"""


def install(folder: Path) -> dict[str, tuple[str, int]]:
    """Name → (version, bytes) of every package after `pip install .` into a new environment."""
    source = folder / "source"
    source.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        path = record.ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        elif path.exists():
            shutil.copy(path, source / name)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, source], check=True)
    listed = subprocess.run([python, "-c", LIST], check=True, capture_output=True, text=True, cwd=folder)
    found = json.loads(listed.stdout)
    if found["early"]:
        raise SystemExit(f"import triptych loads {', '.join(found['early'])}")
    return {name: (number, size) for name, (number, size) in found["sizes"].items() if name not in TOOLS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="triptych-install-") as scratch:
        packages = install(Path(scratch))
    if brought := sorted(UNWANTED & set(packages)):
        raise SystemExit(f"a serving install brings {', '.join(brought)}")
    total = sum(size for _, size in packages.values())
    table = Table(title=f"pip install . — {total / 1e6:,.0f} MB in {len(packages)} packages")
    for column in ("package", "version", "MB"):
        table.add_column(column, justify="right" if column == "MB" else "left")
    ordered = sorted(packages.items(), key=lambda entry: -entry[1][1])
    for name, (number, size) in ordered:
        table.add_row(name, number, f"{size / 1e6:,.1f}")
    Console().print(table)
    found = [record.measure("installed size", "all packages", "B", [total])]
    found += [record.measure("installed size", name, "B", [size]) for name, (_, size) in ordered]
    if asked.json:
        numbers = {name: number for name, (number, _) in ordered}
        record.write(asked.json, record.record("install_size", found, settings={"packages": numbers}))


if __name__ == "__main__":
    main()
