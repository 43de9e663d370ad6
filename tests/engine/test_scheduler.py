"""Who computes how many tokens, with no model, clock or thread."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triptych.core.request import Patches, Sampling
from triptych.engine.blocks import Blocks
from triptych.engine.features import Features
from triptych.engine.scheduler import Limits, Scheduler, Step
from triptych.engine.sequence import Sequence
from triptych.testing import picture, request


def scheduler(*, step=6, sequences=4, tiles=2, num_blocks=8) -> Scheduler:
    limits = Limits(max_step_tokens=step, max_sequences=sequences, max_encode_tiles=tiles)
    return Scheduler(limits, Blocks(num_blocks), Features(1 << 20))


def sequence(name: str, prompt: list, *, priority: int = 0) -> Sequence:
    asked = request(name, prompt, sampling=Sampling(max_tokens=40, temperature=0.0))
    if priority:
        asked = dataclasses.replace(asked, priority=priority)
    return Sequence(asked, lambda delta: None, now_s=0.0)


def encode(held: Scheduler, patches: Patches) -> None:
    """Pretend that the encoder is done with this one."""
    held.features.put(patches.digest, np.zeros((1, 1), np.float32))
    held.encoded(patches.digest)


def turn(held: Scheduler, prompt_tokens: int | None = None) -> Step:
    """Schedule, pretend to run, commit, and give a token to whoever is due one."""
    step = held.schedule(now_s=0.0, prompt_tokens=prompt_tokens)
    held.commit(step.works)
    for patches in step.encode:
        encode(held, patches)
    for work in step.works:
        if work.is_last:
            work.sequence.append(7, now_s=0.0)
    return step


def running(held: Scheduler, name: str, prompt_tokens: int) -> Sequence:
    made = sequence(name, [1] * prompt_tokens)
    held.add(made)
    while made.num_answer_tokens == 0:
        turn(held)
    return made


def tokens_of(step: Step, sequence: Sequence) -> int:
    return sum(work.num_tokens for work in step.works if work.sequence is sequence)


def test_a_long_prompt_never_starves_a_running_answer():
    held = scheduler()
    answering = running(held, "answering", prompt_tokens=4)
    held.add(sequence("long", [2] * 40))
    step = held.schedule(now_s=0.0)
    assert tokens_of(step, answering) == 1
    assert sum(work.num_tokens for work in step.works) == 6


def test_prompts_share_what_answers_leave_of_a_step():
    held = scheduler(step=10)
    first, second = sequence("a", [1] * 7), sequence("b", [2] * 7)
    held.add(first)
    held.add(second)
    step = turn(held)
    assert (tokens_of(step, first), tokens_of(step, second)) == (7, 3)
    step = turn(held)
    assert (tokens_of(step, first), tokens_of(step, second)) == (1, 4)


def test_more_sequences_than_allowed_wait_their_turn():
    held = scheduler(sequences=2)
    made = [sequence(name, [1]) for name in "abc"]
    for one in made:
        held.add(one)
    assert {work.sequence.request.id for work in turn(held).works} == {"a", "b"}
    held.finish(made[0])
    assert {work.sequence.request.id for work in turn(held).works} == {"b", "c"}


def test_a_lower_priority_value_is_served_first():
    held = scheduler(sequences=1)
    held.add(sequence("later", [1], priority=5))
    held.add(sequence("sooner", [1], priority=-1))
    assert held.schedule(now_s=0.0).works[0].sequence.request.id == "sooner"


def test_the_last_in_rank_gives_way_when_blocks_run_out():
    held = scheduler(step=64, num_blocks=2)
    first, second = sequence("a", [1] * 31), sequence("b", [2] * 31)
    held.add(first)
    held.add(second)
    turn(held)
    turn(held)  # each now needs a second block
    step = turn(held)
    assert tokens_of(step, first) == 1
    assert tokens_of(step, second) == 0
    assert held.preemptions == 1
    assert second.num_computed == 0
    held.finish(first)
    assert tokens_of(turn(held), second) > 0


def names(step: Step) -> list[str]:
    return [work.sequence.request.id for work in step.works]


def test_no_more_tiles_are_encoded_at_once_than_allowed_but_always_one_item():
    held = scheduler(step=64, tiles=2)
    held.add(sequence("a", [picture(1, num_tiles=5)]))
    held.add(sequence("b", [picture(2), 3, picture(3), 4]))
    assert [len(patches.tiles) for patches in turn(held).encode] == [5]
    assert [len(patches.tiles) for patches in turn(held).encode] == [1, 1]


def test_one_batch_is_encoded_at_a_time():
    held = scheduler(step=64, tiles=1)
    for name, brightness in (("a", 1), ("b", 2)):
        held.add(sequence(name, [picture(brightness), 7]))
    (first,) = held.schedule(now_s=0.0).encode
    assert held.schedule(now_s=0.0).encode == ()
    encode(held, first)
    step = held.schedule(now_s=0.0)
    assert (names(step), [patches.digest for patches in step.encode]) == (["a"], [picture(2).digest])


def test_a_prompt_that_waits_for_its_picture_is_passed_by():
    held = scheduler(step=64, sequences=1)
    held.add(sequence("shows", [1, 2, picture(1), 3]))
    held.add(sequence("says", [1, 2]))
    step = held.schedule(now_s=0.0)
    assert (names(step), len(step.encode)) == (["says"], 1)


def test_answers_go_on_while_a_picture_is_encoded():
    held = scheduler(step=64)
    answering = running(held, "answering", prompt_tokens=4)
    held.add(sequence("shows", [picture(1), 3]))
    for _ in range(3):
        step = held.schedule(now_s=0.0)
        assert names(step) == ["answering"]
        held.commit(step.works)
        answering.append(7, now_s=0.0)


def test_two_who_show_a_picture_have_it_encoded_once():
    held = scheduler(step=64)
    both = [sequence(name, [picture(1), 3]) for name in "ab"]
    for one in both:
        held.add(one)
    assert len(held.schedule(now_s=0.0).encode) == 1
    assert (held.features.queries, held.features.hits) == (2, 1)
    assert held.encoded(picture(1).digest) == both


def test_a_prompt_longer_than_a_step_is_computed_up_to_the_picture_that_is_not_there_yet():
    held = scheduler(step=6, tiles=1)
    one = sequence("a", [picture(1), 3, *[9] * 3, picture(2), 4])
    held.add(one)
    turn(held)
    assert tokens_of(turn(held), one) == 6
    assert tokens_of(turn(held), one) == 2
    assert tokens_of(turn(held), one) == 5


def digests(step: Step) -> list[str]:
    return [patches.digest for patches in step.encode]


def test_pictures_of_waiting_prompts_are_encoded_only_as_far_as_the_cache_holds_them():
    held = scheduler(step=64, tiles=1)
    held.features.budget_bytes = 8
    running(held, "answering", prompt_tokens=4)
    waiting = [sequence(str(index), [picture(index), *[7] * 400]) for index in range(5)]  # more than there are blocks
    for one in waiting:
        held.add(one)
    had = [turn(held) for _ in range(6)]
    assert [digests(step) for step in had] == [[picture(index).digest] for index in range(3)] + [[]] * 3
    held.finish(waiting[0])
    assert digests(turn(held)) == [picture(3).digest]


@pytest.mark.parametrize("num_seats", [1, 2])
def test_while_one_prompt_has_all_the_room_the_next_ones_picture_is_encoded(num_seats: int):
    held = scheduler(step=8, sequences=num_seats, tiles=1)
    held.add(sequence("long", [1] * 40))
    for name, brightness in (("a", 1), ("b", 2)):
        held.add(sequence(name, [picture(brightness), 3]))
    had = [turn(held) for _ in range(5)]
    assert [names(step) for step in had] == [["long"]] * 5
    assert [digests(step) for step in had] == [[picture(1).digest], [picture(2).digest], [], [], []]


def test_what_others_hold_who_cannot_begin_keeps_no_picture_of_the_first_in_line_from_being_encoded():
    held = scheduler(step=64, sequences=1, tiles=1)
    held.features.budget_bytes = 4
    answering = running(held, "answering", prompt_tokens=4)
    for index in range(3):  # each holds its first picture, and none its second
        held.add(sequence(str(index), [picture(index), picture(10 + index), 1]))
        turn(held)
    first = sequence("first", [picture(20), picture(21), 1], priority=-1)
    held.add(first)
    assert [digests(turn(held)) for _ in range(3)] == [[picture(20).digest], [picture(21).digest], []]
    held.finish(answering)
    assert names(turn(held)) == ["first"]
    held.finish(first)
    while held.waiting or held.running:  # the others get on, one after another
        turn(held)
        for done in [one for one in held.running if one.num_answer_tokens]:
            held.finish(done)
    assert held.features.num_held == 0


def test_a_text_passes_by_any_number_of_prompts_that_wait_for_pictures():
    held = scheduler(step=64, tiles=1)
    for index in range(100):
        held.add(sequence(str(index), [picture(index), 1]))
    held.add(sequence("says", [1, 2]))
    assert names(held.schedule(now_s=0.0)) == ["says"]


def test_without_room_for_any_rows_pictures_are_still_encoded_beside_answers():
    held = scheduler(step=64)
    held.features.budget_bytes = 0
    running(held, "answering", prompt_tokens=4)
    held.add(sequence("shows", [picture(1), 2]))
    assert len(turn(held).encode) == 1
    assert "shows" in names(turn(held))


def pieces(held: Scheduler, ones: list[Sequence], most: int | None) -> list[list[int]]:
    """How each one's prompt was cut."""
    found = [(one, list[int]()) for one in ones]
    for _ in range(60):
        ahead = [(one, had) for one, had in found if not one.num_answer_tokens]
        if not ahead:
            return [had for _, had in found]
        step = turn(held, most)
        for one, had in ahead:
            had += [work.num_tokens for work in step.works if work.sequence is one]
    raise AssertionError("somebody starves")


@settings(max_examples=60, deadline=None)
@example(lengths=[7, 3], most=9, at=0, is_shown=False)
@given(
    lengths=st.lists(st.integers(2, 200), min_size=1, max_size=2),
    most=st.integers(8, 70),
    at=st.integers(0, 199),
    is_shown=st.booleans(),
)
def test_no_token_of_a_prompt_is_computed_alone(lengths: list[int], most: int, at: int, is_shown: bool):
    held = scheduler(step=64, num_blocks=32)
    ones = []
    for index, length in enumerate(lengths):
        prompt: list = [index] * length
        if is_shown:
            prompt.insert(min(at, length), picture(index))
        ones.append(sequence(str(index), prompt))
        held.add(ones[-1])
    for one, had in zip(ones, pieces(held, ones, most), strict=True):
        assert sum(had) == one.num_prompt_tokens
        assert 1 not in had


def test_of_a_seen_prompt_two_tokens_at_least_are_computed_again():
    held = scheduler(step=64)
    for name in "ab":
        one = sequence(name, [1] * 65)
        held.add(one)
        had = pieces(held, [one], None)
        held.finish(one)
    assert had == [[33]]


def test_where_bits_count_answers_are_computed_again_as_they_were_and_found_by_nobody():
    held = scheduler(step=64, num_blocks=8)
    held.limits = dataclasses.replace(held.limits, batch_invariant=True)
    one = sequence("a", [1] * 33)
    held.add(one)
    for _ in range(35):
        turn(held)
    assert one.num_answer_tokens >= 32
    assert one.num_published == 1, "the block that the prompt fills"
    held._preempt(one)
    had = []
    while one.num_uncomputed > 1:
        step = held.schedule(now_s=0.0)
        held.commit(step.works)
        had += [(work.num_tokens, work.is_apart) for work in step.works]
    assert had == [(33, False), (one.num_answer_tokens, True)]


def test_a_prompt_is_let_in_only_where_those_before_it_leave_blocks_to_their_own():
    held = scheduler(step=32, num_blocks=4)
    for name in "ab":
        held.add(sequence(name, [1] * 96))
    turn(held)
    assert [one.request.id for one in held.running] == ["a"]


def test_items_are_let_go_once_passed():
    held = scheduler(step=4)
    held.add(sequence("a", [picture(1), *[1] * 8]))
    turn(held)
    assert held.features.num_held == 1
    turn(held)
    assert held.features.num_held == 0
    assert picture(1).digest in held.features


def test_an_aborted_request_lets_go_of_a_picture_that_is_still_under_way():
    held = scheduler()
    one = sequence("a", [picture(1), 2])
    held.add(one)
    (patches,) = held.schedule(now_s=0.0).encode
    held.finish(one)
    assert held.features.num_held == 0
    encode(held, patches)
    assert picture(1).digest in held.features, "kept for whoever comes next"
