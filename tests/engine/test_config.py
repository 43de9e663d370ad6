"""What was left open is decided so that it fits what was asked."""

from __future__ import annotations

import pytest

from triptych.engine.config import EngineConfig, EnginePlan, cache_type, resolve
from triptych.errors import ConfigError
from triptych.testing import tiny_manifest


def resolved(**asked: int) -> EnginePlan:
    return resolve(EngineConfig(**asked), tiny_manifest().spec, block_bytes=100, free_bytes=1 << 20)


@pytest.mark.parametrize("step", [1, 3, 31, 32, 33, 4096])
def test_a_step_of_any_size_is_served(step: int):
    plan = resolved(max_num_batched_tokens=step)
    assert (plan.max_num_seqs, plan.max_num_batched_tokens) == (min(step, 32), step)


def test_many_answers_at_once_widen_a_step_that_nobody_asked_for():
    assert resolved(max_num_seqs=600).max_num_batched_tokens == 600


def test_what_was_asked_and_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="--max-num-seqs 8 must be between 1 and --max-num-batched-tokens 7"):
        resolved(max_num_seqs=8, max_num_batched_tokens=7)


def test_t68_a_cache_of_four_bits_is_never_chosen_unasked_and_is_told_of_when_it_is():
    assert {cache_type(EngineConfig(dtype=dtype)) for dtype in ("auto", "float")} == {"u8", "f32"}
    plan = resolve(EngineConfig(kv_cache_dtype="u4"), tiny_manifest().spec, block_bytes=100, free_bytes=1 << 20)
    assert "kv-cache-dtype = u4 (as asked)" in plan.choices


def test_a_limit_on_what_is_not_served_is_refused():
    with pytest.raises(ConfigError, match="no video is served"):
        resolved(limit_mm_per_prompt={"video": 2})
    assert resolved(limit_mm_per_prompt={"video": 0, "image": 3}).max_images == 3
