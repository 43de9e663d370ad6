"""Tiny random checkpoints that look on disk as real ones do, and what transformers makes of them.

    folder = make("llava", tmp_path_factory.getbasetemp(), seed=0)      # made once per folder, kind and seed
    inputs = reference_inputs(folder, [user("What is this?", num_images=1)], [picture])
    tokens = reference_tokens(folder, inputs, num_tokens=64)            # fp32, eager attention, greedy

Weights are scaled so that the best token leads clearly; placeholder rows of the LM head are zero, so that no
answer holds one, as with trained models.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Message = dict[str, Any]

CORPUS = (
    "What is in this picture? The picture shows a red apple on a blue background, next to two green pears. "
    "Describe the image in detail, please. How many animals are there? There are three cats and a dog. "
    "The quick brown fox jumps over the lazy dog while 12 of 3456 photographs, taken in 1987 and 2026, are blurred.\n\n"
    "def main(args: list[str]) -> int:\n    return len(args)  # comment\n"
    "Où est la bibliothèque? Die Straße ist naß. Это картинка. 这张图片里有什么? 🍎 🐈 "
) * 4

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True)
class Recipe:
    """All that differs between kinds."""

    architecture: str  # the transformers class that makes and runs it
    config: Callable[[dict[str, int]], dict[str, Any]]  # token ids by text → config.json
    tokenizer: Callable[[], Tokenizer]
    special: tuple[str, ...]  # added tokens, in order
    bos: str | None
    eos: tuple[str, ...]
    template: str
    preprocessor: dict[str, Any]
    processor: dict[str, Any]
    dtype: torch.dtype = torch.float32
    adds_bos: bool = False


# ── tokenizers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _byte_level() -> Tokenizer:
    """GPT-2's kind, as SmolLM2, Llama 3 and Qwen2 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """SentencePiece's kind, as Llama 2 and Mistral have it: `▁` for a space, `<0xNN>` for what has no token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=first, limit_alphabet=70, max_token_length=8, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS.split("\n"), trainer)
    content = json.loads(tokenizer.to_str())  # bytes are ordinary tokens, not special ones
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    return Tokenizer.from_str(json.dumps(content))


# ── configs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _text(ids: dict[str, int], model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "vocab_size": -(-len(ids) // 32) * 32,
    }
    return {"model_type": model_type, **sizes, **changes}


def _idefics3(model_type: str, vision: dict[str, int], **text: Any) -> Callable[[dict[str, int]], dict[str, Any]]:
    def config(ids: dict[str, int]) -> dict[str, Any]:
        tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, **vision}
        return {
            "image_token_id": ids["<image>"],
            "scale_factor": 2,
            "vision_config": tower,
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
            "text_config": _text(ids, "llama", **text),
        }

    return config


def _llava(
    tower: dict[str, Any], text_type: str, *, top: dict[str, Any], **text: Any
) -> Callable[[dict[str, int]], dict[str, Any]]:
    def config(ids: dict[str, int]) -> dict[str, Any]:
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
        return {
            "image_token_index": ids["<image>"],
            "vision_config": {**sizes, **tower},
            "text_config": _text(ids, text_type, **text),
            **top,
        }

    return config


_CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 28, "patch_size": 7}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "num_hidden_layers": 2,
    "image_size": 30,
    "patch_size": 7,
    "vision_use_head": False,
}
_GRIDS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]

# ── chat templates, word for word ───────────────────────────────────────────────────────────────────────────────

_IDEFICS3_TEMPLATE = (
    "{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == 'image' %}"
    "{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_QWEN2_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + content['text'] }}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ '\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}{{'<|im_end|>'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MISTRAL_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ '<<SYS>>\n' + message['content'][0]['text'] "
    "+ '\n<</SYS>>\n\n' }}{% elif message['role'] == 'user' %}{{ '[INST] ' }}{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{# Render all text next #}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] }}{% endfor %}{{' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'][0]['text'] + '</s> '}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

# ── preprocessing facts ─────────────────────────────────────────────────────────────────────────────────────────

_ROWS_AND_COLS = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
_IDEFICS3_SPECIAL = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_ROWS_AND_COLS)


def _idefics3_image(tile: int, *, splits: bool, most: int) -> dict[str, Any]:
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_image_splitting": splits,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": tile},
        "resample": 1,
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": most},
    }


def _clip_image(processor: str, **more: Any) -> dict[str, Any]:
    return {
        "image_processor_type": processor,
        "crop_size": {"height": 28, "width": 28},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"shortest_edge": 28},
        **more,
    }


def _llava_processor(kind: str, *, strategy: str, extra: int) -> dict[str, Any]:
    return {
        "processor_class": kind,
        "image_token": "<image>",
        "patch_size": 7,
        "num_additional_image_tokens": extra,
        "vision_feature_select_strategy": strategy,
    }


_RECIPES: dict[str, Recipe] = {
    "smolvlm": Recipe(
        architecture="SmolVLMForConditionalGeneration",
        config=_idefics3("smolvlm", {"image_size": 32, "patch_size": 8}, tie_word_embeddings=True),
        tokenizer=_byte_level,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_IDEFICS3_SPECIAL),
        bos="<|im_start|>",
        eos=("<end_of_utterance>", "<|im_end|>"),
        template="<|im_start|>" + _IDEFICS3_TEMPLATE,
        preprocessor=_idefics3_image(32, splits=True, most=128),
        processor={"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    ),
    "smolvlm-whole": Recipe(  # the first SmolVLM is an Idefics3 by its own config; splitting turned off
        architecture="Idefics3ForConditionalGeneration",
        config=_idefics3("idefics3", {"image_size": 32, "patch_size": 8}, tie_word_embeddings=True),
        tokenizer=_byte_level,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_IDEFICS3_SPECIAL),
        bos="<|im_start|>",
        eos=("<end_of_utterance>",),
        template="<|im_start|>" + _IDEFICS3_TEMPLATE,
        preprocessor=_idefics3_image(32, splits=False, most=64),
        processor={"image_seq_len": 4, "processor_class": "Idefics3Processor"},
    ),
    "idefics3": Recipe(  # 30 = 4 patches of 7 and a rest, as 384 = 27 patches of 14 and a rest
        architecture="Idefics3ForConditionalGeneration",
        config=_idefics3(
            "idefics3",
            {"image_size": 30, "patch_size": 7},
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        tokenizer=_byte_level,
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", *_IDEFICS3_SPECIAL),
        bos="<|begin_of_text|>",
        eos=("<|end_of_text|>", "<end_of_utterance>"),
        template="<|begin_of_text|>" + _IDEFICS3_TEMPLATE,
        preprocessor=_idefics3_image(30, splits=True, most=120),
        processor={"image_seq_len": 4, "processor_class": "Idefics3Processor"},
        dtype=torch.bfloat16,
    ),
    "llava": Recipe(
        architecture="LlavaForConditionalGeneration",
        config=_llava(_CLIP, "llama", top={}, num_key_value_heads=4),
        tokenizer=_byte_fallback,
        special=("<image>", "<pad>"),
        bos="<s>",
        eos=("</s>",),
        template=_LLAVA_TEMPLATE,
        preprocessor=_clip_image("CLIPImageProcessor"),
        processor=_llava_processor("LlavaProcessor", strategy="default", extra=1),
        adds_bos=True,
    ),
    "llava-qwen2": Recipe(
        architecture="LlavaForConditionalGeneration",
        config=_llava(
            _SIGLIP,
            "qwen2",
            top={"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_seq_length": 16},
            tie_word_embeddings=True,
            rope_theta=1000000.0,
        ),
        tokenizer=_byte_level,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"),
        bos=None,
        eos=("<|im_end|>", "<|endoftext|>"),
        template=_QWEN2_TEMPLATE,
        preprocessor={
            "image_processor_type": "SiglipImageProcessor",
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 30, "width": 30},
        },
        processor=_llava_processor("LlavaProcessor", strategy="full", extra=0),
        dtype=torch.bfloat16,
    ),
    "llava-next": Recipe(
        architecture="LlavaNextForConditionalGeneration",
        config=_llava(
            _CLIP, "mistral", top={"image_grid_pinpoints": _GRIDS}, head_dim=32, sliding_window=None, rope_theta=1e6
        ),
        tokenizer=_byte_fallback,
        special=("<image>", "<pad>"),
        bos="<s>",
        eos=("</s>",),
        template=_MISTRAL_TEMPLATE,
        preprocessor=_clip_image(
            "LlavaNextImageProcessor", aspect_ratio_setting="anyres", do_pad=True, image_grid_pinpoints=_GRIDS
        ),
        processor=_llava_processor("LlavaNextProcessor", strategy="default", extra=1),
        dtype=torch.float16,
        adds_bos=True,
    ),
}

KINDS: tuple[str, ...] = tuple(_RECIPES)


# ── making one ──────────────────────────────────────────────────────────────────────────────────────────────────


def make(kind: str, folder: Path, seed: int) -> Path:
    """The checkpoint of this kind and seed under `folder`; written once, then found again."""
    target = folder / f"{kind}-{seed}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=folder))
    recipe = _RECIPES[kind]
    ids = _write_tokenizer(recipe, scratch)
    _write_model(recipe, ids, scratch, seed)
    _write_json(scratch / "preprocessor_config.json", recipe.preprocessor)
    _write_json(scratch / "processor_config.json", recipe.processor)
    (scratch / "chat_template.jinja").write_text(recipe.template)
    scratch.chmod(0o755)
    try:
        os.replace(scratch, target)
    except OSError:  # another worker was first
        assert (target / "config.json").is_file()
    return target


def _write_tokenizer(recipe: Recipe, folder: Path) -> dict[str, int]:
    tokenizer = recipe.tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in recipe.special])
    if recipe.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    elif recipe.tokenizer is _byte_level:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": recipe.bos,
        "eos_token": recipe.eos[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None})
    return tokenizer.get_vocab(with_added_tokens=True)


def _write_model(recipe: Recipe, ids: dict[str, int], folder: Path, seed: int) -> None:
    model_class = getattr(transformers, recipe.architecture)
    config = model_class.config_class(**recipe.config(ids))
    eos = [ids[text] for text in recipe.eos]
    bos = ids[recipe.bos] if recipe.bos else None
    config.text_config.bos_token_id, config.text_config.eos_token_id = bos, eos[0]
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_random(name, weight, generator))
        unused = [ids["<image>"], *range(len(ids), config.text_config.vocab_size)]
        model.get_output_embeddings().weight[unused] = 0.0
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=bos, eos_token_id=eos if len(eos) > 1 else eos[0], pad_token_id=eos[0]
    )
    model.to(recipe.dtype).save_pretrained(folder)


def _random(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    if name.endswith("bias"):
        return 0.1 * noise
    if weight.ndim == 1 and "norm" in name:
        return 1.0 + 0.1 * noise
    if weight.ndim == 1 or "embed_tokens" in name or "lm_head" in name or "position_embedding" in name:
        return 0.5 * noise
    return 1.4 * noise / weight[0].numel() ** 0.5


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))


# ── pictures and messages ───────────────────────────────────────────────────────────────────────────────────────


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth colourful picture with some noise: resampling and cropping both leave their mark on it."""
    rng = np.random.default_rng([seed, width, height])
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (3 + 2 * c) + c) * np.cos(y / (4 + c)) for c in range(3)]
    colour = 128 + 100 * np.stack(waves, axis=-1) + rng.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(colour, 0, 255).astype(np.uint8), "RGB")


def user(text: str, *, num_images: int = 0) -> Message:
    """A user's message as Hugging Face's templates want it: pictures first, then text."""
    return {"role": "user", "content": [{"type": "image"}] * num_images + [{"type": "text", "text": text}]}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


# ── what transformers makes of it ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ReferenceInputs:
    """prompt: the rendered template, one placeholder a picture. input_ids: (T,) the placeholders written out.
    pixel_values: (N, 3, H, W), the tiles of all pictures in order, normalised. kwargs: for the model."""

    prompt: str
    input_ids: NDArray[np.int64]
    pixel_values: NDArray[np.float32] | None
    kwargs: dict[str, torch.Tensor]


@lru_cache(maxsize=16)
def reference_processor(folder: Path) -> Any:
    """transformers' processor over its PIL image processors; no torchvision, no video."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    image_processors = {
        "Idefics3ImageProcessor": Idefics3ImageProcessorPil,
        "CLIPImageProcessor": CLIPImageProcessorPil,
        "SiglipImageProcessor": SiglipImageProcessorPil,
        "LlavaNextImageProcessor": LlavaNextImageProcessorPil,
    }
    # SmolVLM's processor differs from Idefics3's in video alone, and cannot be made without a video processor.
    processors_by_name = {
        "Idefics3Processor": Idefics3Processor,
        "SmolVLMProcessor": Idefics3Processor,
        "LlavaProcessor": LlavaProcessor,
        "LlavaNextProcessor": LlavaNextProcessor,
    }
    facts = json.loads((folder / "preprocessor_config.json").read_text())
    settings = json.loads((folder / "processor_config.json").read_text())
    image_processor = image_processors[facts["image_processor_type"]].from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    kind = processors_by_name[settings.pop("processor_class")]
    return kind(image_processor, tokenizer, chat_template=template, **settings)


def reference_inputs(folder: Path, messages: Sequence[Message], images: Sequence[Image.Image]) -> ReferenceInputs:
    """Render, tokenize and preprocess as transformers does, for one conversation."""
    processor = reference_processor(folder)
    prompt = processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    kwargs = dict(processor(images=list(images) or None, text=[prompt], return_tensors="pt"))
    pixels = kwargs.get("pixel_values")
    flat = None if pixels is None else _real_tiles(kwargs).numpy()
    return ReferenceInputs(prompt, kwargs["input_ids"][0].numpy(), flat, kwargs)


def _real_tiles(kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
    """All pictures' tiles, without those that only fill up a batch."""
    pixels = kwargs["pixel_values"]
    flat = pixels.reshape(-1, *pixels.shape[-3:])
    return flat[(flat != 0).flatten(1).any(dim=1)]


def as_pixels(pixel_values: NDArray[np.float32], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.uint8]:
    """Undo normalising: (N, 3, H, W) f32 → (N, H, W, 3) uint8, exactly, or AssertionError."""
    values = (pixel_values.transpose(0, 2, 3, 1).astype(np.float64) * np.array(std) + np.array(mean)) * 255
    pixels = np.rint(values)
    assert np.abs(values - pixels).max() < 1e-3
    return pixels.astype(np.uint8)


@lru_cache(maxsize=8)
def reference_model(folder: Path) -> Any:
    """The checkpoint in transformers: fp32, eager attention, end tokens ignored."""
    torch.set_num_threads(1)  # for models this small, more threads only wait for one another
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def reference_tokens(folder: Path, inputs: ReferenceInputs, *, num_tokens: int) -> list[int]:
    """The answer's token ids, greedy, exactly `num_tokens` of them: end tokens do not stop it."""
    with torch.no_grad():
        whole = reference_model(folder).generate(**inputs.kwargs, max_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in whole[0, len(inputs.input_ids) :]]
