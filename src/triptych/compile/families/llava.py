"""LLaVA 1.5 and 1.6: CLIP or SigLIP, an MLP, a decoder (arXiv:2304.08485, 2310.03744)."""

from __future__ import annotations

from typing import Any, Literal

from triptych.compile import projector, vit
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import text, tower
from triptych.compile.families.layout import Layout, prefix, under
from triptych.compile.families.preprocessor import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    RESAMPLE,
    edge,
    grids,
    read_preprocessor,
    square,
)
from triptych.compile.families.section import Section
from triptych.compile.families.tokens import added_token, eos_ids
from triptych.core.spec import ImageSpec, ModelSpec, ProjectorSpec, VisionSpec
from triptych.errors import CheckpointError

MODEL_TYPES = ("llava", "llava_next")
_GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
DEFAULTS: dict[str, Any] = {
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
    "image_grid_pinpoints": _GRIDS,
    "vision_config": {
        "intermediate_size": 4096,
        "hidden_size": 1024,
        "patch_size": 14,
        "image_size": 336,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}
_CLIP = {
    "resample": 3,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_SIGLIP = {"resample": 3, "size": {"height": 224, "width": 224}, "image_mean": HALF, "image_std": HALF}
PROCESSORS: dict[str, dict[str, dict[str, Any]]] = {
    "llava": {
        "CLIPImageProcessor": _CLIP,
        "LlavaImageProcessor": _CLIP | {"do_pad": False},
        "SiglipImageProcessor": _SIGLIP,
    },
    "llava_next": {"LlavaNextImageProcessor": _CLIP | {"image_grid_pinpoints": _GRIDS}},
}
FIRST_ROW = {"default": 1, "full": 0}
Act = Literal["gelu", "gelu_tanh", "silu"]
ACTIVATIONS: dict[Any, Act] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
# what old checkpoints and older and newer versions of transformers write
TEXT = {"language_model.model.": "language_model.lm_head.weight", "model.language_model.": "lm_head.weight"}
VISION = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")
NEWLINE = ("", "model.")


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Raises CheckpointError naming what is not built."""
    config = _config(checkpoint)
    language = text.text_section(config.section("text_config"))
    tied = config.flag("tie_word_embeddings") or language.flag("tie_word_embeddings")
    decoder, start = text.read_decoder(language, tied=tied), _text_start(checkpoint)
    pictures = read_preprocessor(checkpoint, PROCESSORS[config.text("model_type")])
    vision = tower.read_tower(
        _vision_section(config),
        feature_layer=_feature_layer(config),
        first_row=config.one_of("vision_feature_select_strategy", FIRST_ROW),
        colours=pictures,
    )
    is_next = config.text("model_type") == "llava_next"
    token_id = config.integer("image_token_index")
    tiling = _anyres(config, pictures, vision) if is_next else _one_tile(pictures, vision)
    return ModelSpec(
        family="llava",
        decoder=text.settle_head(checkpoint, decoder, start, TEXT[start]),
        vision=vision,
        projector=ProjectorSpec(
            kind="mlp",
            num_tokens=vision.num_tokens,
            hidden=decoder.hidden,
            activation=config.one_of("projector_hidden_act", ACTIVATIONS),
            bias=config.flag("multimodal_projector_bias"),
            num_extra=int(is_next),
        ),
        image=ImageSpec(
            tile_size=vision.image_size,
            tokens_per_tile=vision.num_tokens,
            resample=pictures.one_of("resample", RESAMPLE),
            placeholder=added_token(checkpoint, token_id),
            **tiling,
        ),
        eos_ids=eos_ids(checkpoint, language),
        image_token_id=token_id,
    )


def layout(checkpoint: Checkpoint, spec: ModelSpec) -> Layout:
    """Where every tensor of the checkpoint belongs."""
    assert spec.vision is not None
    assert spec.projector is not None
    start = _text_start(checkpoint)
    seen = prefix(checkpoint, "embeddings.position_embedding.weight", VISION)
    joined = prefix(checkpoint, "linear_1.weight", PROJECTOR)
    names = under(joined, projector.names(spec.projector))
    if spec.projector.num_extra:
        names["newline"] = prefix(checkpoint, "image_newline", NEWLINE) + "image_newline"
    section = _vision_section(_config(checkpoint))
    return Layout(
        parts={
            "vision": under(seen, vit.names(spec.vision)),
            "projector": names,
            "decoder": text.decoder_names(spec.decoder, start, TEXT[start]),
        },
        unused=tower.unused(section, spec.vision, seen) | text.unused(spec.decoder, start, TEXT[start]),
    )


def _config(checkpoint: Checkpoint) -> Section:
    config = Section("config.json", checkpoint.config, DEFAULTS)
    token_id = config.value("image_token_index") or config.value("image_token_id") or 32000
    return config.over({"image_token_index": token_id})


def _vision_section(config: Section) -> Section:
    return tower.vision_section(config, "clip_vision_model")


def _text_start(checkpoint: Checkpoint) -> str:
    return prefix(checkpoint, "embed_tokens.weight", tuple(TEXT))


def _feature_layer(config: Section) -> int:
    """One layer's features; several joined, which some LLaVA-like models take, are not built."""
    found = config.value("vision_feature_layer")
    if isinstance(found, list) and len(found) == 1:
        return Section(config.where, {"vision_feature_layer": found[0]}).integer("vision_feature_layer")
    return config.integer("vision_feature_layer")


def _one_tile(pictures: Section, vision: VisionSpec) -> dict[str, Any]:
    """LLaVA 1.5: scaled until the shorter side fits and cropped, or squashed, or padded to a square first."""
    shortest = edge(pictures, "size", "shortest_edge")
    crop = square(pictures, "crop_size") if pictures.flag("do_center_crop") else None
    side = shortest if shortest is not None else square(pictures, "size")
    pads = pictures.text("image_processor_type") == "LlavaImageProcessor" and pictures.flag("do_pad")
    if side != vision.image_size or crop not in (side, None) or (shortest is not None and crop is None and not pads):
        raise CheckpointError(
            f"{pictures.where}: size {pictures.value('size')} and crop_size {pictures.value('crop_size')} "
            f"do not make squares of {vision.image_size} pixels, which the tower takes"
        )
    if pads:
        red, green, blue = (int(x * 255) for x in pictures.triple("image_mean"))
        return {"tiling": "one", "fit": "pad", "pad_rgb": (red, green, blue)}
    return {"tiling": "one", "fit": "squash" if shortest is None else "shortest_crop"}


def _anyres(config: Section, pictures: Section, vision: VisionSpec) -> dict[str, Any]:
    """LLaVA 1.6: the whole picture squashed, then the grid of tiles that fits it best."""
    side = edge(pictures, "size", "shortest_edge") or square(pictures, "size")
    if not side == square(pictures, "crop_size") == vision.image_size:
        raise CheckpointError(
            f"{pictures.where}: size {pictures.value('size')} and crop_size {pictures.value('crop_size')} "
            f"are not both {vision.image_size} pixels, which the tower takes"
        )
    rows = vision.image_size // vision.patch
    if vision.num_tokens != rows * rows:
        raise CheckpointError(f"config.json: {vision.num_tokens} rows a tile are no grid of {rows} × {rows}")
    choices = grids(pictures, "image_grid_pinpoints")
    if choices != grids(config, "image_grid_pinpoints"):
        raise CheckpointError(f"image_grid_pinpoints differ between config.json and {pictures.where}")
    if any(height % side or width % side for height, width in choices):
        raise CheckpointError(f"config.json: image_grid_pinpoints {choices} are not all multiples of {side}")
    return {"tiling": "anyres", "grids": choices, "has_newline": True}
