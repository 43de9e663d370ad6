"""An answer's stream, delta by delta."""

from __future__ import annotations

import pytest

from triptych.core.request import Delta, FinishReason, Timing, Usage
from triptych.errors import BackendError
from triptych.session.answer import Ending, Stream
from triptych.testing import tiny_text

LAST = Delta(
    request_id="a",
    usage=Usage(prompt_tokens=1, cached_tokens=0, image_tokens=0, completion_tokens=9),
    timing=Timing(queue_s=0, encode_s=0, prefill_s=0, decode_s=0),
)
FAILED = LAST.but(finish=FinishReason.ERROR, error=BackendError("the device is gone"))


def stream(said: str, last: Delta) -> Stream:
    """Of a request that spoke, byte by byte, and ended; a full stop is a stop string."""
    text = tiny_text()
    made = Stream("a", text, Ending(stop=["."]), lambda request_id: None)
    for token in text.spell(said):
        made.push(Delta(request_id="a", token_ids=(token,)))
    made.push(last)
    return made


@pytest.mark.parametrize("last", [FAILED, LAST.but(finish=FinishReason.ABORT)])
def test_an_answer_that_its_stop_string_has_ended_stays_so_whatever_becomes_of_its_request(last: Delta):
    answer = stream("Yes. And", last).answer()
    assert (answer.text, answer.finish, answer.usage.completion_tokens) == ("Yes", FinishReason.STOP, 4)


def test_an_answer_that_failed_before_raises_why():
    with pytest.raises(BackendError, match="the device is gone"):
        stream("Yes", FAILED).answer()
