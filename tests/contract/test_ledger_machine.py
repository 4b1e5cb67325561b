"""Any order of steps, crashes between them included, leaves the ledger as its model says: both stores."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.contract import ledgers
from tests.contract.ledger_machine import LedgerMachine

_EMPTY = """
    TRUNCATE twodoor.tenants, twodoor.jobs, twodoor.turns, twodoor.chunks, twodoor.uploads, twodoor.idempotency,
        twodoor.notifications, twodoor.garbage, twodoor.periodic, twodoor.consumers
"""


def run_now(step: Coroutine[Any, Any, Any]) -> Any:
    """Run a method that never waits."""
    try:
        step.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the store in memory never waits")


def test_the_store_in_memory_agrees_with_the_model_after_any_steps() -> None:
    def machine() -> LedgerMachine:
        store = ledgers.memory_store()
        return LedgerMachine(store.ledger, run_now, store.advance)

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=checks)
    )


def test_postgres_agrees_with_the_model_after_any_steps(database_url: str) -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        store = runner.run(stack.enter_async_context(ledgers.postgres_store(database_url)))

        def machine() -> LedgerMachine:
            runner.run(store.execute(_EMPTY))
            return LedgerMachine(store.ledger, runner.run, store.advance)

        try:
            run_state_machine_as_test(
                machine, settings=settings(max_examples=6, stateful_step_count=25, deadline=None, derandomize=False,
                                           suppress_health_check=list(HealthCheck)),
            )  # fmt: skip
        finally:
            runner.run(stack.aclose())
