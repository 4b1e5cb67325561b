"""The WebSocket under `/v1/stream`: uvicorn's protocol over the websockets library, with every size and every wait bounded.

Compression is not offered: texts are short, and a few bytes that become megabytes would have to be counted while they do.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Close, CloseCode, Frame

from gateway.envelope import LINGER_BYTES, LINGER_S
from gateway.write_clock import WriteClock

PATH = "/v1/stream"
GONE = "twodoor.gone"
"""Where the scope keeps the event that is set once the connection is lost, also while nobody reads from it."""
STOPPING = "twodoor.stopping"
"""The message the app gets at the server's stop: nothing more is read, and what is unanswered is to be finished."""

Headers = Sequence[tuple[bytes, bytes]]

# Of what was read, so much is parsed before the app has taken it: tiny messages cost many times their bytes.
_PARSED_BYTES = 4_096
_STOP_CLOSE_S = 1.0
_HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: -\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n"
)
# uvicorn writes a line with the path and its query for every connection, websockets every frame at its debug level.
_quiet = logging.getLogger(f"{__name__}.uvicorn")
_quiet.setLevel(logging.WARNING)


class Unfinished:
    """The bytes of messages that have begun to come, on all connections together."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held = 0


class StreamSocket(WebSocketsSansIOProtocol):
    """One connection. What uvicorn's protocol leaves open is bounded here.

    What was read stays unparsed until the app has taken what came before. Nothing is read while the peer takes nothing
    of what was written, pongs among it. A message has to be whole in time, a closed connection to end in time. A pong
    that cannot come because we do not read is not missed. At the server's stop the app finishes what is unanswered.
    """

    message_timeout_s: float
    write_timeout_s: float
    min_bytes_per_s: int
    unfinished: Unfinished

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _quiet
        self.conn.debug = False
        self._url, self._headers = b"", cast("Headers", ())
        self._lost = asyncio.Event()
        self._unparsed, self._message = bytearray(), bytearray()
        self._held_bytes = self._dropped_bytes = 0
        self._reading, self._write_paused = True, False
        self._heard_at_s = 0.0
        self._write_clock = WriteClock(self.write_timeout_s, self.min_bytes_per_s)
        self._message_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    def begin(self, url: bytes, headers: Headers, early: bytes) -> None:
        """Answer a handshake that the HTTP protocol has read and found whole; ``early`` came behind its head.

        The library parses a head of our own, with the one field it needs: its limits are not those of our heads.
        """
        self._url, self._headers = url, headers
        self._unparsed += early
        self.read_paused = True  # until the app has accepted, and asks for a message
        key = next(value for name, value in headers if name == b"sec-websocket-key")
        super().data_received(_HANDSHAKE % key)
        self._steer()

    async def run_asgi(self) -> None:
        """Run the app with the handshake as it was sent."""
        path, _, query = self._url.partition(b"?")
        about = {"path": path.decode(), "raw_path": path, "query_string": query, "headers": list(self._headers)}
        cast("dict[str, Any]", self.scope).update(about, **{GONE: self._lost})
        try:
            await super().run_asgi()
        finally:
            # A close waits until everything is written, so also for a peer that takes nothing.
            self._end_within(self.close_timeout + self.write_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell the app at once: what waits unread is nobody's any more."""
        self._write_clock.stop()
        for timer in (self._message_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._lost.set()
        self._unparsed.clear()
        self._message.clear()
        self._hold(0)
        while not self.queue.empty():
            self.queue.get_nowait()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Close, as nothing more can come; what is written already has a bounded time to be taken."""
        self._end_within(self.write_timeout_s)

    def shutdown(self) -> None:
        """Begin the server's stop."""
        self.close_timeout = _STOP_CLOSE_S
        if self.close_sent:
            super().shutdown()
        else:
            self.queue.put_nowait(cast("Any", {"type": STOPPING}))

    def data_received(self, data: bytes) -> None:
        """Keep what came, and parse of it what the app will take now."""
        self._heard_at_s = self.loop.time()
        if self.conn.parser_exc is not None or self._failed:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.close()
            return
        self._unparsed += data
        self._go_on()

    async def receive(self) -> Any:
        """Return the next event. Only who asks for it lets more be read."""
        if self.queue.empty():
            self.read_paused = False
            self._go_on()
        return await self.queue.get()

    async def send(self, message: Any) -> None:
        """Send an event; waits while the peer takes nothing, up to the write timeout. Raises OSError once it is gone.

        Gone is also who was closed below the app: for what it sent, or for its silence.
        """
        await self.writable.wait()
        if self.close_sent:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.close":
            self._reading = True  # the base class has seen to it, for the peer's own close
            self._go_on()

    def handle_text(self, event: Frame) -> None:
        """Begin a text."""
        self.curr_msg_data_type = "text"
        self.handle_cont(event)

    def handle_bytes(self, event: Frame) -> None:
        """Begin a binary message."""
        self.curr_msg_data_type = "bytes"
        self.handle_cont(event)

    def handle_cont(self, event: Frame) -> None:
        """Join the fragments at once: a list of empty ones would have no size and no end."""
        if self.close_sent:
            return
        self._message += event.data
        if event.fin:
            message, self._message = bytes(self._message), bytearray()
            self._pass_on(message)

    def handle_parser_exception(self) -> None:
        """Say why, then read and drop for a moment: closing on unread bytes would reset the reason away."""
        if self.close_sent:
            self.transport.close()
            return
        close = self.conn.close_sent or Close(CloseCode.ABNORMAL_CLOSURE, "")
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        self._unparsed.clear()
        self._message.clear()
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def keepalive_timeout(self) -> None:
        """Give up a peer that is silent. While we do not read it is we who are, and any byte is as good as a pong."""
        if not self._reading or self._heard_at_s > self.ping_sent_at:
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        self._end_within(LINGER_S)

    def pause_writing(self) -> None:
        """Read no more, and give the peer a bounded time to take some of what was written."""
        super().pause_writing()
        self._write_paused = True
        self._steer()
        self._write_clock.start(self.transport)

    def resume_writing(self) -> None:
        """Stop that clock, and read again."""
        self._write_paused = False
        self._write_clock.stop()
        super().resume_writing()
        self._go_on()

    @property
    def _failed(self) -> bool:
        """Whether we closed because of what came; the rest of it is of no interest."""
        return self.close_sent and self.conn.eof_sent

    def _pass_on(self, message: bytes) -> None:
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": message})
        else:
            try:
                self.queue.put_nowait({"type": "websocket.receive", "text": message.decode()})
            except UnicodeDecodeError:
                self._fail(CloseCode.INVALID_DATA, "the text is not UTF-8")
                return
        self.read_paused = True

    def _fail(self, code: CloseCode, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def _go_on(self) -> None:
        """Parse until the app has a message to take, or nothing is left; then read on or not."""
        while self._unparsed and self._may_parse:
            piece = bytes(self._unparsed[:_PARSED_BYTES])
            del self._unparsed[:_PARSED_BYTES]
            super().data_received(piece)
        self._watch_message()
        self._steer()

    @property
    def _may_parse(self) -> bool:
        if not self.handshake_complete or self._write_paused or self._failed or self.transport.is_closing():
            return False
        return self.close_sent or not self.read_paused

    def _steer(self) -> None:
        """Read only while somebody takes what is read: the app its messages, the peer our frames."""
        wanted = self._may_parse or self._failed
        if wanted == self._reading or self.transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def _watch_message(self) -> None:
        """Bound the time and the memory of a message that has begun."""
        pending_bytes = len(self.conn.reader.buffer) + len(self._message)
        begun = pending_bytes > 0 or self.conn.current_size is not None
        if not self._hold(pending_bytes) and not self.close_sent:
            self._fail(CloseCode.TRY_AGAIN_LATER, "too many messages are on their way")
        elif begun and not self.read_paused and not self.close_sent:
            if self._message_timer is None:
                self._message_timer = self.loop.call_later(self.message_timeout_s, self._too_slow)
        elif self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _hold(self, count: int) -> bool:
        """Count the bytes of this connection's unfinished message; returns whether all of them are within the bound."""
        self.unfinished.held += count - self._held_bytes
        grown, self._held_bytes = count > self._held_bytes, count
        return not grown or self.unfinished.held <= self.unfinished.most_bytes

    def _too_slow(self) -> None:
        self._message_timer = None
        if not self.close_sent and not self.transport.is_closing():
            self._fail(CloseCode.POLICY_VIOLATION, f"a message was not whole within {self.message_timeout_s:g} s")

    def _end_within(self, seconds: float) -> None:
        if self._end_timer is None and not self._lost.is_set():
            self._end_timer = self.loop.call_later(seconds, self.transport.abort)
