"""Reading model folders: whole, in shards, GGUF, and what is said of broken ones."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from numpy_decoder import random_weights, spec_of
from triptych.compile.checkpoint import INDEX, Checkpoint
from triptych.compile.gguf import GgufFile
from triptych.core.quantized import Quantized, dequantize
from triptych.errors import CheckpointError


def tensors(count: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"model.layers.{i}.mlp.up_proj.weight": rng.standard_normal((3, 5)).astype(np.float32) for i in range(count)
    }


def whole(folder: Path, content: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(content, folder / "model.safetensors")
    return folder


def sharded(folder: Path, content: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    placed = {}
    for i, name in enumerate(content):
        shard = f"model-{i % 2}.safetensors"
        placed[name] = shard
    for shard in set(placed.values()):
        save_file({name: content[name] for name in content if placed[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


@pytest.mark.parametrize("layout", [whole, sharded])
def test_every_tensor_comes_back_as_it_was_stored(layout, tmp_path):
    content = tensors() | {
        "half": np.arange(3, dtype=np.float16),
        "brain": np.arange(4).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 7), np.float32),
        "scalar": np.array(3, np.int64),
    }
    checkpoint = Checkpoint.open(layout(tmp_path, content))

    assert checkpoint.names() == content.keys()
    assert checkpoint.config == {"model_type": "llama"}
    for name, values in content.items():
        found = checkpoint.tensor(name)
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
        np.testing.assert_array_equal(found, values)


def test_tensors_are_mapped_not_copied(tmp_path):
    checkpoint = Checkpoint.open(whole(tmp_path, tensors()))
    name = "model.layers.0.mlp.up_proj.weight"

    assert not checkpoint.tensor(name).flags.owndata
    assert not checkpoint.tensor(name).flags.writeable


def test_a_missing_tensor_is_named_with_its_neighbours(tmp_path):
    checkpoint = Checkpoint.open(whole(tmp_path, tensors()))

    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.9\.mlp\.up_proj\.weight") as caught:
        checkpoint.tensor("model.layers.9.mlp.up_proj.weight")

    assert "model.layers.3.mlp.up_proj.weight" in caught.value.hint


def test_a_missing_shard_is_named(tmp_path):
    (sharded(tmp_path, tensors()) / "model-1.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 shards: model-1\.safetensors"):
        Checkpoint.open(tmp_path)


def test_an_index_and_shards_that_disagree_are_refused(tmp_path):
    index = sharded(tmp_path, tensors()) / INDEX
    content = json.loads(index.read_text())
    name, shard = next(iter(content["weight_map"].items()))

    content["weight_map"]["lost"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="puts lost in model-0"):
        Checkpoint.open(tmp_path)

    del content["weight_map"]["lost"], content["weight_map"][name]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"holds {name} and 0 more that"):
        Checkpoint.open(tmp_path)


def test_an_index_may_not_lead_out_of_its_folder(tmp_path):
    index = sharded(tmp_path, tensors()) / INDEX
    index.write_text(json.dumps({"weight_map": {"a": "../model-0.safetensors"}}))

    with pytest.raises(CheckpointError, match="outside its folder"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_truncated_file_is_refused(kept, tmp_path):
    file = whole(tmp_path, tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])

    with pytest.raises(CheckpointError, match="cut short|its header promises"):
        Checkpoint.open(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    whole(tmp_path, tensors())
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")

    with pytest.raises(CheckpointError, match="LFS"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "F8_E4M3"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}, "4 numbers of F32 in 4 bytes"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
        (3, "no safetensors file"),
    ],
)
def test_a_wrong_header_is_refused(entry, complaint, tmp_path):
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))

    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_config_that_is_no_object_is_refused(content, tmp_path):
    (whole(tmp_path, tensors()) / "config.json").write_text(content)

    with pytest.raises(CheckpointError, match="config.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ([], "holds no model.safetensors"),
        (["pytorch_model.bin"], "pickles only"),
        (["a.gguf", "b.gguf"], "holds 2 .*gguf"),
        (["model.safetensors"], "cut short"),
    ],
)
def test_a_folder_without_a_model_says_what_it_holds(files, complaint, tmp_path):
    for name in files:
        (tmp_path / name).touch()

    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint.open(tmp_path)


def test_a_path_that_is_nothing_or_no_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()

    for name, complaint in (("gone", "does not exist"), ("notes.txt", "not a model folder")):
        with pytest.raises(CheckpointError, match=complaint):
            Checkpoint.open(tmp_path / name)


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────────────────

SPEC = spec_of(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, tied=True)
THEIRS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes queries and keys."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **facts: float) -> None:
    writer = gguf.GGUFWriter(path, str(facts.pop("arch", "llama")))
    writer.add_block_count(SPEC.num_layers)
    writer.add_context_length(SPEC.max_positions)
    writer.add_embedding_length(SPEC.hidden)
    writer.add_feed_forward_length(SPEC.intermediate)
    writer.add_head_count(SPEC.num_heads)
    writer.add_head_count_kv(SPEC.num_kv_heads)
    writer.add_layer_norm_rms_eps(SPEC.norm_eps)
    writer.add_rope_freq_base(SPEC.rope.theta)
    writer.add_token_list(["a", "b"])
    writer.add_eos_token_id(2)
    if "rope_scaling" in facts:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(facts["rope_scaling"])
    for name, values in random_weights(SPEC).items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            theirs = f"blk.{layer}.{THEIRS[rest.removesuffix('.weight')]}.weight"
        else:
            theirs = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
        heads = {"q_proj": SPEC.num_heads, "k_proj": SPEC.num_kv_heads}.get(name.split(".")[-2])
        values = permuted(values, heads) if heads else values
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(theirs, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_reads_as_its_hugging_face_twin(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    checkpoint = Checkpoint.open(tmp_path)

    weights = random_weights(SPEC)
    assert checkpoint.names() == {f"model.{name}" for name in weights}
    for name, values in weights.items():
        np.testing.assert_array_equal(checkpoint.tensor(f"model.{name}"), values)


@pytest.mark.parametrize(("kind", "steps"), [("F16", 2048), ("Q8_0", 127), ("Q4_1", 15)])
def test_llama_cpps_block_formats_are_unpacked(kind, steps, tmp_path):
    write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")

    for name, values in random_weights(SPEC).items():
        found = checkpoint.tensor(f"model.{name}")
        assert found.dtype == np.float32
        assert np.abs(found - values).max() <= np.ptp(values) / steps


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q8_0", 8)])
def test_even_blocks_are_read_without_another_rounding(kind, bits, tmp_path):
    """Rows of queries and keys, which llama.cpp reorders, come back in order with their scales."""
    quantization = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "m.gguf", quantization)
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")

    for name, numbers in random_weights(SPEC).items():
        found = checkpoint.held(f"model.{name}")
        if numbers.ndim == 1:
            assert isinstance(found, np.ndarray)
            continue
        assert isinstance(found, Quantized)
        assert (found.bits, found.group_size) == (bits, 32)
        expected = gguf.quants.dequantize(gguf.quants.quantize(numbers, quantization), quantization)
        np.testing.assert_array_equal(dequantize(found), expected)
    assert checkpoint.remarks == ()


def test_uneven_blocks_are_numbers_and_said_so(tmp_path):
    write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q4_1)
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")

    assert isinstance(checkpoint.held("model.embed_tokens.weight"), np.ndarray)
    (remark,) = checkpoint.remarks
    assert remark == "15 tensors lie in Q4_1, whose blocks have no whole zero point: read as fp32, and rounded anew"


def test_a_gguf_files_facts_become_a_config(tmp_path):
    write_gguf(tmp_path / "m.gguf", rope_scaling=4.0)
    config = Checkpoint.open(tmp_path).config

    assert config["rms_norm_eps"] == pytest.approx(SPEC.norm_eps)
    expected = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "eos_token_id": 2,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected


def test_the_tokenizers_own_facts_are_kept(tmp_path):
    write_gguf(tmp_path / "m.gguf")

    assert GgufFile(tmp_path / "m.gguf").metadata["tokenizer.ggml.tokens"] == ["a", "b"]


def test_a_config_beside_a_gguf_file_goes_before_its_facts(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')

    assert Checkpoint.open(tmp_path).config == {"model_type": "mine"}


def test_other_architectures_in_gguf_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", arch="gemma")

    with pytest.raises(CheckpointError, match="'gemma' model"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kept", [0, 3, 30, 700, -9000])
def test_a_truncated_gguf_file_is_refused(kept, tmp_path):
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:kept])

    with pytest.raises(CheckpointError, match="not a whole GGUF file|cut short"):
        Checkpoint.open(tmp_path)
