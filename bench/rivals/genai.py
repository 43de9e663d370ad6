"""openvino-genai's continuous batching pipeline, driven step by step."""

from __future__ import annotations

import time
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai
import worker


class GenAI:
    def __init__(self) -> None:
        self.weights = worker.MODELS / "genai-int4"
        self.settings = {
            "weights": "int4 group 64",
            "kv_cache": "u8",
            "max_num_batched_tokens": 2048,
            "threads": worker.NUM_THREADS,
        }
        self.versions = {name: version(name) for name in ("openvino", "openvino-genai")}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = worker.NUM_SEQUENCES
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": worker.NUM_THREADS, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(self.weights), scheduler, "CPU", properties)
        self._num_requests = 0

    def prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        handle = self._add(prompt, 1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        handle.read_all()
        return len(prompt) / (time.perf_counter() - started)

    def decode(self, prompts: list[list[int]], new: int) -> float:
        handles = [self._add(prompt, new + 1) for prompt in prompts]  # a handle let go cancels its request
        self._pipeline.step()  # all prompts fit into one step
        num_steps = 0
        started = time.perf_counter()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            num_steps += 1
        seconds = time.perf_counter() - started
        if num_steps != new or len(handles) != len(prompts):
            raise RuntimeError(f"{num_steps} steps for {new} tokens: not all sequences ran together")
        return len(prompts) * new / seconds

    def answer(self, prompt: list[int], new: int) -> list[int]:
        handle = self._add(prompt, new)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [int(token) for token in handle.read_all()[0].generated_ids]

    def _add(self, prompt: list[int], new: int) -> openvino_genai.GenerationResult:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        self._num_requests += 1
        tokens = openvino.Tensor(np.asarray([prompt], np.int64))
        return self._pipeline.add_request(self._num_requests, tokens, config)


if __name__ == "__main__":
    worker.serve(GenAI)
