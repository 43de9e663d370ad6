"""Who may queue and whose turn it is, by work; and whether what a refusal promises is true."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.request import Request, Sampling
from triptych.engine.pace import Pace
from triptych.engine.qos import FIRST_GUESS, Admission, Turns
from triptych.errors import OverloadError
from triptych.testing import ArithmeticDecoder, TinyEngine, picture, plan, request

TOKEN_S, STEP_S, TILE_S = 0.001, 0.02, 0.5


def pace() -> Pace:
    known = Pace()
    for _ in range(2):
        known.saw_step(0, 1000, 1000 * TOKEN_S, is_alone=True)
    for _ in range(2):
        known.saw_step(4, 0, STEP_S, is_alone=True)
        known.saw_tiles(1, TILE_S)
    return known


def admission(**changes) -> Admission:
    return Admission(pace(), **({"max_running": 4, "max_queued": 100, "max_queue_s": 10.0} | changes))


def asked(name: str, num_tokens: int = 1000, *, tiles: int = 0, max_tokens: int = 10, **fields) -> Request:
    prompt = [1] * num_tokens + ([picture(9, num_tiles=tiles)] if tiles else [])
    made = request(name, prompt, sampling=Sampling(max_tokens=max_tokens, temperature=0.0))
    return dataclasses.replace(made, **fields)


def wait_s(held: Admission, **fields) -> float:
    return held.wait_s(held.work_of(asked("probe", 1, **fields)))


def test_a_request_waits_for_the_prompts_and_pictures_before_it():
    held = admission()
    held.enter(asked("a", 1000))
    held.enter(asked("b", 500, tiles=2))
    assert wait_s(held) == pytest.approx(1.0 + 0.508 + 2 * TILE_S)
    held.began("a")
    assert wait_s(held) == pytest.approx(0.508 + 2 * TILE_S)


def test_answers_under_way_hold_up_only_once_all_places_are_taken():
    held = admission()
    for name in "abc":
        held.enter(asked(name, 1, max_tokens=100))
        held.began(name)
    assert wait_s(held) == 0
    held.enter(asked("d", 1, max_tokens=100))
    held.began("d")
    assert wait_s(held) == pytest.approx(4 * 100 * STEP_S / 4)


def test_an_answer_is_expected_to_be_as_long_as_the_last_ones_were():
    held = admission()
    assert held.work_of(asked("a", max_tokens=5000)).answer_tokens == FIRST_GUESS
    assert held.work_of(asked("a", max_tokens=5)).answer_tokens == 5
    for index in range(100):
        held.enter(asked(str(index), 1))
        held.began(str(index))
        held.leave(str(index), 30)
    assert held.work_of(asked("a", max_tokens=5000)).answer_tokens == pytest.approx(30, abs=3)


def test_too_much_work_is_refused_with_the_time_until_there_is_room():
    held = admission(max_queue_s=9.0)
    for index in range(9):
        held.enter(asked(str(index), 1300 if index == 0 else 1000, max_tokens=1))
    with pytest.raises(OverloadError, match=r"9\.3 s of work wait before this request, the limit is 9 s") as refused:
        held.enter(asked("late"))
    assert refused.value.retry_after_s == 1.0
    assert "late" not in held


def test_a_full_queue_says_when_one_of_it_is_done():
    held = admission(max_running=1, max_queued=1)
    held.enter(asked("a", 3000, max_tokens=1000))
    held.enter(asked("b", 4000, max_tokens=1000))
    with pytest.raises(OverloadError, match="2 requests are unfinished") as refused:
        held.enter(asked("late"))
    assert refused.value.retry_after_s == math.ceil(held.backlog_s / 2) > 3


def test_what_could_not_be_answered_by_its_deadline_is_refused_at_once():
    held = admission()
    for index in range(5):
        held.enter(asked(str(index)))
    with pytest.raises(OverloadError, match="the limit is 2 s"):
        held.enter(asked("hasty", deadline_s=2.0))
    held.enter(asked("patient", deadline_s=20.0))


def test_more_urgent_requests_wait_for_their_like_only():
    held = admission(max_queue_s=20.0)
    for index in range(11):
        held.enter(asked(str(index), priority=5))
    held.enter(asked("urgent", max_tokens=1))
    assert wait_s(held, priority=0, max_tokens=1) == pytest.approx(1.005)


def test_a_caller_is_not_refused_for_what_another_asks():
    held = admission()
    for index in range(10):
        held.enter(asked(str(index), caller="crowd"))
    with pytest.raises(OverloadError):
        held.enter(asked("more", caller="crowd"))
    held.enter(asked("mine", caller="me"))
    assert wait_s(held, caller="me") <= 2.3, "mine, and as much of the crowd's"


def test_a_crowd_may_not_take_every_place_in_the_queue():
    held = admission(max_running=1, max_queued=9, max_queue_s=1e9)
    for index in range(10):
        held.enter(asked(str(index), 1, caller="crowd"))
    with pytest.raises(OverloadError, match="10 requests are unfinished"):
        held.enter(asked("more", 1, caller="crowd"))
    for index in range(4):
        held.enter(asked(f"mine {index}", 1, caller="me"))
    held.enter(asked("the last of mine", 1, caller="me"))
    with pytest.raises(OverloadError):
        held.enter(asked("too much of mine", 1, caller="me"))


def test_no_number_of_callers_passes_twice_the_bound():
    held = admission(max_running=1, max_queued=9, max_queue_s=1e9)
    for index in range(20):
        held.enter(asked(str(index), 1, caller=str(index)))
    with pytest.raises(OverloadError, match="20 requests"):
        held.enter(asked("20", 1, caller="20"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=30))
def test_when_all_have_left_nothing_is_waited_for(steps):
    held = admission(max_queue_s=1e9)
    for index, (caller, priority, _) in enumerate(steps):
        held.enter(asked(str(index), 20, tiles=index % 2, caller=caller, priority=priority))
    for index, (*_, has_begun) in enumerate(steps):
        if has_begun:
            held.began(str(index))
        held.leave(str(index), 3)
    assert (wait_s(held), held.backlog_s, len(held)) == (0, 0, 0)


# ── turns ──────────────────────────────────────────────────────────────────────────────────────────────────────


def order(*requests: Request) -> list[str]:
    turns = Turns()
    ranked = [(turns.take(one), at, one.id) for at, one in enumerate(requests)]
    return [name for *_, name in sorted(ranked)]


def test_one_caller_is_served_as_it_asks():
    assert order(asked("1"), asked("2", 5), asked("3")) == ["1", "2", "3"]


def test_who_asks_one_thing_does_not_wait_behind_who_asks_many():
    crowd = [asked(f"crowd {index}", caller="crowd") for index in range(5)]
    assert order(*crowd, asked("mine", caller="me"))[:2] == ["crowd 0", "mine"]


def test_two_who_ask_much_take_turns_by_work():
    big = [asked(f"big {index}", 1000, caller="big") for index in range(2)]
    small = [asked(f"small {index}", 240, caller="small") for index in range(8)]
    served = order(*big, *small)
    assert served.index("big 1") in (4, 5), "a thousand tokens of one, then a thousand of the other"


def test_time_away_earns_no_advantage():
    turns = Turns()
    for index in range(10):
        turns.served(turns.take(asked(str(index), caller="busy")))
    busy, back = turns.take(asked("a", caller="busy")), turns.take(asked("b", caller="back"))
    assert busy - back < 1100, "at most one request of its own"


def test_callers_long_gone_are_forgotten():
    turns = Turns()
    for index in range(2000):
        turns.served(turns.take(asked(str(index), 1, caller=str(index))))
    assert len(turns._done) <= 1025


# ── in the engine ──────────────────────────────────────────────────────────────────────────────────────────────


class Timed(ArithmeticDecoder):
    """Steps take time by the clock: so much, and more for each token."""

    def __init__(self, engine: TinyEngine) -> None:
        super().__init__()
        self.allocate(engine.plan.num_blocks)
        self.clock = engine.clock

    def __call__(self, arrays):
        self.clock.advance(0.01 + 0.001 * len(arrays["position_ids"]))
        return super().__call__(arrays)


def timed(**changes) -> TinyEngine:
    engine = TinyEngine(plan(**({"max_num_seqs": 4, "num_blocks": 400, "max_queue_s": 2.0} | changes)))
    engine.runner._decoder = Timed(engine)
    return engine


def run_for(engine: TinyEngine, seconds: float) -> None:
    until_s = engine.clock.now_s + seconds
    while engine.clock.now_s < until_s:
        if not engine.engine.step():
            engine.clock.now_s = until_s


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(100, 300), max_tokens=st.integers(4, 40))
def test_who_comes_back_when_told_to_is_let_in_and_hardly_sooner(seed: int, length: int, max_tokens: int):
    generator = np.random.default_rng(seed)
    engine = timed(max_queue_s=1e9)

    def one(name: str) -> Request:
        prompt = generator.integers(0, 900, length).tolist()
        return request(name, prompt, sampling=Sampling(max_tokens=max_tokens, temperature=0.0))

    for index in range(24):  # learn the pace, crowded too
        engine.submit(one(f"warm {index}"))
    run_for(engine, 100)
    engine.engine._admission._max_queue_s = 2.0
    for index in range(200):
        try:
            engine.submit(one(str(index)))
        except OverloadError as error:
            promised_s = error.retry_after_s
            break
    run_for(engine, promised_s + 0.2)
    engine.submit(one("back in time"))
    began_s = engine.clock.now_s
    while not engine.deltas["back in time"]:
        assert engine.engine.step()
    assert 0.3 <= engine.clock.now_s - began_s <= 3.5, "the limit is two seconds until its turn"


def test_a_crowd_of_one_caller_does_not_keep_another_from_being_next():
    engine = timed(max_queue_s=1e9)
    for index in range(40):
        engine.submit(dataclasses.replace(request(f"crowd {index}", [index] * 60), caller="crowd"))
    run_for(engine, 0.3)
    engine.submit(dataclasses.replace(request("mine", [1] * 60), caller="me"))
    engine.run()
    ends = [name for name, _ in sorted(engine.deltas.items(), key=lambda item: item[1][-1].timing.queue_s)]
    assert ends.index("mine") < 8
    assert engine.is_clean()


def order_of(engine: TinyEngine) -> list[str]:
    """Who was answered, in the order they were let in."""
    done = [(deltas[-1].timing.queue_s, name) for name, deltas in engine.deltas.items() if engine.answer(name)]
    return [name for _, name in sorted(done)]


def ask(engine: TinyEngine, caller: str, number: int, num_tokens: int = 60) -> None:
    for index in range(number):
        engine.submit(dataclasses.replace(request(f"{caller} {index}", [index] * num_tokens), caller=caller))


@pytest.mark.parametrize("is_at_once", [True, False])
def test_what_ended_before_it_began_puts_off_nothing_that_its_caller_asks(is_at_once: bool):
    engine = timed(max_queue_s=1e9, max_num_seqs=1)
    ask(engine, "crowd", 50)
    ask(engine, "me", 200, num_tokens=400)
    for index in range(199):
        engine.engine.abort(f"me {index}")
        if not is_at_once and index % 50 == 0:
            engine.engine.step()
    engine.submit(dataclasses.replace(request("me again", [7] * 60), caller="me"))
    engine.run()
    order = order_of(engine)
    assert order.index("me 199") == 1, "the last of many, whose first are gone"
    assert order.index("me again") == 7, "416 tokens are as many as five and a half of theirs"
    assert engine.is_clean()


def test_what_had_begun_is_its_callers_though_it_is_given_up():
    engine = timed(max_queue_s=1e9, max_num_seqs=1)
    ask(engine, "me", 1, num_tokens=400)
    engine.engine.step()
    engine.engine.abort("me 0")
    ask(engine, "crowd", 20)
    engine.submit(dataclasses.replace(request("me again", [7] * 60), caller="me"))
    engine.run()
    assert order_of(engine).index("me again") == 6, "416 tokens are as many as five and a half of theirs"


def test_what_stood_behind_others_gives_its_caller_no_start_when_it_is_given_up():
    orders = []
    for is_given_up in (False, True):
        engine = timed(max_queue_s=1e9, max_num_seqs=1)
        for index in range(5):
            engine.submit(dataclasses.replace(request(f"low {index}", [index] * 60), caller="me", priority=1))
        ask(engine, "crowd", 30)
        while not engine.answer("crowd 12"):
            engine.engine.step()
        ask(engine, "me", 10)
        for index in range(5 if is_given_up else 0):
            engine.engine.abort(f"low {index}")
        engine.run()
        orders.append([name for name in order_of(engine) if not name.startswith("low")])
        assert engine.is_clean()
    assert orders[0] == orders[1]


def test_a_flood_of_prompts_holds_answers_up_by_less_than_half():
    engine = timed(max_num_seqs=16, max_queue_s=1e9, max_num_batched_tokens=512)
    talking = Sampling(max_tokens=400, temperature=0.0)
    for index in range(4):
        engine.submit(request(f"talks {index}", [index] * 10, sampling=talking))
    run_for(engine, 1.0)

    def longest_step(seconds: float) -> float:
        until_s, longest_s = engine.clock.now_s + seconds, 0.0
        while engine.clock.now_s < until_s:
            began_s = engine.clock.now_s
            engine.engine.step()
            longest_s = max(longest_s, engine.clock.now_s - began_s)
        return longest_s

    alone_s = longest_step(1.0)
    for index in range(50):
        engine.submit(request(f"prompt {index}", [index] * 400, sampling=Sampling(max_tokens=1, temperature=0.0)))
    assert longest_step(1.5) <= 2 * alone_s
    engine.run()
    assert engine.is_clean()
