"""Hold one model's parts, and then the whole, against their fp32 twin as they are compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from triptych.backends import ov as backend
from triptych.backends.base import Array, Placement
from triptych.compile import parts
from triptych.compile.verify import figures, gates, served
from triptych.compile.verify.gates import Gates, Subject
from triptych.compile.verify.prompts import Prompt, describe
from triptych.compile.verify.twin import EXACT, Positions, Rows, Twin, decode, encode
from triptych.compile.verify.weights import Audit
from triptych.core.bundle import Evidence, Precision
from triptych.core.spec import Modality
from triptych.core.table import Table
from triptych.media.registry import modality_of

FP32 = "the same graph in fp32"
PLAIN = "the plain decoder, unpaged, in float"
SCREENED = 2  # prompts
FAULT = "this is a fault of triptych, or a broken file: please report it with the model's name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A compiled part.

    is_free: its precision was not asked for, so that it must also pass `auto`'s gates. is_exact: the checkpoint's
    numbers were taken over as they are, so that it must be as near to its twin as fp32 is.
    """

    part: parts.PartName
    precision: Precision
    path: Path
    is_free: bool = False
    is_exact: bool = False

    @property
    def judged(self) -> Precision:
        """The precision whose gates it must pass."""
        return "fp32" if self.is_exact else self.precision

    @property
    def hint(self) -> str:
        if self.judged == "fp32":
            return FAULT
        finer = gates.COARSER[gates.COARSER.index(self.precision) + 1]
        return f"hold it in a finer precision, `--parts {self.part}={finer}`, or choose by `--weights auto`"


@dataclass(slots=True, kw_only=True)
class _Tested:
    """The parts that passed, by name, and what they made of the inputs. A part that passes anew takes its place."""

    parts: dict[str, Candidate] = field(default_factory=dict)
    features: Rows | None = None
    logits: list[Rows] = field(default_factory=list)  # of the twin's embeddings

    @property
    def precision(self) -> Precision:
        return gates.coarsest([part.judged for part in self.parts.values()])

    @property
    def is_free(self) -> bool:
        return any(part.is_free for part in self.parts.values())


class Verification:
    """What is known of one model while its parts are compiled: the twin's outputs, and those of parts that passed.

    Of a part that is compiled anew only what depends on it is computed again.
    """

    def __init__(self, twin: Twin, prompts: Sequence[Prompt], table: Table) -> None:
        self.twin = twin
        self.prompts = tuple(prompts)
        self._table = table
        self._tested = _Tested()

    def check_part(self, candidate: Candidate) -> tuple[Evidence, ...]:
        """Its weights one by one, then what it gives. Call in the order of `parts.names`. Raises GateError."""
        weights = self._check_weights(candidate)
        check = {"vision": self._check_vision, "projector": self._check_projector, "decoder": self._check_decoder}
        evidence = check[candidate.part](candidate)
        self._tested.parts[candidate.part] = candidate
        return (weights, evidence)

    def check_whole(self) -> tuple[Evidence, ...]:
        """All parts in a row against the twin's, and then as they are served. Raises GateError."""
        embedded = self._whole_embedded()
        logits = self._whole_logits(embedded)
        return (self._judge_whole(logits), self._check_served(embedded, logits))

    # ── the twin ────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def tiles(self) -> NDArray[np.uint8]:
        """Of all pictures, in order."""
        return np.concatenate([item.tiles for prompt in self.prompts for item in prompt.items])

    @cached_property
    def twin_features(self) -> Rows:
        return self.twin.features(self.tiles)

    @cached_property
    def twin_projected(self) -> dict[str, Array]:
        return self.twin.project(self.twin_features)

    @cached_property
    def twin_embedded(self) -> list[Rows]:
        """Of each prompt, (T, hidden)."""
        return self.embed(self.twin_projected if self._sees else {})

    @cached_property
    def twin_logits(self) -> list[Rows]:
        return self.twin.logits(self.twin_embedded, self._judged)

    def embed(self, projected: Mapping[str, Array]) -> list[Rows]:
        """Every prompt's embeddings: text by the table, pictures by the projector's rows."""
        first = 0
        embedded = []
        for prompt in self.prompts:
            rows = []
            for item in prompt.items:
                mine = projected["embeddings"][first : first + len(item.tiles)]
                first += len(item.tiles)
                own = mine.reshape(-1, mine.shape[-1])
                extra = projected.get("extra")
                rows.append((own if extra is None else np.concatenate([own, extra]))[item.take])
            is_text = modality_of(prompt.token_ids) == Modality.TEXT
            whole = self._table(np.where(is_text, prompt.token_ids, 0))
            if rows:
                whole[~is_text] = np.concatenate(rows)
            embedded.append(whole)
        return embedded

    def sequences(self, embedded: Sequence[Rows]) -> list[served.Sequence]:
        """The prompts as a paged decoder takes them."""
        return [
            served.Sequence(embeddings=rows, judged=prompt.judged)
            for rows, prompt in zip(embedded, self.prompts, strict=True)
        ]

    @cached_property
    def _judged(self) -> list[Positions]:
        return [prompt.judged for prompt in self.prompts]

    @property
    def _sees(self) -> bool:
        return self.twin.spec.vision is not None

    # ── the parts ───────────────────────────────────────────────────────────────────────────────────────────────

    def _check_weights(self, candidate: Candidate) -> Evidence:
        audit = Audit(ov.Core().read_model(candidate.path))
        parts.build(candidate.part, self.twin.spec, self.twin.weights, audit)
        found, worst = figures.of_weights(audit.finish())
        subject = Subject(
            name=candidate.part,
            precision=candidate.precision,
            twin="the checkpoint's weights",
            inputs=f"{len(audit.figures):,} weights, group by group",
            hint=candidate.hint,
            where=worst,
        )
        return gates.judge(subject, found, gates.WEIGHTS[candidate.judged])

    def _check_vision(self, candidate: Candidate) -> Evidence:
        found = encode(backend.open_part(candidate.path, EXACT), self.tiles)
        evidence = self._judge_arrays(candidate, self.twin_features, found, f"{len(self.tiles)} tiles of pictures")
        self._tested.features = found
        return evidence

    def _check_projector(self, candidate: Candidate) -> Evidence:
        found = backend.open_part(candidate.path, EXACT)({"features": self.twin_features})
        fed = f"the twin's features of {len(self.tiles)} tiles"
        return self._judge_arrays(candidate, stacked(self.twin_projected), stacked(found), fed)

    def _check_decoder(self, candidate: Candidate) -> Evidence:
        opened = backend.open_plain_decoder(candidate.path, EXACT)
        limits = _logits_gates(candidate.judged, candidate.is_free)
        found: list[Rows] = []
        for rows, judged in zip(self.twin_embedded, self._judged, strict=True):
            found.append(decode(opened, rows, judged))
            if candidate.is_free and len(found) == SCREENED:
                self._screen(candidate, found)
        subject = self._subject(candidate, describe(self.prompts))
        evidence = gates.judge(subject, figures.of_logits(self.twin_logits, found), limits)
        self._tested.logits = found
        return evidence

    def _screen(self, candidate: Candidate, found: Sequence[Rows]) -> None:
        """Refuse by the first prompts what is hopeless: more than twice as far as `auto` allows."""
        figure = "kl_mean_nats"
        limit = gates.AUTO_LOGITS[figure].at_most
        assert limit is not None
        first = figures.of_logits(self.twin_logits[: len(found)], found)
        subject = self._subject(candidate, describe(self.prompts[: len(found)]))
        gates.judge(subject, {figure: first[figure]}, {figure: gates.at_most(2 * limit)})

    def _judge_arrays(self, candidate: Candidate, twin: Array, tested: Array, fed: str) -> Evidence:
        limits: Gates = gates.ARRAYS[candidate.judged]
        if candidate.is_free:
            limits = gates.strictest(limits, gates.AUTO_ARRAYS)
        return gates.judge(self._subject(candidate, fed), figures.of_arrays(twin, tested), limits)

    def _subject(self, candidate: Candidate, fed: str) -> Subject:
        return Subject(name=candidate.part, precision=candidate.precision, twin=FP32, inputs=fed, hint=candidate.hint)

    # ── the whole ───────────────────────────────────────────────────────────────────────────────────────────────

    def _whole_embedded(self) -> list[Rows]:
        """Every prompt's embeddings by the compiled vision and projector."""
        if not self._sees:
            return self.twin_embedded
        assert self._tested.features is not None
        opened = backend.open_part(self._tested.parts["projector"].path, EXACT)
        return self.embed(opened({"features": self._tested.features}))

    def _whole_logits(self, embedded: Sequence[Rows]) -> list[Rows]:
        """The compiled decoder on these. Prompts without a picture are as they were."""
        if not self._sees:
            return self._tested.logits
        opened = backend.open_plain_decoder(self._tested.parts["decoder"].path, EXACT)
        known = zip(self.prompts, embedded, self._tested.logits, strict=True)
        return [decode(opened, rows, prompt.judged) if prompt.items else logits for prompt, rows, logits in known]

    def _judge_whole(self, found: Sequence[Rows]) -> Evidence:
        precision = self._tested.precision
        hint = FAULT if precision == "fp32" else "hold its parts in a finer precision, e.g. `--weights int8`"
        subject = Subject(name="whole", precision=precision, twin=FP32, inputs=describe(self.prompts), hint=hint)
        limits = _logits_gates(precision, self._tested.is_free)
        return gates.judge(subject, figures.of_logits(self.twin_logits, found), limits)

    def _check_served(self, embedded: Sequence[Rows], plain: Sequence[Rows]) -> Evidence:
        """The decoder as it is opened for serving: the device's own arithmetic, u8 pages, chunks, many at once."""
        decoder = self._tested.parts["decoder"]
        opened = backend.open_decoder(decoder.path, Placement(), "u8")
        found = served.logits(opened, self.sequences(embedded))
        subject = Subject(
            name="served",
            precision=decoder.precision,
            twin=PLAIN,
            inputs=f"{describe(self.prompts)}, together in chunks, on {opened.place()} with a u8 cache",
            hint=FAULT,
        )
        return gates.judge(subject, figures.of_logits(plain, found), gates.SERVED)


def _logits_gates(precision: Precision, is_free: bool) -> Gates:
    limits = gates.LOGITS[precision]
    return gates.strictest(limits, gates.AUTO_LOGITS) if is_free else limits


def stacked(projected: Mapping[str, Array]) -> Array:
    """All that a projector gives, as rows."""
    return np.concatenate([value.reshape(-1, value.shape[-1]) for value in projected.values()])
