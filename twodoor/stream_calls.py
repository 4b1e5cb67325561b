"""The stream's calls of both clients. What speaks WebSocket is loaded by who streams: every command imports the client."""

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from typing import TYPE_CHECKING

from twodoor.transport import AsyncCore, SyncCore

if TYPE_CHECKING:
    from twodoor.stream_async import OpenStream
    from twodoor.stream_wire import StreamAnswer, StreamItem


class StreamCalls(SyncCore):
    """The stream of the blocking client."""

    def stream(
        self,
        texts: "Iterable[StreamItem]",
        *,
        model: str | None = None,
        truncate: bool = False,
        timeout_s: float | None = None,
        window: int = 32,
        in_order: bool = False,
        outage_s: float = 30.0,
    ) -> "Iterator[StreamAnswer]":
        """Yield one answer for each text over one connection, as they come, or with ``in_order`` in the texts' order.

        ``texts``: strings, or mappings ``{"text", "id"?, "model"?, "truncate"?}``. It may be endless: it is asked for
        the next one while fewer than ``window`` are unanswered, on this thread, so no answer is yielded while it takes
        its time (the async client has no such wait). ``timeout_s`` bounds each text's answer. A broken connection is
        opened anew and what is unanswered is sent again; a server that is away is waited for, up to ``outage_s`` since
        it went. A text without an answer has its error in ``answer``; what ends the stream as a whole is
        raised: Unauthorized, NotReachable, Refused and the like.
        """
        from twodoor.stream import answers
        from twodoor.stream_wire import Window, options

        wanted_s = self.wanted_s(timeout_s)
        state = Window(window, model, truncate, self.retry, wanted_s, in_order=in_order)
        return answers(self, texts, options(self, self._http.headers, wanted_s, window), state, outage_s)


class AsyncStreamCalls(AsyncCore):
    """The stream of the awaiting client."""

    def stream(
        self,
        texts: "Iterable[StreamItem] | AsyncIterable[StreamItem]",
        *,
        model: str | None = None,
        truncate: bool = False,
        timeout_s: float | None = None,
        window: int = 32,
        in_order: bool = False,
        outage_s: float = 30.0,
    ) -> "AsyncGenerator[StreamAnswer, None]":
        """Yield one answer for each text as they come, also while ``texts`` takes its time; else as `Client.stream`."""
        from twodoor.stream_async import answers

        opened = self.open_stream(
            model=model, truncate=truncate, timeout_s=timeout_s, window=window, in_order=in_order, outage_s=outage_s
        )
        return answers(opened, texts)

    def open_stream(
        self,
        *,
        model: str | None = None,
        truncate: bool = False,
        timeout_s: float | None = None,
        window: int = 32,
        in_order: bool = False,
        outage_s: float = 30.0,
    ) -> "OpenStream":
        """Return a stream to use with ``async with``: `send` texts in one task, iterate over the answers in another."""
        from twodoor.stream_async import OpenStream
        from twodoor.stream_wire import Window, options

        wanted_s = self.wanted_s(timeout_s)
        state = Window(window, model, truncate, self.retry, wanted_s, in_order=in_order)
        return OpenStream(self, state, options(self, self._http.headers, wanted_s, window), outage_s)
