"""On a real decoder an answer has the same bits: with guesses and without, alone, beside others, and put off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import openvino as ov
import pytest

from numpy_decoder import random_weights, spec_of
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.compile.join import join
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
CONFIG = EngineConfig(max_model_len=320, max_num_seqs=2, num_threads=1, kv_cache_bytes=1 << 20)
PROMPT = np.tile(np.random.default_rng(4).integers(0, SPEC.vocab_size, 25).astype(np.int32), 4)


@pytest.fixture(scope="module", params=["fp32", "bf16", "int8", "int4"])
def bundle(request, tmp_path_factory) -> Bundle:
    folder, weights = tmp_path_factory.mktemp("bundle"), random_weights(SPEC)
    model = build(SPEC, weights.__getitem__, Store(request.param, group_size=32))
    join(model)
    ov.save_model(model, folder / "decoder.xml", compress_to_fp16=False)
    np.save(folder / "embedding.npy", weights["embed_tokens.weight"])
    spec = ModelSpec(family="llama", decoder=SPEC, eos_ids=(SPEC.vocab_size - 1,))
    manifest = Manifest(schema_version=2, name="tiny", spec=spec, parts=(), files=(), weights_digest="w")
    return Bundle(path=folder, manifest=manifest)


class Eager(Drafter):
    """Guesses as much as it can, whatever it costs."""

    def _best(self, rates):
        return max(rates)


def answered(
    bundle: Bundle, config: EngineConfig, temperature: float = 0.0, seeds: Iterable[int] = range(2)
) -> tuple[list, Engine]:
    """The requests of these seeds, one let in every three steps."""
    opened = compose(open_decoder(bundle, config), config)
    engine, deltas = Engine(opened.runner, opened.plan, eos_ids=frozenset()), list[Delta]()
    if config.speculation is not None:
        engine._drafter = engine._scheduler._drafter = Eager(config.speculation, engine.pace)
    for seed in seeds:
        sampling = Sampling(max_tokens=90, temperature=temperature, top_k=3, seed=seed, num_logprobs=2)
        engine.submit(Request(id=f"{seed}", token_ids=PROMPT[7 * seed :], sampling=sampling), deltas.append)
        for _ in range(3):
            engine.step()
    while engine.step():
        pass
    assert engine.stats().free_blocks == engine.stats().num_blocks
    said = [(delta.request_id, delta.token_ids, delta.logprobs) for delta in deltas]
    return sorted(said, key=lambda one: one[0]), engine


@pytest.mark.parametrize("dtype", ["auto", "float"])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_an_answer_has_the_same_bits_with_guesses_and_without(bundle, dtype, temperature):
    config = replace(CONFIG, dtype=dtype)
    plain, _ = answered(bundle, config, temperature)
    guess = Speculation(prompt_lookup_min=1)
    guessed, engine = answered(bundle, replace(config, speculation=guess), temperature)
    assert engine.stats().drafted_tokens > engine.stats().accepted_tokens > 0
    assert guessed == plain


@pytest.mark.parametrize("dtype", ["auto", "float"])
def test_an_answer_has_the_same_bits_alone_beside_others_and_put_off_between(bundle, dtype):
    config = replace(CONFIG, dtype=dtype, max_num_seqs=5, max_num_batched_tokens=24)
    alone = [said for seed in range(5) for said in answered(bundle, config, seeds=(seed,))[0]]
    beside, engine = answered(bundle, config, seeds=range(5))
    assert engine.stats().preemptions == 0
    assert beside == alone
    scarce = replace(config, kv_cache_bytes=12 * engine.runner._decoder.block_bytes)
    put_off, engine = answered(bundle, scarce, seeds=range(5))
    assert engine.stats().preemptions > 0
    assert put_off == alone
