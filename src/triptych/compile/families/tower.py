"""SigLIP's and CLIP's vision configs: the spec of the tower, and which of its tensors do nothing.

Defaults are those of the config classes in transformers 5.24, where a checkpoint's config leaves a key out.
"""

from __future__ import annotations

from typing import Any, Literal

from triptych.compile.families.layout import under
from triptych.compile.families.section import Section
from triptych.compile.vit import layer_names
from triptych.core.spec import VisionSpec
from triptych.errors import CheckpointError

Act = Literal["gelu", "gelu_tanh", "quick_gelu"]
ACTIVATIONS: dict[Any, Act] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
_COMMON = {"intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "num_channels": 3}
DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": _COMMON
    | {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": _COMMON
    | {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "idefics3_vision": _COMMON
    | {
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "patch_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
DEFAULTS["smolvlm_vision"] = DEFAULTS["idefics3_vision"]
HEAD = (
    "probe",
    *(f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")),
    *(f"{layer}.{kind}" for layer in ("layernorm", "mlp.fc1", "mlp.fc2") for kind in ("weight", "bias")),
)


def vision_section(config: Section, model_type: str) -> Section:
    """`vision_config` over the defaults of its model type; `model_type` where it does not say."""
    plain = config.section("vision_config", {"model_type": model_type})
    defaults = plain.one_of("model_type", DEFAULTS)
    return Section(plain.where, plain.values, defaults)


def read_tower(vision: Section, *, feature_layer: int, first_row: int, colours: Section) -> VisionSpec:
    """The tower as far as hidden state `feature_layer` of transformers' list: 0 is what enters the first layer.

    `colours` has image_mean and image_std. Raises CheckpointError naming what is not built.
    """
    is_clip = vision.text("model_type") == "clip_vision_model"
    vision.must_be("num_channels", 3)
    num_layers = vision.integer("num_hidden_layers")
    if not -num_layers - 1 <= feature_layer <= num_layers:
        raise CheckpointError(f"{vision.where}: feature layer {feature_layer} of a tower of {num_layers} layers")
    hidden, num_heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    if hidden % num_heads:
        raise CheckpointError(f"{vision.where}: {hidden} numbers cannot be split among {num_heads} heads")
    side = vision.integer("image_size") // vision.integer("patch_size")
    return VisionSpec(
        kind="vit",
        image_size=vision.integer("image_size"),
        num_tokens=side * side + is_clip - first_row,
        hidden=hidden,
        patch=vision.integer("patch_size"),
        num_layers=feature_layer % (num_layers + 1),
        num_heads=num_heads,
        intermediate=vision.integer("intermediate_size"),
        norm_eps=vision.number("layer_norm_eps"),
        activation=vision.one_of("hidden_act", ACTIVATIONS),
        patch_bias=not is_clip,
        class_token=is_clip,
        first_row=first_row,
        pre_norm=is_clip,
        mean=colours.triple("image_mean"),
        std=colours.triple("image_std"),
    )


def unused(vision: Section, spec: VisionSpec, start: str) -> frozenset[str]:
    """Layers beyond the one that is read, the norm after them, SigLIP's pooling head, a stored range of numbers."""
    late = range(spec.num_layers, vision.integer("num_hidden_layers"))
    names = [name for index in late for name in layer_names(index)]
    names += [] if spec.post_norm else ["post_layernorm.weight", "post_layernorm.bias"]
    names += [] if spec.class_token else [f"head.{name}" for name in HEAD]
    return frozenset(under(start, [*names, "embeddings.position_ids"]).values())
