"""What stages took: sums, calls, buckets."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.spec import Modality
from triptych.core.stages import BOUNDS_S, Ledger, StageClock


@given(st.lists(st.floats(0.0, 100.0), max_size=40))
def test_every_call_is_in_the_first_bucket_that_it_does_not_pass(values):
    clock = StageClock()
    for value in values:
        clock.add("encode", Modality.IMAGE, value)

    counts = clock.buckets().get(("encode", "image"), (0,) * (len(BOUNDS_S) + 1))
    for at, bound in enumerate(BOUNDS_S):
        assert sum(counts[: at + 1]) == sum(value <= bound for value in values)
    assert sum(counts) == len(values)
    assert clock.seconds["encode", "image"] == pytest.approx(sum(values))


def test_threads_lose_no_call():
    clock = StageClock()
    threads = [
        threading.Thread(target=lambda: [clock.add("fetch", Modality.IMAGE, 0.01) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(clock.buckets()["fetch", "image"]) == 2000


def test_a_ledger_enters_what_ends_and_nothing_that_fails():
    ledger = Ledger()
    with ledger.time("fetch", Modality.IMAGE):
        pass
    with pytest.raises(ZeroDivisionError), ledger.time("tokenize", Modality.TEXT):
        raise ZeroDivisionError

    assert [one.stage for one in ledger.spent] == ["fetch"]
    assert ledger.spent[0].seconds >= 0
