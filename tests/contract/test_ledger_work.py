"""The ledger's contract: claims, leases, completion, fairness and the operator's hand, on both stores."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import pytest
import pytest_asyncio

from jobs.ledger import part_key
from jobs.records import Claim, Suspect
from jobs.states import Status
from serving.errors import UnknownJob
from tests.contract import ledgers
from tests.contract.ledgers import MODELS, ROWS, Store, accept, claim, done, ended, try_claim, work_off


@pytest_asyncio.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield ledgers.memory_store()
        return
    url = request.getfixturevalue("database_url")
    async with ledgers.postgres_store(url, database_connections=8) as opened:
        yield opened


async def test_a_claim_says_all_that_a_consumer_needs_and_pins_the_newest_version(store: Store) -> None:
    ledger = store.ledger
    job = await accept(ledger, 2, truncate=True, has_lines=False, weight=2.0, input_key="imports/default/x")
    found = await claim(ledger, models={"m": ["7", "6"]})
    assert (found.chunk, found.generation, found.plan) == ((job.id, 0), 1, ledgers.plans(2 * ROWS)[0])
    assert (found.tenant, found.weight, found.model, found.model_version) == ("default", 2.0, "m", "7")
    assert (found.truncate, found.has_lines, found.input_key) == (True, False, "imports/default/x")
    assert (found.status, dict(found.suspects)) == (Status.RUNNING, {})
    running = await ledger.get("default", job.id)
    assert (running.status, running.model_version, running.started_at is not None) == (Status.RUNNING, "7", True)
    assert await try_claim(ledger, models={"m": ["6"]}) is None, "a job that runs is for its pinned version"
    assert (await claim(ledger, models={"m": ["8", "7"]})).model_version == "7"


async def test_a_job_is_claimed_only_for_models_at_hand_and_not_where_it_is_full(store: Store) -> None:
    ledger = store.ledger
    first, second = await accept(ledger), await accept(ledger)
    assert await try_claim(ledger, models={}) is None
    assert await try_claim(ledger, models={"m": []}) is None
    assert await try_claim(ledger, models={"x": ["1"]}) is None
    assert (await claim(ledger, full=[first.id])).chunk.job == second.id
    assert await try_claim(ledger, full=[first.id, second.id]) is None


async def test_eight_claimers_at_once_never_get_one_chunk_twice(store: Store) -> None:
    ledger = store.ledger
    for _ in range(4):
        await accept(ledger, 12)
    found: list[Claim] = []

    async def consume(name: str) -> None:
        misses = 0
        # Another claimer's open transaction may hide the last chunk for a moment.
        while misses < 3:
            claimed = await try_claim(ledger, name)
            misses = 0 if claimed else misses + 1
            found.extend([claimed] if claimed else [])

    await asyncio.gather(*(consume(f"c{number}") for number in range(8)))
    assert len(found) == len({claimed.chunk for claimed in found}) == 48
    assert len({claimed.token for claimed in found}) == 48


async def test_a_job_that_starts_is_pinned_once_by_racing_consumers(store: Store) -> None:
    job = await accept(store.ledger, 8)
    tries = await asyncio.gather(*(try_claim(store.ledger, models={"m": [str(n), "9", "0"][:1]}) for n in range(8)))
    pinned = (await store.ledger.get("default", job.id)).model_version
    assert {found.model_version for found in tries if found is not None} == {pinned}


async def test_one_claim_of_a_job_says_that_it_begins_it_and_each_names_the_request_that_made_it(store: Store) -> None:
    ledger = store.ledger
    await accept(ledger, 3, request_id="r-1")
    tries = await asyncio.gather(*(try_claim(ledger, lease_s=30) for _ in range(4)))
    found = [one for one in tries if one is not None]
    await store.advance(31)
    while (again := await try_claim(ledger)) is not None:
        found.append(again)
    assert [claimed.begins_job for claimed in found].count(True) == 1
    assert {claimed.request_id for claimed in found} == {"r-1"}
    ended = await accept(ledger)
    await ledger.cancel("default", ended.id)
    claimed = await claim(ledger, models={})
    assert (claimed.begins_job, claimed.request_id) == (False, None)


async def test_a_lease_that_ran_out_is_claimed_again_and_the_first_claim_is_refused(store: Store) -> None:
    ledger = store.ledger
    await accept(ledger)
    first = await claim(ledger, "c1", lease_s=30)
    assert await try_claim(ledger, "c2") is None
    assert (await ledger.duties())["chunk"] == 0
    await store.advance(31)
    assert (await ledger.duties())["chunk"] == 1
    second = await claim(ledger, "c2")
    assert (second.chunk, second.generation) == (first.chunk, 2)
    assert second.token != first.token
    assert not await ledger.complete(first, done(first))
    assert not await ledger.remember(first, {0: Suspect(1, 0)})
    renewal = await ledger.renew("c1", {first.chunk: 1}, 0, 0, 30)
    assert renewal.lost == {first.chunk}
    await ledger.release([first])
    assert await ledger.complete(second, done(second))
    assert (await ledger.get("default", first.chunk.job)).rows_succeeded == ROWS


async def test_a_lease_that_ran_out_unnoticed_is_renewed(store: Store) -> None:
    ledger = store.ledger
    await accept(ledger)
    found = await claim(ledger, lease_s=30)
    await store.advance(300)
    renewal = await ledger.renew("c1", {found.chunk: found.generation}, 0, ROWS, 30)
    assert (renewal.lost, dict(renewal.ending)) == (frozenset(), {})
    assert await try_claim(ledger, "c2") is None
    assert await ledger.complete(found, done(found))


async def test_completing_again_says_yes_to_the_same_claim_only(store: Store) -> None:
    ledger = store.ledger
    await accept(ledger)
    found = await claim(ledger)
    assert await asyncio.gather(*(ledger.complete(found, done(found)) for _ in range(4))) == [True] * 4
    other = replace(found, token=str(uuid4()))
    assert not await ledger.complete(other, done(other))
    # Its consumer has not heard the answer and still names it.
    assert (await ledger.renew("c1", {found.chunk: found.generation}, 0, 0, 30)).lost == frozenset()
    assert (await ledger.get("default", found.chunk.job)).rows_succeeded == ROWS


async def test_counts_that_are_not_the_chunks_are_a_bug_and_change_nothing(store: Store) -> None:
    await accept(store.ledger)
    found = await claim(store.ledger)
    with pytest.raises(ValueError, match="rows of a chunk"):
        await store.ledger.complete(found, replace(done(found), succeeded=ROWS + 1))
    assert await store.ledger.complete(found, done(found))


async def test_a_released_chunk_is_free_at_once_and_its_old_claim_is_nothing(store: Store) -> None:
    ledger = store.ledger
    await accept(ledger)
    found = await claim(ledger)
    await ledger.release([found])
    await ledger.release([found])
    assert (await ledger.renew("c1", {found.chunk: found.generation}, 0, 0, 30)).lost == {found.chunk}
    assert not await ledger.complete(found, done(found))
    assert (await claim(ledger, "c2")).generation == 2


async def test_suspects_are_remembered_for_the_next_claim(store: Store) -> None:
    ledger = store.ledger
    await accept(ledger)
    found = await claim(ledger)
    suspects = {3: Suspect(attempts=1, deaths=2), 7: Suspect(attempts=2)}
    assert await ledger.remember(found, {0: Suspect(1, 1)})
    assert await ledger.remember(found, suspects)
    await ledger.release([found])
    assert dict((await claim(ledger)).suspects) == suspects


async def test_a_heartbeat_names_lost_claims_and_those_whose_job_no_longer_runs(store: Store) -> None:
    ledger = store.ledger
    jobs = [await accept(ledger) for _ in range(3)]
    claims = {found.chunk.job: found for found in [await claim(ledger) for _ in jobs]}
    await ledger.cancel("default", jobs[0].id)
    assert await ledger.fail(jobs[1].id, "input_lost", "the input is gone")
    renewal = await ledger.renew("c1", {found.chunk: 1 for found in claims.values()}, 0, 20, 30)
    assert renewal.ending == {(jobs[0].id, 0): Status.CANCELLING, (jobs[1].id, 0): Status.FAILING}
    assert renewal.lost == frozenset()
    assert renewal.control == (await ledger.set_paused(False))
    gone = await ledger.renew("c1", {claims[jobs[0].id].chunk: 9}, 0, 20, 30)
    assert gone.lost == {(jobs[0].id, 0)}
    assert (await ledger.renew("c1", {}, 0, 0, 30)).lost == frozenset()


async def test_chunks_of_an_ending_job_need_no_model_and_a_claim_tells_why_it_fails(store: Store) -> None:
    ledger = store.ledger
    job = await accept(ledger, 2)
    running = await claim(ledger)
    failing = await ledger.fail(job.id, "model_gone", "version 1 is gone")
    assert failing == await ledger.get("default", job.id)
    assert not await ledger.fail(job.id, "again", "again")
    assert not await ledger.fail("job_none", "x", "x")
    assert (await ledger.cancel("default", job.id))[1] is False, "who begins to end a job first decides how it ends"
    found = await claim(ledger, models={})
    assert (found.status, found.error_code, found.error_message) == (Status.FAILING, "model_gone", "version 1 is gone")
    for held in (running, found):
        assert await ledger.complete(held, done(held, failed=ROWS))
    (closed,) = await ledger.close_due(10)
    assert (closed.status, closed.error_code, closed.rows_failed) == (Status.FAILED, "model_gone", 2 * ROWS)
    assert not await ledger.fail(job.id, "x", "x")


async def test_tenants_get_rows_in_the_ratio_of_their_weights(store: Store) -> None:
    for tenant, weight in (("one", 1.0), ("three", 3.0)):
        for _ in range(2):
            await accept(store.ledger, 40, tenant=tenant, weight=weight)
    rows = Counter[str]()
    for _ in range(60):
        found = await claim(store.ledger)
        rows[found.tenant] += found.plan.row_count
    assert rows["three"] / rows["one"] == pytest.approx(3, rel=0.1)


async def test_jobs_of_one_tenant_take_turns_so_that_a_small_one_is_not_behind_a_giant(store: Store) -> None:
    giant = await accept(store.ledger, 100)
    for _ in range(10):
        await claim(store.ledger)
    small = await accept(store.ledger, 3)
    next_ones = [(await claim(store.ledger)).chunk.job for _ in range(6)]
    assert next_ones.count(small.id) == 3
    assert next_ones.count(giant.id) == 3


async def test_a_tenant_that_is_new_or_wakes_starts_level_with_the_active_ones(store: Store) -> None:
    ledger = store.ledger
    await ended(ledger, tenant="sleeper")
    await accept(ledger, 60, tenant="busy")
    for _ in range(20):
        await claim(ledger)
    for tenant in ("sleeper", "new"):
        await accept(ledger, 20, tenant=tenant)
    turns = Counter([(await claim(ledger)).tenant for _ in range(30)])
    assert all(abs(count - 10) <= 1 for count in turns.values()), turns
    assert len(turns) == 3


async def test_a_tenant_that_was_alone_does_not_pay_for_it_later(store: Store) -> None:
    await ended(store.ledger, 20, tenant="early")
    await accept(store.ledger, 10, tenant="late")
    await accept(store.ledger, 10, tenant="early")
    turns = Counter([(await claim(store.ledger)).tenant for _ in range(10)])
    assert turns == {"early": 5, "late": 5}


async def test_only_a_chunks_first_claim_counts_as_its_tenants_turn(store: Store) -> None:
    ledger = store.ledger
    for tenant in ("a", "b"):
        await accept(ledger, 10, tenant=tenant)
    first = await claim(ledger)
    for _ in range(5):
        again = await claim(ledger)
        await ledger.release([again])
    assert (await claim(ledger)).tenant != first.tenant


async def test_pause_counts_epochs_and_is_done_when_each_live_consumer_has_obeyed(store: Store) -> None:
    ledger = store.ledger
    assert (await ledger.bulk_state(10)).state == "running"
    for name in ("c1", "c2"):
        await ledger.renew(name, {}, 0, 5, 30)
    control = await ledger.set_paused(True)
    assert (control.epoch, control.paused) == (1, True)
    assert await ledger.set_paused(True) == control, "pausing what is paused changes nothing"
    assert (await ledger.renew("c1", {}, 1, 3, 30)).control == control
    assert (await ledger.bulk_state(10)).state == "pausing"
    await ledger.renew("c1", {}, 1, 0, 30)
    assert (await ledger.bulk_state(10)).state == "pausing", "c2 has not obeyed"
    await ledger.leave("c2")
    state = await ledger.bulk_state(10)
    assert state.state == "paused"
    assert [(found.id, found.epoch, found.rows_in_flight) for found in state.consumers] == [("c1", 1, 0)]
    assert (await ledger.set_paused(False)).epoch == 2
    assert (await ledger.bulk_state(10)).state == "running"


async def test_a_consumer_without_a_sign_of_life_holds_up_no_pause(store: Store) -> None:
    ledger = store.ledger
    await ledger.renew("dead", {}, 0, 9, 30)
    await ledger.set_paused(True)
    assert (await ledger.bulk_state(10)).state == "pausing"
    await store.advance(11)
    state = await ledger.bulk_state(10)
    assert (state.state, list(state.consumers)) == ("paused", [])
    await ledger.renew("dead", {}, 0, 9, 30)
    (back,) = (await ledger.bulk_state(10)).consumers
    assert (back.seen_at - back.started_at).total_seconds() > 10


async def test_a_claim_of_a_removed_job_is_lost(store: Store) -> None:
    ledger = store.ledger
    job = await accept(ledger)
    late = await claim(ledger, lease_s=1)
    await store.advance(2)
    await work_off(ledger)
    await ledger.close_due(10)
    await ledger.delete("default", job.id)
    assert (await ledger.renew("c1", {late.chunk: 1}, 0, 0, 30)).lost == {late.chunk}
    assert not await ledger.complete(late, done(late))
    assert not await ledger.remember(late, {})
    assert part_key(late) not in await ledger.referenced([part_key(late)])
    with pytest.raises(UnknownJob):
        await ledger.parts("default", job.id)
    assert await try_claim(ledger, models=MODELS) is None
