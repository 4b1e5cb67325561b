"""Room for connections: the process raises its own soft limit of open files, as far as the hard limit lets it."""

import math
import resource

import structlog

log = structlog.get_logger(__name__)

OTHER_FILES = 256
"""Open files that are no callers: the channel to Triton, the ledger's connections, objects, logs, threads."""
_TURNED_AWAY_SHARE = 0.25


def make_room(max_connections: int) -> int:
    """Raise the soft limit to what so many connections need; returns how many there is room for.

    Where the hard limit is lower that is logged in one line, and the bound is what is left.
    """
    wanted = max_connections + turned_away_for(max_connections) + OTHER_FILES
    files = _raise_soft_limit(wanted)
    if files >= wanted:
        return max_connections
    bound = max(1, min(max_connections, round((files - OTHER_FILES) / (1 + _TURNED_AWAY_SHARE))))
    log.warning(
        "the hard limit of open files is lower than wanted", hard_limit=files, wanted=wanted, max_connections=bound
    )
    return bound


def turned_away_for(max_connections: int) -> int:
    """Return how many connections over the bound may be open for a moment, until they have their answer."""
    return math.ceil(max_connections * _TURNED_AWAY_SHARE)


def _raise_soft_limit(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted if soft == resource.RLIM_INFINITY else soft
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    return granted
