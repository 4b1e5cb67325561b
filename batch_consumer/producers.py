"""The end of aiokafka's producers: nothing of one runs on, and no error of it stays unread inside the client."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

from aiokafka.errors import ProducerClosed

from batch_consumer.broker import Trouble

log = logging.getLogger(__name__)

# How long the client's sender may take to end once it was told to: it first waits for requests that are under way.
SENDER_END_S = 1.0


async def end(producer: Any, timeout_s: float) -> None:
    """Close a producer within little more than twice the deadline, whatever state it is in.

    ``stop()`` waits until everything is delivered, and a batch of an idempotent producer never expires. Where that is
    cut short, the client's sender lives on: it would deliver late, out of order, and open connections nobody closes.
    """
    try:
        with suppress(*Trouble):
            async with asyncio.timeout(timeout_s):
                await producer.stop()
    finally:
        await _end_sender(producer)
        with suppress(*Trouble):
            async with asyncio.timeout(timeout_s):
                await producer.client.close()
        # Whoever waits for a delivery, the client's own flush too, hears that there will be none.
        producer._message_accumulator.fail_all(ProducerClosed())
        read_errors(producer)


async def _end_sender(producer: Any) -> None:
    sender = producer._sender.sender_task
    # The second time it leaves the requests under way alone; closing the connections ends those.
    for _ in range(2):
        if sender is None or sender.done():
            return
        sender.cancel()
        await asyncio.wait([sender], timeout=SENDER_END_S)


def read_outcome(future: "asyncio.Future[Any]") -> None:
    """Read an error that nobody may wait for any more; a callback of a future inside the client."""
    if not future.cancelled() and future.exception() is not None:
        log.debug("not delivered: %s", type(future.exception()).__name__)


def read_errors(producer: Any) -> None:
    """Read, now or later, the error that aiokafka also puts into futures nobody awaits after a failed step.

    They are the transaction's own, those of offsets whose ``shield`` was cancelled, and that of each batch which was
    never handed to a broker.
    """
    accumulator, transactions = producer._message_accumulator, producer._txn_manager
    batches = [*accumulator._pending_batches, *(batch for queue in accumulator._batches.values() for batch in queue)]
    waiters = [batch._drain_waiter for batch in batches]
    waiters += [future for _, _, future in transactions._pending_txn_offsets]
    for waiter in (transactions.wait_for_transaction_end(), *waiters):
        if waiter is not None:
            waiter.add_done_callback(read_outcome)
