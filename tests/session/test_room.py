"""Bytes take room from before they come until nobody holds them."""

from __future__ import annotations

import contextlib
import time

import pytest

from triptych.errors import MediaError, OverloadError
from triptych.session.room import Room
from triptych.testing import picture

TILE_BYTES = picture(1).tiles.nbytes


def retry_s(room: Room, num_bytes: int, *, of: int = 0) -> float:
    with pytest.raises(OverloadError) as refused:
        room.take(num_bytes, of=of)
    return refused.value.retry_after_s


def test_bytes_leave_evenly_so_it_is_known_when_there_is_room_for_others():
    room = Room("bodies", 100)
    room.take(90)
    assert retry_s(room, 300) == 2, "nothing is known yet"
    room.give(90, since_s=time.perf_counter() - 29.9)
    room.take(90)
    assert retry_s(room, 27) == 9
    assert retry_s(room, 11, of=300) == 30


def test_tiles_take_room_while_they_are_made_and_for_as_long_as_they_live():
    room, held = Room("tiles", TILE_BYTES + 8), picture(1)
    with room.making() as take:
        take(TILE_BYTES)
        room.keep([held])
    with contextlib.suppress(MediaError), room.making() as take:
        take(8)
        raise MediaError("the second of two is broken")

    with room.making() as take:
        take(8)
        assert retry_s(room, 1)
    del held
    room.take(TILE_BYTES + 8)


def test_who_is_alone_or_has_nothing_may_come_in_and_take_more():
    room = Room("tiles", 1)
    with room.making() as take:
        take(100)
        take(100)
        room.take(0)
        assert retry_s(room, 1)
    room.take(1)
    with room.making() as take:
        take(0)
        with pytest.raises(OverloadError):
            take(1)
