"""A stream, awaited: who sends and who iterates may be two tasks, so answers come while the next text is waited for."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from twodoor import errors
from twodoor.stream_wire import Outage, StreamAnswer, StreamItem, Window, translated
from twodoor.transport import AsyncCore

_LOOK_S = 1.0


async def answers(
    stream: "OpenStream", texts: Iterable[StreamItem] | AsyncIterable[StreamItem]
) -> AsyncGenerator[StreamAnswer, None]:
    """Yield one answer for each text; see `AsyncStreamCalls.stream`."""
    async with stream, _feeding(stream, texts) as feeder:
        async for answer in stream:
            yield answer
        await feeder


class OpenStream:
    """One stream. Iterating carries everything on: answers, texts that are sent again, a connection opened anew.

    It ends when `end` was called and every text has its answer; what ends the stream as a whole is raised there.
    """

    def __init__(self, core: AsyncCore, state: Window, how: dict[str, Any], outage_s: float) -> None:
        self._core, self._state, self._how = core, state, how
        self._outage = Outage(outage_s)
        self._socket: ClientConnection | None = None
        self._sending = asyncio.Lock()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False
        self._failure: errors.TwodoorError | None = None

    async def __aenter__(self) -> Self:
        while self._socket is None:
            await self._carried_out(self._open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._failure = self._failure or errors.ConnectionLost("the stream is closed", code="stream_closed")
        self._room.set()
        if self._socket is not None:
            await self._socket.close()

    async def send(
        self,
        text: str,
        *,
        id: str | None = None,  # noqa: A002 - as on the wire
        model: str | None = None,
        truncate: bool | None = None,
    ) -> None:
        """Hand one text over; waits while ``window`` texts have no answer that was taken.

        Raises what ended the stream, where that has happened.
        """
        item: dict[str, Any] = {"text": text}
        given = {"id": id, "model": model, "truncate": truncate}
        await self.send_item(item | {name: value for name, value in given.items() if value is not None})

    async def send_item(self, item: StreamItem) -> None:
        """The same for a text, or a mapping ``{"text", "id"?, "model"?, "truncate"?}``."""
        while not self._state.has_room and self._failure is None:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise ValueError("the stream was ended")
        self._state.add(item)
        self._changed.set()
        try:
            await self._flush()
        except (ConnectionClosed, OSError):
            return  # who iterates notices too, and has it sent again

    def end(self) -> None:
        """Say that no more texts come."""
        self._ended = True
        self._changed.set()

    def __aiter__(self) -> AsyncIterator[StreamAnswer]:
        return self

    async def __anext__(self) -> StreamAnswer:
        try:
            while (answer := self._state.take()) is None:
                if not self._state.is_waiting:
                    if self._ended:
                        raise StopAsyncIteration
                    await self._until_changed()
                else:
                    await self._carried_out(self._exchange)
        except errors.TwodoorError as exc:
            self._failure = exc
            raise
        finally:
            self._room.set()
        return answer

    async def _until_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _carried_out(self, step: Callable[[], Awaitable[object]]) -> None:
        """Do a step; where the connection breaks, drop it and wait a moment, so that the next step opens it anew."""
        if self._failure is not None:
            raise self._failure
        try:
            with translated(self._core):
                await step()
        except errors.TwodoorError as error:
            if self._socket is not None:
                socket, self._socket = self._socket, None
                await socket.close()
            pause_s = self._outage.pause_s(error)
            if pause_s is None:
                raise
            await asyncio.sleep(pause_s)

    async def _exchange(self) -> None:
        socket = self._socket or await self._open()
        await self._flush()
        try:
            async with asyncio.timeout(self._state.wait_s(_LOOK_S)):
                message = await socket.recv()
        except TimeoutError:
            self._state.check_silence()
            return
        self._state.received(message)
        self._outage.over()

    async def _open(self) -> ClientConnection:
        made = await connect(**self._how)
        if self._failure is not None:
            await made.close()
            raise self._failure
        async with self._sending:
            self._state.lost()
            self._socket = made
        self._outage.opened()
        return made

    async def _flush(self) -> None:
        """Send what is to be sent, in order; without a connection it waits for the next one."""
        async with self._sending:
            socket = self._socket
            if socket is None:
                return
            for message in self._state.unsent():
                await socket.send(message)


@asynccontextmanager
async def _feeding(
    stream: OpenStream, texts: Iterable[StreamItem] | AsyncIterable[StreamItem]
) -> AsyncIterator["asyncio.Task[None]"]:
    """Send texts in a task of its own while the block runs."""

    async def feed() -> None:
        try:
            if isinstance(texts, AsyncIterable):
                async for item in texts:
                    await stream.send_item(item)
            else:
                for item in texts:
                    await stream.send_item(item)
        finally:
            stream.end()

    task = asyncio.create_task(feed(), name="stream feed")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
