"""The package keeps the rules of the house, and each rule notices when it is broken on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from docs.generate import block, draw_tree

from architecture import MAX_TOTAL_LINES, breaches, read

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "triptych"
HEAVY = ("torch", "transformers", "openvino")


def test_the_package_keeps_every_rule():
    assert breaches(PACKAGE) == []


def test_the_tree_is_the_one_drawn_in_the_documents():
    drawn = block((ROOT / "docs/reference/tree.md").read_text(), "tree")
    assert drawn.strip().splitlines()[1:-1] == draw_tree(PACKAGE).splitlines(), "run `python docs/generate.py`"


def test_the_drawing_shows_each_module_with_its_first_line():
    drawing = draw_tree(PACKAGE)
    assert len([line for line in drawing.splitlines() if ".py " in line]) == len(
        [module for module in read(PACKAGE) if module.path.name != "__init__.py" or module.name == "__init__"]
    )


@pytest.mark.parametrize("module", ["triptych", "triptych.cli", "triptych.errors"])
def test_importing_is_light(module):
    program = f"import {module}, sys, json; print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


SOUND = {
    "__init__.py": '"""A package."""\n',
    "errors.py": '"""Errors."""\n',
    "core/__init__.py": '"""Facts."""\n',
    "core/spec.py": '"""Specs."""\nimport numpy as np\nfrom tiny.errors import Oops\n',
    "media/__init__.py": '"""Media."""\n',
    "media/image.py": '"""Pixels."""\nfrom PIL import Image\nfrom ..core.spec import Spec\nfrom . import text\n',
    "media/text.py": '"""Text."""\n',
    "backends/__init__.py": '"""Backends."""\n',
    "backends/base.py": '"""The contract."""\n',
    "engine/__init__.py": '"""Engine."""\n',
    "compile/__init__.py": '"""Compile."""\n',
    "cli.py": '"""Verbs."""\nimport click\ndef serve():\n    from tiny.engine import loop\n',
}


def plant(root: Path, files: dict[str, str]) -> Path:
    package = root / "tiny"
    for name, text in (SOUND | files).items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_a_sound_tree_breaks_no_rule(tmp_path):
    assert breaches(plant(tmp_path, {})) == []


FAULTS = {
    "a stage imports its sibling": ("engine/loop.py", "from tiny.compile import graph", "engine (floor 3) imports"),
    "a stage imports its sibling, relatively": ("engine/loop.py", "from ..compile import graph", "imports compile"),
    "a stage imports its sibling by its parent": ("engine/loop.py", "from .. import compile", "imports compile"),
    "a stage imports its sibling within a function": (
        "engine/loop.py",
        "class A:\n    def f(self):\n        import tiny.compile",
        "imports compile",
    ),
    "a stage imports its sibling by its name in a string": (
        "engine/loop.py",
        "import importlib\ng = lambda: importlib.import_module('tiny.compile')",
        "imports compile",
    ),
    "a stage imports its sibling for types alone": (
        "engine/loop.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tiny import compile",
        "imports compile",
    ),
    "media and backends meet": ("media/sound.py", "from tiny.backends.base import Executable", "imports backends"),
    "a fact imports a stage": ("core/device.py", "import tiny.engine.loop", "core (floor 1) imports engine (floor 3)"),
    "a floor imports the package's own names": ("core/device.py", "from tiny import Session", "imports __init__"),
    "a deep relative import climbs": ("compile/families/llava.py", "from ...engine import loop", "imports engine"),
    "the engine takes a foreign package": ("engine/loop.py", "import openvino", "engine.loop may not import openvino"),
    "torch outside the reference": ("backends/ov.py", "def f():\n    import torch", "backends.ov may not import torch"),
    "facts take a foreign package": ("core/device.py", "from PIL.Image import open", "may not import PIL"),
    "errors take anything": ("errors.py", "import numpy", "errors may not import numpy, only none"),
    "the command line loads a stage at once": ("cli.py", "from tiny.engine import loop", "before it is called for"),
    "the package loads a stage at once": ("__init__.py", "from .engine import loop", "before it is called for"),
    "a new top-level part": ("training/loop.py", "", "training.loop: a new top-level part"),
    "a module of oddments": ("core/utils.py", "", "core.utils: a name that holds anything"),
    "a folder of oddments": ("engine/common/paging.py", "", "engine.common.paging: a name that holds anything"),
    "a second base": ("media/base.py", "", "media.base: a name that holds anything"),
    "a long module": ("core/device.py", "\n" * 400, "401 lines, at most 400"),
    "a long function": ("core/device.py", "def f():\n" + "    pass\n" * 40, "f has 41 lines, at most 40"),
    "a long method": ("core/device.py", "class A:\n    async def f(self):\n" + "        1\n" * 40, "f has 41 lines"),
    "a sixth parameter": ("core/device.py", "class A:\n    def f(self, a, b, /, c, *d, e, **g): 1", "f has 6 param"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(tmp_path, fault):
    path, code, sentence = FAULTS[fault]
    found = breaches(plant(tmp_path, {path: f'"""A fault."""\n{code}'}))
    assert len(found) == 1
    assert sentence in found[0]


SPEECHLESS = ["", "import os\n", '# licence\n"""Late."""\n', '"""No full stop"""\n', '"""\nBelow."""\n']


@pytest.mark.parametrize("text", SPEECHLESS)
def test_a_module_that_does_not_say_what_it_is_for_is_noticed(tmp_path, text):
    found = breaches(plant(tmp_path, {"core/device.py": text}))
    assert found == ["core.device: the first line must be a docstring that says what it is for, as one sentence"]


def test_a_first_line_that_does_not_fit_the_tree_is_noticed(tmp_path):
    found = breaches(plant(tmp_path, {"core/device.py": f'"""{"F" * 100}."""\n'}))
    assert found == ["core.device: the first line has 101 characters, at most 100 fit the tree"]


def test_too_many_lines_in_all_are_noticed(tmp_path):
    full = '"""One of many."""\n' + "\n" * 399
    many = {f"engine/part{index}.py": full for index in range(MAX_TOTAL_LINES // 400 + 1)}
    found = breaches(plant(tmp_path, many))
    assert len(found) == 1
    assert f"at most {MAX_TOTAL_LINES:,}" in found[0]


def test_five_parameters_and_commands_with_more_are_fine(tmp_path):
    command = "import click\n@click.group()\ndef main(): ...\n@main.command()\ndef serve(a, b, c, d, e, f, g): ...\n"
    record = "class A:\n    def f(self, a, b, c, d, e): ...\n"
    assert breaches(plant(tmp_path, {"cli.py": f'"""Verbs."""\n{command}', "core/a.py": f'"""A."""\n{record}'})) == []


def test_a_module_missing_from_the_drawing_is_noticed(tmp_path):
    before = draw_tree(plant(tmp_path, {}))
    after = draw_tree(plant(tmp_path, {"engine/blocks.py": '"""Pages of cache."""\n'}))
    assert set(after.splitlines()) - set(before.splitlines()) == {"    └── blocks.py         Pages of cache."}
