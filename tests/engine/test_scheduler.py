"""Who computes how many tokens, with no model, clock or thread."""

from __future__ import annotations

from triptych.core.request import Sampling
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
        import dataclasses

        asked = dataclasses.replace(asked, priority=priority)
    return Sequence(asked, lambda delta: None, now_s=0.0)


def turn(held: Scheduler) -> Step:
    """Schedule, pretend to run, commit, and give a token to whoever is due one."""
    step = held.schedule(now_s=0.0)
    for work in step.works:
        for patches in work.sequence.patches_in(work.start, work.end):
            if patches.digest not in work.sequence.held:
                held.features.put(patches.digest, __import__("numpy").zeros((1, 1), "f4"))
                held.features.hold([patches.digest], misses=0)
                work.sequence.held.append(patches.digest)
    held.commit(step)
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


def test_a_long_prompt_never_starves_a_running_answer():
    held = scheduler()
    answering = running(held, "answering", prompt_tokens=4)
    held.add(sequence("long", [2] * 40))
    step = held.schedule(now_s=0.0)
    assert step.tokens_of(answering) == 1
    assert step.num_tokens == 6


def test_prompts_share_what_answers_leave_of_a_step():
    held = scheduler(step=10)
    first, second = sequence("a", [1] * 7), sequence("b", [2] * 7)
    held.add(first)
    held.add(second)
    step = turn(held)
    assert (step.tokens_of(first), step.tokens_of(second)) == (7, 3)
    step = turn(held)
    assert (step.tokens_of(first), step.tokens_of(second)) == (1, 4)


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
    assert step.tokens_of(first) == 1
    assert step.tokens_of(second) == 0
    assert held.preemptions == 1
    assert second.num_computed == 0
    held.finish(first)
    assert turn(held).tokens_of(second) > 0


def test_a_step_encodes_no_more_tiles_than_allowed_but_always_one_item():
    held = scheduler(step=64, tiles=2)
    big, other = sequence("a", [picture(1, num_tiles=5)]), sequence("b", [picture(2), 3, picture(3), 4])
    held.add(big)
    held.add(other)
    step = turn(held)
    assert [len(patches.tiles) for patches in step.encode] == [5]
    assert step.tokens_of(other) == 0
    step = turn(held)
    assert [len(patches.tiles) for patches in step.encode] == [1, 1]


def test_a_chunk_ends_where_the_next_picture_must_wait_for_its_encoder():
    held = scheduler(step=64, tiles=1)
    one = sequence("a", [9, 9, picture(1), 3, picture(2), 4])
    held.add(one)
    step = turn(held)
    assert step.tokens_of(one) == 7  # two words, the first picture's four rows, one word
    assert len(step.encode) == 1
    assert turn(held).tokens_of(one) == 5


def test_items_are_let_go_once_passed():
    held = scheduler(step=4)
    one = sequence("a", [picture(1), *[1] * 8])
    held.add(one)
    turn(held)
    assert held.features.num_held == 0
    assert picture(1).digest in held.features
