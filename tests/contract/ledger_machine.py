"""A model of the ledger beside a ledger: consumers that vanish between any two steps and come back as zombies, callers
that cancel, clocks that jump. After each step both have to agree."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jobs.ledger import Ledger, input_key, part_key
from jobs.records import ChunkId, Claim
from jobs.states import CLOSES_AS, NEXT, Status
from serving.errors import JobNotEnded, UnknownJob
from tests.contract.ledgers import MODELS, ROWS, done, new_job, plans

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]
TENANTS = {"a": 1.0, "b": 3.0}
WINDOW_S, RESULT_TTL_S, REMEMBERED_S = 300, 500, 86_400


@dataclass(slots=True)
class Chunk:
    """What must be true of a chunk."""

    generation: int = 0
    token: str | None = None
    lease_until: float = 0.0
    done_by: str | None = None
    failed: int = 0


@dataclass(slots=True)
class Modelled:
    """What must be true of a job."""

    tenant: str
    chunks: list[Chunk]
    created: float
    status: Status = Status.QUEUED
    expires: float = 0.0
    closed: int = 0

    @property
    def open(self) -> list[int]:
        return [number for number, chunk in enumerate(self.chunks) if chunk.done_by is None]


@dataclass(slots=True)
class Held:
    """A claim as its consumer knows it: alive or a zombie, with its part written or not."""

    claim: Claim
    consumer: str
    put: bool = False


@dataclass(slots=True)
class World:
    """The whole model."""

    now: float = 0.0
    jobs: dict[str, Modelled] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    held: list[Held] = field(default_factory=list)
    zombies: list[Held] = field(default_factory=list)
    objects: set[str] = field(default_factory=set)

    def chunk(self, chunk: ChunkId) -> Chunk | None:
        job = self.jobs.get(chunk.job)
        return job.chunks[chunk.number] if job else None

    def claimable(self) -> set[ChunkId]:
        return {
            ChunkId(job_id, number)
            for job_id, job in self.jobs.items()
            for number in job.open
            if job.chunks[number].lease_until <= self.now
        }


class LedgerMachine(RuleBasedStateMachine):
    """``ledger`` under test, ``run`` to await it, ``advance`` to move its clock."""

    def __init__(self, ledger: Ledger, run: Run[Any], advance: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self.ledger, self.run, self._advance = ledger, run, advance
        self.world = World()

    # Callers

    @rule(tenant=st.sampled_from(sorted(TENANTS)), chunks=st.integers(1, 3))
    def submit(self, tenant: str, chunks: int) -> None:
        job = new_job(
            chunks * ROWS,
            tenant=tenant,
            weight=TENANTS[tenant],
            completion_window_s=WINDOW_S,
            result_ttl_s=RESULT_TTL_S,
        )
        self.run(self.ledger.accept(job, plans(job.row_count)))
        self.world.jobs[job.id] = Modelled(tenant, [Chunk() for _ in range(chunks)], self.world.now)
        self.world.objects.add(input_key(job.id))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), how=st.sampled_from([Status.CANCELLING, Status.FAILING]))
    def begin_to_end(self, data: st.DataObject, how: Status) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.world.jobs)))
        job = self.world.jobs[job_id]
        if how is Status.CANCELLING:
            _, began = self.run(self.ledger.cancel(job.tenant, job_id))
        else:
            began = self.run(self.ledger.fail(job_id, "input_lost", "gone")) is not None
        assert began == (how in NEXT[job.status])
        if began:
            job.status = how

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.world.jobs)))
        job = self.world.jobs[job_id]
        try:
            self.run(self.ledger.delete(job.tenant, job_id))
        except JobNotEnded:
            assert not job.status.ended
        else:
            assert job.status.ended
            self._remove(job_id)

    # Consumers

    @rule(consumer=st.sampled_from("xyz"), lease_s=st.sampled_from([20.0, 60.0]))
    def claim(self, consumer: str, lease_s: float) -> None:
        found = self.run(self.ledger.claim(consumer, MODELS, (), lease_s))
        claimable = self.world.claimable()
        if found is None:
            assert not claimable
            return
        assert found.chunk in claimable
        job, chunk = self.world.jobs[found.chunk.job], self.world.chunk(found.chunk)
        assert chunk is not None
        assert found.generation == chunk.generation + 1
        job.status = Status.RUNNING if job.status is Status.QUEUED else job.status
        assert found.status is job.status
        chunk.generation, chunk.token, chunk.lease_until = found.generation, found.token, self.world.now + lease_s
        self.world.held.append(Held(found, consumer))

    @precondition(lambda self: self.world.held)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        self._write(self._draw(data, self.world.held))

    @precondition(lambda self: self.world.held or self.world.zombies)
    @rule(data=st.data(), failed=st.integers(0, 2), heard=st.booleans())
    def complete(self, data: st.DataObject, failed: int, heard: bool) -> None:
        """``heard`` False: the transaction ends, its answer is lost, and the consumer may ask again."""
        held = self._draw(data, self.world.held + self.world.zombies)
        self._write(held)
        chunk, claim = self.world.chunk(held.claim.chunk), held.claim
        first = chunk is not None and chunk.done_by is None and chunk.token == claim.token
        again = chunk is not None and chunk.done_by == claim.token
        assert self.run(self.ledger.complete(claim, done(claim, failed))) == (first or again)
        if chunk is not None and first:
            chunk.done_by, chunk.failed = claim.token, failed
        if heard:
            self._forget([held])
            if not (first or again):
                self.world.objects.discard(part_key(claim))

    @precondition(lambda self: self.world.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self._draw(data, self.world.held)
        self.run(self.ledger.release([held.claim]))
        chunk = self.world.chunk(held.claim.chunk)
        if chunk is not None and chunk.done_by is None and chunk.token == held.claim.token:
            chunk.token, chunk.lease_until = None, 0.0
        # Its answer may be lost too: the claim that was given back comes again as a zombie.
        self._forget([held])
        self.world.zombies.append(held)

    @rule(consumer=st.sampled_from("xyz"))
    def vanish(self, consumer: str) -> None:
        gone = [held for held in self.world.held if held.consumer == consumer]
        self._forget(gone)
        self.world.zombies += gone

    @rule(consumer=st.sampled_from("xyz"), lease_s=st.sampled_from([20.0, 60.0]))
    def renew(self, consumer: str, lease_s: float) -> None:
        claims = {held.claim.chunk: held.claim.generation for held in self.world.held if held.consumer == consumer}
        renewal = self.run(self.ledger.renew(consumer, claims, 0, 0, lease_s))
        lost, ending = set(), {}
        for where, generation in claims.items():
            chunk = self.world.chunk(where)
            if chunk is None or chunk.generation != generation or chunk.token is None:
                lost.add(where)
                continue
            if chunk.done_by is None:
                chunk.lease_until = self.world.now + lease_s
            status = self.world.jobs[where.job].status
            if not status.runs:
                ending[where] = status
        assert (renewal.lost, dict(renewal.ending)) == (lost, ending)

    # Time and the housekeeper

    @rule(seconds=st.sampled_from([1.0, 25.0, 70.0, 400.0, 90_000.0]))
    def jump(self, seconds: float) -> None:
        self.run(self._advance(seconds))
        self.world.now += seconds

    @rule()
    def close(self) -> None:
        closed = {job.id: job for job in self.run(self.ledger.close_due(100))}
        expected = {job_id for job_id, job in self.world.jobs.items() if not job.status.ended and not job.open}
        assert set(closed) == expected
        for job_id, record in closed.items():
            job = self.world.jobs[job_id]
            job.status = CLOSES_AS[job.status]
            job.closed += 1
            job.expires = self.world.now + RESULT_TTL_S
            assert record.status is job.status

    @rule()
    def expire(self) -> None:
        expected = {
            job_id
            for job_id, job in self.world.jobs.items()
            if job.status.runs and job.open and job.created + WINDOW_S <= self.world.now
        }
        assert {job.id for job in self.run(self.ledger.expire_due(100))} == expected
        for job_id in expected:
            self.world.jobs[job_id].status = Status.EXPIRING

    @rule()
    def retire_and_forget(self) -> None:
        expected = {
            job_id for job_id, job in self.world.jobs.items() if job.status.ended and job.expires <= self.world.now
        }
        assert {job.id for job in self.run(self.ledger.retire_due(100))} == expected
        for job_id in expected:
            self._remove(job_id)
        self.run(self.ledger.forget_due(100, REMEMBERED_S))

    # What is true after each step

    @invariant()
    def jobs_agree(self) -> None:
        for job_id, job in self.world.jobs.items():
            record = self.run(self.ledger.get(job.tenant, job_id))
            finished = [chunk for chunk in job.chunks if chunk.done_by is not None]
            failed = sum(chunk.failed for chunk in finished)
            assert record.status is job.status
            assert (record.rows_succeeded, record.rows_failed) == (ROWS * len(finished) - failed, failed)
            assert not record.status.ended or not job.open
            assert job.closed == record.status.ended
        for job_id in self.world.removed:
            for tenant in TENANTS:
                try:
                    self.run(self.ledger.get(tenant, job_id))
                except UnknownJob:
                    continue
                raise AssertionError("a removed job is still there")

    @invariant()
    def what_is_needed_is_referred_to_and_nothing_else(self) -> None:
        needed = set()
        for job_id, job in self.world.jobs.items():
            needed.add(input_key(job_id))
            for number, chunk in enumerate(job.chunks):
                token = chunk.done_by or chunk.token
                needed.add(f"jobs/{job_id}/parts/{number:08d}/{token}")
        assert self.run(self.ledger.referenced(sorted(self.world.objects))) == needed & self.world.objects

    def teardown(self) -> None:
        """Whatever happened: consumers that live end every job, each chunk done once, and its part is there."""
        self.world.held, self.world.zombies = [], []
        self.run(self._advance(61.0))
        self.world.now += 61.0
        while (found := self.run(self.ledger.claim("last", MODELS, (), 60.0))) is not None:
            self.world.objects.add(part_key(found))
            assert self.run(self.ledger.complete(found, done(found)))
            job, chunk = self.world.jobs[found.chunk.job], self.world.jobs[found.chunk.job].chunks[found.chunk.number]
            assert chunk.done_by is None
            job.status = Status.RUNNING if job.status is Status.QUEUED else job.status
            chunk.done_by, chunk.failed = found.token, 0
        self.close()
        for job_id, job in self.world.jobs.items():
            assert job.status.ended
            assert job.closed == 1
            parts = [part.key for part in self.run(self.ledger.parts(job.tenant, job_id))]
            assert parts == [f"jobs/{job_id}/parts/{n:08d}/{c.done_by}" for n, c in enumerate(job.chunks)]
            assert set(parts) <= self.world.objects
        self.jobs_agree()

    def _draw(self, data: st.DataObject, held: Sequence[Held]) -> Held:
        return held[data.draw(st.integers(0, len(held) - 1))]

    def _write(self, held: Held) -> None:
        held.put = True
        self.world.objects.add(part_key(held.claim))

    def _forget(self, gone: Sequence[Held]) -> None:
        self.world.held = [held for held in self.world.held if held not in gone]
        self.world.zombies = [held for held in self.world.zombies if held not in gone]

    def _remove(self, job_id: str) -> None:
        del self.world.jobs[job_id]
        self.world.removed.add(job_id)
        self.world.objects = {key for key in self.world.objects if f"/{job_id}/" not in key}
