"""Samples as the fp32 model reads them: what it answers in torch is what the session answered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from checkpoints import make, picture
from triptych.compile.assemble import compile_checkpoint
from triptych.compile.config import CompileConfig
from triptych.compress.model import Model
from triptych.compress.samples import Sample, read
from triptych.core.bundle import Bundle
from triptych.core.progress import silent
from triptych.core.spec import Modality
from triptych.errors import ConfigError
from triptych.session import calibration
from triptych.session.calibration import ANSWER_TOKENS, own_words, prepare

pytestmark = pytest.mark.reference
ANSWER = "A red apple."
TOLERANCE = 1e-4  # of embeddings; greatest seen: 4e-6


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """LLaVA 1.6's: several tiles, newline rows, padding left out."""
    folder = make("llava-next", tmp_path_factory.getbasetemp(), 0)
    return compile_checkpoint(folder, tmp_path_factory.mktemp("fp32") / "bundle", CompileConfig(weights="fp32"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    for index, size in enumerate(((70, 30), (28, 90))):
        picture(*size, index).save(folder / f"{index}.png")
    pictures = [{"type": "image_url", "image_url": f"{index}.png"} for index in (0, 1, 0)]
    asked = [
        {"id": "two", "messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": "What?"}]}]},
        {"id": "text", "messages": [{"role": "user", "content": "Why?"}]},
        {"id": "given", "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": ANSWER}]},
    ]
    (folder / "samples.jsonl").write_text("\n".join(json.dumps(line) for line in asked))
    return folder


@pytest.fixture(scope="module")
def samples(bundle: Bundle, place: Path) -> dict[str, Sample]:
    found = prepare(bundle, read(place / "samples.jsonl"), lambda what, share: None, cache=place / "cache")
    return {sample.name: sample for sample in found}


def test_the_torch_model_sees_the_same_embeddings(bundle, samples):
    model = Model.open(bundle)

    for sample in samples.values():
        with torch.no_grad():
            found = model.embed(sample)
        np.testing.assert_allclose(found.numpy(), sample.embeddings, atol=TOLERANCE, rtol=0)
    assert len(samples["two"].tiles) == len(np.unique(samples["two"].tiles, axis=0))  # a picture shown twice, once
    assert (samples["two"].modality == Modality.IMAGE).sum() == len(samples["two"].rows) > 0


def test_the_torch_model_gives_the_answer_that_the_session_gave(bundle, samples):
    model = Model.open(bundle)

    for name in ("two", "text"):
        sample = samples[name]
        with torch.no_grad():
            likeliest = model.logits(sample).argmax(-1).numpy()
        assert 1 <= sample.is_answer.sum() <= ANSWER_TOKENS
        np.testing.assert_array_equal(likeliest, sample.token_ids[sample.is_answer])


def test_a_given_answer_is_taken_with_its_end(bundle, samples):
    given, asked = samples["given"], samples["text"]

    start = int(np.argmax(given.is_answer))
    assert given.token_ids[-1] in bundle.manifest.spec.eos_ids
    np.testing.assert_array_equal(given.token_ids[:start], asked.token_ids[:start])
    assert given.is_answer.sum() < ANSWER_TOKENS


def test_what_was_prepared_is_not_prepared_again(bundle, place, samples, monkeypatch):
    monkeypatch.setattr(calibration, "Session", None)

    again = prepare(bundle, read(place / "samples.jsonl"), lambda what, share: None, cache=place / "cache")

    assert [sample.name for sample in again] == list(samples)


def changed(bundle: Bundle, what: str) -> Bundle:
    """The bundle with another tokenizer, template or end."""
    manifest = bundle.manifest
    files = tuple(replace(file, sha256="0" * 64) if file.path == what else file for file in manifest.files)
    spec = replace(manifest.spec, eos_ids=(0,)) if what == "eos_ids" else manifest.spec
    assert (files, spec) != (manifest.files, manifest.spec)
    return replace(bundle, manifest=replace(manifest, files=files, spec=spec))


@pytest.mark.parametrize("what", ["chat_template.jinja", "tokenizer.json", "eos_ids"])
def test_what_another_reader_prepared_is_not_taken(bundle, place, samples, monkeypatch, what):
    def opened(*_: object, **__: object) -> None:
        raise InterruptedError("it is prepared anew")

    monkeypatch.setattr(calibration.Session, "open", opened)

    with pytest.raises(InterruptedError):
        prepare(changed(bundle, what), read(place / "samples.jsonl"), silent, cache=place / "cache")


def test_a_sample_that_does_not_fit_is_named(bundle, place, tmp_path):
    content = [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]
    (tmp_path / "bad.jsonl").write_text(
        json.dumps({"id": "bad one", "messages": [{"role": "user", "content": content}]})
    )

    with pytest.raises(ConfigError, match="sample bad one: "):
        prepare(bundle, read(tmp_path / "bad.jsonl"), lambda what, share: None, cache=tmp_path)


def test_the_models_own_words_begin_at_drawn_tokens_and_are_the_same_each_time(bundle, tmp_path):
    talks = own_words(bundle, silent, cache=tmp_path, num_tokens=6)
    again = own_words(bundle, silent, cache=tmp_path / "again", num_tokens=6)

    assert len({int(one.token_ids[0]) for one in talks}) > len(talks) / 2
    assert all(2 <= one.num_tokens <= 6 for one in talks)
    assert all(list(one.judged) == list(range(one.num_tokens - 1)) for one in talks)
    for one, other in zip(talks, again, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_own_words_are_not_said_again(bundle, tmp_path, monkeypatch):
    own_words(bundle, silent, cache=tmp_path, num_tokens=4)
    monkeypatch.setattr(calibration.Session, "open", None)

    assert len(own_words(bundle, silent, cache=tmp_path, num_tokens=4)) == calibration.OWN_WORDS
