"""Llama, Mistral, Qwen2 and Qwen3: decoders alone, and the text half of the other families.

Defaults are those of the config classes in transformers 5.24 (`models/*/configuration_*.py`), where a checkpoint's
config leaves a key out.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families.layout import Layout, under
from triptych.compile.families.section import Section
from triptych.compile.families.tokens import eos_ids
from triptych.core.spec import DecoderSpec, ModelSpec, RopeSpec
from triptych.errors import CheckpointError

_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "hidden_size": 4096, "num_hidden_layers": 32}
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _COMMON | _QWEN,
    "qwen3": _COMMON | _QWEN | {"head_dim": 128},
}
MODEL_TYPES = tuple(DEFAULTS)
THETA = 10000.0
ROPES = {None: "none", "default": "none", "linear": "linear", "llama3": "llama3"}


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """A decoder alone. Raises CheckpointError naming what is not built."""
    config = text_section(Section("config.json", checkpoint.config))
    decoder = read_decoder(config, tied=config.flag("tie_word_embeddings"))
    return ModelSpec(
        family="text",
        decoder=settle_head(checkpoint, decoder, "model.", "lm_head.weight"),
        eos_ids=eos_ids(checkpoint, config),
    )


def layout(checkpoint: Checkpoint, spec: ModelSpec) -> Layout:
    """The decoder's tensors, as Hugging Face's Llama has them."""
    parts = {"decoder": decoder_names(spec.decoder, "model.", "lm_head.weight")}
    return Layout(parts=parts, unused=unused(spec.decoder, "model.", "lm_head.weight"))


def text_section(config: Section) -> Section:
    """The same object over the defaults of its model type."""
    config = Section(config.where, config.values, {"model_type": "llama"})
    return Section(config.where, config.values, config.one_of("model_type", DEFAULTS))


def read_decoder(text: Section, *, tied: bool) -> DecoderSpec:
    """What a text config says of the decoder. Raises CheckpointError naming what is not built."""
    kind = text.text("model_type")
    text.must_be("hidden_act", "silu")
    for key in ("mlp_bias", "attention_bias"):
        if text.flag(key):
            raise CheckpointError(f"{text.where}: {key} is true; biases of a {kind}'s {key[:-5]} are not built")
    num_heads, hidden = text.integer("num_attention_heads"), text.integer("hidden_size")
    return DecoderSpec(
        num_layers=text.integer("num_hidden_layers"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=text.integer("num_key_value_heads") if "num_key_value_heads" in text else num_heads,
        head_dim=text.integer("head_dim") if "head_dim" in text else hidden // num_heads,
        intermediate=text.integer("intermediate_size"),
        vocab_size=text.integer("vocab_size"),
        max_positions=text.integer("max_position_embeddings"),
        norm_eps=text.number("rms_norm_eps"),
        rope=_rope(text),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tied=tied,
        sliding_window=_sliding_window(text, kind),
    )


def _rope(text: Section) -> RopeSpec:
    """Both spellings: `rope_theta` beside `rope_scaling`, and transformers 5's `rope_parameters`."""
    newer = "rope_parameters" in text
    rope = text.section(
        "rope_parameters" if newer else "rope_scaling", {"rope_theta": text.value("rope_theta") or THETA}
    )
    kind = rope.value("rope_type") or rope.value("type")
    scaling = Section(rope.where, {"rope_type": kind}).one_of("rope_type", ROPES)
    partial = rope.value("partial_rotary_factor") or text.value("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise CheckpointError(f"{rope.where}: partial_rotary_factor is {partial}; only whole heads are rotated")
    theta = rope.number("rope_theta")
    match scaling:
        case "none":
            return RopeSpec(theta=theta)
        case "linear":
            return RopeSpec(theta=theta, scaling="linear", factor=rope.number("factor"))
        case _:
            return RopeSpec(
                theta=theta,
                scaling="llama3",
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_positions=rope.integer("original_max_position_embeddings"),
            )


def _sliding_window(text: Section, kind: str) -> int | None:
    """The window that all layers share. Raises CheckpointError when some look further than others."""
    if kind == "mistral":
        window = text.integer("sliding_window") if "sliding_window" in text else None
    elif text.flag("use_sliding_window"):
        window = text.integer("sliding_window")
    else:
        window = None
    layer_types = set(text.value("layer_types") or ())
    if window is not None and kind != "mistral" and not layer_types:
        layer_types = _qwen_layer_types(text)
    if layer_types - {"full_attention"} and (window is None or layer_types != {"sliding_attention"}):
        raise CheckpointError(
            f"{text.where}: layers attend in {len(layer_types)} ways, {sorted(layer_types)}; only one is built"
        )
    if layer_types == {"full_attention"}:
        return None
    return window if window is not None and window < text.integer("max_position_embeddings") else None


def _qwen_layer_types(text: Section) -> set[str]:
    full = min(text.integer("max_window_layers"), text.integer("num_hidden_layers"))
    kinds = ["full_attention"] * full + ["sliding_attention"] * (text.integer("num_hidden_layers") - full)
    return set(kinds)


def settle_head(checkpoint: Checkpoint, spec: DecoderSpec, start: str, head: str) -> DecoderSpec:
    """The spec with `tied` as transformers settles it: a head that is stored and differs is never tied."""
    if not spec.tied or head not in checkpoint.names():
        return spec
    same = np.array_equal(checkpoint.tensor(head), checkpoint.tensor(f"{start}embed_tokens.weight"))
    return spec if same else msgspec.structs.replace(spec, tied=False)


def decoder_names(spec: DecoderSpec, start: str, head: str) -> dict[str, str]:
    """Own name → the checkpoint's, with the text model under `start` and the LM head at `head`."""
    names = under(start, _body_names(spec))
    return names if spec.tied else names | {"lm_head.weight": head}


def unused(spec: DecoderSpec, start: str, head: str) -> frozenset[str]:
    """A tied head stored twice, and a buffer that old versions of transformers stored."""
    buffers = {f"{start}layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(spec.num_layers)}
    return frozenset(buffers | {f"{start}rotary_emb.inv_freq"} | ({head} if spec.tied else set()))


def _body_names(spec: DecoderSpec) -> list[str]:
    inner = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    inner += [f"mlp.{proj}_proj.weight" for proj in ("gate", "up", "down")]
    inner += [f"self_attn.{proj}_proj.weight" for proj in "qkvo"]
    if spec.qkv_bias:
        inner += [f"self_attn.{proj}_proj.bias" for proj in "qkv"]
    if spec.qk_norm:
        inner += [f"self_attn.{proj}_norm.weight" for proj in "qk"]
    layers = [f"layers.{index}.{name}" for index in range(spec.num_layers) for name in inner]
    return ["embed_tokens.weight", *layers, "norm.weight"]
