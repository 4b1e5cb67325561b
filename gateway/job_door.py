"""What the job routes need, opened with the app: the ledger, the object store, and who follows whether they answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from gateway.body import BodyReader
from gateway.results import Downloads
from gateway.uploads import Uploads
from gateway.waiting import Waiters
from jobs.intake import JobIntake
from jobs.ledger import Ledger
from jobs.objects import Objects
from serving.errors import DependencyDown
from serving.registry import Registry
from serving.settings import GatewaySettings, JobsSettings

log = structlog.get_logger(__name__)

_CHECK_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class Stores:
    """Where jobs are kept."""

    ledger: Ledger
    objects: Objects


class Health:
    """Whether each store answers, as a task of its own last saw it: `/readyz` asks nobody."""

    def __init__(self, stores: Stores) -> None:
        self._pings: dict[str, Callable[[], Awaitable[None]]] = {
            "postgres": stores.ledger.ping,
            "objects": stores.objects.ping,
        }
        self.up = dict.fromkeys(self._pings, False)

    async def run(self) -> None:
        """Ask both stores now and then until cancelled; one that hangs does not hold up the word of the other."""
        await asyncio.gather(*map(self._follow, self._pings))

    async def _follow(self, name: str) -> None:
        while True:
            await self._look(name)
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def _look(self, name: str) -> None:
        try:
            await self._pings[name]()
        except DependencyDown as exc:
            if self.up[name]:
                log.warning("dependency away", dependency=name, reason=str(exc))
            self.up[name] = False
        except Exception as exc:
            log.error("dependency check failed", dependency=name, exc_info=exc)
            self.up[name] = False
        else:
            if not self.up[name]:
                log.info("dependency up", dependency=name)
            self.up[name] = True


@dataclass(frozen=True, slots=True)
class JobDoor:
    """What the job routes need; found in ``request.state.door.jobs``."""

    gateway: GatewaySettings
    settings: JobsSettings
    registry: Registry
    ledger: Ledger
    objects: Objects
    intake: JobIntake
    bodies: BodyReader
    uploads: Uploads
    downloads: Downloads
    waiters: Waiters
    health: Health


@asynccontextmanager
async def following(stores: Stores) -> AsyncIterator[Health]:
    """Own the task that follows the stores."""
    health = Health(stores)
    task = asyncio.create_task(health.run(), name="stores")
    try:
        yield health
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
