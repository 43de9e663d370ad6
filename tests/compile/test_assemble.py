"""From a checkpoint's folder to a bundle: all or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import faults
from checkpoints import make
from triptych.compile import assemble, parts
from triptych.compile.assemble import compile_checkpoint
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.config import CompileConfig, fingerprint
from triptych.compile.families import family_of
from triptych.compile.verify import Twin, Verification, against, gates
from triptych.compile.verify.gates import at_most
from triptych.core.bundle import Bundle, check_digests, open_bundle
from triptych.errors import BackendError, BundleError, CheckpointError, ConfigError, GateError
from triptych.media.text import Text


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("smolvlm", tmp_path_factory.getbasetemp(), 0)


@pytest.fixture(scope="module")
def bundle(smolvlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    asked = CompileConfig(weights="int8", parts={"projector": "bf16", "embedding": "fp16"})
    return compile_checkpoint(smolvlm, tmp_path_factory.mktemp("made") / "bundle", asked)


@pytest.fixture
def copied(smolvlm: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(shutil.copytree(smolvlm, tmp_path / "checkpoint"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts in place of all."""
    found = assemble.prompts_for
    monkeypatch.setattr(assemble, "prompts_for", lambda *model: found(*model)[5:10])


def test_a_bundle_opens_again_with_every_part_and_file(bundle: Bundle) -> None:
    opened = open_bundle(bundle.path, verify=check_digests)

    assert opened.manifest == bundle.manifest
    precisions = {part.name: part.precision for part in opened.manifest.parts}
    assert precisions == {"embedding": "fp16", "vision": "int8", "projector": "bf16", "decoder": "int8"}
    assert {file.path for file in opened.manifest.files} == {
        *(f"{part}.{kind}" for part in ("vision", "projector", "decoder") for kind in ("xml", "bin")),
        "embedding.npy",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert len(opened.manifest.weights_digest) == 64
    assert opened.manifest.history[0].stage == "compile"


def test_every_part_and_the_whole_carry_their_evidence(bundle: Bundle) -> None:
    subjects = [evidence.subject for evidence in bundle.manifest.evidence]

    assert subjects == ["vision", "vision", "projector", "projector", "decoder", "decoder", "whole", "served"]
    for evidence in bundle.manifest.evidence:
        assert any(measure.at_least is not None or measure.at_most is not None for measure in evidence.measures)
        assert all(measure.is_met for measure in evidence.measures)


def test_the_table_is_the_checkpoints_own_in_the_type_asked_for(bundle: Bundle, smolvlm: Path) -> None:
    checkpoint = Checkpoint.open(smolvlm)
    family = family_of(checkpoint)
    true = family.weights(checkpoint, family.read_spec(checkpoint))["decoder"]("embed_tokens.weight")

    held = np.load(bundle.file("embedding.npy"))

    np.testing.assert_array_equal(held, true.astype(np.float16))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"weights": "int3"}, "choose auto, fp32, bf16, fp16, int8, int4"),
        ({"parts": {"audio": "int4"}}, "the parts are vision, projector, decoder, embedding"),
        ({"parts": {"vision": "int2"}}, "it can be held in fp32, bf16, fp16, int8, int4"),
        ({"parts": {"embedding": "int8"}}, "it can be held in fp32, fp16, bf16"),
        ({"verify": "hope"}, "choose graph or reference"),
        ({"group_size": 48}, "group size 48"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_with_what_can(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CompileConfig(**asked)

    assert named in str(refused.value)


def test_auto_takes_the_smallest_precision_that_passes_and_says_what_was_refused(
    smolvlm: Path, tmp_path: Path, quick: None
) -> None:
    made = compile_checkpoint(smolvlm, tmp_path / "bundle", CompileConfig(parts={"vision": "fp32"}))

    decoder = made.manifest.part("decoder")
    assert decoder is not None
    assert decoder.precision == "int8"  # a random decoder says something else in int4
    assert any("int4 was refused" in sentence and "kl_mean_nats" in sentence for sentence in decoder.fallbacks)
    assert made.manifest.history[0].metrics["refused decoder int4"] == 1.0


def test_auto_gives_up_the_coarsest_choice_when_only_the_whole_misses(
    smolvlm: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_check, seen = Verification.check_whole, []

    def check(self: Verification) -> Any:
        seen.append({part: one.precision for part, one in self._tested.parts.items()})
        if len(seen) == 1:
            raise GateError("the whole is not equal enough")
        return true_check(self)

    monkeypatch.setattr(Verification, "check_whole", check)
    made = compile_checkpoint(smolvlm, tmp_path / "bundle", CompileConfig())

    assert len(seen) == 2
    assert len(seen[0].items() - seen[1].items()) == 1
    assert sum("not equal enough" in why for part in made.manifest.parts for why in part.fallbacks) == 1


def test_a_part_that_misses_its_gate_leaves_nothing_behind(
    smolvlm: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, faults.tensors(vision__embeddings__position_embedding__weight=faults.rolled))
    (tmp_path / "out").mkdir()

    with pytest.raises(GateError, match="vision in int4, held against") as refused:
        compile_checkpoint(smolvlm, tmp_path / "out" / "bundle", CompileConfig(weights="int4", group_size=32))

    assert "--parts vision=int8" in str(refused.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_refused_compile_leaves_the_older_bundle_as_it_was(
    smolvlm: Path, bundle: Bundle, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = shutil.copytree(bundle.path, tmp_path / "bundle")
    monkeypatch.setattr(gates, "SERVED", {"kl_mean_nats": at_most(-1.0)})

    with pytest.raises(GateError, match="served in fp32"):
        compile_checkpoint(smolvlm, old, CompileConfig(weights="fp32"))

    assert open_bundle(old, verify=check_digests).manifest == bundle.manifest


def test_the_command_line_refuses_a_fault_with_its_exit_code(
    smolvlm: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from triptych.cli import main

    plant(monkeypatch, faults.inside(faults.vit, "normalized", faults.colours_swapped))

    with pytest.raises(SystemExit) as left:
        main(["compile", str(smolvlm), "-o", str(tmp_path / "bundle"), "--weights", "int8"])

    assert left.value.code == GateError.exit_code
    told = capsys.readouterr().err
    assert "vision in int8" in told
    assert "the gate is at least" in told
    assert not (tmp_path / "bundle").exists()


def test_what_is_not_a_bundle_is_not_replaced(smolvlm: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(BundleError, match="is not a bundle"):
        compile_checkpoint(smolvlm, tmp_path, CompileConfig())

    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_without_a_tokenizer_the_way_to_make_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")

    with pytest.raises(CheckpointError, match="has no tokenizer.json") as refused:
        assemble.write_text(tmp_path, tmp_path)

    assert "save_pretrained" in str(refused.value)


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_the_chat_template_is_found_wherever_the_checkpoint_keeps_it(place: str, copied: Path, tmp_path: Path) -> None:
    template = (copied / "chat_template.jinja").read_text()
    (copied / "chat_template.jinja").unlink()
    path = copied / place
    if place.endswith(".json"):
        content = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(content | {"chat_template": template}))
    else:
        path.write_text(template)
    (tmp_path / "bundle").mkdir()

    assemble.write_text(copied, tmp_path / "bundle")

    assert (tmp_path / "bundle" / "chat_template.jinja").read_text() == template
    assert Text.open(tmp_path / "bundle", placeholder="<image>")


def test_the_checkpoints_sampling_is_kept_and_greedy_ones_change_nothing(copied: Path) -> None:
    path = copied / "generation_config.json"

    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 2}))
    assert assemble._generation(Checkpoint.open(copied)) == {"temperature": 0.6, "top_k": 20.0}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert assemble._generation(Checkpoint.open(copied)) == {}


def test_a_fingerprint_changes_with_the_files_and_the_wishes(copied: Path) -> None:
    first = fingerprint(copied, CompileConfig())

    assert fingerprint(copied, CompileConfig()) == first
    assert fingerprint(copied, CompileConfig(weights="int8")) != first
    (copied / "generation_config.json").write_text("{}")
    assert fingerprint(copied, CompileConfig()) != first


def test_the_reference_is_missed_before_any_work(
    smolvlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="needs torch and transformers") as refused:
        compile_checkpoint(smolvlm, tmp_path / "bundle", CompileConfig(verify="reference"))

    assert "pip install '.[reference]'" in str(refused.value)


@pytest.mark.reference
def test_a_model_that_transformers_does_not_know_is_refused_before_any_work(copied: Path, tmp_path: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "triptych_mini"}))

    with pytest.raises(BackendError, match="transformers does not know"):
        compile_checkpoint(copied, tmp_path / "bundle", CompileConfig(verify="reference"))


@pytest.mark.reference
def test_a_model_that_sees_nothing_compiles_and_is_held_against_transformers(smolvlm: Path, tmp_path: Path) -> None:
    source = decoder_alone(smolvlm, tmp_path / "text")

    made = compile_checkpoint(source, tmp_path / "bundle", CompileConfig(weights="bf16", verify="reference"))

    assert [part.name for part in made.manifest.parts] == ["embedding", "decoder"]
    assert [one.subject for one in made.manifest.evidence] == ["decoder", "decoder", "whole", "served", "decoder"]
    with pytest.raises(ConfigError, match="does not have"):
        compile_checkpoint(source, tmp_path / "other", CompileConfig(parts={"vision": "int8"}))


def test_a_twin_cut_into_windows_says_the_same_as_whole(smolvlm: Path) -> None:
    checkpoint = Checkpoint.open(smolvlm)
    family = family_of(checkpoint)
    spec = family.read_spec(checkpoint)
    weights = family.weights(checkpoint, spec)
    prompts = [np.random.default_rng(n).standard_normal((n, spec.decoder.hidden)).astype(np.float32) for n in (1, 40)]

    judged = [np.arange(len(prompt))[::2] for prompt in prompts]

    whole = Twin(spec=spec, weights=weights).logits(prompts, judged)
    cut = Twin(spec=spec, weights=weights, window_bytes=1).logits(prompts, judged)

    for a, b in zip(whole, cut, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], Any]) -> None:
    """Break what is compiled, and neither its twin nor the audit of its weights."""
    monkeypatch.setattr(assemble, "parts", SimpleNamespace(names=parts.names, build=fault(parts.build)))


def decoder_alone(tokens: Path, target: Path) -> Path:
    """A tiny Llama with the tokenizer of another checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = json.loads((tokens / "config.json").read_text())["text_config"]["vocab_size"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokens / name, target / name)
    return target
