"""Memory that all requests share: taken before it is filled, free when nobody holds what is in it."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from triptych.core.request import Patches
from triptych.engine.pace import Estimate
from triptych.errors import OverloadError

Take = Callable[[int], None]  # room for so many bytes; raises OverloadError


class Room:
    """Counts the bytes of one kind of things; the operator's flag is named for them. From any thread."""

    def __init__(self, kind: str, max_bytes: int) -> None:
        self._kind = kind
        self._max_bytes = max_bytes
        self._num_bytes = 0  # under the lock
        self._changes: deque[int] = deque()  # that are not in it yet: tiles may end anywhere, so that takes no lock
        self._lock = threading.Lock()
        self._stays = Estimate()  # seconds

    def take(self, num_bytes: int, *, own: int = 0, of: int = 0) -> None:
        """Who is alone may have any number. own: what the request has already; of: what it will have in all.

        Raises OverloadError with the time in which so many leave, as those that are here leave evenly.
        """
        with self._lock:
            while self._changes:
                self._num_bytes += self._changes.popleft()
            held = self._num_bytes
            if held > own and num_bytes and held + num_bytes > self._max_bytes:
                raise OverloadError(
                    f"requests under way hold {held:,} bytes, the limit is {self._max_bytes:,}",
                    retry_after_s=self._stays.value * min(1.0, max(num_bytes, of) / held),
                    hint="try again a little later, or send smaller pictures; "
                    f"the operator set --max-{self._kind}-bytes",
                )
            self._num_bytes += num_bytes

    def give(self, num_bytes: int, since_s: float | None = None) -> None:
        """since_s: when they came, on time.perf_counter, where their stay tells of others'."""
        if num_bytes:
            self._changes.append(-num_bytes)
        if since_s is not None:
            self._stays.see(time.perf_counter() - since_s)

    @contextlib.contextmanager
    def making(self) -> Iterator[Take]:
        """What takes room, until the block ends, for what one request is made of."""
        own = 0

        def take(num_bytes: int) -> None:
            nonlocal own
            self.take(num_bytes, own=own)
            own += num_bytes

        try:
            yield take
        finally:
            self.give(own)

    def keep(self, items: Iterable[Patches]) -> None:
        """Room for the tiles of each, for as long as they live."""
        for item in items:
            self._changes.append(item.tiles.nbytes)
            weakref.finalize(item.tiles, self.give, item.tiles.nbytes, time.perf_counter())
