"""A compressed folder is read back number for number, opens in transformers, and is compiled as it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
import transformers

import checkpoints
from compressed import BESIDE, STEP, Compressed, compress, edited
from lowbits import random_weight
from triptych.compile import assemble, parts
from triptych.compile.assemble import compile_checkpoint
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.config import CompileConfig
from triptych.compile.families import family_of
from triptych.compile.graph import Store
from triptych.compile.join import rows
from triptych.compile.verify.weights import values
from triptych.compress import write
from triptych.compress.write import Source, write_checkpoint
from triptych.core.bundle import Bundle
from triptych.core.quantized import Quantized, dequantize, plain
from triptych.core.table import open_table
from triptych.errors import BundleError, CheckpointError, ConfigError

DOWN, PROJ = "model.text_model.layers.1.mlp.down_proj", "model.connector.modality_projection.proj"
KINDS = ("smolvlm", "llava", "idefics3")  # tied and fp32, untied and fp32, bf16
ARCHITECTURES = {
    "smolvlm": "SmolVLMForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[str, tuple[Compressed, Path]] = {}

    def of(kind: str) -> tuple[Compressed, Path]:
        if kind not in found:
            compressed = compress(kind, tmp_path_factory.getbasetemp())
            found[kind] = compressed, compressed.write(tmp_path_factory.mktemp("out") / kind)
        return found[kind]

    return of


@pytest.fixture(scope="module")
def bundle(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        found = assemble.prompts_for
        patch.setattr(assemble, "prompts_for", lambda *model: found(*model)[5:10])
        return compile_checkpoint(made("smolvlm")[1], tmp_path_factory.mktemp("made") / "b", CompileConfig())


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_read_back(kind: str, made: Any) -> None:
    compressed, folder = made(kind)
    checkpoint = Checkpoint.open(folder)

    assert checkpoint.names() == Checkpoint.open(compressed.source.folder).names()
    changed = {name: held for part in compressed.changes.values() for name, held in part.items()}
    for name in checkpoint.names():
        found, expected = checkpoint.held(name), changed.get(name, compressed.source.tensors[name]())
        assert isinstance(found, Quantized) == isinstance(expected, Quantized)
        np.testing.assert_array_equal(plain(found), plain(expected))
    compressed.check(folder)


def test_config_names_every_module_once(made: Any) -> None:
    compressed, folder = made("smolvlm")
    told = json.loads((folder / "config.json").read_text())["quantization_config"]

    targets = [target for group in told["config_groups"].values() for target in group["targets"]]
    assert len(targets) == len(set(targets))
    assert told["format"] == "mixed-precision"
    assert {group["format"] for group in told["config_groups"].values()} == {"pack-quantized", "int-quantized"}
    assert "lm_head" in told["ignore"]
    assert not set(targets) & set(told["ignore"])
    modules = {name.removesuffix(".weight") for part in compressed.changes.values() for name in part}
    ours = json.loads((folder / "triptych" / "config.json").read_text())["config_groups"].values()
    assert modules == {*targets, *(target for group in ours for target in group["targets"])}


def test_what_compressed_tensors_cannot_hold_is_plain_for_others(made: Any) -> None:
    """The first convolution and the table: in the main file as numbers, quantized in our own."""
    _, folder = made("smolvlm")
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        kernel = file.get_tensor("model.vision_model.embeddings.patch_embedding.weight")
        assert file.get_tensor("model.text_model.embed_tokens.weight").dtype == torch.float32
    held = Checkpoint.open(folder).held("model.vision_model.embeddings.patch_embedding.weight")
    assert isinstance(held, Quantized)
    np.testing.assert_array_equal(kernel.numpy(), dequantize(held))


@pytest.mark.reference
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_opens_in_transformers(kind: str, made: Any) -> None:
    """Logits equal those of the source whose weights are replaced, inputs of vision rounded by the same rule.

    To one part in a million of the greatest; none was seen to differ at all.
    """
    compressed, folder = made(kind)
    architecture = getattr(transformers, ARCHITECTURES[kind])
    shown = checkpoints.reference_inputs(
        compressed.source.folder, [checkpoints.user("What is this?", num_images=1)], [checkpoints.picture(40, 30)]
    )

    theirs = _logits(architecture.from_pretrained(folder, dtype=torch.float32), shown)
    ours = _logits(_fake_quantized(architecture, compressed), shown)

    assert np.abs(theirs - ours).max() <= 1e-6 * np.abs(ours).max()
    plain_logits = _logits(architecture.from_pretrained(compressed.source.folder, dtype=torch.float32), shown)
    assert np.abs(plain_logits - ours).max() > 0.01 * np.abs(ours).max()  # the test sees something


def _logits(model: Any, shown: Any) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(**shown.kwargs).logits.float())


def _fake_quantized(architecture: Any, compressed: Compressed) -> Any:
    """The source in transformers, every quantized weight replaced by what it stands for.

    Tables, heads and kernels are plain numbers there, in the model's type.
    """
    model = architecture.from_pretrained(compressed.source.folder, dtype=torch.float32)
    modules = dict(model.named_modules())
    for tensors in compressed.changes.values():
        for name, held in tensors.items():
            spelled = write._spelled(name.removesuffix(".weight"))
            module = next(modules[one] for one in reversed(spelled) if one in modules)
            is_shared = len(held.shape) == 2 and not name.removesuffix(".weight").endswith(write.TABLES)
            numbers = torch.from_numpy(dequantize(held))
            with torch.no_grad():
                module.weight.copy_(numbers if is_shared else numbers.to(getattr(torch, str(held.scales.dtype))))
            if held.input_scale is not None and isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(_rounding(held.input_scale))
    return model


def _rounding(scale: float) -> Any:
    return lambda module, inputs: (torch.clamp(torch.round(inputs[0] / scale), -128, 127) * scale,)


def test_auto_transcribes_and_never_rounds_again(bundle: Bundle, made: Any) -> None:
    compressed, _ = made("smolvlm")
    precisions = {part.name: part.precision for part in bundle.manifest.parts}
    assert precisions == {"embedding": "int8", "vision": "int8", "projector": "int4", "decoder": "int4"}
    changed = {name: held for part in compressed.changes.values() for name, held in part.items()}
    opened = ov.Core().read_model(bundle.file("decoder.xml"))
    nodes = {name: (node, own) for node in opened.get_ordered_ops() for name, own in rows(node)}
    for name, held in changed.items():
        if name.startswith("model.text_model.layers."):
            node, own = nodes[name.removeprefix("model.text_model.")]
            np.testing.assert_array_equal(values(node)[own], dequantize(held))
    projector = bundle.manifest.part("projector")
    assert projector is not None
    assert projector.fallbacks == ("3 bits lie in 4: 1 weights",)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_every_part_stands_in_the_graph(kind: str, made: Any) -> None:
    compressed, folder = made(kind)
    checkpoint = Checkpoint.open(folder)
    family = family_of(checkpoint)
    spec = family.read_spec(checkpoint)
    names = family.layout(checkpoint, spec).parts
    changed = {name: held for part in compressed.changes.values() for name, held in part.items()}
    seen = set()
    for part, weight in family.weights(checkpoint, spec).items():
        model = parts.build(part, spec, {part: weight}, Store("stored"))
        nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
        for own, name in names[part].items():
            if name in changed and own in nodes:
                expected = dequantize(changed[name])
                np.testing.assert_array_equal(values(nodes[own]).reshape(expected.shape), expected)
                seen.add(name)
    tables = {name for name in changed if name.endswith("embed_tokens.weight")} if not spec.decoder.tied else set()
    assert seen == changed.keys() - tables


def test_the_table_keeps_its_eight_bits(bundle: Bundle, made: Any) -> None:
    compressed, _ = made("smolvlm")
    (held,) = compressed.changes["embedding"].values()
    table = open_table(bundle.file("embedding.npy"))

    np.testing.assert_array_equal(table(np.arange(5, dtype=np.int32)), dequantize(held)[:5])
    assert bundle.file("embedding.npy").stat().st_size < held.codes.size * 1.2 + 128


def test_what_compress_said_goes_into_the_manifest(bundle: Bundle) -> None:
    manifest = bundle.manifest

    assert manifest.history[0] == STEP
    assert manifest.history[1].stage == "compile"
    assert manifest.evidence[-1] == BESIDE.compression.evidence[0]
    assert manifest.kv_policy == BESIDE.compression.kv_policy
    assert bundle.file("kv.npz").read_bytes() == b"statistics"


@pytest.mark.reference
def test_transformers_judges_the_compiled_folder(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = assemble.prompts_for
    monkeypatch.setattr(assemble, "prompts_for", lambda *model: found(*model)[5:10])

    made_of = compile_checkpoint(made("smolvlm")[1], tmp_path / "b", CompileConfig(verify="reference"))

    judged = [one.subject for one in made_of.manifest.evidence if "transformers" in one.twin]
    assert judged == ["preprocessing", "vision", "projector", "decoder", "whole"]
    with pytest.raises(ConfigError, match="transformers reads it rounded to bfloat16"):
        compile_checkpoint(made("idefics3")[1], tmp_path / "c", CompileConfig(verify="reference"))


def permuted(tensors: dict[str, Any]) -> None:
    tensors[f"{DOWN}.weight_scale"] = tensors[f"{DOWN}.weight_scale"].roll(1, 0).contiguous()


def unquantized(tensors: dict[str, Any]) -> None:
    shape = tensors[f"{PROJ}.weight_shape"].tolist()
    for kind in ("packed", "scale", "shape"):
        tensors.pop(f"{PROJ}.weight_{kind}")
    tensors[f"{PROJ}.weight"] = torch.ones(shape)


def moved(tensors: dict[str, Any]) -> None:
    tensors["model.vision_model.post_layernorm.bias"] += 1


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (permuted, f"decoder: {DOWN}.weight is not as"),
        (unquantized, f"projector: {PROJ}.weight is not as"),
        (moved, "vision: model.vision_model.post_layernorm.bias is not as"),
    ],
)
def test_a_folder_changed_after_it_was_compressed_is_refused_with_the_part(
    edit: Any, complaint: str, made: Any, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(made("smolvlm")[1], tmp_path / "copy"))
    edited(copied, edit)

    with pytest.raises(CheckpointError, match=complaint) as refused:
        compile_checkpoint(copied, tmp_path / "bundle", CompileConfig())
    assert "compress the model again" in str(refused.value.hint)


def test_another_group_size_than_was_compressed_is_refused_with_the_part(made: Any, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(made("smolvlm")[1], tmp_path / "copy"))
    told = json.loads((copied / "config.json").read_text())
    for group in told["quantization_config"]["config_groups"].values():
        group["weights"]["group_size"] = 32 if group["weights"]["num_bits"] == 4 else group["weights"]["group_size"]
    (copied / "config.json").write_text(json.dumps(told))

    with pytest.raises(CheckpointError, match=r"decoder: .*: weight_scale has shape .* groups of 32 need"):
        compile_checkpoint(copied, tmp_path / "bundle", CompileConfig())


def test_large_checkpoints_are_cut_into_shards(tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed, _ = made("smolvlm")
    monkeypatch.setattr(write, "SHARD_BYTES", 20_000)

    folder = compressed.write(tmp_path / "out")

    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert (folder / "model.safetensors.index.json").is_file()
    compressed.check(folder)
    assert Checkpoint.open(folder).names() == Checkpoint.open(compressed.source.folder).names()


def source_of(tmp_path: Path, **tensors: Any) -> Source:
    return Source(folder=tmp_path, config={}, tensors={name: lambda v=value: v for name, value in tensors.items()})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"m.weight": random_weight(4)}, r"decoder: m.weight has shape \(4, 64\), in the source \(8, 64\)"),
        ({"n.weight": random_weight()}, "decoder: .* has no tensor n.weight"),
        ({"m.weight": random_weight(scale_type="float32")}, "m.weight: scales in float32 are not the same in bfloat16"),
    ],
)
def test_what_does_not_fit_its_source_is_refused(changes: Any, complaint: str, tmp_path: Path) -> None:
    import ml_dtypes

    source = source_of(tmp_path, **{"m.weight": np.zeros((8, 64), np.float32), "norm": np.ones(4, ml_dtypes.bfloat16)})

    with pytest.raises(CheckpointError, match=complaint):
        write_checkpoint(source, tmp_path / "out", {"decoder": changes}, BESIDE)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    source = source_of(tmp_path, **{"m.weight": np.zeros((8, 64), np.float32)})

    with pytest.raises(BundleError, match="is not a compressed checkpoint"):
        write_checkpoint(source, tmp_path, {}, BESIDE)


def test_a_kernel_of_a_panel_is_written_for_us_alone(tmp_path: Path) -> None:
    held = replace(random_weight(6, 36, bits=8, size=None, scale_type="float32"), shape=(6, 4, 3, 3))
    tensors = {"panel.vision.stem.weight": np.zeros((6, 4, 3, 3), np.float32), "m.weight": np.ones((8, 64), np.float32)}
    (tmp_path / "in").mkdir()

    write_checkpoint(
        source_of(tmp_path / "in", **tensors), tmp_path / "out", {"vision": {"panel.vision.stem.weight": held}}, BESIDE
    )

    found = Checkpoint.open(tmp_path / "out")
    assert found.names() == set(tensors)
    np.testing.assert_array_equal(plain(found.held("panel.vision.stem.weight")), dequantize(held))
