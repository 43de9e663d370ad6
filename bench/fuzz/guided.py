"""Files that a coverage-guided fuzzer (atheris) grows out of good ones, read as a decoder process reads them.

usage: python bench/fuzz/guided.py --runs 100000 --seconds 600 --corpus FOLDER
Needs atheris: pip install --target bench/.rivals/atheris --no-deps atheris
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE.parent / "src"), str(HERE), str(HERE / ".rivals" / "atheris")]

import atheris  # noqa: E402

with atheris.instrument_imports(include=["triptych.media.image", "PIL"]):
    from fuzz.files import corpus
    from fuzz.media import LIMITS, SPECS, judged
    from triptych.errors import MediaError
    from triptych.media.image import read


def one(data: bytes) -> None:
    """Raises, and so ends the run, on whatever is at fault."""
    spec = SPECS[len(data) % len(SPECS)]
    with contextlib.suppress(MediaError):
        outcome = judged(read(data, LIMITS, spec), data, spec)
        assert not outcome.startswith("FAULT"), outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, required=True)
    asked = parser.parse_args()
    asked.corpus.mkdir(parents=True, exist_ok=True)
    for data in corpus():
        (asked.corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    warnings.simplefilter("ignore")
    limits = [
        f"-runs={asked.runs}",
        f"-max_total_time={asked.seconds}",
        "-timeout=60",
        "-rss_limit_mb=2048",
        "-max_len=8192",
    ]
    atheris.Setup([sys.argv[0], *limits, str(asked.corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
