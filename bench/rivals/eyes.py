"""SmolLM2 with eyes: SmolVLM-256M's architecture with a trained decoder and a random tower, as a Hugging Face folder.

usage: eyes.py SMOLLM2_FOLDER TARGET     (in the environment `export`: transformers and torch)

Text answers are the trained model's own. The tower has SmolVLM-256M's shape and random weights, and the projector's are
scaled so that a picture's tokens are as large as words': what a picture costs is real, what is said of it is not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

TILE, EDGE = 512, 1024  # pixels: a picture is scaled to EDGE and cut into tiles, and shown whole beside them
VISION = {"image_size": TILE, "patch_size": 16, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
          "intermediate_size": 3072}  # fmt: skip
ROWS_AND_COLS = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
ADDED = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *ROWS_AND_COLS]
VOCAB = 49280
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for line in message['content'] %}{% if line['type'] == 'image' %}"
    "{{ '<image>' }}{% else %}{{ line['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PREPROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor", "do_convert_rgb": True,
    "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_image_size": {"longest_edge": TILE}, "resample": 1,
    "rescale_factor": 1 / 255, "size": {"longest_edge": EDGE},
}  # fmt: skip


def write_tokenizer(source: Path, target: Path) -> dict[str, int]:
    """SmolLM2's, with digits apart as it was trained, and SmolVLM's marks after its vocabulary. Ids by text."""
    content = json.loads((source / "tokenizer.json").read_text())
    special = [token for token in content["added_tokens"] if token["id"] < 17]
    first = len(content["model"]["vocab"])
    ids = {text: first + index for index, text in enumerate(ADDED)}
    content["added_tokens"] = special + [{**special[0], "id": number, "content": text} for text, number in ids.items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    content |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]}, "normalizer": None}
    content |= {"decoder": {**level, "add_prefix_space": True}, "post_processor": level}
    _write(target / "tokenizer.json", content)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    settings = {"clean_up_tokenization_spaces": False, "model_max_length": 8192}
    _write(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings, **names})
    return ids


def write_model(source: Path, target: Path, ids: dict[str, int]) -> None:
    text = json.loads((source / "config.json").read_text())
    text = {key: value for key, value in text.items() if not key.startswith(("_", "transformers"))}
    text |= {"vocab_size": VOCAB, "dtype": "float32"}
    config = SmolVLMConfig(
        image_token_id=ids["<image>"], scale_factor=4, tie_word_embeddings=True, text_config=text,
        vision_config={"model_type": "smolvlm_vision", **VISION}, pad_token_id=2,
    )  # fmt: skip
    model = SmolVLMForConditionalGeneration(config)
    stored = load_file(source / "model.safetensors")
    trained = {name.removeprefix("model."): value.float() for name, value in stored.items()}
    words = trained.pop("embed_tokens.weight")
    trained.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "text_model" not in name and "lm_head" not in name:
                weight.copy_(_random(name, weight, generator, float(words.std())))
        decoder = model.model.text_model
        table = decoder.embed_tokens.weight
        table.zero_()
        table[: len(words)] = words
        marks = len(words) + torch.tensor([ADDED.index(mark) for mark in ADDED if mark != "<image>"])
        table[marks] = 0.1 * float(words.std()) * torch.randn(len(marks), table.shape[1], generator=generator)
    missing, unexpected = decoder.load_state_dict(trained, strict=False)
    assert missing == ["embed_tokens.weight"], missing
    assert not unexpected, unexpected
    model.save_pretrained(target)
    config_path = target / "config.json"
    content = json.loads(config_path.read_text())
    content["text_config"]["architectures"] = ["LlamaForCausalLM"]  # what llama.cpp's converter asks for
    _write(config_path, content)
    _write(target / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})


def _random(name: str, weight: torch.Tensor, generator: torch.Generator, words: float) -> torch.Tensor:
    """words: how large the words' own numbers are."""
    noise = torch.randn(weight.shape, generator=generator)
    if name.endswith("bias"):
        return 0.1 * noise
    if weight.ndim == 1:
        return 1.0 + 0.1 * noise
    if "position_embedding" in name:
        return 0.5 * noise
    gain = words if "connector" in name else 1.4
    return gain * noise / weight[0].numel() ** 0.5


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    write_model(source, target, write_tokenizer(source, target))
    _write(target / "preprocessor_config.json", PREPROCESSOR)
    _write(target / "processor_config.json", {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"})
    (target / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
