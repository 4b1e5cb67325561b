"""Deletes stored objects that nobody needs: those under a prefix given up, and orphans no row of the ledger refers to.

Why an object that is unreferenced now cannot be needed later: its reference is older than itself. An input's upload row
is there before its first byte, and a part's token stands in the chunk row before the part is put. Both are used once:
an upload given up is never accepted, a token that was replaced never completes its chunk. So once the ledger, asked
after the object was listed, knows no row for it, none will come. An upload still open, and a claim whose lease ran out
but that nobody took over, are rows that refer to it. The age is no part of this proof: the store's clock may be wrong
in either direction. It is time for an operator who restored an older ledger.
"""

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

import structlog

from jobs.ledger import Ledger
from jobs.objects import Objects
from serving.crashpoint import crashpoint

log = structlog.get_logger(__name__)

PAGE_KEYS = 500
ROOT = "jobs/"
_JOB_PREFIX = re.compile(r"jobs/job_[0-9a-f]{32}/")
_OURS = re.compile(r"(jobs/job_[0-9a-f]{32}/(?:input|parts/[0-9]{8,}/[0-9a-zA-Z-]{1,64}))(?:#[0-9]+)?")
"""Our keys; a local folder also shows what is being written, or was when its writer died, as the key and ``#n``."""


async def empty(objects: Objects, prefix: str, may_go_on: Callable[[], bool]) -> bool:
    """Delete everything under one job's prefix, in pages; False where ``may_go_on`` ended it before.

    It may be repeated, also by two at one time. Raises DependencyDown.
    """
    if not _JOB_PREFIX.fullmatch(prefix):
        # A prefix of another shape would reach what is not ours.
        log.error("not deleted: no prefix of a job", prefix=prefix)
        return True
    page: list[str] = []
    async for info in objects.list(prefix):
        page.append(info.key)
        if len(page) == PAGE_KEYS:
            await objects.delete(page)
            page = []
            if not may_go_on():
                return False
    if page:
        await objects.delete(page)
    return True


class Orphans:
    """One sweep over all objects of jobs."""

    def __init__(self, ledger: Ledger, objects: Objects, grace_s: float, now: Callable[[], datetime]) -> None:
        self._ledger = ledger
        self._objects = objects
        self._grace = timedelta(seconds=grace_s)
        self._now = now
        self.seen = 0
        self.deleted = 0

    async def sweep(self, may_go_on: Callable[[], bool]) -> bool:
        """Delete what is older than the grace and not referred to; False where ``may_go_on`` ended it before the end.

        Raises DependencyDown; what is not deleted then, the next sweep finds again.
        """
        page: dict[str, str] = {}
        async for info in self._objects.list(ROOT):
            self.seen += 1
            ours = _OURS.fullmatch(info.key)
            if ours and self._now() - info.modified_at > self._grace:
                page[info.key] = ours[1]
            if len(page) == PAGE_KEYS:
                await self._judge(page)
                page = {}
            if not may_go_on():
                return False
        await self._judge(page)
        return True

    async def _judge(self, page: Mapping[str, str]) -> None:
        """Delete those objects (the mapping's keys) whose reference (its values) the ledger does not know."""
        if not page:
            return
        needed = await self._ledger.referenced(sorted(set(page.values())))
        orphans = [key for key, reference in page.items() if reference not in needed]
        if not orphans:
            return
        await self._objects.delete(orphans)
        crashpoint("after_sweep")
        self.deleted += len(orphans)
        log.info("orphans deleted", count=len(orphans), first=orphans[0])
