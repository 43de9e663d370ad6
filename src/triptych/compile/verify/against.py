"""Hold the fp32 twin, and so the code that built it, against transformers on torch: the `reference` extra."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from triptych.backends.base import Array
from triptych.backends.reference import Reference
from triptych.compile.verify import figures, gates, served
from triptych.compile.verify.gates import Subject
from triptych.compile.verify.prompts import describe
from triptych.compile.verify.twin import Rows
from triptych.compile.verify.verification import FAULT, Verification, stacked
from triptych.core.bundle import Evidence
from triptych.errors import ConfigError

NEEDED = ("torch", "transformers")


def need_reference() -> None:
    """Raises ConfigError when the extra is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--verify reference needs {' and '.join(missing)}", hint="pip install 'triptych[reference]'"
        )


def check_reference(checkpoint: Path, verification: Verification) -> tuple[Evidence, ...]:
    """Vision, projector, decoder and the whole, each on the same inputs. Raises GateError."""
    reference = Reference.open(checkpoint)
    judge = _Judge(reference.decoder().place(), verification)
    evidence: list[Evidence] = []
    if verification.twin.spec.vision is not None:
        vision, projector = reference.part("vision"), reference.part("projector")
        features = vision({"pixels": verification.tiles})["features"]
        evidence.append(judge.arrays("vision", verification.twin_features, features))
        projected = projector({"features": verification.twin_features})
        evidence.append(judge.arrays("projector", stacked(verification.twin_projected), stacked(projected)))
        embedded = verification.embed(projector({"features": features}))
        evidence.append(judge.logits("whole", verification.twin_logits, _logits(reference, embedded)))
    logits = _logits(reference, verification.twin_embedded)
    evidence.append(judge.logits("decoder", verification.twin_logits, logits))
    return tuple(evidence)


def _logits(reference: Reference, embedded: Sequence[Rows]) -> list[Rows]:
    longest = max(len(rows) for rows in embedded)
    return served.logits(reference.decoder(), embedded, (longest,))


class _Judge:
    """Fills in what every comparison with transformers has in common."""

    def __init__(self, place: str, verification: Verification) -> None:
        self._place = place
        self._verification = verification

    def arrays(self, part: str, twin: Array, reference: Array) -> Evidence:
        fed = f"{len(self._verification.tiles)} tiles of pictures"
        return gates.judge(self._subject(part, fed), figures.of_arrays(reference, twin), gates.REFERENCE_ARRAYS)

    def logits(self, name: str, twin: Sequence[Rows], reference: Sequence[Rows]) -> Evidence:
        """The rows' own likeness as well: it sees faults too small to move a probability."""
        found = figures.of_logits(reference, twin)
        found |= figures.of_arrays(np.concatenate(list(reference)), np.concatenate(list(twin)))
        subject = self._subject(name, describe(self._verification.prompts))
        return gates.judge(subject, found, {**gates.REFERENCE_ARRAYS, **gates.REFERENCE_LOGITS})

    def _subject(self, name: str, fed: str) -> Subject:
        return Subject(name=name, precision="fp32", twin=self._place, inputs=fed, hint=FAULT)
