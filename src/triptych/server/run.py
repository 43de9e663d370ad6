"""Serve until told to stop: listen, say so, drain on SIGTERM or SIGINT, leave with 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from triptych.errors import BackendError, ConfigError
from triptych.server.connection import Connection
from triptych.server.listener import listen, url_of
from triptych.server.serving import Serving

log = logging.getLogger("triptych.server")

KEEP_ALIVE_S = 60  # longer than most clients keep a silent connection: they should close first
QUEUE = 1024  # connections that the system holds until they are accepted
ACCEPTED_AT_ONCE = 64  # asyncio accepts as many as a queue may hold before it looks at one, files or not
GRACE_S = 2.0  # for the last bytes of answers that were cut short


def serve(app: Starlette, listener: socket.socket, *, announce: Callable[[], None]) -> None:
    """Answer requests until SIGTERM, SIGINT or a call of `Server.stop`; `announce` is called once it listens."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is an open file
    Server(app, announce=announce).run(sockets=[listener])


@contextlib.contextmanager
def background(app: Starlette) -> Iterator[str]:
    """Serve on a free port of this machine from a thread, for as long as the block runs; yields the URL."""
    with listen("127.0.0.1", 0) as listener:
        is_ready = threading.Event()
        server = Server(app, announce=is_ready.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="triptych-server")
        thread.start()
        try:
            while not is_ready.wait(0.1):
                if not thread.is_alive():
                    raise BackendError("the server did not start", hint="its log says why")
            yield url_of(listener)
        finally:
            server.stop()
            thread.join()


class Server(uvicorn.Server):
    """uvicorn's, but a signal ends it with exit code 0, and answers that outlast the drain end with an error."""

    def __init__(self, app: Starlette, *, announce: Callable[[], None]) -> None:
        self._serving: Serving = app.state.serving
        self._announce = announce
        self._is_cut = False
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                backlog=ACCEPTED_AT_ONCE,
                proxy_headers=False,  # a caller's address decides something in `server/visit`
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(self._serving.config.drain_s + GRACE_S) + 1,
            )
        )

    def stop(self) -> None:
        """From any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # both had bound the port; the other was ready first
            where = url_of(sockets[0]) if sockets else "its port"
            raise ConfigError(
                f"cannot listen on {where}: {error.strerror or error}", hint="choose another --port; 0 takes a free one"
            ) from error
        for listener in sockets or ():
            listener.listen(QUEUE)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._serving.is_draining = True
        log.info("stopping", extra={"facts": {"answers": self._serving.num_live}})
        cutting = asyncio.create_task(self._cut_short())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_short(self) -> None:
        waited_s = 0.0
        while waited_s < self._serving.config.drain_s and not self._is_cut:
            await asyncio.sleep(0.1)
            waited_s += 0.1
        log.warning("drain ended", extra={"facts": {"answers_cut": self._serving.num_live}})
        self._serving.abort_all()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again afterwards: stopping when told to is success."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends every answer with an error, the third waits for nothing."""
        self.force_exit = self._is_cut
        self._is_cut = self.should_exit
        self.should_exit = True
