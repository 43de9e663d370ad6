"""What a model is: towers, layers, heads, placeholders; how pictures become tiles."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec


class Modality(IntEnum):
    """What a token stands for. The values are stored in bundles: never renumber."""

    TEXT = 0
    IMAGE = 1
    AUDIO = 2
    VIDEO = 3


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen record that is stored as JSON: an unknown key or a wrong type is refused on read."""


def pretty_json(content: object) -> bytes:
    """Records as people read them."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


class RopeSpec(Fact, frozen=True, kw_only=True):
    """Rotary position embedding (arXiv:2104.09864), halves rotated as Hugging Face does."""

    theta: float
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, as the three below
    high_freq_factor: float = 4.0
    original_positions: int = 8192


class DecoderSpec(Fact, frozen=True, kw_only=True):
    """A causal decoder of the Llama kind: Llama, Mistral, Qwen2, Qwen3."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int  # rows of the embedding table and of the LM head
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # LM head shares the embedding table
    sliding_window: int | None = None


class Counted(Fact, frozen=True, kw_only=True):
    """What a compiled part holds: operations of one tile, and weights."""

    flops: float
    num_weights: int


class VisionSpec(Fact, frozen=True, kw_only=True):
    """An image encoder: one square RGB tile in, `num_tokens` rows of `hidden` out."""

    kind: Literal["vit", "conv"]
    image_size: int  # pixels a side of one tile
    num_tokens: int  # rows out per tile
    hidden: int
    # the ViT's own facts; a conv tower has none of them
    patch: int = 0
    num_layers: int = 0  # layers that are run, after the family's choice of feature layer
    num_heads: int = 0
    intermediate: int = 0
    norm_eps: float = 1e-6
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    patch_bias: bool = True  # SigLIP: has one; CLIP: none
    class_token: bool = False  # CLIP: prepended
    first_row: int = 0  # of the rows computed, the first handed on: 1 drops CLIP's class token
    pre_norm: bool = False  # CLIP: LayerNorm after the embeddings
    post_norm: bool = False  # SigLIP: LayerNorm after the last layer
    mean: tuple[float, float, float]  # of pixels in [0, 1]; normalising is part of the graph
    std: tuple[float, float, float]
    counted: Counted | None = None  # for plans: a conv tower's, whose shape does not tell


class ProjectorSpec(Fact, frozen=True, kw_only=True):
    """From encoder rows to decoder rows."""

    kind: Literal["pixel_shuffle", "mlp", "soft_words"]
    num_tokens: int  # rows out per tile
    hidden: int  # the decoder's width
    shuffle: int = 1  # pixel_shuffle only: side of the square that becomes one row
    activation: Literal["gelu", "gelu_tanh", "silu"] = "gelu"  # mlp only, as `bias`
    bias: bool = True
    num_extra: int = 0  # constant rows it has besides: LLaVA 1.6's newline
    counted: Counted | None = None  # soft_words: as the tower's


class ImageSpec(Fact, frozen=True, kw_only=True):
    """How a picture becomes tiles and text: everything `media/image` must know of a family.

    tiling
      one:    the whole picture as one tile (`fit` says how it is made square), between marks if the family has some
      split:  Idefics3: a grid of tiles, then the whole picture, with row and column marks
      anyres: LLaVA 1.6: the whole picture, then the best grid of `grids`, padding rows cut away
    """

    tiling: Literal["one", "split", "anyres"]
    tile_size: int
    tokens_per_tile: int  # anyres: a square of them
    resample: Literal["bilinear", "bicubic", "lanczos"]
    fit: Literal["squash", "shortest_crop", "pad"] = "squash"
    pad_rgb: tuple[int, int, int] = (0, 0, 0)
    longest_edge: int | None = None  # split and one: the picture is first scaled to this
    grids: tuple[tuple[int, int], ...] = ()  # anyres: (height, width) in pixels
    placeholder: str  # what the chat template writes for a picture, and one visual token's text
    open_mark: str = ""  # split: before each tile
    grid_mark: str = ""  # split: format of a tile's mark, with {row} and {col} from 1
    whole_mark: str = ""  # split: mark of the whole picture
    has_newline: bool = False  # anyres: a learned row ends each line of the grid


class ModelSpec(Fact, frozen=True, kw_only=True):
    """One multimodal model."""

    family: str
    decoder: DecoderSpec
    vision: VisionSpec | None = None
    projector: ProjectorSpec | None = None
    image: ImageSpec | None = None
    eos_ids: tuple[int, ...]
    image_token_id: int | None = None  # the tokenizer's id for `image.placeholder`
