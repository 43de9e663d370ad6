"""`triptych analyze` of a tiny model: what it measures, that it goes on where it ended, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tests.compile.test_assemble import decoder_alone

from checkpoints import make, picture
from triptych.cli import main
from triptych.compress import analysis as measuring
from triptych.compress.report import Analysis, page
from triptych.errors import BundleError
from triptych.session.analysis import AnalyzeConfig, analyze_model

pytestmark = pytest.mark.reference
QUIET = lambda what, share: None  # noqa: E731


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("smolvlm", tmp_path_factory.getbasetemp(), 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with five samples of one name, four of them about pictures."""
    folder = tmp_path_factory.mktemp("analysis")
    lines = []
    for index in range(5):
        parts: list[dict[str, object]] = [{"type": "text", "text": f"What is number {index} </script>?"}]
        if index:
            picture(40, 30, index).save(folder / f"{index}.png")
            parts.insert(0, {"type": "image_url", "image_url": f"{index}.png"})
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A red apple, or two."}]
        lines.append(json.dumps({"id": "a</script>", "messages": messages}))
    (folder / "samples.jsonl").write_text("\n".join(lines))
    return folder


def config(place: Path) -> AnalyzeConfig:
    return AnalyzeConfig(samples=place / "samples.jsonl", cache=place / "cache")


@pytest.fixture(scope="module")
def found(checkpoint: Path, place: Path) -> Analysis:
    return analyze_model(checkpoint, config(place), QUIET)


def test_parts_have_their_bytes_and_fewer_bits_cost_more(found):
    assert [part.name for part in found.parts] == ["embedding", "vision", "projector", "decoder"]
    assert all(part.num_bytes and part.precision == "fp32" for part in found.parts)
    losses = {(one.part, one.bits): one.divergence for one in found.sensitivities if not one.layer}
    for part in found.parts:
        assert losses[part.name, 4] > losses[part.name, 8] > 0


def test_every_layer_of_the_decoder_is_rounded_and_looked_at(found):
    layers = {one.layer for one in found.sensitivities if one.part == "decoder" and one.layer}
    assert layers == {f"layers.{index}" for index in range(len(found.layers))}
    for layer in found.layers:
        assert 0 < layer.text_media <= 1
        assert layer.media_text is not None  # text precedes pictures in this chat template
        assert layer.mass["text"] + layer.mass["image"] == pytest.approx(1.0)


def test_the_loss_is_measured_at_the_proposed_ratio_too(found):
    assert 0 < found.proposed <= 1
    assert {point.keep for point in found.points} == {0.25, 0.5, 0.75, found.proposed} - {1.0}
    assert all(0 <= point.lost < 1 for point in found.points)
    assert all((point.divergence > 0) == (point.lost > 0) for point in found.points)  # a ratio near 1 may drop nothing
    assert len(found.points) == 4 * len({point.keep for point in found.points})
    assert [one.name for one in found.predictions] == ["effective number", "attention lost", "ratio alone"]


def test_a_tower_that_no_sample_shows_anything_is_not_said_to_lose_nothing(checkpoint, place, tmp_path):
    first = (place / "samples.jsonl").read_text().splitlines()[0]
    (tmp_path / "text.jsonl").write_text("\n".join(9 * [first]))

    found = analyze_model(checkpoint, AnalyzeConfig(samples=tmp_path / "text.jsonl", cache=place / "cache"), QUIET)

    assert {one.part for one in found.sensitivities} == {"embedding", "decoder"}
    assert page(found)


def test_single_layers_are_measured_on_eight_samples_at_most(checkpoint, place, tmp_path, monkeypatch):
    first = (place / "samples.jsonl").read_text().splitlines()[0]
    (tmp_path / "text.jsonl").write_text("\n".join(9 * [first]))
    counts, plain = [], measuring._Runs._whole
    monkeypatch.setattr(measuring._Runs, "_whole", lambda *asked: (counts.append(1), plain(*asked))[1])
    cache = tmp_path / "cache"
    shutil.copytree(place / "cache" / "bundles", cache / "bundles")

    found = analyze_model(checkpoint, AnalyzeConfig(samples=tmp_path / "text.jsonl", cache=cache), QUIET)

    layers = sum(bool(one.layer) for one in found.sensitivities)
    wholes = len(found.sensitivities) - layers
    assert len(counts) == 9 + 9 * wholes + 5 * layers + 9  # exactly, whole parts, every second sample, attention


def test_a_model_that_sees_nothing_is_asked_the_built_in_questions_alone(checkpoint, tmp_path):
    source = decoder_alone(checkpoint, tmp_path / "text")
    shutil.copyfile(checkpoint / "chat_template.jinja", source / "chat_template.jinja")

    found = analyze_model(source, AnalyzeConfig(cache=tmp_path / "cache"), QUIET)

    assert "20 in all, 0 with pictures" in found.fed
    assert {one.part for one in found.sensitivities} == {"embedding", "decoder"}


def test_samples_without_a_picture_do_not_thin_what_is_said_of_attention(found, checkpoint, place, tmp_path):
    folder = Path(shutil.copytree(place, tmp_path / "place"))
    lines = (folder / "samples.jsonl").read_text().splitlines()
    (folder / "samples.jsonl").write_text("\n".join(lines[1:]))

    shown = analyze_model(checkpoint, config(folder), QUIET)

    assert [layer.mass["image"] for layer in shown.layers] == [layer.mass["image"] for layer in found.layers]


def test_a_second_analysis_measures_nothing_and_finds_the_same(found, checkpoint, place, monkeypatch):
    def measured(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring._Runs, "_logprobs", measured)
    assert analyze_model(checkpoint, config(place), QUIET) == found


def test_the_page_stands_alone_and_holds_the_figures(found):
    text = page(found)
    assert not re.findall(r"(?:src|href)=|@import|url\(", text)
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    (held,) = re.findall(r'<script id="analysis" type="application/json">(.*?)</script>', text, re.DOTALL)
    told = json.loads(held)
    assert told.pop("verdict")
    assert msgspec.convert(told, Analysis) == found


def test_the_verb_prints_tables_writes_the_page_and_gives_json(found, checkpoint, place, monkeypatch):
    monkeypatch.setattr("triptych.session.analysis.analyze_model", lambda *asked: found)
    asked = [
        "analyze",
        str(checkpoint),
        "--samples",
        str(place / "samples.jsonl"),
        "--html",
        str(place / "report.html"),
    ]

    shown = CliRunner().invoke(main, asked)
    assert shown.exit_code == 0, shown.output
    for words in ("Parts", "Decoder by layer", "predicted against measured", "ratio alone", "Proposed from attention"):
        assert words in shown.stdout
    assert (place / "report.html").read_text() == page(found)

    told = CliRunner().invoke(main, [*asked[:4], "--json"])
    assert msgspec.json.decode(told.stdout, type=Analysis) == found


def test_a_bundle_that_is_rounded_already_is_refused_with_what_to_do(found, place, tmp_path):
    (exact,) = (place / "cache" / "bundles").iterdir()
    shutil.copytree(exact, tmp_path / "small")
    manifest = tmp_path / "small" / "bundle.json"
    manifest.write_text(
        re.sub(r'("name": "vision",.*?"precision": )"fp32"', r'\1"int8"', manifest.read_text(), flags=re.S)
    )
    with pytest.raises(BundleError, match="vision in int8") as refused:
        analyze_model(tmp_path / "small", config(place), QUIET)
    assert "--weights fp32" in str(refused.value.hint)
