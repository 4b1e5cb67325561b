"""Waiting for an event, for a while."""

import asyncio


async def happens(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the event is set, for ``timeout_s`` at most; returns whether it was.

    ``asyncio.wait_for`` of Python 3.11 swallows a cancellation that comes while the event is being set: the task would
    live on, and whoever waits for its end would wait for ever.
    """
    if event.is_set():
        await asyncio.sleep(0)  # the rest of the process gets its turn
        return True
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
