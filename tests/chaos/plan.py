"""The seeded plan: which faults hit which round. Pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Hit(Enum):
    """What a fault has to meet to count."""

    CHUNK = "a leased chunk"
    RECORD = "records read and not committed"
    CALL = "a call in flight"
    UPLOAD = "an upload in flight"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``what`` is done to ``target``; ``hold_s`` is how long it lasts before it is taken back."""

    what: str
    target: str
    hits: Hit
    hold_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} {self.target}"


# Longer than the lease, the Kafka session and the upload's time to live of the chaos stack: a stopped process comes back
# as a zombie.
ZOMBIE_S = 8.0

KILLS = (
    Fault("kill", "consumer", Hit.CHUNK),
    Fault("kill", "consumer-2", Hit.RECORD),
    Fault("kill", "gateway", Hit.UPLOAD),
    Fault("kill", "triton", Hit.CHUNK),
    Fault("kill", "model process", Hit.CHUNK),
    Fault("kill", "kafka", Hit.RECORD),
    Fault("kill", "postgres", Hit.CHUNK),
)
STOPS = (
    Fault("stop", "consumer", Hit.CHUNK, ZOMBIE_S),
    Fault("stop", "consumer-2", Hit.RECORD, ZOMBIE_S),
    Fault("stop", "gateway", Hit.UPLOAD, ZOMBIE_S),
    Fault("stop", "triton", Hit.CALL, 3.0),
    Fault("stop", "kafka", Hit.RECORD, 5.0),
    Fault("stop", "postgres", Hit.CHUNK, 6.0),
)
RESTARTS = (
    Fault("restart", "consumer", Hit.CHUNK),
    Fault("restart", "gateway", Hit.CALL),
    Fault("restart", "triton", Hit.CHUNK),
    Fault("restart", "kafka", Hit.RECORD),
    Fault("restart", "postgres", Hit.CHUNK),
)
# With one consumer less and then again one more, partitions move twice.
MOVES = (Fault("move", "partitions", Hit.RECORD, 1.0),)
WIPES = (Fault("wipe", "kafka", Hit.RECORD),)
STORE = (
    Fault("refuse", "objects", Hit.CHUNK, 4.0),
    Fault("reset", "objects", Hit.CHUNK, 4.0),
    Fault("slow", "objects", Hit.CHUNK, 4.0),
)
FULL_DISK = (Fault("fill", "objects", Hit.CHUNK, 4.0),)

ALL = KILLS + STOPS + RESTARTS + MOVES + WIPES + STORE
# One of each kind whose recovery is short: what a run of three minutes has room for.
SHORT = (KILLS[0], STOPS[0], KILLS[6], STORE[0], KILLS[5], KILLS[2], KILLS[4], STOPS[1])


def rounds(seed: int, faults: Sequence[Fault] = ALL, per_round: int = 2) -> Iterator[tuple[Fault, ...]]:
    """Yield the faults of one round after another, for ever.

    Faults are dealt from a shuffled deck, so that each comes once before any comes twice; two of one round never hit
    the same target.
    """
    dice = random.Random(seed)
    deck: list[Fault] = []
    while True:
        hand: list[Fault] = []
        while len(hand) < min(per_round, len({fault.target for fault in faults})):
            if not deck:
                deck = list(faults)
                dice.shuffle(deck)
            place = next((i for i, fault in enumerate(deck) if fault.target not in {f.target for f in hand}), None)
            if place is None:
                # Only the same target is left: the next deck goes on top of it.
                more = list(faults)
                dice.shuffle(more)
                deck += more
                continue
            hand.append(deck.pop(place))
        yield tuple(hand)
