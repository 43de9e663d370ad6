"""Guessed tokens on a real decoder: in 32-bit floats an answer has the same bits with them and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import openvino as ov
import pytest

from numpy_decoder import random_weights, spec_of
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.core.bundle import Bundle, Manifest
from triptych.core.policy import Speculation
from triptych.core.request import Delta, Request, Sampling
from triptych.core.spec import ModelSpec
from triptych.engine.config import EngineConfig
from triptych.engine.draft import Drafter
from triptych.engine.loop import Engine
from triptych.session.opening import open_decoder
from triptych.session.parts import compose

SPEC = spec_of(head_dim=32)
CONFIG = EngineConfig(dtype="float", max_model_len=320, max_num_seqs=2, num_threads=1, kv_cache_bytes=1 << 20)
PROMPT = np.tile(np.random.default_rng(4).integers(0, SPEC.vocab_size, 25).astype(np.int32), 4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    folder, weights = tmp_path_factory.mktemp("bundle"), random_weights(SPEC)
    ov.save_model(build(SPEC, weights.__getitem__, Store("fp32")), folder / "decoder.xml", compress_to_fp16=False)
    np.save(folder / "embedding.npy", weights["embed_tokens.weight"])
    spec = ModelSpec(family="llama", decoder=SPEC, eos_ids=(SPEC.vocab_size - 1,))
    manifest = Manifest(schema_version=2, name="tiny", spec=spec, parts=(), files=(), weights_digest="w")
    return Bundle(path=folder, manifest=manifest)


class Eager(Drafter):
    """Guesses as much as it can, whatever it costs."""

    def _best(self, rates):
        return max(rates)


def answered(bundle: Bundle, config: EngineConfig, temperature: float) -> tuple[list, Engine]:
    opened = compose(open_decoder(bundle, config), config)
    engine, deltas = Engine(opened.runner, opened.plan, eos_ids=frozenset()), list[Delta]()
    if config.speculation is not None:
        engine._drafter = engine._scheduler._drafter = Eager(config.speculation, engine.pace)
    for seed in range(2):
        sampling = Sampling(max_tokens=90, temperature=temperature, top_k=3, seed=seed, num_logprobs=2)
        engine.submit(Request(id=f"{seed}", token_ids=PROMPT[seed:], sampling=sampling), deltas.append)
    while engine.step():
        pass
    assert engine.stats().free_blocks == engine.stats().num_blocks
    said = [(delta.request_id, delta.token_ids, delta.logprobs) for delta in deltas]
    return sorted(said, key=lambda one: one[0]), engine


@pytest.mark.parametrize("cache", ["f32", "u8"])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_an_answer_has_the_same_bits_with_guesses_and_without(bundle, cache, temperature):
    config = replace(CONFIG, kv_cache_dtype=cache)
    plain, _ = answered(bundle, config, temperature)
    guess = Speculation(prompt_lookup_min=1)
    guessed, engine = answered(bundle, replace(config, speculation=guess), temperature)
    assert engine.stats().drafted_tokens > engine.stats().accepted_tokens > 0
    assert guessed == plain
