"""A step's work is what the model's shape says it is."""

from __future__ import annotations

import msgspec
import pytest

from triptych.core.spec import DecoderSpec, RopeSpec
from triptych.errors import ConfigError
from triptych.plan.work import (
    Chunk,
    Held,
    Step,
    check_cut,
    decoder_work,
    layer_weights,
    on_one_of,
    token_bytes,
)

SPEC = DecoderSpec(
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab_size=320,
    max_positions=256,
    norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0),
    tied=True,
)
HELD = Held(decoder="int4")


def test_a_layer_has_the_weights_of_its_seven_products() -> None:
    assert layer_weights(SPEC) == 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96


def test_an_answer_multiplies_every_weight_once_and_its_head_is_never_in_four_bits() -> None:
    work = decoder_work(SPEC, HELD, Step(answers=1, cached=100))

    assert sum(part.num_weights for part in work.values()) == 2 * layer_weights(SPEC) + 320 * 64
    assert work["head"].precision == "int8"
    assert work["head"].flops == 2 * 320 * 64
    assert work["attention"].flops == 4 * 2 * 4 * 16 * 100
    assert work["attention"].other_bytes == 100 * token_bytes(SPEC, HELD)


def test_of_a_prompt_only_the_last_token_goes_behind_the_last_attention() -> None:
    work = decoder_work(SPEC, HELD, Step(chunks=(Chunk(num_tokens=32),)))

    assert (work["layers"].rows, work["last"].rows, work["head"].rows) == (32, 1, 1)


def test_a_chunk_that_is_not_a_prompts_last_has_no_head() -> None:
    assert set(decoder_work(SPEC, HELD, Step(chunks=(Chunk(num_tokens=32, is_last=False),)))) == {"layers", "attention"}


@pytest.mark.parametrize(("tokens", "rows"), [(32, 32), (33, 48), (48, 48), (500, 512)])
def test_large_steps_are_filled_up_as_the_backend_does(tokens: int, rows: int) -> None:
    assert Step(chunks=(Chunk(num_tokens=tokens),)).rows == rows


def test_each_token_of_a_chunk_looks_at_all_before_it() -> None:
    assert Step(chunks=(Chunk(num_tokens=3, earlier=10),)).pairs == 11 + 12 + 13


@pytest.mark.parametrize(("degree", "share"), [(1, 1), (2, 2), (8, 2)])
def test_devices_beyond_the_heads_of_keys_hold_the_same_ones(degree: int, share: int) -> None:
    """Of 2 heads each of 8 devices holds one, half of the cache, and reads it."""
    whole = decoder_work(SPEC, HELD, Step(answers=1, cached=100))["attention"]

    assert token_bytes(SPEC, HELD, degree) * share == token_bytes(SPEC, HELD)
    assert on_one_of(whole, degree, SPEC.num_kv_heads).other_bytes * share == whole.other_bytes


@pytest.mark.parametrize(("heads", "degree"), [((6, 3), 2), ((8, 8), 6), ((12, 4), 6)])
def test_a_model_is_only_cut_where_heads_are_shared_evenly(heads: tuple[int, int], degree: int) -> None:
    uneven = msgspec.structs.replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1])

    with pytest.raises(ConfigError, match=r"heads .*evenly"):
        check_cut(uneven, degree)
    check_cut(uneven, 1)
