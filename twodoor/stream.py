"""A stream, blocking: texts go out over one WebSocket and answers come back as they are ready."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

from twodoor import errors
from twodoor.stream_wire import Outage, StreamAnswer, StreamItem, Window, translated
from twodoor.transport import SyncCore

_LOOK_S = 1.0


def answers(
    core: SyncCore, texts: Iterable[StreamItem], how: dict[str, Any], state: Window, outage_s: float
) -> Iterator[StreamAnswer]:
    """Yield one answer for each text; see `StreamCalls.stream`."""
    with _Link(core, state, how, outage_s) as link:
        for item in texts:
            while not state.has_room:
                yield from link.answers(_LOOK_S)
            state.add(item)
            yield from link.answers(0.0)
        while state.is_waiting:
            yield from link.answers(_LOOK_S)


class _Link:
    """The connection of one stream, opened anew when it breaks."""

    def __init__(self, core: SyncCore, state: Window, how: dict[str, Any], outage_s: float) -> None:
        self._core, self._state, self._how = core, state, how
        self._outage = Outage(outage_s)
        self._socket: ClientConnection | None = None
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._carried_out(self._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def answers(self, wait_s: float) -> Iterator[StreamAnswer]:
        """Send what is to be sent, wait for an answer at most so long, and yield all that are there."""
        try:
            self._carried_out(lambda: self._exchange(wait_s))
        except errors.TwodoorError:
            yield from self._state.taken()  # what had come before the stream ended
            raise
        yield from self._state.taken()

    def _exchange(self, wait_s: float) -> None:
        socket = self._socket or self._open()
        for message in self._state.unsent():
            socket.send(message)
        try:
            self._received(socket.recv(self._state.wait_s(wait_s)))
            while True:
                self._received(socket.recv(0))
        except TimeoutError:
            self._state.check_silence()

    def _received(self, message: str | bytes) -> None:
        self._state.received(message)
        self._outage.over()

    def _open(self) -> ClientConnection:
        self._state.lost()
        self._socket = self._closing.enter_context(connect(**self._how))
        self._outage.opened()
        return self._socket

    def _carried_out(self, step: Callable[[], object]) -> None:
        """Do a step; where the connection breaks, drop it and wait a moment, so that the next step opens it anew."""
        try:
            with translated(self._core):
                step()
        except errors.TwodoorError as error:
            self._drop()
            pause_s = self._outage.pause_s(error)
            if pause_s is None:
                raise
            time.sleep(pause_s)

    def _drop(self) -> None:
        self._socket = None
        self._closing.close()
