"""`bench/soak.py` for a few seconds on the arithmetic model: twice its capacity, aborts, bad media, killed decoders."""

from __future__ import annotations

import asyncio
import os
import random

from soak import Soak, Weather, run
from traffic import questions
from traffic.served import found
from traffic.tally import FAULTS, Tally

from asking import is_clean
from scripted import eventually, serving
from triptych.testing import plan, tiny_session

WEATHER = Weather(bad=0.3, kill_every_s=1.0, capacity_s=0.5, pauses_s=(0.02,))


def test_under_twice_its_capacity_no_answer_is_lost_or_crossed_and_everything_is_given_back(monkeypatch):
    monkeypatch.setattr(questions, "NUM_WORDS", (3, 12))  # a byte is a token here
    tally = Tally()
    with tiny_session(plan(max_model_len=2048, num_blocks=600, max_num_queued=16)) as session, serving(session) as url:
        served = found(url, None)
        served = type(served)(url=served.url, model=served.model, pid=os.getpid())
        asyncio.run(run(Soak(served=served, weather=WEATHER, tally=tally, rng=random.Random(7)), seconds=4.0))
        assert eventually(lambda: is_clean(session))

    assert {name: tally.outcomes[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0), tally.faults
    assert tally.outcomes["hurt"] <= tally.kills, tally.faults
    assert tally.outcomes["answered"] > 0 < tally.outcomes["refused"], tally.outcomes
    assert not any(tally.left_over.values()), tally.left_over
