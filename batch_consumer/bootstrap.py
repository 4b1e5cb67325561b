"""The first exchange of an aiokafka client, whose connection the library forgets to close where it is cut short."""

import asyncio
from typing import Any

# How long it may go on then. A broker that answers needs less, and one that does not is given up by the client itself.
GRACE_S = 1.0


def ends_by_itself(client: Any) -> None:
    """Let the ``bootstrap()`` of a client, which ``start()`` begins with, go on for a moment where ``start()`` is cut short.

    aiokafka keeps the connection of that exchange to itself: cancelled, it would stay open until it is collected.
    """
    bootstrap = client.bootstrap

    async def to_its_end() -> None:
        running = asyncio.create_task(bootstrap(), name="bootstrap")
        try:
            await asyncio.wait([running])
        finally:
            if not running.done():
                await asyncio.wait([running], timeout=GRACE_S)
                running.cancel()
                await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
        running.result()

    client.bootstrap = to_its_end
