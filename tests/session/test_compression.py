"""From a checkpoint to a compressed one: what it is, what it costs, when it is refused, how it goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from checkpoints import make, picture
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import family_of
from triptych.compress.rounding import Grid, round_weight
from triptych.compress.run import Job, Made
from triptych.core.quantized import Held, Quantized, plain
from triptych.errors import BundleError, ConfigError, GateError
from triptych.session import compression
from triptych.session.compression import CompressConfig, Report, compress_checkpoint

pytestmark = pytest.mark.reference
QUIET = lambda what, share: None  # noqa: E731
DECODER, VISION = "model.text_model.layers.0.mlp.down_proj.weight", "model.vision_model.encoder.layers.0.mlp.fc1.weight"
TABLE, HEAD = "model.text_model.embed_tokens.weight", "lm_head.weight"
W4 = '[[steps]]\npart = "decoder"\nbits = 4\ngroup_size = 32\nround = "gptq"\nscale = "mbq"\n'
W8 = '[[steps]]\npart = "decoder"\nbits = 8\n'
REST = "".join(f'[[steps]]\npart = "{part}"\nbits = 8\n' for part in ("vision", "projector", "embedding"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with samples: four about pictures, four without, answers given in two."""
    folder = tmp_path_factory.mktemp("compression")
    lines = []
    for index in range(8):
        parts = [{"type": "text", "text": f"What is number {index}?"}]
        if index % 2:
            picture(40, 30, index).save(folder / f"{index}.png")
            parts.insert(0, {"type": "image_url", "image_url": f"{index}.png"})
        messages = [{"role": "user", "content": parts}]
        messages += [{"role": "assistant", "content": "A red apple on a blue background."}] if index < 2 else []
        lines.append(json.dumps({"messages": messages}))
    (folder / "samples.jsonl").write_text("\n".join(lines))
    (folder / "blind.jsonl").write_text("\n".join(lines[::2]))
    texts = [json.dumps({"messages": [{"role": "user", "content": f"Name number {index}."}]}) for index in range(8)]
    (folder / "few.jsonl").write_text("\n".join([*texts, *lines[1:6:2]]))
    (folder / "w4.toml").write_text(W4 + REST)
    (folder / "nearest.toml").write_text(W8 + REST)
    (folder / "kept.toml").write_text(W8 + REST.replace("bits = 8", 'keep = "fp32"'))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("smolvlm", tmp_path_factory.getbasetemp(), 0)


def config(place: Path, **asked: object) -> CompressConfig:
    samples = place / str(asked.pop("samples", "samples.jsonl"))
    return CompressConfig(**{"samples": samples, "cache": place / "cache", **asked})  # type: ignore[arg-type]


def compressed(checkpoint: Path, place: Path, **asked: object) -> Report:
    return compress_checkpoint(checkpoint, place / "out", config(place, **asked), QUIET)


def measures(report: Report, subject: str = "whole") -> dict[str, float]:
    found = [report.whole, *(part.evidence for part in report.parts if part.evidence is not None)]
    return {one.name: one.value for evidence in found if evidence.subject == subject for one in evidence.measures}


def test_modality_gives_each_part_its_own_form(checkpoint, place):
    report = compressed(checkpoint, place)

    became = {part.part: part.became for part in report.parts}
    assert became["vision"].startswith("int8, activations int8")
    assert became["projector"] == "int4 in groups of 32"
    assert became["decoder"] == "bf16"
    assert became["embedding"] == "int8"
    assert measures(report)["KL divergence, mean"] < 0.05
    assert not (place / ".out.work").exists()


def test_the_folder_holds_what_was_measured(checkpoint, place):
    compressed(checkpoint, place)

    opened = Checkpoint.open(place / "out")
    told = json.loads((place / "out" / "compression.json").read_bytes())
    vision, decoder = opened.held(VISION), opened.held(DECODER)
    assert isinstance(vision, Quantized)
    assert vision.bits == 8
    assert vision.input_scale
    assert not isinstance(decoder, Quantized)
    assert json.loads(told["recipe"])["name"] == "modality"
    assert [one["subject"] for one in told["evidence"]] == ["whole", "vision", "projector", "decoder", "embedding"]
    assert "2 samples, 1 with pictures, held out from samples.jsonl" in told["evidence"][0]["inputs"]
    assert told["kv_policy"]["statistics"]


def test_an_fp16_checkpoint_keeps_its_scales_and_norms_in_fp16(checkpoint, place, tmp_path):
    narrow = tmp_path / "narrow"
    shutil.copytree(checkpoint, narrow)
    for path in narrow.glob("*.safetensors"):
        halves = {name: values.astype(np.float16) for name, values in load_file(path).items()}
        texts = {name: name.endswith("norm.weight") and "text_model" in name for name in halves}
        save_file({name: held.astype(np.float32) if texts[name] else held for name, held in halves.items()}, path)

    compressed(narrow, place, recipe=str(place / "nearest.toml"))

    opened = Checkpoint.open(place / "out")
    assert opened.held(DECODER).scales.dtype == np.float16
    norms = [name for name, is_norm in texts.items() if is_norm]
    assert norms
    assert {plain(opened.held(name)).dtype for name in norms} == {np.dtype(np.float16)}


def test_a_recipe_of_ones_own_is_taken(checkpoint, place):
    report = compressed(checkpoint, place, recipe=str(place / "w4.toml"))

    (decoder,) = (part for part in report.parts if part.part == "decoder")
    assert decoder.became == "int4 in groups of 32"
    assert 4.4 < decoder.bits < 4.6
    assert decoder.bytes_after < decoder.bytes_before / 5
    assert measures(report)["KL divergence, mean"] >= measures(report, "embedding")["KL divergence, mean"]


def test_w4_is_most_int4_and_some_int8_in_the_bits_it_asks_for(checkpoint, place):
    report = compressed(checkpoint, place, recipe="w4")

    (decoder,) = (part for part in report.parts if part.part == "decoder")
    assert decoder.became.startswith("int4")
    assert "int8" in decoder.became
    assert 4.4 < decoder.bits <= 4.6


def test_a_missed_gate_names_the_part_that_costs_most_and_writes_nothing(checkpoint, place):
    target = place / "refused"

    with pytest.raises(GateError, match=r"mean KL divergence is .*, the gate 1e-06; the decoder alone costs"):
        compress_checkpoint(checkpoint, target, config(place, recipe=str(place / "w4.toml"), max_kld=1e-6), QUIET)

    assert not target.exists()


def test_calibration_without_pictures_is_refused_with_the_part(checkpoint, place):
    with pytest.raises(
        ConfigError, match="vision: recipe modality is calibrated on pictures, and none of the . samples"
    ):
        compressed(checkpoint, place, samples="blind.jsonl")
    (place / "text.toml").write_text(W4 + REST)
    with pytest.raises(ConfigError, match="decoder: recipe text weighs modalities"):
        compressed(checkpoint, place, samples="blind.jsonl", recipe=str(place / "text.toml"))


def permuted(held: Quantized) -> Quantized:
    return replace(held, scales=np.roll(held.scales, 1, axis=0))


def coarser(held: Quantized) -> Quantized:
    true = torch.from_numpy(plain(held))
    return round_weight(true, Grid(bits=4, group_size=true.shape[1], scale_type="float32"))


@pytest.mark.parametrize(
    ("part", "edit", "complaint"),
    [
        ("vision", permuted, "vision: .*(scales are .* from those that fit|dB from its source)"),
        ("projector", plain, "projector: .* is left in float32, the recipe says 8 bits"),
        ("decoder", coarser, "decoder: .* is in 4 bits, a scale a row, the recipe says 4 bits, groups of 32"),
    ],
)
def test_a_planted_fault_is_refused_with_the_part_and_nothing_is_written(
    part: str, edit: Callable[[Quantized], Held], complaint: str, checkpoint: Path, place: Path, monkeypatch
) -> None:
    plain_compress, target = compression.compress, place / "planted"

    def planted(job: Job) -> Made:
        made = plain_compress(job)
        own = {name: edit(held) if isinstance(held, Quantized) else held for name, held in made.changed[part].items()}
        return replace(made, changed=made.changed | {part: own})

    monkeypatch.setattr(compression, "compress", planted)
    with pytest.raises(GateError, match=complaint):
        compress_checkpoint(checkpoint, target, config(place, recipe=str(place / "w4.toml")), QUIET)
    assert not target.exists()


def test_a_tied_head_that_is_stored_again_stays_tied_and_is_compressed_once(checkpoint, place, tmp_path):
    doubled = tmp_path / "doubled"
    shutil.copytree(checkpoint, doubled)
    tensors = load_file(doubled / "model.safetensors")
    save_file(tensors | {HEAD: tensors[TABLE]}, doubled / "model.safetensors")

    compressed(doubled, place, recipe=str(place / "nearest.toml"))

    opened = Checkpoint.open(place / "out")
    assert HEAD in Checkpoint.open(doubled).names()
    assert family_of(opened).read_spec(opened).decoder.tied
    assert isinstance(opened.held(TABLE), Quantized)
    assert HEAD not in opened.names()


def test_too_few_pictures_to_hold_one_out_are_measured_on_all_the_same(checkpoint, place, monkeypatch):
    plain_compress, asked = compression.compress, {"samples": "few.jsonl", "recipe": "w8"}
    report = compressed(checkpoint, place, **asked)

    def blinded(job: Job) -> Made:
        made = plain_compress(job)
        zeros = {name: np.zeros_like(plain(held)) for name, held in made.changed["vision"].items()}
        return replace(made, changed=made.changed | {"vision": zeros})

    monkeypatch.setattr(compression, "compress", blinded)
    with pytest.raises(GateError, match=r"the gate 0\.01; the vision alone costs"):
        compressed(checkpoint, place, **asked, max_kld=0.01)
    told = "5 samples, 3 with pictures, held out from few.jsonl; the 3 with pictures are too few for that"
    assert told in report.whole.inputs


def test_a_gate_is_refused_where_no_picture_shows_what_a_tower_costs(checkpoint, place):
    asked = {"samples": "blind.jsonl", "recipe": str(place / "nearest.toml")}
    with pytest.raises(ConfigError, match="none of 1 samples .* in the vision and the projector .* --max-kld"):
        compressed(checkpoint, place, **asked, max_kld=1.0)

    report = compressed(checkpoint, place, **asked)
    kept = compressed(checkpoint, place, samples="blind.jsonl", recipe=str(place / "kept.toml"), max_kld=1.0)

    assert "vision and the projector is not measured" in report.remarks[0]
    assert [part.part for part in report.parts if part.evidence is None] == ["vision", "projector"]
    assert not kept.remarks


def test_a_folder_of_something_else_is_refused_before_any_work(checkpoint, place):
    (place / "mine").mkdir()
    (place / "mine" / "letter.txt").write_text("keep me")

    with pytest.raises(BundleError, match="mine exists and is not a compressed checkpoint"):
        compress_checkpoint(checkpoint, place / "mine", CompressConfig(samples=place / "nowhere.jsonl"), QUIET)


def test_interrupted_work_goes_on_where_it_ended(checkpoint, place, monkeypatch):
    target, asked = place / "resumed", config(place, recipe=str(place / "w4.toml"))

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compression, "measure", fail)
        with pytest.raises(KeyboardInterrupt):
            compress_checkpoint(checkpoint, target, asked, QUIET)
    monkeypatch.setattr("triptych.compress.run.gptq", fail)  # all that is left to do needs none
    compress_checkpoint(checkpoint, target, asked, QUIET)

    held = Checkpoint.open(target).held(DECODER)
    assert isinstance(held, Quantized)
    assert held.bits == 4


def test_a_budget_of_bytes_is_kept_and_goes_where_it_helps(checkpoint, place):
    whole = compressed(checkpoint, place, recipe="w8")
    small = compressed(checkpoint, place, recipe=str(place / "w4.toml"))
    sizes = [sum(part.bytes_after for part in report.parts) for report in (small, whole)]
    budget = int(0.3 * sizes[0] + 0.7 * sizes[1])  # one of two layers in 8 bits, not both

    mixed = compressed(checkpoint, place, recipe=str(place / "w4.toml"), budget_bytes=budget)

    (decoder,) = (part for part in mixed.parts if part.part == "decoder")
    assert "int4" in decoder.became
    assert "int8" in decoder.became
    assert sizes[0] < sum(part.bytes_after for part in mixed.parts) <= budget
    assert measures(mixed)["KL divergence, mean"] < measures(small)["KL divergence, mean"]
