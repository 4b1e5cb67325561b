"""How long a peer may leave alone what was written to it: the same for an HTTP answer and for a stream's messages."""

import asyncio


class WriteClock:
    """Runs while writing is paused. A peer that takes less than the pace in ``timeout_s`` is let go."""

    def __init__(self, timeout_s: float, min_bytes_per_s: int) -> None:
        self._timeout_s = timeout_s
        self._least_bytes = min_bytes_per_s * timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        """Give the peer ``timeout_s`` to take some of what waits, and so on until ``stop``."""
        unsent_bytes = transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._check, transport, unsent_bytes)

    def stop(self) -> None:
        """Stop; it may be started again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, transport: asyncio.Transport, before_bytes: int) -> None:
        if before_bytes - transport.get_write_buffer_size() >= self._least_bytes:
            self.start(transport)
        else:
            transport.abort()
