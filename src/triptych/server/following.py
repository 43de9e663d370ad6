"""All answers of one request, drained at once into one sink."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from triptych.core.request import FinishReason
from triptych.errors import UnavailableError
from triptych.session import Stream, TextDelta

Sink = Callable[[int, TextDelta], Awaitable[None]]  # an answer's index, and what has become certain of it


async def follow(streams: Sequence[Stream], sink: Sink) -> None:
    """Hand every delta to `sink`; the answers of one request wait for one another only there.

    The first failure ends all of them. Raises what a stream raises, and UnavailableError for one that was aborted.
    """
    failures: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def pump(index: int, stream: Stream) -> None:
            try:
                async for delta in stream:
                    if delta.finish is FinishReason.ABORT:
                        message = "the server is stopping and ended this answer"
                        raise UnavailableError(message, hint="ask again in a moment")
                    await sink(index, delta)
            except Exception as error:  # carried out by hand: a task group would wrap it
                failures.append(error)
                group.cancel_scope.cancel()

        for index, stream in enumerate(streams):
            group.start_soon(pump, index, stream)
    if failures:
        raise failures[0]
