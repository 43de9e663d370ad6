"""transformers' own model, in bf16: one batch of sequences of equal length, a loop of greedy steps."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import time
from importlib.metadata import version

import torch
import worker
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    def __init__(self) -> None:
        torch.set_num_threads(worker.NUM_THREADS)
        self.weights = worker.MODELS / "smollm2-hf"
        self.settings = {"weights": "bf16", "kv_cache": "bf16", "attention": "sdpa", "threads": worker.NUM_THREADS}
        self.versions = {name: version(name) for name in ("torch", "transformers")}
        self._model = AutoModelForCausalLM.from_pretrained(
            self.weights, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        self._greedy([prompt], 1)
        return len(prompt) / (time.perf_counter() - started)

    def decode(self, prompts: list[list[int]], new: int) -> float:
        started = self._greedy(prompts, 1 + new)[1]
        return len(prompts) * new / (time.perf_counter() - started)

    def answer(self, prompt: list[int], new: int) -> list[int]:
        return [int(tokens) for tokens in self._greedy([prompt], new)[0]]

    @torch.inference_mode()
    def _greedy(self, prompts: list[list[int]], new: int) -> tuple[list[torch.Tensor], float]:
        """The tokens of each step, (num_prompts, 1), and when the first were there."""
        cache = DynamicCache(config=self._model.config)
        tokens = [self._step(torch.tensor(prompts), cache)]
        began_s = time.perf_counter()
        while len(tokens) < new:
            tokens.append(self._step(tokens[-1], cache))
        return tokens, began_s

    def _step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return self._model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)


if __name__ == "__main__":
    worker.serve(Transformers)
