"""Each run of the tests tries the same cases; new ones are looked for by bench/fuzz.py and bench/forms.py."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.load_profile("same")
