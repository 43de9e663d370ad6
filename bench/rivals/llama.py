"""llama.cpp, through its own batch interface: one `llama_decode` a step for all sequences.

usage: llama.py [smollm2-q4_0.gguf]
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import llama_cpp
import numpy as np
import worker

# (token id, position, sequence, whether its logits are wanted)
Row = tuple[int, int, int, bool]


class Llama:
    def __init__(self, weights: Path) -> None:
        self.weights = weights
        self.settings = {
            "weights": weights.stem,
            "kv_cache": "f16",
            "flash_attention": True,
            "threads": worker.NUM_THREADS,
        }
        self.versions = {"llama_cpp_python": version("llama_cpp_python")}
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(weights).encode(), llama_cpp.llama_model_default_params()
        )
        self._context = llama_cpp.llama_init_from_model(self._model, self._context_settings())
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(4096, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def prefill(self, prompt: list[int]) -> float:
        self._forget()
        started = time.perf_counter()
        self._read(prompt, 0)
        return len(prompt) / (time.perf_counter() - started)

    def decode(self, prompts: list[list[int]], new: int) -> float:
        self._forget()
        tokens = [self._read(prompt, sequence) for sequence, prompt in enumerate(prompts)]
        started = time.perf_counter()
        for step in range(new):
            rows = [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)]
            self._run(rows)
            tokens = [self._greedy(i) for i in range(len(rows))]
        return len(prompts) * new / (time.perf_counter() - started)

    def answer(self, prompt: list[int], new: int) -> list[int]:
        self._forget()
        tokens = [self._read(prompt, 0)]
        while len(tokens) < new:
            self._run([(tokens[-1], len(prompt) + len(tokens) - 1, 0, True)])
            tokens.append(self._greedy(0))
        return tokens

    def _context_settings(self) -> llama_cpp.llama_context_params:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = worker.NUM_SEQUENCES * worker.SEQUENCE_TOKENS
        settings.n_batch = 2048
        settings.n_ubatch = 512
        settings.n_seq_max = worker.NUM_SEQUENCES
        settings.n_threads = settings.n_threads_batch = worker.NUM_THREADS
        settings.kv_unified = False
        settings.flash_attn_type = 1
        return settings

    def _forget(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)

    def _read(self, prompt: list[int], sequence: int) -> int:
        """The first answer token after `prompt`."""
        last = len(prompt) - 1
        self._run([(token, position, sequence, position == last) for position, token in enumerate(prompt)])
        return self._greedy(last)

    def _run(self, rows: list[Row]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if failed := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {failed}")
        llama_cpp.llama_synchronize(self._context)

    def _greedy(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-q4_0.gguf"
    worker.serve(lambda: Llama(worker.MODELS / name))
