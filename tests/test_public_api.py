"""The names `triptych` exports are those it lists: each importable, typed, and loaded only when asked for."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import triptych


def test_every_listed_name_is_there_and_says_what_it_is():
    for name in triptych.__all__:
        found = getattr(triptych, name)
        assert found is not None
        if inspect.isclass(found) or inspect.isfunction(found):
            assert found.__module__.startswith("triptych.")
            assert inspect.getdoc(found), f"{name} has no docstring"


def test_what_completion_offers_is_what_is_listed():
    assert sorted(name for name in dir(triptych) if name[0].isupper()) == sorted(
        name for name in triptych.__all__ if name[0].isupper()
    )


def test_the_list_is_sorted_and_has_no_doubles():
    assert list(triptych.__all__) == sorted(set(triptych.__all__))


def test_an_unknown_name_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="Sesion"):
        triptych.Sesion  # noqa: B018


def test_a_star_import_gives_the_listed_names():
    space: dict[str, object] = {}
    exec("from triptych import *", space)
    assert set(space) - {"__builtins__"} == set(triptych.__all__)


def test_importing_the_package_loads_no_part_of_it_but_itself():
    program = "import triptych, sys; print(*sorted(n for n in sys.modules if n.startswith('triptych.')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() in ([], ["triptych.errors"])
