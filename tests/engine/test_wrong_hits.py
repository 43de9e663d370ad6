"""Every way we know of to be given what belongs to another prompt, picture or tenant, tried at random.

The arithmetic decoder answers with a checksum of what its pages hold, so a page of another prompt or picture gives
another answer than the plain twin's. A page of another tenant would give the same: so the tokens said to be cached
are held against what this tenant itself has had computed.
"""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

import pages
from triptych.core.policy import Reduction
from triptych.core.request import Request, Sampling
from triptych.engine.blocks import key_of
from triptych.testing import TinyEngine, picture, plain_answer, plan, request

Atom = tuple[int, str]  # a token, and the digest of the picture that it is a row of

TENANTS = ("", "a", "ab", "b", "a/b", "a\0", "\0", "tenant", "a\1")
# Beginnings that end around a block's edge, so that one more or one less token decides.
BEGINNINGS = [[5] * length for length in (0, 1, 31, 32, 33, 63, 64, 65)]
REDUCTIONS = [None, Reduction(method="grid", keep=0.5), Reduction(method="pool", keep=0.5)]

pictures = st.builds(
    picture,
    st.sampled_from([0, 1, 40]),
    num_tiles=st.sampled_from([1, 4, 9]),
    reduction=st.sampled_from(REDUCTIONS),
)
prompts = st.builds(
    lambda beginning, shown, middle, end: [*beginning, *shown, *middle, end],
    st.sampled_from(BEGINNINGS),
    st.lists(pictures, max_size=2, unique_by=lambda item: item.digest),
    st.sampled_from(BEGINNINGS),
    st.integers(0, 3),
)
asked = st.lists(
    st.tuples(
        prompts,
        st.sampled_from(TENANTS),
        st.integers(0, 3),  # steps before the next one comes
        st.sampled_from(["", "", "", "abort", "fault", "answer on"]),
    ),
    min_size=2,
    max_size=12,
)


def atoms(one: Request, answer: list[int]) -> list[Atom]:
    shown = {
        at: span.digest for span in one.spans for at in range(span.start, span.end)
    }  # row numbers are in the token ids
    prompt = [(token, shown.get(at, "")) for at, token in enumerate(one.token_ids.tolist())]
    return prompt + [(token, "") for token in answer]


def common(one: list[Atom], other: list[Atom]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@settings(max_examples=40, deadline=None)
@given(
    asked=asked,
    num_blocks=st.sampled_from([16, 24, 64]),
    cache_bytes=st.sampled_from([0, 100, 1 << 20]),
    chunk=st.sampled_from([8, 31, 64]),
)
def test_nobody_is_answered_from_what_was_computed_for_another(asked, num_blocks, cache_bytes, chunk):
    engine = TinyEngine(plan(num_blocks=num_blocks, encoder_cache_bytes=cache_bytes, max_num_batched_tokens=chunk))
    sampling = Sampling(max_tokens=6, temperature=0.0)
    made: dict[str, Request] = {}
    last: dict[str, list] = {}
    for index, (prompt, tenant, steps, event) in enumerate(asked):
        parts = [*last[tenant], 7] if event == "answer on" and tenant in last else prompt
        one = made[str(index)] = request(str(index), parts, tenant=tenant, sampling=sampling)
        engine.submit(one)
        for _ in range(steps):
            engine.engine.step()
        if event == "abort":
            engine.engine.abort(one.id)
        if event == "fault":
            engine.clock.advance(100)
            engine.engine._start_over(RuntimeError("told to fail"))
        if event == "answer on":
            engine.run()
            last[tenant] = [*parts, *engine.answer(one.id)][:200]
    engine.run()
    for name, one in made.items():
        had = engine.answer(name)
        assert had == plain_answer(one, 6)[: len(had)]
        own = atoms(one, [])
        before = [atoms(other, plain_answer(other, 6)) for other in made.values() if other.tenant == one.tenant]
        most = max(common(own, other) for other in before if other != own) if len(before) > 1 else 0
        is_twin = sum(other == own + other[len(own) :] for other in before) > 1
        assert engine.last(name).usage.cached_tokens <= (len(own) if is_twin else most)
    assert engine.is_clean()
    pages.check(engine.engine._blocks)


salts = st.text(max_size=140)
digests = st.text(st.characters(codec="utf-8"), min_size=1, max_size=70)


@settings(deadline=None)
@given(
    st.tuples(salts, st.binary(min_size=128, max_size=128), digests),
    st.tuples(salts, st.binary(min_size=128, max_size=128), digests),
)
@example(("", b"a" * 128, "0:x"), ("a", b"a" * 127 + b"0", ":x"))
@example(("\0", b"a" * 128, "x"), ("", b"\0" + b"a" * 127, "ax"))
def test_no_two_beginnings_have_one_key_whatever_salts_and_names_are_made_of(one, other):
    def key(tenant: str, tokens: bytes, name: str) -> bytes:
        shown = dataclasses.replace(picture(1, num_tiles=8), digest=name)
        return key_of(request("a", [shown], tenant=tenant), tokens, 0, None)

    assert (key(*one) == key(*other)) == (one == other)


@settings(deadline=None)
@given(st.lists(digests, min_size=1, max_size=4), st.lists(digests, min_size=1, max_size=4))
def test_pictures_in_a_block_cannot_be_told_as_others(one, other):
    def key(names: list[str]) -> bytes:
        shown = [dataclasses.replace(picture(1), digest=name) for name in dict.fromkeys(names)]
        return key_of(request("a", shown), b"\0" * 128, 0, None)

    assert (key(one) == key(other)) == (list(dict.fromkeys(one)) == list(dict.fromkeys(other)))


def test_a_block_is_never_found_by_one_tenant_under_anothers_key():
    engine = TinyEngine()
    prompt = [*range(100), picture(5)]
    for index, tenant in enumerate(TENANTS):
        engine.submit(request(str(index), prompt, tenant=tenant))
        engine.run()
        assert engine.last(str(index)).usage.cached_tokens == 0
        engine.submit(request(f"again {index}", prompt, tenant=tenant))
        engine.run()
        assert engine.last(f"again {index}").usage.cached_tokens == 96
