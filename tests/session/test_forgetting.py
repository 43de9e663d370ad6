"""A budget for the KV cache, from a bundle on disk to answers of a real decoder."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import openvino as ov
import pytest

from numpy_decoder import random_weights, spec_of
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.core.bundle import Bundle, Manifest
from triptych.core.policy import EVICTIONS, KVPolicy
from triptych.core.queries import FILE, Queries
from triptych.core.request import Delta, Request, Sampling
from triptych.core.spec import ModelSpec
from triptych.engine.config import EngineConfig
from triptych.engine.loop import Engine
from triptych.errors import BundleError, ConfigError
from triptych.session.opening import forgetting, open_decoder
from triptych.session.parts import Opened, compose

SPEC = spec_of(head_dim=32)
CONFIG = EngineConfig(dtype="float", max_model_len=320, max_num_seqs=2, num_threads=1, kv_cache_bytes=1 << 20)
PROMPT = np.random.default_rng(4).integers(0, SPEC.vocab_size, 200).astype(np.int32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    folder, weights = tmp_path_factory.mktemp("bundle"), random_weights(SPEC)
    ov.save_model(build(SPEC, weights.__getitem__, Store("fp32")), folder / "decoder.xml", compress_to_fp16=False)
    np.save(folder / "embedding.npy", weights["embed_tokens.weight"])
    shape = (SPEC.num_layers, SPEC.num_heads, SPEC.head_dim)
    rng = np.random.default_rng(1)
    queries = Queries(
        mean=rng.standard_normal(shape), covariance=np.broadcast_to(np.eye(shape[-1]), (*shape, shape[-1]))
    )
    queries.write(folder / FILE)
    spec = ModelSpec(family="llama", decoder=SPEC, eos_ids=(SPEC.vocab_size - 1,))
    manifest = Manifest(schema_version=2, name="tiny", spec=spec, parts=(), files=(), weights_digest="w")
    return Bundle(path=folder, manifest=manifest)


def with_policy(bundle: Bundle, policy: KVPolicy | None) -> Bundle:
    return Bundle(path=bundle.path, manifest=msgspec.structs.replace(bundle.manifest, kv_policy=policy))


def open_parts(bundle, config: EngineConfig) -> Opened:
    return compose(open_decoder(bundle, config), config)


def answered(opened: Opened, kv: KVPolicy | None) -> tuple[list[int], list[float], Engine]:
    """An answer's tokens and their log-probabilities, turned by hand."""
    engine, deltas = Engine(opened.runner, opened.plan, eos_ids=frozenset()), list[Delta]()
    sampling = Sampling(max_tokens=60, temperature=0.0, num_logprobs=0)
    engine.submit(Request(id="a", token_ids=PROMPT, sampling=sampling, kv=kv), deltas.append)
    while engine.step():
        pass
    assert engine.stats().free_blocks == engine.stats().num_blocks
    given = [one.logprob for delta in deltas for one in delta.logprobs]
    return [token for delta in deltas for token in delta.token_ids], given, engine


@pytest.mark.parametrize("cache", ["f32", "u8", "u4"])
def test_a_decoder_that_could_forget_answers_bit_for_bit_as_one_that_cannot(bundle, cache):
    asked = replace(CONFIG, kv_cache_dtype=cache)
    ordinary = answered(open_parts(bundle, asked), None)
    whole = answered(open_parts(bundle, replace(asked, kv_budget=0.5)), None)
    assert whole[:2] == ordinary[:2]


@pytest.mark.parametrize("method", EVICTIONS)
@pytest.mark.parametrize("cache", ["f32", "u8"])
def test_every_method_forgets_to_its_budget_and_answers(bundle, method, cache):
    statistics = FILE if method == "expected" else ""
    policy = KVPolicy(method=method, statistics=statistics, budget=0.4, layer_density=(0.6, 0.2), adaptive=0.2)
    opened = open_parts(with_policy(bundle, policy), replace(CONFIG, kv_cache_dtype=cache, kv_budget=0.4))
    tokens, logprobs, engine = answered(opened, policy)
    assert len(tokens) == 60
    assert np.isfinite(logprobs).all()
    assert 120 <= engine.stats().evicted_tokens <= 156  # three fifths of the prompt at once, and of the answer later


def test_forgetting_changes_little_where_most_is_kept_and_more_where_less_is(bundle):
    """Log-probabilities of one answer, against the whole cache: nearer with 0.8 of it than with 0.2."""
    _, exact, _ = answered(open_parts(bundle, replace(CONFIG, kv_cache_dtype="f32")), None)
    away = []
    for budget in (0.8, 0.2):
        policy = KVPolicy(method="snapkv", budget=budget)
        opened = open_parts(with_policy(bundle, policy), replace(CONFIG, kv_cache_dtype="f32", kv_budget=budget))
        _, found, _ = answered(opened, policy)
        away.append(abs(found[1] - exact[1]))
    assert 0 < away[0] < away[1]


def test_without_statistics_another_method_is_taken_and_said(bundle):
    policy, why = forgetting(with_policy(bundle, None))
    assert policy.method == "snapkv"
    assert "no statistics" in why
    opened = open_parts(with_policy(bundle, None), replace(CONFIG, kv_budget=0.5))
    assert opened.plan.choices[-1] == why
    assert opened.bundle.manifest.kv_policy == policy


def test_what_cannot_forget_is_refused_with_a_way_out(bundle):
    looks_back = msgspec.structs.replace(SPEC, sliding_window=64)
    spec = msgspec.structs.replace(bundle.manifest.spec, decoder=looks_back)
    sliding = Bundle(path=bundle.path, manifest=msgspec.structs.replace(bundle.manifest, spec=spec))
    with pytest.raises(ConfigError, match="forgets already"):
        forgetting(sliding)
    with pytest.raises(BundleError, match="layer_density speaks of 3 layers, the model has 2"):
        forgetting(with_policy(bundle, KVPolicy(method="knorm", layer_density=(0.1, 0.2, 0.3))))
    config, elsewhere = replace(CONFIG, kv_budget=0.5), KVPolicy(method="knorm", devices=("cpu:0", "gpu:5"))
    with pytest.raises(ConfigError, match="gpu:5"):
        open_parts(with_policy(bundle, elsewhere), config)
    missing = KVPolicy(method="expected", statistics="nowhere.npz")
    with pytest.raises(BundleError, match="no statistics"):
        open_parts(with_policy(bundle, missing), config)
