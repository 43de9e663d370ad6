"""onnxruntime-genai's generator: one batch of sequences of equal length."""

from __future__ import annotations

import json
import time
from importlib.metadata import version

import numpy as np
import onnxruntime_genai
import worker


class Ort:
    def __init__(self) -> None:
        self.weights = worker.MODELS / "ort-int4"
        self.settings = {"weights": "int4 block 32, int8 activations", "kv_cache": "f32", "threads": worker.NUM_THREADS}
        self.versions = {name: version(name) for name in ("onnxruntime", "onnxruntime-genai")}
        onnxruntime_genai.disable_telemetry_events()
        config = onnxruntime_genai.Config(str(self.weights))
        threads = {"intra_op_num_threads": worker.NUM_THREADS, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self._model = onnxruntime_genai.Model(config)

    def prefill(self, prompt: list[int]) -> float:
        generator = self._generator([prompt], 1)
        started = time.perf_counter()
        self._read(generator, [prompt])
        return len(prompt) / (time.perf_counter() - started)

    def decode(self, prompts: list[list[int]], new: int) -> float:
        generator = self._generator(prompts, new + 1)
        self._read(generator, prompts)
        started = time.perf_counter()
        for _ in range(new):
            generator.generate_next_token()
        return len(prompts) * new / (time.perf_counter() - started)

    def answer(self, prompt: list[int], new: int) -> list[int]:
        generator = self._generator([prompt], new)
        self._read(generator, [prompt])
        for _ in range(new - 1):
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)[len(prompt) :]]

    def _generator(self, prompts: list[list[int]], new: int) -> onnxruntime_genai.Generator:
        length = len(prompts[0]) + new
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        lengths = {"max_length": length + 1, "min_length": length + 1}  # so that no sequence stops early
        parameters.set_search_options(
            batch_size=len(prompts), do_sample=False, past_present_share_buffer=True, **lengths
        )
        return onnxruntime_genai.Generator(self._model, parameters)

    @staticmethod
    def _read(generator: onnxruntime_genai.Generator, prompts: list[list[int]]) -> None:
        """The prompts, up to each one's first answer token."""
        generator.append_tokens(np.asarray(prompts, np.int32))
        generator.generate_next_token()


if __name__ == "__main__":
    worker.serve(Ort)
