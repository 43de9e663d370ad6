"""Families read what real checkpoints say, in old and new words, and refuse by name what is not built."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import KINDS, make
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import FAMILIES, family_of, idefics3
from triptych.compile.families.section import Section
from triptych.compile.families.text import read_decoder, text_section
from triptych.compile.families.tower import read_tower, vision_section
from triptych.core.spec import DecoderSpec, ModelSpec, RopeSpec
from triptych.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture
def remade(root: Path, tmp_path: Path) -> Callable[..., Checkpoint]:
    """A made checkpoint with its config, pictures' facts or tensors changed."""

    def build(
        kind: str,
        *,
        config: Callable[[dict], object] = lambda found: None,
        pictures: Callable[[dict], object] = lambda found: None,
        tensors: Callable[[Tensors], Tensors] = lambda found: found,
    ) -> Checkpoint:
        folder = tmp_path / "checkpoint"
        shutil.copytree(make(kind, root, 0), folder)
        for name, change in (("config.json", config), ("preprocessor_config.json", pictures)):
            found = json.loads((folder / name).read_text())
            change(found)
            (folder / name).write_text(json.dumps(found))
        held = tensors(load_file(folder / "model.safetensors"))
        save_file({name: values.clone() for name, values in held.items()}, folder / "model.safetensors")
        return Checkpoint.open(folder)

    return build


def read(checkpoint: Checkpoint) -> ModelSpec:
    """Both halves of a family: the spec, and that every tensor has its place."""
    family = family_of(checkpoint)
    spec = family.read_spec(checkpoint)
    family.weights(checkpoint, spec)
    return spec


def put(path: str, value: object) -> Callable[[dict], None]:
    """Set one value of a nested config, or drop it where `value` is ...."""

    def change(found: dict) -> None:
        *outer, last = path.split(".")
        for key in outer:
            found = found[key]
        if value is ...:
            found.pop(last, None)
        else:
            found[last] = value

    return change


def both(*changes: Callable[[dict], None]) -> Callable[[dict], None]:
    def change(found: dict) -> None:
        for each in changes:
            each(found)

    return change


# ── which family ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_model_type_is_refused_with_the_known_ones(remade):
    with pytest.raises(CheckpointError, match="no family reads model type 'qwen9_vl'") as refused:
        family_of(remade("llava", config=put("model_type", "qwen9_vl")))
    for family in FAMILIES:
        for model_type in family.model_types:
            assert model_type in str(refused.value.hint)


def test_no_model_type_belongs_to_two_families():
    known = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(known) == len(set(known))


# ── every fact ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_smolvlm_is_read_to_the_last_fact(root: Path):
    spec = read(Checkpoint.open(make("smolvlm", root, 0)))
    assert spec.family == "idefics3"
    assert (spec.vision.num_layers, spec.vision.num_tokens, spec.vision.post_norm) == (2, 16, True)
    assert (spec.vision.class_token, spec.vision.activation) == (False, "gelu_tanh")
    assert (spec.projector.kind, spec.projector.num_tokens, spec.projector.shuffle) == ("pixel_shuffle", 4, 2)
    assert (spec.image.tiling, spec.image.tile_size, spec.image.tokens_per_tile) == ("split", 32, 4)
    assert (spec.image.longest_edge, spec.image.resample, spec.image.placeholder) == (128, "lanczos", "<image>")
    assert spec.decoder.tied
    assert len(spec.eos_ids) == 2


def test_llava_runs_all_layers_but_the_last_and_drops_the_class_token(root: Path):
    spec = read(Checkpoint.open(make("llava", root, 0)))
    assert (spec.vision.num_layers, spec.vision.class_token, spec.vision.first_row) == (2, True, 1)
    assert (spec.vision.num_tokens, spec.vision.pre_norm, spec.vision.patch_bias) == (16, True, False)
    assert (spec.image.tiling, spec.image.fit, spec.image.resample) == ("one", "shortest_crop", "bicubic")
    assert spec.projector.num_extra == 0


def test_llava_with_siglip_and_qwen2_keeps_every_row_of_the_last_layer(root: Path):
    spec = read(Checkpoint.open(make("llava-qwen2", root, 0)))
    assert (spec.vision.num_layers, spec.vision.class_token, spec.vision.first_row) == (2, False, 0)
    assert (spec.image.fit, spec.decoder.qkv_bias, spec.decoder.tied) == ("squash", True, True)


def test_llava_next_has_grids_and_a_newline(root: Path):
    spec = read(Checkpoint.open(make("llava-next", root, 0)))
    assert (spec.image.tiling, spec.image.has_newline) == ("anyres", True)
    assert spec.image.grids[0] == (28, 56)
    assert (spec.projector.num_extra, spec.decoder.head_dim, spec.decoder.sliding_window) == (1, 32, None)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kinds_decoder_is_as_transformers_reads_it(root: Path, kind: str):
    from transformers import AutoConfig

    folder = make(kind, root, 0)
    assert_same(read(Checkpoint.open(folder)).decoder, AutoConfig.from_pretrained(folder).text_config)


def assert_same(ours: DecoderSpec, theirs) -> None:
    assert ours.num_layers == theirs.num_hidden_layers
    assert (ours.hidden, ours.intermediate) == (theirs.hidden_size, theirs.intermediate_size)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert (ours.vocab_size, ours.max_positions) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


# the text configs of real checkpoints, which leave most keys out
REAL_TEXTS = {
    "llava-1.5-7b": {
        "model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064,
    },
    "llava-v1.6-mistral-7b": {
        "model_type": "mistral", "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "vocab_size": 32064,
    },
    "llava-interleave-qwen-0.5b": {
        "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "rope_theta": 1000000.0, "sliding_window": 32768,
        "max_window_layers": 21, "tie_word_embeddings": True, "vocab_size": 152000,
    },
    "SmolVLM-256M": {
        "model_type": "llama", "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536,
        "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pixel_shuffle_factor": 4, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "use_resampler": False, "vocab_size": 49280,
    },
    "nothing but a name": {"model_type": "llama"},
    "nothing at all": {},
    "mistral-7b-v0.1 with its window": {"model_type": "mistral", "max_position_embeddings": 32768},
    "qwen3": {"model_type": "qwen3", "hidden_size": 1024, "num_key_value_heads": 8, "num_attention_heads": 16},
}  # fmt: skip


@pytest.mark.parametrize("name", REAL_TEXTS)
def test_keys_that_a_real_text_config_leaves_out_mean_what_transformers_takes_them_for(name: str):
    from transformers import CONFIG_MAPPING

    said = REAL_TEXTS[name]
    ours = read_decoder(text_section(Section("text_config", copy.deepcopy(said))), tied=False)
    assert_same(ours, CONFIG_MAPPING[said.get("model_type", "llama")](**copy.deepcopy(said)))


@pytest.mark.parametrize("model_type", ["clip_vision_model", "siglip_vision_model"])
def test_keys_that_a_vision_config_leaves_out_mean_what_transformers_takes_them_for(model_type: str):
    from transformers import CONFIG_MAPPING

    section = vision_section(Section("config.json", {"vision_config": {"model_type": model_type}}), model_type)
    colours = Section("colours", {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    ours = read_tower(section, feature_layer=-1, first_row=0, colours=colours)
    theirs = CONFIG_MAPPING[model_type]()
    assert (ours.hidden, ours.intermediate) == (theirs.hidden_size, theirs.intermediate_size)
    assert (ours.num_heads, ours.num_layers) == (theirs.num_attention_heads, theirs.num_hidden_layers)
    assert (ours.image_size, ours.patch, ours.norm_eps) == (theirs.image_size, theirs.patch_size, theirs.layer_norm_eps)


# config.json and preprocessor_config.json of published models, as far as they speak of what we read; and what follows
PUBLISHED = {
    "SmolVLM-256M-Instruct": (
        {
            "model_type": "idefics3", "image_token_id": 49190, "scale_factor": 4, "tie_word_embeddings": False,
            "text_config": REAL_TEXTS["SmolVLM-256M"],
            "vision_config": {
                "hidden_size": 768, "image_size": 512, "intermediate_size": 3072, "model_type": "idefics3",
                "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 16, "use_base_siglip": True,
                "max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048},
            },
        },
        {
            "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": True, "do_pad": True,
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "max_image_size": {"longest_edge": 512},
            "resample": 1, "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 2048},
        },
        {"tokens_per_tile": 64, "tile_size": 512, "tiling": "split", "longest_edge": 2048, "resample": "lanczos"},
    ),
    "SmolVLM2-2.2B-Instruct, which leaves out what is usual": (
        {
            "model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 3,
            "text_config": {"model_type": "llama", "hidden_size": 2048, "vocab_size": 49280, "head_dim": 64},
            "vision_config": {
                "image_size": 384, "intermediate_size": 4304, "model_type": "smolvlm_vision", "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
        {
            "image_processor_type": "SmolVLMImageProcessor", "max_image_size": {"longest_edge": 384},
            "size": {"longest_edge": 1536},
        },
        {"tokens_per_tile": 81, "tile_size": 384, "tiling": "split", "longest_edge": 1536, "resample": "lanczos"},
    ),
    "Idefics3-8B-Llama3": (
        {
            "model_type": "idefics3", "image_token_id": 128257, "scale_factor": 2,
            "text_config": {"model_type": "llama", "vocab_size": 128259, "num_key_value_heads": 8, "rope_theta": 5e5},
            "vision_config": {
                "hidden_size": 1152, "image_size": 364, "intermediate_size": 4304, "model_type": "idefics3",
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
            },
        },
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 1456}},
        {"tokens_per_tile": 169, "tile_size": 364, "tiling": "split", "longest_edge": 1456, "resample": "lanczos"},
    ),
    "llava-1.5-7b-hf": (
        {
            "model_type": "llava", "image_token_index": 32000, "text_config": REAL_TEXTS["llava-1.5-7b"],
            "vision_config": {
                "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
                "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
            },
        },
        {
            "image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 336, "width": 336},
            "size": {"shortest_edge": 336}, "resample": 3,
        },
        {"tokens_per_tile": 576, "tile_size": 336, "tiling": "one", "fit": "shortest_crop", "resample": "bicubic"},
    ),
    "llava-v1.6-mistral-7b-hf, its tower left to the defaults": (
        {
            "model_type": "llava_next", "image_token_index": 32000,
            "text_config": REAL_TEXTS["llava-v1.6-mistral-7b"],
        },
        {
            "image_processor_type": "LlavaNextImageProcessor", "crop_size": {"height": 336, "width": 336},
            "size": {"shortest_edge": 336}, "aspect_ratio_setting": "anyres",
        },
        {"tokens_per_tile": 576, "tile_size": 336, "tiling": "anyres", "has_newline": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_become_the_tiles_and_tokens_they_are_known_for(name: str, tmp_path: Path):
    config, pictures, known = PUBLISHED[name]
    token_id = config.get("image_token_id") or config["image_token_index"]
    added = {"added_tokens": [{"id": token_id, "content": "<image>", "special": True}]}
    for file, content in (("tokenizer.json", added), ("preprocessor_config.json", pictures)):
        (tmp_path / file).write_text(json.dumps(content))
    names = ["model.text_model.embed_tokens.weight", "language_model.model.embed_tokens.weight", "lm_head.weight"]
    checkpoint = Checkpoint(tmp_path, config, dict.fromkeys(names))
    spec = family_of(checkpoint).read_spec(checkpoint)
    assert {fact: getattr(spec.image, fact) for fact in known} == known
    assert spec.projector.num_tokens == known["tokens_per_tile"]
    assert spec.eos_ids == (2,)


def test_both_spellings_of_rotary_scaling_are_read_alike():
    llama3 = {
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    expected = RopeSpec(
        theta=5e5, scaling="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192
    )
    for said in (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **llama3}},
    ):
        assert read_decoder(text_section(Section("text_config", said)), tied=False).rope == expected


# ── where tensors lie ───────────────────────────────────────────────────────────────────────────────────────────

LAYOUTS = {
    "before 4.52, as the published LLaVA": {"vision_tower.": "vision_tower.vision_model."},
    "4.52 to 4.57": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.vision_model.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "image_newline": "model.image_newline",
    },
    "flat tower under model": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "image_newline": "model.image_newline",
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llava", "llava-next", "llava-qwen2"])
def test_llava_is_found_in_every_layout_that_was_ever_written(remade, root: Path, kind: str, layout: str):
    def moved(found: Tensors) -> Tensors:
        return {rename(name, LAYOUTS[layout]): values for name, values in found.items()}

    here, there = Checkpoint.open(make(kind, root, 0)), remade(kind, tensors=moved)
    spec = read(there)
    assert spec == read(here)
    ours, theirs = family_of(there).weights(there, spec), family_of(here).weights(here, spec)
    for part, name in (
        ("decoder", "layers.1.mlp.up_proj.weight"),
        ("vision", "encoder.layers.1.mlp.fc1.weight"),
        ("projector", "newline" if kind == "llava-next" else "linear_2.bias"),
    ):
        assert np.array_equal(ours[part](name), theirs[part](name)), name


def rename(name: str, moves: dict[str, str]) -> str:
    for start, other in moves.items():
        if name.startswith(start):
            return other + name.removeprefix(start)
    return name


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_old_versions_stored_and_parts_that_are_not_run_are_no_surprise(remade, kind: str):
    def more(found: Tensors) -> Tensors:
        text = next(name for name in found if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
        tower = next(name for name in found if name.endswith("position_embedding.weight"))
        tower = tower.removesuffix("embeddings.position_embedding.weight")
        extra = {
            f"{text}layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            f"{tower}embeddings.position_ids": torch.arange(16)[None],
            f"{tower}post_layernorm.weight": torch.ones(32),
            f"{tower}post_layernorm.bias": torch.ones(32),
        }
        return extra | found

    read(remade(kind, tensors=more))


def test_siglips_pooling_head_is_left_aside(remade):
    from triptych.compile.families.tower import HEAD

    def headed(found: Tensors) -> Tensors:
        return found | {f"vision_tower.head.{name}": torch.ones(3) for name in HEAD}

    read(remade("llava-qwen2", tensors=headed))


def test_a_tensor_nobody_uses_is_an_error_that_names_it(remade):
    def more(found: Tensors) -> Tensors:
        return found | {"model.audio_tower.conv.weight": torch.ones(3)}

    with pytest.raises(CheckpointError, match=r"model\.audio_tower\.conv\.weight"):
        read(remade("smolvlm", tensors=more))


def test_a_layer_beyond_the_configs_count_is_an_error(remade):
    def more(found: Tensors) -> Tensors:
        return found | {"model.text_model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}

    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight"):
        read(remade("smolvlm", tensors=more))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tensor_is_an_error_that_names_it(remade, kind: str):
    def fewer(found: Tensors) -> Tensors:
        gone = next(name for name in found if name.endswith("layers.1.self_attn.v_proj.weight"))
        return {name: values for name, values in found.items() if name != gone}

    with pytest.raises(CheckpointError, match=r"lacks .*layers\.1\.self_attn\.v_proj\.weight"):
        read(remade(kind, tensors=fewer))


def test_a_tied_head_that_is_stored_again_is_still_tied(remade):
    def doubled(found: Tensors) -> Tensors:
        return found | {"lm_head.weight": found["model.text_model.embed_tokens.weight"]}

    assert read(remade("smolvlm", tensors=doubled)).decoder.tied


def test_a_head_that_differs_from_the_table_is_used_whatever_the_config_says(remade):
    def other(found: Tensors) -> Tensors:
        return found | {"lm_head.weight": found["model.text_model.embed_tokens.weight"] + 1}

    checkpoint = remade("smolvlm", tensors=other)
    spec = read(checkpoint)
    assert not spec.decoder.tied
    weight = family_of(checkpoint).weights(checkpoint, spec)["decoder"]
    assert not np.array_equal(weight("lm_head.weight"), weight("embed_tokens.weight"))


def test_stored_types_are_kept(root: Path):
    checkpoint = Checkpoint.open(make("idefics3", root, 0))
    weights = family_of(checkpoint).weights(checkpoint, read(checkpoint))
    assert weights["decoder"]("embed_tokens.weight").dtype == ml_dtypes.bfloat16


# ── what is not built ───────────────────────────────────────────────────────────────────────────────────────────

REFUSED = [
    ("llava", put("text_config.rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}), "'yarn'"),
    ("llava", put("text_config.rope_parameters.partial_rotary_factor", 0.5), "partial_rotary_factor is 0.5"),
    ("llava", put("text_config.hidden_act", "gelu"), "hidden_act is 'gelu'"),
    ("llava", put("text_config.attention_bias", True), "attention_bias is true"),
    ("llava", put("text_config.mlp_bias", True), "mlp_bias is true"),
    ("llava", put("text_config.model_type", "gemma2"), "model_type is 'gemma2'; only 'llama', 'mistral'"),
    ("llava", put("text_config.hidden_size", "64"), "hidden_size is '64', not a whole number"),
    ("llava", put("vision_config.model_type", "dinov2"), "model_type is 'dinov2'; only 'clip_vision_model'"),
    ("llava", put("vision_config.hidden_act", "swish"), "hidden_act is 'swish'"),
    ("llava", put("vision_config.num_channels", 4), "num_channels is 4"),
    ("llava", put("vision_feature_layer", [-2, -1]), r"vision_feature_layer is \[-2, -1\]"),
    ("llava", put("vision_feature_layer", -9), "feature layer -9 of a tower of 3 layers"),
    ("llava", put("vision_feature_select_strategy", "cls"), "vision_feature_select_strategy is 'cls'"),
    ("llava", put("projector_hidden_act", "relu"), "projector_hidden_act is 'relu'"),
    ("llava", put("image_token_index", 7), "a picture's token is 7"),
    (
        "llava-qwen2",
        both(
            put("text_config.use_sliding_window", True),
            put("text_config.layer_types", ["full_attention", "sliding_attention"]),
            put("text_config.sliding_window", 64),
        ),
        "layers attend in 2 ways",
    ),
    ("llava-next", put("vision_feature_select_strategy", "full"), "17 rows a tile are no grid of 4 × 4"),
    ("llava-next", put("image_grid_pinpoints", [[28, 56]]), "image_grid_pinpoints differ"),
    ("smolvlm", put("scale_factor", 3), "scale_factor 3 does not divide 4 patches"),
    ("smolvlm", both(put("vision_config.image_size", 608), put("vision_config.patch_size", 32)), "19 patches a side"),
]


@pytest.mark.parametrize(("kind", "change", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_a_config_asks_and_is_not_built_is_refused_by_name(remade, kind: str, change, words: str):
    with pytest.raises(CheckpointError, match=words):
        read(remade(kind, config=change))


REFUSED_PICTURES = [
    ("llava", put("do_resize", False), "do_resize is False"),
    ("llava", put("do_rescale", False), "do_rescale is False"),
    ("llava", put("do_normalize", False), "do_normalize is False"),
    ("llava", put("rescale_factor", 1 / 128), "rescale_factor is 0.0078125, not 1/255"),
    ("llava", put("resample", 0), "resample is 0"),
    ("llava", put("image_processor_type", "VivitImageProcessor"), "image_processor_type is 'VivitImageProcessor'"),
    ("llava", put("crop_size", {"height": 28, "width": 20}), "only squares"),
    ("llava", put("crop_size", {"height": 20, "width": 20}), "do not make squares of 28 pixels"),
    ("llava", put("do_center_crop", False), "do not make squares of 28 pixels"),
    ("llava", put("image_mean", [0.5]), "not three numbers"),
    ("llava-next", put("image_grid_pinpoints", [[28, 57]]), "image_grid_pinpoints differ"),
    ("smolvlm", put("max_image_size", {"longest_edge": 64}), "tiles of 64 pixels for a tower of 32"),
    ("smolvlm", put("size", {"height": 64, "width": 64}), "size is"),
]


@pytest.mark.parametrize(("kind", "change", "words"), REFUSED_PICTURES, ids=[words for _, _, words in REFUSED_PICTURES])
def test_what_a_preprocessor_asks_and_is_not_built_is_refused_by_name(remade, kind: str, change, words: str):
    with pytest.raises(CheckpointError, match=words):
        read(remade(kind, pictures=change))


def test_a_checkpoint_without_an_end_token_is_refused(remade):
    checkpoint = remade("llava", config=put("text_config.eos_token_id", None))
    (checkpoint.folder / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="names no end token"):
        read(checkpoint)


# ── other ways to say the same ──────────────────────────────────────────────────────────────────────────────────


def test_preprocessing_facts_may_lie_in_processor_config(remade):
    checkpoint = remade("smolvlm")
    expected = read(checkpoint)
    facts = json.loads((checkpoint.folder / "preprocessor_config.json").read_text())
    (checkpoint.folder / "preprocessor_config.json").unlink()
    (checkpoint.folder / "processor_config.json").write_text(json.dumps({"image_processor": facts}))
    assert read(Checkpoint.open(checkpoint.folder)) == expected


def test_bare_numbers_and_the_fast_processors_name_mean_the_same(remade, root: Path):
    change = both(put("size", 28), put("crop_size", 28), put("image_processor_type", "CLIPImageProcessorFast"))
    assert read(remade("llava", pictures=change)) == read(Checkpoint.open(make("llava", root, 0)))


def test_llava_that_pads_to_a_square_says_with_which_colour(remade):
    change = both(put("image_processor_type", "LlavaImageProcessor"), put("do_pad", True))
    image = read(remade("llava", pictures=change)).image
    assert (image.fit, image.pad_rgb) == ("pad", (122, 116, 104))


def test_an_idefics3_that_does_not_split_shows_one_squashed_tile_between_marks(root: Path):
    image = read(Checkpoint.open(make("smolvlm-whole", root, 0))).image
    assert (image.tiling, image.fit, image.longest_edge) == ("one", "squash", 64)
    assert image.open_mark == "<fake_token_around_image>"


def test_a_decoder_alone_is_a_family_too(remade):
    def text_only(found: dict) -> None:
        text = found.pop("text_config")
        found.clear()
        found |= text | {"tie_word_embeddings": True}

    def body(found: Tensors) -> Tensors:
        start = "model.text_model."
        inner = {name: values for name, values in found.items() if name.startswith(start)}
        return {"model." + name.removeprefix(start): values for name, values in inner.items()}

    spec = read(remade("smolvlm", config=text_only, tensors=body))
    assert spec.family == "text"
    assert spec.vision is None
    assert spec.image is None
    assert spec.decoder.tied


# ── transformers' position buckets ──────────────────────────────────────────────────────────────────────────────


def test_sides_that_are_read_keep_every_patch_in_its_own_place():
    """transformers' own module, with a table whose rows are their numbers, for every side that we accept."""
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    for side in range(1, idefics3.MOST_SIDE + 1):
        config = Idefics3VisionConfig(hidden_size=1, image_size=side, patch_size=1)
        module = Idefics3VisionEmbeddings(config)
        with torch.no_grad():
            module.patch_embedding.weight.zero_()
            module.patch_embedding.bias.zero_()
            module.position_embedding.weight.copy_(torch.arange(side * side)[:, None])
            mask = torch.ones(1, side, side, dtype=torch.bool)
            found = module(pixel_values=torch.zeros(1, 3, side, side), patch_attention_mask=mask)[0, :, 0]
        if side not in idefics3.ROUNDED_SIDES:
            assert torch.equal(found, torch.arange(side * side, dtype=torch.float32)), side
    assert not {26, 27, 32} & idefics3.ROUNDED_SIDES
