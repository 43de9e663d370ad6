"""Hold the fp32 twin, and so its builder, against transformers on torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from triptych.backends.base import Array
from triptych.backends.reference import Reference, check_known, preprocess
from triptych.compile.checkpoint import json_object
from triptych.compile.verify import figures, gates, served
from triptych.compile.verify.gates import Subject
from triptych.compile.verify.inputs import pictures
from triptych.compile.verify.prompts import QUESTION, describe, prompt_ids
from triptych.compile.verify.twin import Rows
from triptych.compile.verify.verification import FAULT, Verification, stacked
from triptych.core.bundle import Evidence
from triptych.core.spec import ModelSpec
from triptych.core.stored import OWN
from triptych.errors import ConfigError, install
from triptych.media.image import prepare, prompt_text
from triptych.media.text import Text

NEEDED = ("torch", "transformers")


def need_reference(checkpoint: Path) -> None:
    """Raises ConfigError when the extra is not installed or transformers would read other numbers, BackendError when
    it does not know the model.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--verify reference needs {' and '.join(missing)}", hint=install("reference"))
    check_known(checkpoint)
    dtype = json_object(checkpoint / "config.json").get("dtype")
    if (checkpoint / OWN).is_dir() and dtype != "float32":
        raise ConfigError(
            f"{checkpoint} keeps a quantized table or kernel for us alone; transformers reads it rounded to {dtype}",
            hint="`--verify graph`, or compress a float32 checkpoint",
        )


def check_reference(checkpoint: Path, verification: Verification, text: Text) -> tuple[Evidence, ...]:
    """Preprocessing, vision, projector, decoder and the whole, each on the same inputs. Raises GateError."""
    reference = Reference.open(checkpoint)
    judge = _Judge(reference.decoder().place(), verification)
    evidence: list[Evidence] = []
    embedded = None
    if verification.twin.spec.vision is not None:
        evidence.append(check_preprocessing(checkpoint, verification.twin.spec, text))
        vision, projector = reference.part("vision"), reference.part("projector")
        features = vision({"pixels": verification.tiles})["features"]
        evidence.append(judge.arrays("vision", verification.twin_features, features))
        projected = projector({"features": verification.twin_features})
        evidence.append(judge.arrays("projector", stacked(verification.twin_projected), stacked(projected)))
        embedded = verification.embed(projector({"features": features}))
    evidence.append(judge.logits("decoder", _logits(reference, verification.sequences(verification.twin_embedded))))
    if embedded is not None:
        evidence.append(judge.logits("whole", _logits(reference, verification.sequences(embedded))))
    return tuple(evidence)


def check_preprocessing(checkpoint: Path, spec: ModelSpec, text: Text) -> Evidence:
    """Tiles and prompt ids of every picture, alone and all together, against the family's own processor."""
    assert spec.image is not None
    drawn = [Image.fromarray(picture) for picture in pictures().values()]
    cases = [*([picture] for picture in drawn), drawn]
    differing, furthest = 0, 0.0
    for shown in cases:
        ours = prompt_ids([prompt_text(picture.size, spec.image) for picture in shown], text)
        tiles = np.concatenate([prepare(picture, spec.image)[0] for picture in shown])
        theirs = preprocess(checkpoint, QUESTION, shown)
        differing += not np.array_equal(np.asarray(ours), theirs.input_ids)
        is_alike = tiles.shape == theirs.tiles.shape
        furthest = max(furthest, float(np.abs(tiles - theirs.tiles).max()) if is_alike else 255.0)
    subject = Subject(
        name="preprocessing",
        precision="fp32",
        twin="the model's processor in transformers",
        inputs=f"{len(drawn)} pictures of odd sizes, alone and together",
        hint=FAULT,
    )
    found = {"differing prompts": float(differing), "furthest pixel of 255": furthest}
    return gates.judge(subject, found, gates.PREPROCESSING)


def _logits(reference: Reference, sequences: Sequence[served.Sequence]) -> list[Rows]:
    """Each prompt in one call: the reference computes all that came before again."""
    return served.logits(reference.decoder(), sequences, (max(map(len, sequences)),))


class _Judge:
    """Fills in what every comparison with transformers has in common."""

    def __init__(self, place: str, verification: Verification) -> None:
        self._place = place
        self._verification = verification

    def arrays(self, part: str, twin: Array, reference: Array) -> Evidence:
        fed = f"{len(self._verification.tiles)} tiles of pictures"
        return gates.judge(self._subject(part, fed), figures.of_arrays(reference, twin), gates.REFERENCE_ARRAYS)

    def logits(self, name: str, reference: Sequence[Rows]) -> Evidence:
        subject = self._subject(name, describe(self._verification.prompts))
        found = figures.of_logits(reference, self._verification.twin_logits)
        return gates.judge(subject, found, gates.REFERENCE_LOGITS)

    def _subject(self, name: str, fed: str) -> Subject:
        return Subject(name=name, precision="fp32", twin=self._place, inputs=fed, hint=FAULT)
