"""Deltas arrive in order, whatever their readers do."""

from __future__ import annotations

import threading

from triptych.core.request import Delta
from triptych.engine.courier import Courier


def deltas(count: int) -> list[Delta]:
    return [Delta(request_id=str(index)) for index in range(count)]


def test_what_was_sent_is_delivered_in_order_before_closing_returns():
    courier, got = Courier(), []
    courier.start()
    sent = deltas(1000)
    for delta in sent:
        courier.send(got.append, delta)
    courier.close()
    assert got == sent


def test_a_reader_that_fails_or_dawdles_never_holds_up_the_sender():
    courier, got, may_go = Courier(), [], threading.Event()

    def dawdle(delta: Delta) -> None:
        assert may_go.wait(5)
        raise RuntimeError("gone")

    courier.start()
    first, second = deltas(2)
    courier.send(dawdle, first)
    courier.send(got.append, second)
    assert got == []
    may_go.set()
    courier.close()
    assert got == [second]


def test_without_a_thread_sending_is_delivering():
    courier, got = Courier(), []
    [delta] = deltas(1)
    courier.send(got.append, delta)
    assert got == [delta]
    courier.close()
