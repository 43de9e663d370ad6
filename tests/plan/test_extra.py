"""What belongs to the extra `plan` is named, with the way to have it, where it is missing."""

from __future__ import annotations

import math
import sys

import pytest

from triptych.errors import ConfigError
from triptych.plan.extra import extra


def test_a_module_that_is_missing_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ConfigError, match="this needs matplotlib") as told:
        extra("matplotlib")

    assert told.value.hint == "pip install '.[plan]' in Triptych's folder"


def test_a_module_that_is_there_is_given():
    assert extra("math") is math
