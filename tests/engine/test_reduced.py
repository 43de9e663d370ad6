"""Reduced pictures in the engine: fewer tokens at their original positions, and no cache that mixes them up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.policy import METHODS, Reduction
from triptych.core.request import Patches, Request, Sampling
from triptych.media.registry import IMAGE_BASE, place
from triptych.testing import VOCAB, TinyEngine, picture, plain_answer, plain_rows, plan, request

HALF = Reduction(keep=0.5)
reductions = st.builds(Reduction, method=st.sampled_from(METHODS), keep=st.sampled_from([0.01, 0.25, 0.5, 0.8, 1.0]))
prompt_parts = st.one_of(
    st.integers(0, 900),
    st.builds(
        picture, st.integers(0, 3).map(lambda b: 60 * b), num_tiles=st.integers(1, 3), reduction=reductions
    ),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(st.lists(prompt_parts, min_size=1, max_size=40), min_size=1, max_size=12),
    chunk=st.integers(8, 40),
    num_blocks=st.integers(16, 40),
    cache_bytes=st.sampled_from([0, 64, 1 << 20]),
    share=st.booleans(),
)
def test_any_mixture_of_reductions_is_answered_as_a_plain_twin_that_reduces_whole(
    prompts, chunk, num_blocks, cache_bytes, share
):
    engine = TinyEngine(
        plan(
            max_num_batched_tokens=chunk, num_blocks=num_blocks, encoder_cache_bytes=cache_bytes, share_prefixes=share
        )  # fmt: skip
    )
    requests = [request(str(index), prompt) for index, prompt in enumerate(prompts)]
    for asked in requests:
        engine.submit(asked)
    engine.run()
    for asked in requests:
        assert engine.answer(asked.id) == plain_answer(asked, 8)
    assert engine.is_clean()
    assert not engine.features._kept or set(engine.features._kept) <= set(engine.features._rows)


def with_marks(name: str, item: Patches, tile_tokens: int, *after: int) -> Request:
    """A picture whose tiles stand between marks, as Idefics3's do."""
    ids: list[int] = []
    for tile in range(len(item.take) // tile_tokens):
        ids += [500 + tile, *([VOCAB] * tile_tokens)]
    placed = place([*ids, 600, *after], VOCAB, [item])
    return Request(
        id=name, token_ids=placed.token_ids, positions=placed.positions, spans=placed.spans,
        patches={item.digest: item}, sampling=Sampling(max_tokens=8, temperature=0.0),
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_tiles_between_marks_keep_their_own_places(method: str, chunk: int):
    item = picture(90, num_tiles=3, reduction=Reduction(method=method, keep=0.5))
    asked = with_marks("a", item, 4, 7, 8)
    engine = TinyEngine(plan(max_num_batched_tokens=chunk, max_num_seqs=1))
    engine.submit(asked)
    engine.run()
    assert engine.answer("a") == plain_answer(asked, 8)
    kept = plain_rows(item).kept
    stands = asked.positions + np.where(asked.token_ids >= IMAGE_BASE, kept[(asked.token_ids - IMAGE_BASE) % 6], 0)
    assert stands.tolist() == sorted(stands.tolist())
    assert set(stands[asked.token_ids < IMAGE_BASE]) == {0, 5, 10, 15, 16, 17}, "marks and text stay where they were"
    assert [int(((5 * tile < stands) & (stands < 5 * tile + 5)).sum()) for tile in range(3)] == [2, 2, 2]
    assert asked.num_positions == 18


def test_the_answer_goes_on_where_the_whole_prompt_would_have_ended():
    for prompt in ([1, picture(9, num_tiles=2, reduction=HALF), 4], [1, picture(9, num_tiles=2, reduction=HALF)]):
        assert request("a", prompt).num_positions == request("b", [picture(9, num_tiles=2), *prompt[::2]]).num_positions


def test_usage_counts_what_stands_in_the_prompt():
    engine = TinyEngine()
    engine.submit(request("a", [1, picture(90, num_tiles=2, reduction=HALF), 2]))
    engine.run()
    assert engine.last("a").usage.image_tokens == 4
    assert engine.last("a").usage.prompt_tokens == 6


def test_a_second_question_finds_the_reduced_picture_in_the_prefix_cache():
    shown = picture(90, num_tiles=20, reduction=HALF)
    engine = TinyEngine()
    first, second = request("a", [shown, 5]), request("b", [shown, 6, 7])
    for asked in (first, second):
        engine.submit(asked)
        engine.run()
        assert engine.answer(asked.id) == plain_answer(asked, 8)
    assert engine.last("b").usage.cached_tokens == 32
    assert engine.encoder.num_tiles == 20


@pytest.mark.parametrize(
    "other", [Reduction(), Reduction(keep=0.45), Reduction(method="grid", keep=0.5)], ids=["whole", "share", "method"]
)
def test_another_reduction_of_the_same_picture_never_hits(other: Reduction):
    engine = TinyEngine(plan(max_num_batched_tokens=100))
    for name, how in (("a", HALF), ("b", other)):
        asked = request(name, [picture(90, num_tiles=20, reduction=how), 5])
        engine.submit(asked)
        engine.run()
        assert engine.answer(name) == plain_answer(asked, 8)
        assert engine.last(name).usage.cached_tokens == 0


def test_the_same_picture_twice_in_one_prompt_is_encoded_once_and_stands_in_two_places():
    shown = picture(90, reduction=HALF)
    asked = request("a", [shown, 3, shown, 4])
    engine = TinyEngine()
    engine.submit(asked)
    engine.run()
    assert engine.answer("a") == plain_answer(asked, 8)
    assert engine.encoder.num_tiles == 1
    assert asked.positions.tolist() == [0, 0, 4, 5, 5, 9]


@pytest.mark.parametrize("method", METHODS)
def test_keeping_all_is_the_same_request(method: str):
    whole, asked = (request("a", [1, picture(9, reduction=how), 2]) for how in (None, Reduction(method=method)))
    assert asked.positions is None
    assert asked.token_ids.tobytes() == whole.token_ids.tobytes()
    assert asked.spans == whole.spans
