"""SmolLM2's decoder written out in torch, f32: quick to take apart where quantizers are compared layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 576, 9, 3, 64
EPS, THETA, BOS = 1e-5, 100_000.0, 1
LINEARS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(f"mlp.{n}_proj" for n in ("gate", "up", "down"))


class Llama:
    """`weights` by own name, without `model.` and `.weight`; replace them at will. Token ids are (N, T)."""

    def __init__(self, folder: Path, max_tokens: int = 512) -> None:
        from safetensors.torch import load_file

        held = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("model.").removesuffix(".weight"): v.float() for name, v in held.items()}
        turn = 1 / (THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
        angle = torch.arange(max_tokens).float()[:, None] * torch.cat([turn, turn])
        self._cos, self._sin = angle.cos(), angle.sin()

    def copy(self) -> Llama:
        other = Llama.__new__(Llama)
        other.__dict__ = self.__dict__ | {"weights": dict(self.weights)}
        return other

    def in_bf16(self) -> Llama:
        other = self.copy()
        other.weights = {name: weight.bfloat16() for name, weight in self.weights.items()}
        other._cos, other._sin = self._cos.bfloat16(), self._sin.bfloat16()
        return other

    def names(self) -> list[str]:
        """Of all linears, layer by layer."""
        return [f"layers.{layer}.{name}" for layer in range(NUM_LAYERS) for name in LINEARS]

    def embed(self, ids: Any) -> Any:
        return self.weights["embed_tokens"][ids]

    def linear(self, x: Any, name: str) -> Any:
        return functional.linear(x, self.weights[name])

    def norm(self, x: Any, name: str) -> Any:
        return functional.rms_norm(x, (HIDDEN,), self.weights[name], EPS)

    def heads(self, x: Any, layer: int, start: int = 0) -> tuple[Any, Any, Any]:
        """Queries and keys, turned from position `start` on, and values; (N, heads, T, HEAD_DIM)."""
        q, k, v = (self.linear(x, f"layers.{layer}.self_attn.{name}_proj") for name in "qkv")
        q, k, v = (y.view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2) for y in (q, k, v))
        return self._turned(q, start), self._turned(k, start), v

    def attend(self, x: Any, layer: int) -> Any:
        """Normed x → what the output projection is given."""
        mixed = functional.scaled_dot_product_attention(*self.heads(x, layer), is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(x.shape)

    def gated(self, x: Any, layer: int) -> Any:
        """Normed x → what the down projection is given."""
        gate = functional.silu(self.linear(x, f"layers.{layer}.mlp.gate_proj"))
        return gate * self.linear(x, f"layers.{layer}.mlp.up_proj")

    def rest(self, x: Any, mixed: Any, layer: int) -> Any:
        """The layer from the output projection on."""
        prefix = f"layers.{layer}"
        x = x + self.linear(mixed, f"{prefix}.self_attn.o_proj")
        hidden = self.gated(self.norm(x, f"{prefix}.post_attention_layernorm"), layer)
        return x + self.linear(hidden, f"{prefix}.mlp.down_proj")

    def hidden(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in range(NUM_LAYERS):
            x = self.rest(x, self.attend(self.norm(x, f"layers.{layer}.input_layernorm"), layer), layer)
        return self.norm(x, "norm")

    def logits(self, ids: Any) -> Any:
        return self.hidden(ids) @ self.weights["embed_tokens"].T

    def say(self, first: Any, num_tokens: int, generator: torch.Generator, least: float = 0.02) -> Any:
        """Ids (N, 1) gone on with up to (N, num_tokens), drawn at temperature 1 from what is `least` as likely as the
        likeliest."""
        said = torch.empty(len(first), num_tokens, dtype=torch.int64)
        said[:, :1] = first
        shape = (NUM_LAYERS, len(first), NUM_KV_HEADS, num_tokens, HEAD_DIM)
        keys, values = (torch.zeros(shape, dtype=self.weights["norm"].dtype) for _ in range(2))
        for at in range(num_tokens - 1):
            x = self.embed(said[:, at : at + 1])
            for layer in range(NUM_LAYERS):
                q, k, v = self.heads(self.norm(x, f"layers.{layer}.input_layernorm"), layer, at)
                keys[layer, :, :, at], values[layer, :, :, at] = k[:, :, 0], v[:, :, 0]
                so_far = (keys[layer, :, :, : at + 1], values[layer, :, :, : at + 1])
                mixed = functional.scaled_dot_product_attention(q, *so_far, enable_gqa=True)
                x = self.rest(x, mixed.transpose(1, 2).reshape(x.shape), layer)
            chance = torch.softmax((self.norm(x, "norm")[:, 0] @ self.weights["embed_tokens"].T).float(), -1)
            chance[:, [0, 2]] = 0  # it never ends
            chance[chance < least * chance.amax(-1, keepdim=True)] = 0
            said[:, at + 1] = torch.multinomial(chance, 1, generator=generator)[:, 0]
        return said

    def _turned(self, x: Any, start: int) -> Any:
        cos, sin = (table[start : start + x.shape[-2]] for table in (self._cos, self._sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
