"""The frozen decoder in torch: a Hugging Face folder made from the GGUF, asked with captions in place of pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.mini import assets
from recipes.mini.caption import token_ids

FOLDER = assets.WORK / "smollm2-hf"
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
BEFORE_PICTURE = SYSTEM + "<|im_start|>user\n"
AFTER_QUESTION = "<|im_end|>\n<|im_start|>assistant\n"
END_ID = 2


def convert() -> None:
    """Write the GGUF's weights as safetensors, once; transformers reads the rest from the GGUF itself."""
    if (FOLDER / "model.safetensors").exists():
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = assets.gguf_path()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.config.rms_norm_eps = 1e-5
    model.save_pretrained(FOLDER)
    AutoTokenizer.from_pretrained(**where).save_pretrained(FOLDER)


def load(dtype: torch.dtype = torch.bfloat16) -> Any:
    """The decoder, frozen."""
    from transformers import AutoModelForCausalLM

    convert()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    return model.requires_grad_(False)


def embed(model: Any, text: str) -> Tensor:
    """Text as embeddings (tokens, hidden)."""
    rows: Tensor = model.get_input_embeddings().weight[token_ids(text)]
    return rows


@torch.no_grad()
def reply(model: Any, visual: Tensor, questions: list[str], max_tokens: int = 40) -> list[str]:
    """Greedy answers to one question about each picture; visual: (N, tokens, hidden)."""
    from recipes.mini.caption import tokenizer

    table = model.get_input_embeddings().weight
    before = embed(model, BEFORE_PICTURE)
    prompts = [
        torch.cat([before, v.to(table.dtype), embed(model, q + AFTER_QUESTION)])
        for v, q in zip(visual, questions, strict=True)
    ]
    longest = max(map(len, prompts))
    inputs = torch.stack([torch.cat([table[:1].expand(longest - len(p), -1), p]) for p in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(p)).long() for p in prompts])
    out = model.generate(
        inputs_embeds=inputs, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=END_ID
    )
    return [tokenizer().decode(row.tolist(), skip_special_tokens=True).strip() for row in out]
