"""A row's bits are its own: never computed alone, and equal whoever is beside it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.backends.steady import Steady
from triptych.core.request import Sampling
from triptych.testing import ArithmeticDecoder, TinyEngine, picture, plain_answer, plan, request

parts = st.lists(st.one_of(st.integers(0, 900), st.builds(picture, st.sampled_from([40, 80]))), min_size=1, max_size=40)


class Watched(ArithmeticDecoder):
    """Refuses what it must never be asked."""

    def __call__(self, arrays):
        assert len(arrays["position_ids"]) != 1
        assert len(arrays["sampled"]) != 1
        assert len(arrays["embeddings"]) == len(arrays["position_ids"]) == arrays["subsequence_begins"][-1]
        assert len(arrays["block_indices"]) == arrays["block_indices_begins"][-1]
        return super().__call__(arrays)


@settings(max_examples=30, deadline=None)
@given(st.lists(parts, min_size=1, max_size=3), st.sampled_from([1, 2, 8, 64]))
def test_no_row_is_computed_alone_and_the_answers_are_the_same(prompts, chunk):
    engine = TinyEngine(plan(max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3)))
    steady = Steady(Watched())
    steady.allocate(engine.plan.num_blocks)
    engine.runner._decoder = steady
    sampling = Sampling(max_tokens=4, temperature=0.0, num_prompt_logprobs=0, num_logprobs=1)
    made = [request(str(at), prompt, sampling=sampling) for at, prompt in enumerate(prompts)]
    for one in made:
        engine.submit(one)
    engine.run()
    for one in made:
        assert engine.answer(one.id) == plain_answer(one, 4)
    assert engine.is_clean()
