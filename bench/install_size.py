"""How many bytes `pip install .` puts on a disk, package by package, in a new virtual environment.

`python bench/install_size.py` writes bench/results/install_size.json, from which README's table is generated.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "bench" / "results" / "install_size.json"
UNWANTED = ("torch", "transformers")

# Runs inside the new environment: each distribution's files, as its own record lists them.
COUNT = """
import importlib.metadata, json
def size(dist):
    paths = [dist.locate_file(path) for path in dist.files or []]
    return sum(path.stat().st_size for path in paths if path.is_file())
dists = importlib.metadata.distributions()
print(json.dumps([{"name": d.name, "version": d.version, "bytes": size(d)} for d in dists]))
"""


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", "--no-input", str(ROOT)], check=True)
        listed = json.loads(subprocess.run([python, "-c", COUNT], check=True, capture_output=True, text=True).stdout)
    packages = sorted((each for each in listed if each["name"] != "pip"), key=lambda each: -each["bytes"])
    unwanted = [each["name"] for each in packages if each["name"] in UNWANTED]
    assert not unwanted, f"a serving install brings {unwanted}"
    return {
        "value": sum(each["bytes"] for each in packages),
        "unit": "bytes",
        "num_packages": len(packages),
        "packages": packages,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "commit": subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "measured": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    found = measure()
    TARGET.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['num_packages']} packages, {found['value'] / 1e6:,.0f} MB: {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
