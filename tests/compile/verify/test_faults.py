"""A gate that cannot fail is a defect: each planted fault is refused by the gate that should see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
import pytest

from checkpoints import make
from faults import GRAPH, REFERENCE, Build, Fault
from triptych.backends.reference import Reference
from triptych.compile import parts
from triptych.compile.assemble import open_table
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import family_of
from triptych.compile.graph import Store
from triptych.compile.verify import Candidate, Prompt, Twin, Verification, against, check_reference, prompts_for
from triptych.core.bundle import Evidence
from triptych.core.spec import ModelSpec
from triptych.errors import GateError
from triptych.media.text import Text

SUBJECTS = ["vision", "vision", "projector", "projector", "decoder", "decoder", "whole", "served"]
KEPT = ("prose", "65 tokens", "two pictures, small")  # prompts enough: the faster, the more faults


@dataclass(frozen=True)
class World:
    """A checkpoint that is read, with a few prompts of its own."""

    folder: Path
    spec: ModelSpec
    weights: parts.Weights
    text: Text
    prompts: tuple[Prompt, ...]

    def verification(self, build: Build | None = None) -> Verification:
        twin = Twin(spec=self.spec, weights=self.weights)
        table = self.weights["decoder"]("embed_tokens.weight")
        return Verification(twin, self.prompts, lambda ids: table[ids].astype(np.float32))


@pytest.fixture(scope="module")
def open_world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def opened(kind: str) -> World:
        checkpoint = Checkpoint.open(make(kind, tmp_path_factory.getbasetemp(), 0))
        family = family_of(checkpoint)
        spec = family.read_spec(checkpoint)
        assert spec.image is not None
        text = Text.open(checkpoint.folder, eos_ids=spec.eos_ids, placeholder=spec.image.placeholder)
        kept = tuple(prompt for prompt in prompts_for(spec, text) if prompt.name in KEPT)
        return World(checkpoint.folder, spec, family.weights(checkpoint, spec), text, kept)

    return opened


@pytest.fixture(scope="module")
def open_verification(open_world: Any) -> Any:
    """One verification a kind: what the twin says is computed once."""
    return cache(lambda kind: open_world(kind).verification())


def compile_with(build: Build, verification: Verification, precision: Any, folder: Path) -> Iterator[Evidence]:
    """Build every part with `build` and hold it against a sound twin; then the whole."""
    for part in parts.names(verification.twin.spec):
        model = build(part, verification.twin.spec, verification.twin.weights, Store(precision, group_size=32))
        path = folder / f"{part}.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        yield from verification.check_part(Candidate(part=part, precision=precision, path=path))
    yield from verification.check_whole()


def numbered(faults: tuple[Fault, ...]) -> list[Any]:
    return [
        pytest.param(fault, id=f"{index} of {len(faults)}: {fault.name}") for index, fault in enumerate(faults, start=1)
    ]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["smolvlm", "llava", "llava-next"])
def test_a_sound_model_passes(kind: str, precision: str, open_verification: Any, tmp_path: Path) -> None:
    evidence = list(compile_with(parts.build, open_verification(kind), precision, tmp_path))

    assert [one.subject for one in evidence] == SUBJECTS
    assert all(measure.is_met for one in evidence for measure in one.measures)


@pytest.mark.parametrize("fault", numbered(GRAPH))
def test_a_fault_in_the_compiled_form_is_refused(fault: Fault, open_verification: Any, tmp_path: Path) -> None:
    broken = fault.plant(parts.build)

    with fault.patch(), pytest.raises(GateError) as refused:
        list(compile_with(broken, open_verification(fault.kind), fault.precision, tmp_path))

    assert refused.value.message.startswith(f"{fault.part} in {fault.precision}, held against")
    assert " is " in refused.value.message
    assert "the gate is at " in refused.value.message
    assert refused.value.hint


@pytest.mark.reference
@pytest.mark.parametrize("fault", numbered(REFERENCE))
def test_a_fault_in_the_builder_is_refused_by_transformers(
    fault: Fault, open_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: World = open_world(fault.kind)
    monkeypatch.setattr(against, "Reference", _Loaded)
    monkeypatch.setattr(parts, "build", fault.plant(parts.build))

    with fault.patch(), pytest.raises(GateError) as refused:
        check_reference(world.folder, world.verification(), world.text)

    assert refused.value.message.startswith(f"{fault.part} in fp32, held against")


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["smolvlm", "smolvlm-whole", "idefics3", "llava", "llava-qwen2", "llava-next"])
def test_a_sound_builder_agrees_with_transformers(kind: str, open_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "Reference", _Loaded)
    world: World = open_world(kind)

    evidence = check_reference(world.folder, world.verification(), world.text)

    assert [one.subject for one in evidence] == ["preprocessing", "vision", "projector", "decoder", "whole"]


class _Loaded:
    """Each checkpoint is loaded into transformers once."""

    open = staticmethod(cache(Reference.open))


def test_the_written_table_reads_as_it_was(tmp_path: Path) -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
    for kind in (np.float32, np.float16):
        np.save(tmp_path / "table.npy", table.astype(kind))
        np.testing.assert_array_equal(open_table(tmp_path / "table.npy")(np.array([2, 0])), table[[2, 0]])
    np.save(tmp_path / "table.npy", table.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(open_table(tmp_path / "table.npy")(np.array([2, 0])), table[[2, 0]])
